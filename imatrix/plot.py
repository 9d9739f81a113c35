"""An importance matrix as a picture: energy per layer and kind of tensor, and how often experts were seen."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from gguf_tools.errors import BadRequest
from gguf_tools.files.atomic_write import whole_file
from imatrix.stats import EntryStats, entry_stats
from quantize.importances.entries import ImportanceFile
from quantize.roles import layer_of


def plot(contents: ImportanceFile, path: Path) -> None:
    """Write a PNG with two heat maps.

    Left: the mean squared activation, on a logarithmic scale. Right: for every layer with experts, each
    expert's count as a multiple of what an even spread would give it.
    raises  BadRequest without matplotlib, OutputError when the file can't be written
    """
    if find_spec("matplotlib") is None:
        raise BadRequest("--plot needs matplotlib: pip install 'gguf-tools[plot]', or '.[plot]' in a clone")
    from matplotlib.figure import Figure

    entries = [entry for entry in entry_stats(contents) if entry.layer is not None]
    coverage = expert_coverage(contents)
    figure = Figure(figsize=(15, 3 + 0.16 * max(10, *(1 + (entry.layer or 0) for entry in entries), 0)))
    left, right = figure.subplots(1, 2)
    energy, kinds, layers = _energy(entries)
    image = left.imshow(energy, aspect="auto", cmap="viridis", interpolation="nearest")
    left.set_xticks(range(len(kinds)), kinds, rotation=90)
    left.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    left.set_ylabel("layer")
    left.set_title("mean squared activation, log10")
    figure.colorbar(image, ax=left)
    if coverage:
        table = np.full((len(coverage), max(map(len, coverage.values()))), np.nan)
        for row, counts in enumerate(coverage.values()):
            table[row, : len(counts)] = counts
        image = right.imshow(table, aspect="auto", cmap="magma", interpolation="nearest", vmin=0)
        right.set_yticks(range(len(coverage)), [str(layer) for layer in coverage])
        right.set_xlabel("expert")
        right.set_title("times seen, 1 = evenly spread")
        figure.colorbar(image, ax=right)
    else:
        right.set_axis_off()
        right.set_title("no counts per expert")
    figure.tight_layout()
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def expert_coverage(contents: ImportanceFile) -> dict[int, np.ndarray]:
    """Return, by layer, each expert's count divided by the mean count, float64 (n_experts,)."""
    coverage: dict[int, np.ndarray] = {}
    for name, entry in sorted(contents.entries.items()):
        layer = layer_of(name)
        if layer is not None and len(entry.counts) > 1 and layer not in coverage:
            counts = entry.counts.astype(np.float64)
            coverage[layer] = counts / counts.mean() if counts.any() else counts
    return dict(sorted(coverage.items()))


def _energy(entries: list[EntryStats]) -> tuple[np.ndarray, list[str], list[int]]:
    """Return log10 of the means, (n_layers, n_kinds) with NaN for gaps, and the names of columns and rows."""
    kinds = sorted({entry.kind for entry in entries})
    layers = sorted({entry.layer for entry in entries if entry.layer is not None})
    table = np.full((max(1, len(layers)), max(1, len(kinds))), np.nan)
    for entry in entries:
        if entry.layer is not None and entry.mean > 0:
            table[layers.index(entry.layer), kinds.index(entry.kind)] = np.log10(entry.mean)
    return table, kinds, layers
