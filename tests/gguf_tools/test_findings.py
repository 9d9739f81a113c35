"""What a finding is: a value with a level, which may stop a run."""

from __future__ import annotations

from gguf_tools.errors import BadRequest
from gguf_tools.findings import Finding, Level


def test_a_finding_stops_a_run_if_it_has_an_error() -> None:
    note = Finding("fallback", "Q8_0 instead of Q4_K", about=("a", "b"))
    assert (note.stops, note.is_bad, note.level, note.tensors, note.where) == (
        False, False, Level.WARNING, ("a", "b"), "a",
    )  # fmt: skip
    stop = Finding.stopping("refused", "no", BadRequest)
    assert (stop.stops, stop.is_bad, stop.error, stop.tensors, stop.where) == (True, True, BadRequest, (), "")


def test_levels_are_in_order_and_print_as_words() -> None:
    assert [str(level) for level in sorted(Level)] == ["note", "warning", "bad"]
