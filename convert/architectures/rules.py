"""Rules that say which weights of a checkpoint become which tensors of the file.

A model family is a table of rules. A rule says where it applies (once, in every layer, in the layers with
experts ...) and what comes out there; an output names its source, the shape that the configuration
promises for it, and how rows are arranged:

    Rule(every_layer, Output("blk.{layer}.attn_output.weight",
                             "model.layers.{layer}.self_attn.o_proj.weight", "hidden_size attention_cols"))

A source with "{expert}" stands for one weight per routed expert, which the output stacks. An output without a
source follows from the configuration alone; it stands before all others.

Matching is total. The configuration decides which weights a rule wants, name by name, so missing and
unclaimed weights are both known before a weight is read. Every logical name of the checkpoint is claimed by
exactly one rule, or dropped by a `Drop` that says why, or reported.

The outputs of a rule stand together, where the last of its weights stands in the checkpoint. That is the
order of llama.cpp's converter, which goes through the checkpoint once and can write a stack only when it has
all of its experts. Weights that it makes of packed integers come after all others (`Weights.last`).

An output tensor is a class for each way to arrange rows. None holds data; all read what a row range needs and
no more, from any thread. They are the SourceTensors that the quantizer fills files from.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import numpy as np

from convert.weights.base import Weight, Weights, rows_and_cols
from gguf_tools.errors import CheckpointError, MissingTensor, UnexpectedTensors
from gguf_tools.format.ggml_types import F32, GGMLType
from gguf_tools.text import first_of
from quantize.fill.sources import FLOAT_DTYPES, SourceTensor, joined, raw_rows, rows_dtype, split_rows


class OutputTensor(SourceTensor, Protocol):
    """One tensor of the file to come, by its name in that file.

    type       how raw_rows stores a row: F32, F16 or BF16, or the quantized type that the checkpoint's own
               codes can be had in
    stored_as  how the checkpoint holds the (first) weight that it is made of
    """

    @property
    def stored_as(self) -> str: ...


@dataclass(frozen=True)
class Renamed:
    """A weight as it is, under another name.

    A class that arranges rows of floats overrides `read_rows` alone.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    weight: Weight

    @property
    def stored_as(self) -> str:
        return self.weight.stored_as

    @property
    def by_rows(self) -> bool:
        return self.weight.by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = self.weight.read_rows(start, stop).astype(rows_dtype(self.type), copy=False)
        return np.ascontiguousarray(rows)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        if self.type in FLOAT_DTYPES:
            return np.ascontiguousarray(self.read_rows(start, stop)).reshape(-1).view(np.uint8)
        return raw_rows(self.weight, start, stop)


@dataclass(frozen=True, eq=False)
class Mapped(Renamed):
    """A weight whose numbers are mapped one by one, float32."""

    function: Callable[[np.ndarray], np.ndarray]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.function(super().read_rows(start, stop))


@dataclass(frozen=True)
class Stacked:
    """Equal-sized weights one after the other, as a matrix each.

    Where they are stored in several types (some experts plain, others decoded), all are given as F32.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    weights: tuple[Weight, ...]

    @property
    def stored_as(self) -> str:
        return self.weights[0].stored_as

    @property
    def by_rows(self) -> bool:
        return self.weights[0].by_rows

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        dtype = rows_dtype(self.type)
        runs = [weight.read_rows(low, high) for weight, low, high in self._runs(start, stop)]
        return joined([rows.astype(dtype, copy=False) for rows in runs], (self.shape[-1],), dtype)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        if self.type in FLOAT_DTYPES:
            return self.read_rows(start, stop).reshape(-1).view(np.uint8)
        blocks = [raw_rows(weight, low, high) for weight, low, high in self._runs(start, stop)]
        return joined(blocks, (), np.dtype(np.uint8))

    def _runs(self, start: int, stop: int) -> Iterator[tuple[Weight, int, int]]:
        """Yield the rows of weights that rows `start` to `stop`, counted over all matrices, are made of."""
        rows_per_weight, _ = rows_and_cols(self.weights[0].shape)
        for index, low, high in split_rows(start, stop, rows_per_weight):
            yield self.weights[index], low, high


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that follows from the configuration: no weight of the checkpoint is in it.

    values  float32, in the tensor's shape
    """

    name: str
    values: np.ndarray

    stored_as: ClassVar[str] = "computed"
    by_rows: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def type(self) -> GGMLType:
        return F32

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.values.reshape(-1, self.shape[-1])[start:stop]

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self.read_rows(start, stop)).reshape(-1).view(np.uint8)


def common_type(weights: Sequence[Weight]) -> GGMLType:
    """Return the type that all `weights` have, F32 if there is none."""
    types = {weight.type for weight in weights}
    return types.pop() if len(types) == 1 else F32


Where = Callable[[Any, Any], Iterable[object]]
"""(config, options) -> the layers where a rule applies; (None,) for once in the model.

A layer that source and output count differently is an object, and a name takes one of its numbers:
{layer.number}."""

Arrange = Callable[[str, Sequence[Weight], Any], OutputTensor]
"""(name, weights, config) -> the output tensor; `weights` has one entry per source, or per expert."""

Sizes = str | Callable[[Weight, Any], str]
"""A shape as attributes of the configuration, separated by spaces; or what says so of (weight, config), where
a weight may be stored in several ways."""

_OF_MLX = "; MLX has written the checkpoint, and stores this model in a way that is not read"
LISTED = 8
"""Number of names that an error message lists before it counts the rest."""


def renamed(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the one weight as it is."""
    (weight,) = weights
    return Renamed(name, weight.shape, weight.type, weight)


def plus_one(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the weight of a norm, which a checkpoint stores less one."""
    (weight,) = weights
    return Mapped(name, weight.shape, F32, weight, lambda numbers: numbers + np.float32(1))


def stacked(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Return the weights of all experts as one tensor, (n_experts, rows, cols)."""
    return Stacked(name, (len(weights), *weights[0].shape), common_type(weights), tuple(weights))


@dataclass(frozen=True)
class Output:
    """One tensor of the file.

    name     in the file, with {layer}
    source   logical weight it is made of, with {layer} and possibly {expert} or {part}; several of them
             separated by spaces; "" for none
    sizes    shape of (each) source
    arrange  how the tensor is made of its weights
    parts    attribute of the configuration: how many weights a source with {part} stands for
    """

    name: str
    source: str
    sizes: Sizes
    arrange: Arrange = renamed
    parts: str = ""


@dataclass(frozen=True)
class Rule:
    """Outputs that appear together in each place that `where` names.

    optional  a place where the checkpoint has none of the sources goes without these outputs
    when      names of weights: the rule applies only in places where the checkpoint has one of them
    unless    names of weights: the rule applies only in places where the checkpoint lacks them all
    first     the outputs stand before all others, in the order of rules and layers
    early     weight -> whether what is made of it stands before all that the checkpoint gives in order
    """

    where: Where
    outputs: tuple[Output, ...]
    optional: bool = False
    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    early: Callable[[Weight], bool] | None = None
    first: bool = False


@dataclass(frozen=True)
class Drop:
    """Weights that are left out: those whose name `fits` accepts, unless a rule wants them."""

    fits: Callable[[str], bool]
    reason: str


@dataclass(frozen=True)
class _Placed:
    """A rule in one place: each output's name and sources spelled out."""

    outputs: tuple[tuple[Output, str, tuple[str, ...]], ...]
    optional: bool
    early: Callable[[Weight], bool] | None
    first: bool

    @property
    def sources(self) -> dict[str, Output]:
        return {source: output for output, _, sources in self.outputs for source in sources}


def match(
    model: Weights,
    rules: Iterable[Rule],
    drops: Iterable[Drop],
    config: Any,
    options: Any,
    n_experts: int,
) -> tuple[tuple[OutputTensor, ...], dict[str, str]]:
    """Return the output tensors in file order, and the dropped weights with their reasons.

    raises  MissingTensor, UnexpectedTensors listing names; CheckpointError for a wrong shape, naming tensor,
            found, expected
    """
    last = model.last
    in_order = sorted(model.names(), key=last.__contains__)
    position = {name: index for index, name in enumerate(in_order)}
    placed = [
        place
        for place in _place(rules, position, config, options, n_experts)
        if not place.optional or any(source in position for source in place.sources)
    ]
    wanted = {source for place in placed for source in place.sources}
    dropped = dict(_drop((name for name in position if name not in wanted), drops))
    dropped |= dict(_zeros(model, (name for name in position if name not in wanted and name not in dropped)))
    unclaimed = [name for name in position if name not in wanted and name not in dropped]
    folder = model.checkpoint.folder
    of_mlx = _OF_MLX if model.checkpoint.is_of_mlx else ""
    missing = [source for place in placed for source in place.sources if source not in position]
    if missing:
        others = f"; no rule claims {_listed(unclaimed)}" if unclaimed else ""
        found = f"{_listed(missing)}, which config.json promises{others}"
        raise MissingTensor(f"{folder}: missing {found}{of_mlx}")
    if unclaimed:
        biased = all(name.endswith(_BIAS) for name in unclaimed)
        why = _HAS_NO_PLACE if biased else "no rule claims or drops them"
        raise UnexpectedTensors(f"{folder}: unexpected {_listed(unclaimed)}: {why}{of_mlx}")
    placed.sort(
        key=lambda place: (
            not place.first,
            place.early is None or not any(place.early(model.weight(source)) for source in place.sources),
            -1 if place.first else max((position[source] for source in place.sources), default=-1),
        )
    )
    tensors = tuple(tensor for place in placed for tensor in _build(place, model, config))
    return tensors, dropped


def _place(
    rules: Iterable[Rule], names: Container[str], config: Any, options: Any, n_experts: int
) -> Iterator[_Placed]:
    for rule in rules:
        for layer in rule.where(config, options):
            if rule.when and not any(name.format(layer=layer) in names for name in rule.when):
                continue
            if any(name.format(layer=layer) in names for name in rule.unless):
                continue
            outputs = tuple(
                (output, output.name.format(layer=layer), _sources(output, layer, n_experts, config))
                for output in rule.outputs
            )
            yield _Placed(outputs, rule.optional, rule.early, rule.first)


def _sources(output: Output, layer: object, n_experts: int, config: Any) -> tuple[str, ...]:
    template = output.source
    if output.parts:
        n_parts = attrgetter(output.parts)(config)
        return tuple(template.format(layer=layer, part=part) for part in range(n_parts))
    if "{expert}" not in template:
        return tuple(source.format(layer=layer) for source in template.split())
    return tuple(template.format(layer=layer, expert=expert) for expert in range(n_experts))


def _drop(names: Iterable[str], drops: Iterable[Drop]) -> Iterator[tuple[str, str]]:
    drops = tuple(drops)
    for name in names:
        drop = next((drop for drop in drops if drop.fits(name)), None)
        if drop is not None:
            yield name, drop.reason


_BIAS = ".bias"
_HAS_NO_PLACE = "llama.cpp has no place for these biases, and they are not zero"


def _zeros(model: Weights, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the biases that add nothing, which a file can do without; they are read."""
    for name in names:
        weight = model.weight(name) if name.endswith(_BIAS) else None
        if weight is not None and len(weight.shape) == 1 and not weight.read_rows(0, 1).any():
            yield name, "a bias of zeros, for which llama.cpp has no place"


def _build(place: _Placed, model: Weights, config: Any) -> Iterator[OutputTensor]:
    weights: dict[str, Weight] = {}
    for source, output in place.sources.items():
        weights[source] = model.weight(source)
        sizes = output.sizes if isinstance(output.sizes, str) else output.sizes(weights[source], config)
        if sizes:
            _check_shape(weights[source], sizes, model, config)
    for output, name, inputs in place.outputs:
        yield output.arrange(name, [weights[source] for source in inputs], config)


def _check_shape(weight: Weight, sizes: str, model: Weights, config: Any) -> None:
    expected = tuple(attrgetter(size)(config) for size in sizes.split())
    if weight.shape != expected:
        path = (
            model.checkpoint.raw(weight.name).path
            if weight.name in model.checkpoint
            else model.checkpoint.folder
        )
        raise CheckpointError(
            f"{path}: {weight.name}: shape {weight.shape}, expected {expected} from config.json"
            f" ({', '.join(sizes.split())}){_OF_MLX if model.checkpoint.is_of_mlx else ''}"
        )


def _listed(names: Sequence[str]) -> str:
    """Return "3 tensors: a, b, c", the rest counted when there are many."""
    return f"{len(names)} tensor{'s' * (len(names) != 1)}: {first_of(names, LISTED)}"
