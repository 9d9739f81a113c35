"""Kinds of disturbance of a single command: kills, interruptions, failing calls, limits, a second run."""

from __future__ import annotations

import resource
import signal
import time

from tests.attack import beside, children, cleaning, mutations, places, streams
from tests.attack.children import CHANGES, Disturbance
from tests.attack.places import Failure
from tests.attack.trials import LINE, NOT_REACHED, SAME, Kind, Trial

ERRORS = {
    "openat": ("EIO", "EACCES", "ENOSPC", "EMFILE", "EINTR", "EROFS", "ENOMEM"),
    "read": ("EIO", "EINTR", "EISDIR"),
    "write": ("ENOSPC", "EIO", "EINTR", "EDQUOT", "EFBIG"),
    "fsync": ("EIO", "ENOSPC", "EINTR", "EROFS"),
    "fallocate": ("ENOSPC", "EOPNOTSUPP", "EINTR", "EIO"),
    "ftruncate": ("EIO", "EFBIG", "EINTR", "EROFS"),
    "fadvise64": ("EINVAL", "ESPIPE", "ENOSYS"),
    "flock": ("ENOLCK", "EOPNOTSUPP", "EINTR", "EAGAIN"),
    "rename": ("EIO", "ENOSPC", "EACCES", "EROFS", "EXDEV"),
    "copy_file_range": ("EXDEV", "EIO", "ENOSPC", "EOPNOTSUPP", "EINVAL", "ENOSYS"),
    "other": ("EIO", "EACCES", "ENOMEM"),
}
"""Errors that a call may report; calls of a family share them."""

_FAMILIES = {
    "pread64": "read", "preadv": "read", "pwrite64": "write", "writev": "write", "fdatasync": "fsync",
    "renameat": "rename", "unlink": "rename", "unlinkat": "rename", "mkdir": "rename", "rmdir": "rename",
    "sendfile": "copy_file_range",
}  # fmt: skip
_DULL = ("newfstatat",)


def kill(trial: Trial) -> str:
    """Kill the command up to three times, at a moment or at a call that changes a file, and resume it."""
    before = trial.reference.before
    for _ in range(trial.rng.choice((1, 1, 1, 2, 3))):
        ended = trial.run(*_some_kill(trial))
        if ended.code >= 0:
            break
        trial.n_hits += 1
        trial.check(before)
    trial.finish()
    return SAME if trial.n_hits else NOT_REACHED


def _some_kill(trial: Trial) -> tuple[Disturbance, str]:
    calls = {name: count for name, count in trial.reference.calls.items() if name in CHANGES}
    if calls and trial.rng.random() < 0.6:
        name = trial.rng.choice(sorted(calls))
        inject = f"{name}:signal=KILL:when={trial.rng.randint(1, calls[name])}"
        return Disturbance(inject=inject), f"kill at {inject}"
    seconds = trial.rng.uniform(0, trial.reference.seconds)
    return Disturbance(signal_after=(signal.SIGKILL, seconds)), f"kill after {seconds:.3f} s"


def interrupt(trial: Trial) -> str:
    """Press ctrl-C at some moment, then resume."""
    seconds = trial.rng.uniform(0, trial.reference.seconds)
    ended = trial.run(Disturbance(signal_after=(signal.SIGINT, seconds)), f"ctrl-C after {seconds:.3f} s")
    if ended.code:
        trial.n_hits += 1
        if ended.code != 130 or "Traceback" in ended.said or ended.said.count(": interrupted") != 1:
            raise Failure(f"ended with {ended.code} and {ended.said[-900:]!r}")
    trial.check()
    trial.finish()
    return SAME if trial.n_hits else NOT_REACHED


def fault(trial: Trial) -> str:
    """Let a call of the system fail, once or from then on."""
    if not trial.reference.calls:  # without strace
        return NOT_REACHED
    name, inject = _some_fault(trial)
    ended = trial.run(Disturbance(inject=inject), f"fault {inject}")
    if not ended.injected:
        return NOT_REACHED
    trial.n_hits += 1
    if ended.code == 0:
        now = trial.check()
        if not places.is_complete(trial.reference, now):
            raise Failure("succeeded, and the outputs are others")
        if name not in ("unlink", "unlinkat", "rmdir"):  # what can't be removed stays
            places.check_same(trial.reference, now)
        return SAME
    places.check_one_line(ended)
    trial.check()
    trial.finish()
    return LINE


def _some_fault(trial: Trial) -> tuple[str, str]:
    calls = trial.reference.calls
    dull = trial.rng.random() < 0.1
    name = trial.rng.choice([name for name in sorted(calls) if (name in _DULL) == dull])
    error = trial.rng.choice(ERRORS.get(_FAMILIES.get(name, name), ERRORS["other"]))
    lasts = name in CHANGES and error != "EINTR" and trial.rng.random() < 0.3
    return name, f"{name}:error={error}:when={trial.rng.randint(1, calls[name])}{'+' if lasts else ''}"


def limit(trial: Trial) -> str:
    """Let files be no longer than some size, or only so many be open: what can be written is cut short."""
    sizes = [(trial.folder / name).stat().st_size for name in trial.reference.before]
    if trial.rng.random() < 0.8:
        which, name, value = resource.RLIMIT_FSIZE, "size", int(max(sizes) ** trial.rng.random())
    else:
        which, name, value = resource.RLIMIT_NOFILE, "open files", trial.rng.randint(3, 30)
    ended = trial.run(Disturbance(limits=((which, value),)), f"limit of {name} {value}")
    if ended.code == 0:
        places.check_same(trial.reference, trial.check())
        return NOT_REACHED
    trial.n_hits += 1
    places.check_one_line(ended)
    trial.check()
    trial.finish()
    return LINE


def twice(trial: Trial) -> str:
    """Run the command twice at once."""
    scratch = trial.bench.scratch
    first = children.start(trial.command, trial.folder, scratch)
    time.sleep(trial.rng.uniform(0, trial.reference.seconds / 2))
    second = children.start(trial.command, trial.folder, scratch)
    both = [first.wait(), second.wait()]
    trial.steps.append(f"two at once -> {both[0].code}, {both[1].code}")
    trial.n_hits += 1
    for ended in both:
        if ended.code:
            places.check_one_line(ended)
    trial.check()
    if all(ended.code == 0 for ended in both):
        places.check_same(trial.reference, trial.tree())
        return SAME
    if all(ended.code for ended in both):
        trial.finish()
    places.check_same(trial.reference, trial.tree())
    return LINE


KINDS: dict[str, Kind] = {
    "kill": kill,
    "interrupt": interrupt,
    "fault": fault,
    "limit": limit,
    "twice": twice,
    "changed-input": mutations.under_a_run,
    "changed-between": mutations.between_runs,
    "beside": beside.beside,
    "cleaned": cleaning.cleaned,
    "streams": streams.streams,
    "names": streams.names,
}
