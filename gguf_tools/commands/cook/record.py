"""Record of what was made in a folder, and of what: `.cook/record.json`, written anew after each step.

A step begins with a note of what decides its outputs, when none of them is there. All outputs appear whole
under their names. So an output that is there, of a step that was begun with the same decisions, is finished,
whatever happened to the process that made it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.named_files import sha256_of, write_whole
from gguf_tools.files.run_lock import JSONDifference, Refusals, RunLock, first_difference, lock_run, plain
from gguf_tools.system.files import Closing
from gguf_tools.text import for_json

FOLDER = ".cook"


class Record(Closing):
    """The record of a folder, which belongs to this process until `close`.

    inputs  names of what this run reads, by what decides: "model", "text"
    raises  OutputError for a folder that can't be written or that another process works in, BadRequest for a
            record that can't be read
    """

    def __init__(self, folder: Path, inputs: Mapping[str, str] = MappingProxyType({})) -> None:
        self.folder, self._inputs = folder, dict(inputs)
        self.work = folder / FOLDER
        with OutputError.from_os(f"{self.work}: can't be made"):
            self.work.mkdir(parents=True, exist_ok=True)
        self._path = self.work / "record.json"
        self._run_lock: RunLock = lock_run(self.work / "lock", {}, _refusals(folder))
        try:
            self._steps = _read(self._path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._run_lock.close()

    def is_finished(self, step: str, decided_by: Mapping[str, Any], outputs: Sequence[Path]) -> bool:
        """Whether all outputs of a step are there, made by the same decisions.

        raises  BadRequest for outputs that are there and were made by others, or by nobody knows what
        """
        there = [output for output in outputs if output.exists()]
        begun = self._steps.get(step)
        if there and begun is None:
            raise BadRequest(
                f"{there[0]}: exists already and was not cooked here; --force replaces it, or name another"
                " folder"
            )
        if begun is None:
            return False
        difference = first_difference(begun["decided_by"], plain(decided_by))
        if difference is not None:
            remedy = "name another folder, or make all anew with --restart"
            raise BadRequest(f"{self._in_words(outputs[0], begun, difference)}; {remedy}")
        return len(there) == len(outputs)

    def _in_words(self, output: Path, begun: Mapping[str, Any], difference: JSONDifference) -> str:
        """Say what an output was begun with, and what this run has instead."""
        what = difference.where.partition(",")[0]
        old, new = begun.get("inputs", {}).get(what), self._inputs.get(what)
        if new is None:
            return f"{output}: was begun with another {what} ({difference.old}, now {difference.new})"
        if old == new:
            return f"{output}: was begun with another {what}: {new} has changed since"
        return f"{output}: was begun with another {what} ({old or 'unknown'}, now {new})"

    def refuse_another_model(self, model: Sequence[Any]) -> None:
        """Raise BadRequest if what is here was made of another model; `model` decides, as in the steps."""
        new = self._inputs.get("model", "another one")
        for step in self._steps.values():
            if first_difference(step["decided_by"].get("model", model), model) is not None:
                old = step.get("inputs", {}).get("model", "another model")
                since = f"{new}, which has changed since"
                found = since if old == new else f"{old}, and this run is for {new}"
                remedy = "name another folder, or make all anew with --restart"
                raise BadRequest(f"{self.folder}: holds what was made of {found}; {remedy}")

    def knows(self, step: str) -> bool:
        """Whether a step was begun in this folder."""
        return step in self._steps

    def differs(self, step: str, decided_by: Mapping[str, Any]) -> bool:
        """Whether a step was begun, and by other decisions."""
        begun = self._steps.get(step)
        return begun is not None and first_difference(begun["decided_by"], plain(decided_by)) is not None

    def begin(self, step: str, decided_by: Mapping[str, Any]) -> None:
        """Note what decides the outputs of a step, before any of them is made."""
        self._steps[step] = {"decided_by": plain(decided_by), "files": {}, "inputs": self._inputs}
        self._write()

    def forget(self, step: str, outputs: Sequence[Path]) -> None:
        """Remove a step and its outputs."""
        for output in outputs:
            output.unlink(missing_ok=True)
        if self._steps.pop(step, None) is not None:
            self._write()

    def digest(self, path: Path) -> str:
        """The SHA-256 of an output; it is computed once for each state of the file."""
        state = _state(path)
        for step in self._steps.values():
            known = step["files"].get(path.name)
            if known is not None and for_json(known["state"]) == state:
                return str(known["sha256"])
        return sha256_of(path)

    def finish(self, step: str, outputs: Sequence[Path]) -> None:
        """Note the digests of a step's outputs."""
        files = {}
        for output in outputs:
            files[output.name] = {"state": _state(output), "sha256": self.digest(output)}
        if self._steps[step]["files"] != files:
            self._steps[step]["files"] = files
            self._write()

    def clear(self) -> None:
        """Forget all that is recorded."""
        self._steps = {}
        self._write()

    def _write(self) -> None:
        write_whole(self._path, (json.dumps({"steps": self._steps}, indent=1) + "\n").encode())


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    try:
        steps: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        for step in steps.values():
            dict(step["decided_by"]), dict(step["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"{path}: is no record of what was cooked ({error}); remove it") from error
    return steps


def _state(path: Path) -> list[Any]:
    """Size and time in nanoseconds of a file, which change when it is written anew."""
    status = path.stat()
    state: list[Any] = for_json([status.st_size, status.st_mtime_ns])
    return state


def _refusals(folder: Path) -> Refusals:
    return Refusals(
        unwritable=lambda reason: OutputError(f"{folder / FOLDER}: can't be written ({reason})"),
        taken=lambda: OutputError(f"{folder}: another process is cooking here"),
        another=lambda difference: BadRequest(f"{folder}: {difference}"),
    )
