"""Standard streams that are closed, that nobody reads, or whose disk is full; names that steer a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.attack import places
from tests.attack.children import KEPT, STREAMS, Disturbance, Ended
from tests.attack.places import Failure, Tree
from tests.attack.trials import LINE, SAME, Trial

PIPE_CLOSED = 141
_CHOICES = [(out, err) for out in (KEPT, *STREAMS) for err in (KEPT, *STREAMS) if (out, err) != (KEPT, KEPT)]


def streams(trial: Trial) -> str:
    """Do something to the streams: the work is done all the same, and the exit code says what happened."""
    out, err = trial.rng.choice(_CHOICES)
    trial.n_hits += 1
    ended = trial.run(Disturbance(stdout=out, stderr=err), f"stdout {out}, stderr {err}")
    _check_ended(ended)
    if ended.code not in _codes(out, err, bool(trial.reference.printed)):
        raise Failure(f"ended with code {ended.code} and {ended.said[-700:]!r}")
    places.check_same(trial.reference, trial.check())
    if ended.code == 1 and err == KEPT:
        places.check_one_line(ended)
    return LINE if ended.code else SAME


def _codes(out: str, err: str, prints: bool) -> tuple[int, ...]:
    """Return the exit codes that are right: what was printed may be lost, and then the code may say so."""
    lost = [1] if out == "full" and prints else []
    return (0, *lost, *([PIPE_CLOSED] if "broken" in (out, err) else []))


def _check_ended(ended: Ended) -> None:
    if ended.hung:
        raise Failure(f"hung, after {ended.said[-300:]!r}")
    if "Traceback" in ended.said or "Exception ignored" in ended.said:
        raise Failure(f"a traceback: {ended.said[-900:]!r}")


# ---- names that steer a terminal

_MARKER = "MADE-UP"
NASTY = (
    "\x1b[31m", "\x1b]0;title\x07", f"\n{_MARKER}: error: ", f"\r{_MARKER} ", "\u202e", "\x9b2J", "\x7f",
    "\u2028", "\b\b",
)  # fmt: skip
_STEERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]|^" + _MARKER, re.MULTILINE
)
"""What a terminal obeys instead of showing it; the beginning of a line that a name has made up."""

_OUTPUTS = re.compile(r"o(\W.*)?|cooked|kept|work")


def names(trial: Trial) -> str:
    """Give files, or metadata and tensors, names that would steer a terminal: none reaches it."""
    nasty = trial.rng.choice(NASTY)
    if trial.rng.random() < 0.5:
        ended, new = _renamed_files(trial, nasty)
    else:
        ended, new = _nasty_contents(trial, nasty), {}
    trial.n_hits += 1
    if ended.hung:
        raise Failure(f"hung, after {ended.said[-300:]!r}")
    check_harmless(ended)
    if ended.code:
        places.check_told(trial.command, ended)
        return LINE
    if new and trial.reference.outputs:
        _check_outputs(trial, new)
    return SAME


def _renamed_files(trial: Trial, nasty: str) -> tuple[Ended, dict[str, str]]:
    """Run the command with other names for inputs and outputs; return how it ended, and old name -> new."""
    new: dict[str, str] = {}
    for word in trial.command.words:
        if (trial.folder / word).exists() and word != ".":
            (trial.folder / word).rename(trial.folder / (nasty + word))
            new[word] = nasty + word
        elif _OUTPUTS.fullmatch(word):
            new[word] = nasty + word
    if trial.command.words.count("in-00001-of-00003.gguf"):
        for number in (2, 3):
            name = f"in-{number:05d}-of-00003.gguf"
            (trial.folder / name).rename(trial.folder / (nasty + name))
            new[name] = nasty + name
    words = [new.get(word, word) for word in trial.command.words]
    trial.command = replace(trial.command, typed=(trial.command.program, *words))
    return trial.run(step=f"{nasty!r} before every name"), new


def _check_outputs(trial: Trial, new: dict[str, str]) -> None:
    """Raise Failure if fewer outputs are there than the undisturbed run made; some hold names."""
    now: Tree = trial.tree()
    missing = [
        name
        for name in trial.reference.outputs
        if name in new and new[name] not in now and not any(other.startswith(new[name]) for other in now)
    ]
    if missing:
        raise Failure(f"succeeded, and {missing[0]} is missing")


_CONTENTS = (
    b"attn_norm.weight", b"output_norm.weight", b"ffn_norm.weight", b"blk.0.ffn_gate_exps", b"general.name",
    b"general.type", b"DeepseekV3ForCausalLM", b"deepseek2", b"kv_a_layernorm", b"<|User|>", b"gpt2",
    b"general.architecture", b"text.txt", b"tokenizer.ggml.pre", b"blk.1.attn_output.weight",
)  # fmt: skip


def _nasty_contents(trial: Trial, nasty: str) -> Ended:
    """Write something nasty over a name in the inputs, as long as it was, and run the command."""
    data = nasty.encode()
    paths = [path for path in _files(trial) if path.stat().st_size < 1 << 26]
    wanted = trial.rng.sample(_CONTENTS, len(_CONTENTS))
    changed = []
    for path in paths:
        content = path.read_bytes()
        # In JSON a control character is an escape of six letters.
        over = "".join(f"\\u{ord(one):04x}" for one in nasty).encode() if content[:1] in b"{[" else data
        name = next((name for name in wanted if len(name) >= len(over) and name in content), None)
        if name is not None:
            path.write_bytes(content.replace(name, over + name[len(over) :], 2))
            changed.append(f"{path.name}: {name.decode()}")
    return trial.run(step=f"{nasty!r} in {', '.join(changed) or 'nothing'}")


def _files(trial: Trial) -> Iterator[Path]:
    for name in trial.reference.before:
        if name.startswith(trial.command.inputs):
            yield trial.folder / name


def check_harmless(ended: Ended) -> None:
    """Raise Failure if what a command said or printed would steer a terminal."""
    for stream, text in (("stdout", ended.printed), ("stderr", ended.said)):
        if found := _STEERS.search(text):
            around = text[max(0, found.start() - 60) : found.end() + 60]
            raise Failure(f"{stream} has {found.group()!r} in {around!r}")
