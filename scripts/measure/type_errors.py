"""Print the table of docs/types.md: bits per weight, use of importances, and error on the trained tiny model.

    python scripts/measure/type_errors.py

The error is taken over all weights of examples/tiny-deepseek-v3 whose importances are known and whose
rows fit every type: sqrt(sum w (x - q)^2 / sum w x^2), where w is the mean squared activation of the column.
The weights are quantized without importances and with them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import imatrix
from gguf_tools import GGUFSet, open_gguf
from quantize.fill.sources import GGUFTensor
from quantize.formats import available, get_format
from quantize.formats.base import QuantFormat
from quantize.formats.codecs import CODECS, ignores_importances, requires_importances
from quantize.importances.entries import resolve
from quantize.importances.weighting import ColumnWeights
from tests.end_to_end.quantize_cases import GOLDEN, make_inputs

LONGEST_BLOCK = 256
Matrix = tuple[np.ndarray, np.ndarray]


def matrices(file: GGUFSet) -> Iterator[Matrix]:
    """Yield (rows float32 (n_rows, n_cols), weights float32 (n_cols,)) of every matrix with importances."""
    entries = imatrix.load(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf").entries
    n_heads = file.get("deepseek2.attention.head_count")
    for info in file.tensors.values():
        resolved = resolve(info, entries, n_heads)
        if resolved is None or info.n_cols % LONGEST_BLOCK:
            continue
        rows = GGUFTensor(file, info.name).read_rows(0, info.n_rows).astype(np.float32)
        step = resolved.rows_per_weights
        for start in range(0, info.n_rows, step):
            yield rows[start : start + step], resolved.weighting_of_row(start).values


def error(format_: QuantFormat, known: list[Matrix], *, weighted: bool) -> float:
    """Return the weighted relative error; `weighted` says whether the search uses the importances too."""
    lost = total = 0.0
    for rows, weights in known:
        data = format_.encode(rows, ColumnWeights(weights) if weighted else None)
        decoded = format_.decode(data, rows.shape[1]).astype(np.float64)
        lost += float((weights * (rows - decoded) ** 2).sum())
        total += float((weights * rows.astype(np.float64) ** 2).sum())
    return (lost / total) ** 0.5


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        inputs = Path(name) / "inputs"
        make_inputs(inputs)
        with open_gguf(inputs / "in.gguf") as file:
            known = list(matrices(file))
    formats = sorted((get_format(name) for name in available()), key=lambda f: f.type.bits_per_weight)
    print("| type | bits per weight | importances | error without | error with |")
    print("|---|---|---|---|---|")
    for format_ in formats:
        if format_.type.name == "F32":
            continue
        name = format_.type.name
        plain = "-" if requires_importances(name) else f"{error(format_, known, weighted=False):.2%}"
        weighted = "" if ignores_importances(name) else f"{error(format_, known, weighted=True):.2%}"
        bits = f"{format_.type.bits_per_weight:.4g}"
        print(f"| {format_.type.name} | {bits} | {CODECS[name].use.value} | {plain} | {weighted} |")


if __name__ == "__main__":
    main()
