"""scripts/check/fuzz_readers.py notices, keeps and survives whatever an input does to a process."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from collections import deque
from pathlib import Path
from types import ModuleType

import pytest

from gguf_tools.errors import FormatError
from tests.fuzz.targets import Target

SCRIPT = Path(__file__).parents[2] / "scripts" / "check" / "fuzz_readers.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_readers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(data: bytes) -> None:
    """Die, fail, or take too much time or memory, depending on the number in the input."""
    if data == b"3":
        os.kill(os.getpid(), signal.SIGKILL)
    if data == b"5":
        raise ValueError("five")
    if data == b"6":
        raise FormatError("six")
    if data == b"7":
        while True:
            pass
    if data == b"8":
        bytearray(10**9)


def test_every_end_is_counted_and_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {f"strange 9 {index}": b"%d" % index for index in range(12)}
    inputs = {repr(random.Random(text).getstate()): data for text, data in numbers.items()}
    target = Target(lambda rng: inputs[repr(rng.getstate())], read, lambda path: None, lambda: None)
    monkeypatch.setattr(script, "CPU_SECONDS", 0.2)
    monkeypatch.setitem(script.TARGETS, "strange", target)
    tally = script.Tally()
    for name, part in script.run(deque([script.Chunk("strange", 9, 0, 12)]), 1, tmp_path / "kept"):
        assert name == "strange"
        tally.add(part)
    assert tally.endings == {
        "not counted": 3, "FAILED: process died": 1, "read": 4, "FAILED: ValueError": 1, "FormatError": 1,
        "FAILED: TookTooLongError": 1, "FAILED: MemoryError": 1,
    }  # fmt: skip
    assert tally.failures == ["strange-9-3", "strange-9-5", "strange-9-7", "strange-9-8"]
    assert (tmp_path / "kept" / "strange-9-5").read_bytes() == b"5"
    assert "five" in (tmp_path / "kept" / "strange-9-5.txt").read_text()
    assert "code -9" in (tmp_path / "kept" / "strange-9-3.txt").read_text()


def test_shares_are_of_all_targets(script: ModuleType) -> None:
    assert script.SHARES.keys() == script.TARGETS.keys()
    chunks = script.chunks_of(10_000, list(script.SHARES), 0)
    assert sum(chunk.stop - chunk.start for chunk in chunks) == 10_000
