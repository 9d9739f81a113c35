"""Measure what the bounds of `gguf-tools audit` rest on: how clean files lie within them, and what they hide.

    python scripts/measure/audit.py clean BASE FILE...
    python scripts/measure/audit.py revisions BASE

`clean` prints, by type, the largest error of a tensor and of a row in units of the plain encoder's, and of
the slope. `revisions` prints from which distance on weights of another revision are told.

BASE is a folder, or a GGUF file. convert/audit/expected.py has the bounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from convert.audit.base import open_audit_base  # noqa: E402
from convert.audit.expected import CALIBRATED, Encoder, as_encoded, expect, read_rows, rise_of  # noqa: E402
from convert.audit.judge import Pair, bad_rows  # noqa: E402
from convert.audit.measure import measure, runs_of  # noqa: E402
from convert.audit.pairs import fits  # noqa: E402
from gguf_tools.format.ggml_types import GGMLType, by_name  # noqa: E402
from gguf_tools.format.shards import open_gguf  # noqa: E402
from gguf_tools.format.tensors import TensorInfo  # noqa: E402
from gguf_tools.text import table  # noqa: E402
from quantize.fill.sources import GGUFTensor, SourceTensor  # noqa: E402

TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "IQ3_XXS", "Q2_K", "IQ2_XS", "IQ1_S")
DISTANCES = np.geomspace(0.003, 1, 36)
ENCODERS: tuple[Encoder, ...] = get_args(Encoder)
N_TENSORS = 4


def measure_clean(base: Path, files: list[Path]) -> None:
    """Print how far the tensors of clean files are from what the plain encoder makes."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for path in files:
        with open_gguf(path) as file, open_audit_base(base, file) as of:
            for info in file.tensors.values():
                source = of.find(info.name)
                if info.type.is_quantized and source is not None and fits(info.shape, source.shape):
                    numbers = _compared(info, GGUFTensor(file, info.name), source)
                    found.setdefault(info.type.name, []).append(numbers)
    rows = [
        (name, str(len(each)), *(f"{max(column):.3f}" for column in zip(*each, strict=True)))
        for name, each in found.items()
    ]
    print("\n".join(table([("type", "tensors", "tensor", "row", "slope"), *rows], right=(1, 2, 3, 4))))


def _compared(info: TensorInfo, stored: SourceTensor, base: SourceTensor) -> tuple[float, float, float]:
    """Return the errors of a tensor, of its worst row and of its slope, in units of the plain error."""
    runs = list(runs_of(info, every_row=True))
    expected = expect(info, stored, base, runs)
    sums = measure(stored, base, info, runs, ordinary=expected.ordinary(CALIBRATED)).sums
    rows = float(sums.relative.max()) / expected.relative
    slope = abs(float(expected.measured.slope) - expected.slope) / expected.relative
    return max(expected.ratio, float(sums.over().relative) / expected.relative), rows, slope


class _Held:
    """Weights in memory, as a tensor of a file or a base."""

    by_rows = True

    def __init__(self, name: str, rows: np.ndarray, type_: GGMLType) -> None:
        self.name, self.rows, self.shape, self.type = name, rows, rows.shape, type_

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.rows[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError


def measure_revisions(base: Path) -> None:
    """Print from which relative distance on other weights are told, in the worst of a few tensors."""
    rows = [
        (name, *(f"{100 * _told_from(base, name, encoder):.2g}%" for encoder in ENCODERS)) for name in TYPES
    ]
    print("\n".join(table([("type", *ENCODERS), *rows], right=(1, 2, 3))))


def _told_from(base: Path, type_name: str, encoder: Encoder) -> float:
    return max(_first_told(weights, by_name(type_name), encoder) for weights in _matrices(base))


def _matrices(base: Path) -> Iterator[np.ndarray]:
    with open_gguf(base) as file, open_audit_base(base, file) as of:
        names = [name for name, info in file.tensors.items() if info.n_rows > 64 and info.n_cols % 256 == 0]
        for name in names[:: max(1, len(names) // N_TENSORS)][:N_TENSORS]:
            source = of.find(name)
            assert source is not None
            yield read_rows(source, np.arange(min(512, file.tensor(name).n_rows)))


def _first_told(weights: np.ndarray, type_: GGMLType, encoder: Encoder) -> float:
    noise = np.random.default_rng(0).normal(size=weights.shape).astype(np.float32)
    noise *= np.linalg.norm(weights) / np.linalg.norm(noise)
    info = TensorInfo("blk.0.attn_output.weight", weights.shape, type_)
    source = _Held(info.name, weights, by_name("F32"))
    for distance in DISTANCES:
        encoded = as_encoded(type_, weights + np.float32(distance) * noise)
        assert encoded is not None
        stored = _Held(info.name, encoded[1], type_)
        runs = list(runs_of(info, every_row=True))
        rise = rise_of(type_, encoder)
        pair = Pair(info, stored, source, expect(info, stored, source, runs), rise)
        measured = measure(stored, source, info, runs, ordinary=pair.expected.ordinary(rise))
        if len(bad_rows(pair, measured)):
            return float(distance)
    return 1.0


if __name__ == "__main__":
    what, of, *files = sys.argv[1:]
    if what == "clean":
        measure_clean(Path(of), [Path(file) for file in files])
    else:
        measure_revisions(Path(of))
