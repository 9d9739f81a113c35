"""The errors of a calibration on each class of text, from the records of its parts."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gguf_tools.findings import Level  # noqa: E402
from imatrix.calibrate.run.output import ChunkErrors, Record, Records  # noqa: E402
from imatrix.calibrate.run.report import (  # noqa: E402  # noqa: E402
    FinalDivergence,
    Report,
    class_findings,
    errors_by_class,
    report_lines,
)
from imatrix.calibrate.run.strips import HeldErrors  # noqa: E402
from imatrix.calibrate.statistics.gradient_factors import OutputBlock  # noqa: E402
from imatrix.calibrate.statistics.inputs import HoldoutSplit  # noqa: E402
from imatrix.evaluate.divergence import Estimate  # noqa: E402

SPLIT = HoldoutSplit.of(8, 64, ("prose", "code", "rare", "prose", "code", "prose", "code", "prose"))
PROSE, CODE = (next(n for n in SPLIT.held if SPLIT.classes[n] == name) for name in ("prose", "code"))
"""The chunks that are held out; the class of one chunk has none."""


def part(first: int, prose: tuple[float, float], code: tuple[float, float], **more: bool) -> Record:
    """Make a record of errors, of the method's bytes and of stock's."""
    chunks = (ChunkErrors(PROSE, *prose), ChunkErrors(CODE, *code))
    record = Record("blk.0.ffn_down.weight", first, 8, 256, 400, True, 1.0, 2.0, False, chunks, in_nats=True)
    return replace(record, **more)


def shares(*parts: Record) -> dict[str, float | None]:
    return {each.name: each.share for each in errors_by_class(parts, SPLIT)}


def test_errors_in_nats_are_added_up() -> None:
    found = shares(part(0, (0.1, 0.4), (3.0, 2.0)), part(8, (0.2, 0.2), (0.5, 1.0)))
    assert found == {"prose": pytest.approx(0.3 / 0.6), "code": pytest.approx(3.5 / 3.0), "rare": None}


def test_parts_that_keep_stocks_bytes_have_stocks_errors() -> None:
    found = shares(part(0, (0.1, 0.4), (9.0, 2.0), is_stock=True), part(8, (0.2, 0.4), (1.0, 2.0)))
    assert found == {"prose": pytest.approx(0.6 / 0.8), "code": pytest.approx(3.0 / 4.0), "rare": None}


def test_without_gradients_the_logarithms_of_shares_are_averaged() -> None:
    large = part(0, (100.0, 400.0), (50.0, 100.0), in_nats=False)
    small = part(8, (0.5, 1.0), (0.5, 1.0), in_nats=False)
    assert shares(large, small)["prose"] == pytest.approx(sqrt(0.25 * 0.5))
    nats = part(16, (0.1, 0.2), (0.3, 0.2))  # which alone count where there are some
    assert shares(large, small, nats)["code"] == pytest.approx(1.5)


def test_a_text_without_chunks_held_back_tells_nothing() -> None:
    assert errors_by_class([part(0, (1, 2), (1, 2))], HoldoutSplit.of(1, 64)) == []
    assert shares(replace(part(0, (1, 2), (1, 2)), chunks=())) == dict.fromkeys(("prose", "code", "rare"))


@pytest.mark.parametrize(
    ("code", "said"),
    [((1.0, 2.0), None), ((2.0, 2.0), "code (1.00 of"), ((3.0, 2.0), "code (1.50 of")],
)
def test_classes_that_are_not_better_than_stock_are_named(
    code: tuple[float, float], said: str | None
) -> None:
    found = list(class_findings(errors_by_class([part(0, (0.1, 0.2), code)], SPLIT)))
    assert [finding.level for finding in found] == ([Level.BAD] if said else [])
    assert said is None or said in found[0].text
    assert not any("prose" in finding.text for finding in found)


def test_the_report_has_a_line_for_each_class() -> None:
    divergence = FinalDivergence(
        Estimate(0.01, 0.001), Estimate(0.02, 0.002), {"prose": Estimate(0.03, 0.003)}
    )
    report = Report((part(0, (0.1, 0.4), (1.0, 2.0)),), SPLIT, divergence)
    heads, *lines = list(report_lines(report))[2:]
    assert heads.split() == [
        "class", "chunks", "held", "back", "errors", "of", "matrices", "/", "stock's", "KLD", "held", "back",
    ]  # fmt: skip
    assert [line.split() for line in lines] == [
        ["prose", "4", "1", "0.25", "0.03000", "+/-", "0.00300"],
        ["code", "3", "1", "0.50", "-"],
        ["rare", "1", "0", "-", "-"],
    ]


def test_of_a_single_text_each_chunk_is_told() -> None:
    split = HoldoutSplit.of(16, 64)
    errors = zip(split.held, (1.0, 2.5), strict=True)
    chunks = tuple(ChunkErrors(chunk, error, 2.0) for chunk, error in errors)
    record = replace(part(0, (1, 2), (1, 2)), chunks=chunks)
    (line,) = list(report_lines(Report((record,), split)))[1:]
    said = "errors of matrices on chunks held back: 0.88 of stock's (0.50 on chunk 5, 1.25 on chunk 13)"
    assert line == said


def test_a_run_that_goes_on_has_the_errors_by_chunk(tmp_path: Path) -> None:
    record = part(0, (0.1, 0.4), (3.0, 2.0))
    for _ in range(2):
        records = Records(tmp_path / "records.jsonl", "a")
        records.add(record)
        records.close()
    again = Records(tmp_path / "records.jsonl", "a")
    again.close()
    assert again.of([record.tensor]) == [record]


@pytest.mark.parametrize("step", [1, 3])
def test_errors_of_a_chunk_are_half_the_mean_of_the_squared_gradients_along_them(step: int) -> None:
    """The slow way: each error times each gradient, squared; the first token of a chunk counts for none."""
    random = np.random.RandomState(0)
    errors, gradients = random.normal(size=(24, 5)).astype(np.float32), random.normal(size=(40, 5))
    split, tokens = HoldoutSplit(4, 12, (1, 3)), np.r_[12:24, 36:48]
    covariance = gradients.T @ gradients
    mean = float(np.diagonal(covariance).mean())
    scaled = (covariance / mean).astype(np.float32)
    block = OutputBlock(0, 5, None, scaled, mean / 40)  # type: ignore[arg-type]
    shown = torch.from_numpy(errors[::step])
    places = split.places(torch.from_numpy(tokens[::step]), step).weighed(None)
    found = HeldErrors.of(shown, places, block)
    for chunk in split.held:
        own = [error for error, token in zip(errors[::step], tokens[::step], strict=True)
               if token // 12 == chunk and token % 12]  # fmt: skip
        squares = [(gradients @ error) ** 2 / 2 for error in own]
        assert found.by_chunk[chunk] == pytest.approx(np.mean(squares) * len(own) * step / 12, rel=1e-5)
    plain = HeldErrors.of(shown, places, None)
    counted = errors[::step][tokens[::step] % 12 > 0].astype(np.float64)
    assert plain.total == pytest.approx(float((counted**2).sum()) * step / 12)
    twice = HeldErrors.sum([found, found])
    assert twice.by_chunk == {chunk: 2 * error for chunk, error in found.by_chunk.items()}


@pytest.mark.parametrize(
    ("ours", "stocks", "is_close"),
    [
        ([1, 1, 1, 1, 1], [2, 2, 2, 2, 2], False),
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], False),
        ([1, 1, 1], [2, 2, 2], True),
        ([1, 1, 1, 1, 9], [2, 2, 2, 2, 2], True),
        ([2, 2, 2, 2, 2], [2, 2, 2, 2, 2], False),
        ([], [], False),
    ],
    ids=["better", "worse", "few rows", "rows disagree", "the same bytes", "no rows"],
)
def test_rows_tell_which_errors_are_smaller(ours: list[int], stocks: list[int], is_close: bool) -> None:
    one, other = (HeldErrors(np.array(each, float)) for each in (ours, stocks))
    assert one.is_close_to(other) == other.is_close_to(one) == is_close
