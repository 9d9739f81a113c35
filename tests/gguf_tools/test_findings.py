"""What a finding is: a value with a level, which may stop a run."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import gguf_tools
from gguf_tools.choices import speaking_flags
from gguf_tools.errors import BadRequest
from gguf_tools.findings import Finding, Level, remark, teller


def test_a_finding_stops_a_run_if_it_has_an_error() -> None:
    note = Finding("fallback", "Q8_0 instead of Q4_K", about=("a", "b"))
    assert (note.stops, note.is_bad, note.level, note.tensors, note.where) == (
        False, False, Level.WARNING, ("a", "b"), "a",
    )  # fmt: skip
    stop = Finding.stopping("refused", "no", BadRequest)
    assert (stop.stops, stop.is_bad, stop.error, stop.tensors, stop.where) == (True, True, BadRequest, (), "")


def test_levels_are_in_order_and_print_as_words() -> None:
    assert [str(level) for level in sorted(Level)] == ["note", "warning", "bad"]


def test_findings_are_logged_and_in_a_command_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    finding = Finding("kind", "odd", Level.NOTE)
    teller(quiet=False)(finding)
    remark("again")
    assert capsys.readouterr().err == ""
    told = [(each.name, each.levelname, each.getMessage()) for each in caplog.records]
    assert told == [("gguf_tools", "INFO", "odd"), ("gguf_tools", "WARNING", "again")]
    assert caplog.records[0].__dict__["finding"] is finding
    with speaking_flags():
        teller(quiet=False)(finding)
        remark("again")
    assert capsys.readouterr().err == "note: odd\nagain\n"
    assert len(caplog.records) == 2


def test_without_a_tell_findings_go_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    gguf_tools.RunOptions().tell(Finding("kind", "odd"))
    assert [each.getMessage() for each in caplog.records] == ["odd"]


def test_numba_logs_no_steps_of_its_compiler() -> None:
    code = (
        "import logging, quantize.simd.kernel; print(logging.getLogger('numba.core.ssa').getEffectiveLevel())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{logging.WARNING}\n"
