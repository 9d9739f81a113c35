"""An importance matrix in numbers: what it holds, how its energy is spread, and what it has not seen.

The numbers per entry are those of llama-imatrix --show-statistics. They are taken over the mean squared
activations of all columns of all matrices that have seen anything:

    total, mean, min, max, deviation
    active       share of columns above 1e-5
    entropy      of the columns' shares of the total, in bits, and as a share of the largest possible
    outliers     share of columns more than a standard deviation above the mean
    similarity   cosine between the sums and those of the same tensor in the previous layer

Coverage is counted besides: matrices that were never seen or rarely seen (a tenth of the median count or
less), and columns whose sum is zero.

`plot` makes a picture of them: energy per layer and kind of tensor, and how often experts were seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gguf_tools.drawing import Canvas, drawn_file, heat_colours, require_matplotlib
from gguf_tools.text import printable, table
from quantize.importances.entries import ImportanceEntry, ImportanceFile, Importances
from quantize.roles import layer_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACTIVE_ABOVE = 1e-5
"""Mean squared activation above which a column counts as active."""

RARE_SHARE = 0.1
"""Share of the median count up to which a matrix counts as rarely seen."""


@dataclass(frozen=True)
class EntryStats:
    """Statistics of one entry; shares are 0 to 1. The numbers of an entry that has seen nothing are NaN.

    layer       None for a tensor outside the layers
    kind        the name without its layer
    similarity  None where there is no previous layer
    """

    name: str
    layer: int | None
    kind: str
    total: float
    mean: float
    min: float
    max: float
    deviation: float
    active: float
    n_elements: int
    entropy: float
    entropy_share: float
    outliers: float
    similarity: float | None
    n_mats: int
    n_unseen: int
    n_rare: int
    n_zero_columns: int


@dataclass(frozen=True)
class LayerStats:
    """Means over a layer's entries, weighted by their numbers of elements."""

    layer: int
    total: float
    outliers: float
    similarity: float


def entry_stats(contents: ImportanceFile) -> tuple[EntryStats, ...]:
    """Compute the statistics of all entries, by kind and then by layer."""
    entries = [_of_entry(name, contents.entries) for name in contents.entries]
    return tuple(sorted(entries, key=lambda entry: (entry.kind, -1 if entry.layer is None else entry.layer)))


def layer_stats(entries: tuple[EntryStats, ...]) -> tuple[LayerStats, ...]:
    """Return the means of every layer."""
    means = []
    for layer in sorted({entry.layer for entry in entries if entry.layer is not None}):
        mine = [entry for entry in entries if entry.layer == layer and entry.n_elements]
        weights = np.array([entry.n_elements for entry in mine], np.float64)
        if not weights.sum():
            continue

        def mean(values: list[float], weights: np.ndarray = weights) -> float:
            return float(np.average(values, weights=weights))

        means.append(
            LayerStats(
                layer,
                mean([entry.total for entry in mine]),
                mean([entry.outliers for entry in mine]),
                mean([entry.similarity or 0.0 for entry in mine]),
            )
        )
    return tuple(means)


@np.errstate(invalid="ignore", divide="ignore")  # a file with NaN or infinity has them in its numbers, too
def _of_entry(name: str, entries: Importances) -> EntryStats:
    entry = entries[name]
    counts = entry.counts.astype(np.float64)
    seen = counts > 0
    sums = entry.read()
    means = (sums[seen].astype(np.float64) / counts[seen, np.newaxis]).reshape(-1)
    total = float(means.sum())
    mean = float(means.mean()) if means.size else np.nan
    deviation = float(means.std()) if means.size else np.nan
    shares = means[means > 0] / total if total > 0 else np.empty(0)
    entropy = float(-(shares * np.log2(shares)).sum())
    return EntryStats(
        name=name,
        layer=layer_of(name),
        kind=_kind(name),
        total=total,
        mean=mean,
        min=float(means.min()) if means.size else np.nan,
        max=float(means.max()) if means.size else np.nan,
        deviation=deviation,
        active=float((np.abs(means) > ACTIVE_ABOVE).mean()) if means.size else np.nan,
        n_elements=int(means.size),
        entropy=entropy,
        entropy_share=entropy / float(np.log2(means.size)) if means.size > 1 else np.nan,
        outliers=float((means > mean + deviation).mean()) if means.size and deviation > 0 else 0.0,
        similarity=_similarity(name, sums, entries),
        n_mats=len(counts),
        n_unseen=int((~seen).sum()),
        n_rare=int((seen & (counts <= RARE_SHARE * np.median(counts))).sum()),
        n_zero_columns=int((sums[seen] == 0).sum()),
    )


def _kind(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight")


def _similarity(name: str, sums: np.ndarray, entries: Importances) -> float | None:
    """Return the cosine between an entry's sums and those of the previous layer; None without those."""
    layer = layer_of(name)
    before = None if layer is None else entries.get(re.sub(r"^blk\.\d+\.", f"blk.{layer - 1}.", name))
    if before is None or before.n_values != sums.size:
        return None
    one = sums.reshape(-1).astype(np.float64)
    other = before.read().reshape(-1).astype(np.float64)
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norms if norms > 0 else None


def as_json(contents: ImportanceFile) -> dict[str, Any]:
    """Return all statistics as plain data; what can't be known is null."""
    entries = entry_stats(contents)
    return {
        "entries": [_plain(asdict(entry)) for entry in entries],
        "layers": [_plain(asdict(layer)) for layer in layer_stats(entries)],
        "coverage": {
            name: entry.whole_counts().astype(int).tolist()
            for name, entry in contents.entries.items()
            if len(entry.counts) > 1
        },
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in values.items()
    }


_MOST_LABELS = 40
"""Layers whose numbers stand beside a heat map."""

_NOTHING = "#8a898340"
"""Colour of a heat map where there is no number: a grey that can be seen on light and on dark."""

_HEAD = (
    "layer", "tensor", "total", "min", "max", "mean", "sd", "active", "values", "entropy", "equal",
    "outliers", "similar",
)  # fmt: skip


def stats_lines(contents: ImportanceFile) -> Iterator[str]:
    """Yield the statistics as text: entries, layers, and what has not been seen."""
    entries = entry_stats(contents)
    yield from table([_HEAD, *map(_row, entries)], right=(0, *range(2, len(_HEAD))), gap=1)
    layers = layer_stats(entries)
    if layers:
        yield ""
        yield "means per layer, weighed by elements"
        rows = [("layer", "total", "outliers", "similarity")]
        rows += [
            (str(one.layer), f"{one.total:.2f}", f"{one.outliers:.2%}", f"{one.similarity:.4f}")
            for one in layers
        ]
        yield from table(rows, right=(0, 1, 2, 3))
    gaps = [entry for entry in entries if entry.n_unseen or entry.n_rare or entry.n_zero_columns]
    if gaps:
        yield ""
        yield "not seen"
        for entry in gaps:
            yield f"  {printable(entry.name)}: {gap_text(entry)}"


def gap_text(entry: EntryStats) -> str:
    """Say in words what an entry has not seen."""
    gaps = (
        (entry.n_unseen, f"{entry.n_unseen} of {entry.n_mats} matrices never seen"),
        (entry.n_rare, f"{entry.n_rare} of {entry.n_mats} rarely seen"),
        (entry.n_zero_columns, f"{entry.n_zero_columns} columns at zero"),
    )
    return ", ".join(text for number, text in gaps if number)


def _row(entry: EntryStats) -> tuple[str, ...]:
    return (
        "-" if entry.layer is None else str(entry.layer),
        entry.kind,
        f"{entry.total:.5g}",
        *(f"{number:.3g}" for number in (entry.min, entry.max, entry.mean, entry.deviation)),
        f"{entry.active:.1%}",
        str(entry.n_elements),
        f"{entry.entropy:.3f}",
        f"{entry.entropy_share:.1%}",
        f"{entry.outliers:.1%}",
        "-" if entry.similarity is None else f"{entry.similarity:.3f}",
    )


def describe(contents: ImportanceFile) -> dict[str, Any]:
    """Describe a file as plain data: where it comes from, and a row per entry.

    An entry has n_mats and n_cols as stored, the smallest and the largest count, the number of matrices that
    have seen nothing, and the mean of all weights.
    """
    return {
        "format": contents.format,
        "datasets": list(contents.datasets),
        "chunk_count": contents.chunk_count,
        "chunk_size": contents.chunk_size,
        "entries": [{"name": name, **_facts(entry)} for name, entry in contents.entries.items()],
    }


def _facts(entry: ImportanceEntry) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # NaN and infinity are shown as they are
        counts = entry.whole_counts()
        mean = entry.weights().mean(dtype=np.float64)
    n_mats, n_cols = entry.shape
    return {
        "n_mats": n_mats,
        "n_cols": n_cols,
        "min_count": _whole(counts.min()),
        "max_count": _whole(counts.max()),
        "n_unseen": int(np.count_nonzero(counts <= 0)),
        "mean": float(mean),
    }


def _whole(count: np.float32) -> int | float:
    return int(count) if np.isfinite(count) else float(count)


def description_lines(contents: ImportanceFile) -> Iterator[str]:
    """Yield `describe` as text."""
    facts = describe(contents)
    datasets = ", ".join(map(printable, facts["datasets"])) or "unknown"
    size = f" of {facts['chunk_size']} tokens" if facts["chunk_size"] else ""
    yield f"{len(facts['entries'])} entries, form {facts['format']}"
    yield f"datasets: {datasets}; {facts['chunk_count']} chunks{size}"
    rows = [("name", "matrices", "columns", "counts", "mean square", "")]
    for entry in facts["entries"]:
        low, high = entry["min_count"], entry["max_count"]
        rows.append(
            (
                entry["name"],
                str(entry["n_mats"]),
                str(entry["n_cols"]),
                str(high) if low == high else f"{low} to {high}",
                f"{entry['mean']:.4g}",
                f"{entry['n_unseen']} never seen" if entry["n_unseen"] else "",
            )
        )
    yield from table(rows, right=(1, 2, 3, 4))


def plot(contents: ImportanceFile, path: Path) -> None:
    """Write an SVG, or what else the path's ending says: a heat map, or two for a model with experts.

    The first has the mean squared activation of each tensor's input, with powers of ten as plain numbers. The
    second has, for every layer with experts, each expert's count as a multiple of what an even spread would
    give it. Grey is what there is not.
    raises  BadRequest without matplotlib or for another kind of picture, OutputError when the file can't be
            written
    """
    require_matplotlib("--plot")
    from matplotlib.colors import LogNorm

    means, kinds, layers = _means([entry for entry in entry_stats(contents) if entry.layer is not None])
    coverage = expert_coverage(contents)
    heights = [190 + 15 * max(8, len(layers)), *([90 + 15 * max(4, len(coverage))] if coverage else ())]
    canvas = Canvas("", 150 + max(390, 19 * len(kinds)), sum(heights))
    with drawn_file(path, canvas, "Mean squared activations, and how often experts were seen") as figure:
        (above, *below) = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        above.set_xticks(range(len(kinds)), map(printable, kinds), rotation=90)
        norm = LogNorm() if np.isfinite(means).any() else None
        _draw_heat(figure, above, means, "mean squared activation (grey: no such tensor)", layers, norm=norm)
        if coverage:
            table = np.full((len(coverage), max(map(len, coverage.values()))), np.nan)
            for row, counts in enumerate(coverage.values()):
                table[row, : len(counts)] = counts
            below[0].set_xlabel("expert")
            below[0].xaxis.get_major_locator().set_params(integer=True)
            title = "tokens of each expert (1: the mean of its layer)"
            _draw_heat(figure, below[0], table, title, list(coverage), vmin=0)


def _draw_heat(
    figure: Figure, axes: Axes, table: np.ndarray, title: str, layers: list[int], **scale: Any
) -> None:
    """Draw a heat map, with numbers of layers where there is room, and what colours mean in plain numbers."""
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(heat_colours(256)).with_extremes(bad=_NOTHING)
    image = axes.imshow(table, aspect="auto", cmap=colours, interpolation="nearest", **scale)
    step = -(-len(layers) // _MOST_LABELS) or 1
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel("layer")
    axes.set_title(title)
    axes.tick_params(length=0, pad=6)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.12g}")
    bar.ax.yaxis.set_minor_formatter(lambda value, _: "")


def expert_coverage(contents: ImportanceFile) -> dict[int, np.ndarray]:
    """Return, by layer, each expert's count divided by the mean count, float64 (n_experts,)."""
    coverage: dict[int, np.ndarray] = {}
    for name, entry in sorted(contents.entries.items()):
        layer = layer_of(name)
        if layer is not None and len(entry.counts) > 1 and layer not in coverage:
            counts = entry.counts.astype(np.float64)
            coverage[layer] = counts / counts.mean() if counts.any() else counts
    return dict(sorted(coverage.items()))


def _means(entries: list[EntryStats]) -> tuple[np.ndarray, list[str], list[int]]:
    """Return the means, (n_layers, n_kinds) with NaN for gaps, and the names of columns and rows."""
    kinds = sorted({entry.kind for entry in entries})
    layers = sorted({entry.layer for entry in entries if entry.layer is not None})
    table = np.full((max(1, len(layers)), max(1, len(kinds))), np.nan)
    for entry in entries:
        if entry.layer is not None and entry.mean > 0:
            table[layers.index(entry.layer), kinds.index(entry.kind)] = entry.mean
    return table, kinds, layers
