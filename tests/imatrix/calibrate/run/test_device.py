"""Calibrated runs and refinements on another device than the CPU: every tensor is where it is needed.

Sums come in another order there, so they differ in their last digits. Where rounding only reads them, it is
chaotic: all weights of a matrix may be rounded the other way, and some decisions go the other way, too: which
label is drawn, which expert a token goes to, how long the step is that makes up for drift, whose bytes are
kept. So bytes may differ, and the distance from the original's weights, most of which may be that step. What
rounding reads may not, nor may the errors on held-out rows, but as far as another order of the sums moves
them on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convert
import gguf_tools
from gguf_tools.format.shards import open_gguf
from quantize import quantize
from tests.imatrix.calibrate.words import write_words
from tests.support.decoder_models import decoder_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.calibrate.refine.pipeline import refine  # noqa: E402
from imatrix.calibrate.run.output import Record  # noqa: E402
from imatrix.calibrate.run.report import FinalDivergence, Report, report_lines  # noqa: E402
from imatrix.calibrate.run.strips import EncodedStrip, Strip, ThreadStrips, encode_strips  # noqa: E402
from imatrix.calibrate.statistics.inputs import Moments  # noqa: E402
from imatrix.evaluate.divergence import Estimate  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

NAMES = [pytest.param("llama-biases", marks=pytest.mark.slow), "qwen3moe"]
Run = Callable[..., "Report"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.imatrix.forward.pretended_device import keep_to_one_thread

    keep_to_one_thread(monkeypatch, "imatrix.calibrate.refine.gradients", "imatrix.calibrate.run.report")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text") / "text.txt", 4000)


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small F32 file."""
    decoder_model(request.param, tmp_path / "hf", hidden_size=256, intermediate_size=256)
    convert.convert(tmp_path / "hf", tmp_path / "base.gguf", outtype="f32")
    return tmp_path / "base.gguf"


@pytest.fixture
def run(base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calibrate on a device, and return the report."""
    reports: list[Report] = []

    def keep(report: Report) -> Iterator[str]:
        reports.append(report)
        return report_lines(report)

    def run(device: object = "cpu", **options: Any) -> Report:
        forward = ForwardOptions(device=str(device))
        how = gguf_tools.Calibration(text, Cut(64, n_chunks=10), forward=forward, **options)
        quantize(base, tmp_path / f"{len(reports)}.gguf", "Q4_K_M", calibration=how, n_threads=1)
        return reports[-1]

    monkeypatch.setattr("imatrix.calibrate.run.run.report_lines", keep)
    return run


@contextmanager
def backwards() -> Iterator[None]:
    """Sum up the rows of every piece from its last to its first."""
    forwards = Moments.add

    def add(self: Moments, x: Any, originals: Any, workers: Any, roots: Any = None) -> None:
        turned = (None if each is None else each.flip(0) for each in (originals, roots))
        forwards(self, x.flip(0), next(turned), workers, next(turned))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Moments, "add", add)
        yield


def shares(report: Report) -> npt.NDArray[np.float64]:
    """Return the logarithm of each matrix' error on held-out rows, as a share of that of stock's bytes."""
    return np.log([part.error / part.stock_error for part in in_order(report) if part.chunks])


def in_order(report: Report) -> list[Record]:
    return sorted(report.parts, key=lambda part: (part.tensor, part.first))


@pytest.mark.slow
@pytest.mark.parametrize("base", NAMES, indirect=True)
def test_another_device_calibrates_alike(run: Run) -> None:
    """As alike as both orders of the sums on one device."""
    from tests.imatrix.forward.pretended_device import pretended

    here = run()
    with backwards():
        twin = run()
    with pretended() as device:
        there = run(device)
    expected, moved, found = map(shares, (here, twin, there))
    # Of 1656 triples of such twins, the ratio of two distances was 2.3 at most for the mean of all matrices,
    # and 3.04 for the matrix that differs most.
    for distance, most in ((np.mean, 3), (np.max, 4)):
        assert distance(np.abs(found - expected)) < most * distance(np.abs(moved - expected))
    assert abs(np.mean(found - expected)) < 0.1 * abs(np.mean(expected)), "a tenth of what calibration gains"
    assert here.divergence is not None
    assert there.divergence is not None
    for one, other in zip(estimates(here.divergence), estimates(there.divergence), strict=True):
        assert abs(one.value - other.value) < 3 * np.hypot(one.error, other.error)
    for part, other_part in zip(in_order(here), in_order(twin), strict=True):
        was_told = part.is_close or other_part.is_close
        assert was_told or part.is_stock == other_part.is_stock, "a choice that is not as good as a coin's"


def estimates(divergence: FinalDivergence) -> tuple[Estimate, Estimate]:
    return divergence.summed, divergence.held


@pytest.mark.slow
@pytest.mark.parametrize("base", NAMES, indirect=True)
@pytest.mark.parametrize(
    ("method", "near"),
    [
        # No random number and no rounding is on the way, so only the last digits of float32 differ.
        ("one-sided", 1e-5),
        # Labels are drawn. With one of the 2304 drawn otherwise, no matrix differs by more than 0.02.
        ("two-sided", 0.1),
    ],
)
def test_another_device_rounds_under_the_same(
    method: str, near: float, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the original model alone, which what is rounded does not change."""
    from tests.imatrix.forward.pretended_device import pretended

    seen: list[Strip] = []

    def keep(strips: ThreadStrips, batches: Iterable[Sequence[Strip]]) -> Iterator[list[EncodedStrip]]:
        for batch in batches:
            seen.extend(batch)
            yield encode_strips(strips.method, strips.sources, batch)

    monkeypatch.setattr(ThreadStrips, "each", keep)
    run(method=method, embedding=False, sequential=False)
    expected = list(seen)
    seen.clear()
    with pretended() as device:
        run(device, method=method, embedding=False, sequential=False)
    assert [strip.rows for strip in seen] == [strip.rows for strip in expected]
    n_compared = 0
    for here, there in zip(expected, seen, strict=True):
        for one, other in zip(read_by_rounding(here), read_by_rounding(there), strict=True):
            assert np.linalg.norm(other - one) < near * np.linalg.norm(one), str(here)
            n_compared += 1
    assert n_compared > len(expected)


def read_by_rounding(strip: Strip) -> Iterator[npt.NDArray[np.float32]]:
    """Yield what the strip is rounded under, and the rows that its encodings are compared on."""
    if strip.conditions.factor is not None:
        yield strip.conditions.factor.hessian
    if strip.conditions.held is not None:
        yield strip.conditions.held.x.numpy()
    if strip.block is not None:
        yield strip.block.covariance


@pytest.mark.slow
@pytest.mark.parametrize("base", ["llama-biases"], indirect=True)
def test_another_device_refines_alike(base: Path, text: Path, tmp_path: Path) -> None:
    """A few moves are rounded the other way."""
    from tests.imatrix.forward.pretended_device import pretended

    quantize(base, tmp_path / "file.gguf", "Q2_K")

    def made(to: str, device: object) -> Any:
        inputs = tmp_path / "file.gguf", base, text, tmp_path / to
        forward = ForwardOptions(device=str(device), n_threads=1)
        return refine(*inputs, chunk_size=64, n_chunks=10, steps=2, passes=1, forward=forward)

    here = made("here.gguf", "cpu")
    with pretended() as device:
        there = made("there.gguf", device)
    assert there.before.value == pytest.approx(here.before.value, rel=1e-5)
    gain = here.before.value - here.after.value
    assert abs(there.after.value - here.after.value) < 0.01 * gain
    paths = [tmp_path / name for name in ("file.gguf", "here.gguf", "there.gguf")]
    with open_gguf(paths[0]) as before, open_gguf(paths[1]) as one, open_gguf(paths[2]) as other:
        assert [*one.tensors] == [*other.tensors]
        for name in one.tensors:
            begun, expected, found = (file.values(name) for file in (before, one, other))
            assert (found != expected).mean() <= 0.1 * (expected != begun).mean(), name
