"""Pruning: whole layers left out, and what the metadata say about layers by their number.

The layers that stay are numbered anew from 0 in their old order. A value for each layer goes with its layer,
and counts of the first or last layers become smaller. Where llama.cpp tells kinds of layers apart by their
numbers, the new numbers would make other kinds of them: the kinds are then written one by one, if there is a
key for that, and otherwise the pruning is refused. Where only the computation differs, it is a note.

All of this is what llama.cpp's loader does with the keys (src/models/*.cpp: load_arch_hparams).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gguf_tools.errors import BadRequest
from gguf_tools.findings import Finding
from gguf_tools.format import keys
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value
from quantize.plan.findings import Kind
from quantize.roles import in_layer, layer_of


@dataclass(frozen=True)
class Pruning:
    """Which layers are left out.

    pruned  their numbers
    """

    pruned: frozenset[int] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str], pruned: Sequence[int]) -> Pruning:
        """Return the pruning that drops the layers `pruned` from a model with the tensors `names`.

        raises  BadRequest for a layer that the model does not have, or when none would stay
        """
        names = list(names)
        layers = sorted({layer for name in names if (layer := layer_of(name)) is not None})
        unknown = sorted(set(pruned) - set(layers))
        if unknown:
            raise BadRequest(f"can't prune layers {unknown}: the model has {_span(layers)}")
        if not set(layers) - set(pruned):
            raise BadRequest(f"can't prune all layers of the model, {_span(layers)}")
        whole = next((name for name in names if name in _OF_ALL_LAYERS), None)
        if pruned and whole is not None:
            raise BadRequest(f"can't prune layers: {whole} has rows for every layer of the model")
        return cls(frozenset(pruned))

    def new_number(self, layer: int) -> int | None:
        """Return the number of `layer` in the output, or None when it is dropped."""
        return None if layer in self.pruned else layer - sum(other < layer for other in self.pruned)

    def new_name(self, name: str) -> str | None:
        """Return the output's name for the tensor `name`, or None when its layer is dropped."""
        layer = layer_of(name)
        if layer is None:
            return name
        number = self.new_number(layer)
        return None if number is None else in_layer(name, number)


def _span(layers: Sequence[int]) -> str:
    return f"layers {layers[0]} to {layers[-1]}" if layers else "no layers blk.N"


MAX_LAYERS = 512
"""Layers that llama.cpp has room for (src/llama-hparams.h: LLAMA_MAX_LAYERS)."""

_OF_ALL_LAYERS = ("per_layer_model_proj.weight",)
"""Tensors outside the layers whose rows belong to them (gemma3n, gemma4)."""

_OF_FIRST = (keys.LEADING_DENSE_BLOCK_COUNT, keys.HASH_LAYER_COUNT)
_OF_LAST = (keys.NEXTN_PREDICT_LAYERS, keys.SHARED_KV_LAYERS)


@dataclass(frozen=True)
class _Period:
    """Layers of another kind, which llama.cpp finds by their number.

    key       template of the key with the period, None where the program has it
    what      the kind, in a phrase that follows `one layer in 4`
    defaults  period by architecture where no key says it
    place     such a layer is the one with this remainder of the period; -1: the last
    first     architectures where it is the first
    needs     template of a key without which all layers are of one kind
    flags     template of a key that says for each layer whether it is of the common kind
    loads     whether a file loads with another kind: it has the same tensors, which are computed otherwise
    """

    key: str | None
    what: str
    defaults: Mapping[str, int] = field(default_factory=dict)
    place: int = -1
    first: frozenset[str] = frozenset()
    needs: str | None = None
    flags: str | None = None
    loads: bool = True


_DENSE_FIRST = frozenset({"cohere2moe", "laguna", "modern-bert", "smallthinker"})

_PERIODS: tuple[_Period, ...] = (
    _Period(
        keys.FULL_ATTENTION_INTERVAL,
        "has full attention",
        {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8},
        flags=keys.RECURRENT_LAYERS,
        loads=False,
    ),
    _Period(
        keys.SLIDING_WINDOW_PATTERN,
        "has no window",
        WINDOW_PERIODS,
        first=_DENSE_FIRST,
        needs=keys.SLIDING_WINDOW,
        flags=keys.SLIDING_WINDOW_PATTERN,
    ),
    _Period(keys.INTERLEAVE_MOE_LAYER_STEP, "has experts", loads=False),
    _Period(keys.MOE_EVERY_N_LAYERS, "has experts", place=1, loads=False),
    _Period(
        None,
        "without rotation",
        {"llama4": 4, "smollm3": 4, "afmoe": 4, "smallthinker": 4},
        first=frozenset({"smallthinker"}),
    ),
    _Period(keys.RESCALE_EVERY_N_LAYERS, "halves hidden states"),
    _Period(keys.ATTN_RES_BLOCK_SIZE, "begins a new residual stream", place=0),
)


def prune_metadata(
    metadata: Metadata, n_layers: int, pruning: Pruning
) -> tuple[dict[str, Value], tuple[Finding, ...]]:
    """Return the metadata without what they say about the pruned layers, and notes.

    n_layers  layers of the whole model, those for multi-token prediction included
    raises    BadRequest naming the key where the layers that stay would no longer load
    """
    if n_layers > MAX_LAYERS:
        raise BadRequest(f"can't prune layers: block_count is {n_layers}, expected at most {MAX_LAYERS}")
    return _Pruned(metadata, n_layers, pruning).change()


class _Pruned:
    """The metadata of one model on their way to those of a smaller one."""

    def __init__(self, metadata: Metadata, n_layers: int, pruning: Pruning) -> None:
        self.old, self.new = metadata, dict(metadata)
        self.architecture = architecture_of(metadata) or ""
        self.n_layers, self.pruning = n_layers, pruning
        self.n_trunk = n_layers - self._number(keys.NEXTN_PREDICT_LAYERS)
        self.kept = [layer for layer in range(n_layers) if layer not in pruning.pruned]

    def change(self) -> tuple[dict[str, Value], tuple[Finding, ...]]:
        self._refuse()
        notes = [*self._arrays(), *self._deepstack()]
        self._counts()
        for period in _PERIODS:
            notes += self._other_kinds(period)
        self._set_last(keys.BLOCK_COUNT, Value.u32(len(self.kept)))
        return self.new, tuple(Finding(Kind.PRUNED, text) for text in notes)

    def _key(self, template: str) -> str:
        return template.format(arch=self.architecture)

    def _number(self, template: str) -> int:
        value = self.old.get(self._key(template))
        return value.data if value is not None and isinstance(value.data, int) else 0

    def _set_last(self, template: str, value: Value) -> None:
        self.new.pop(self._key(template), None)
        self.new[self._key(template)] = value

    def _refuse(self) -> None:
        """Refuse layers that others need."""
        n_shared, n_own = self._number(keys.SHARED_KV_LAYERS), 0
        if n_shared:
            n_own = self.n_layers - n_shared
        lenders = [layer for layer in range(max(n_own - 2, 0), n_own) if layer in self.pruning.pruned]
        if lenders:
            raise BadRequest(
                f"can't prune layers {lenders}: the last {n_shared} layers use their keys and values"
                f" ({self._key(keys.SHARED_KV_LAYERS)})"
            )
        if self._number(keys.HRM_LAYERS_PER_STACK):
            raise BadRequest(
                f"can't prune layers: {self._key(keys.HRM_LAYERS_PER_STACK)} says how they form stacks"
            )
        listed = self.old.get(self._key(keys.PLE_LAYERS))
        numbers = listed.data if listed is not None and isinstance(listed.data, tuple) else ()
        named = sorted(self.pruning.pruned.intersection(numbers))
        if named:
            raise BadRequest(f"can't prune layers {named}: {self._key(keys.PLE_LAYERS)} names them")

    def _arrays(self) -> Iterator[str]:
        """Take the values of pruned layers out of arrays."""
        for key, value in self.old.items():
            if not isinstance(value.data, tuple):
                continue
            if key == self._key(keys.PLE_LAYERS):
                moved = tuple(map(self.pruning.new_number, value.data))
                self.new[key] = Value.array(value.item or value.kind, moved)
            elif keys.is_per_layer(key, self.architecture):
                left = [item for layer, item in enumerate(value.data) if layer not in self.pruning.pruned]
                self.new[key] = Value.array(value.item or value.kind, left)
            elif (
                key.startswith(f"{self.architecture}.")
                and len(value.data) == self.n_layers
                and not keys.expected_kinds(key, self.architecture)
            ):
                yield f"{key} has as many values as the model had layers and keeps them: an unknown key"

    def _counts(self) -> None:
        """Lower the counts of first and last layers by those that are pruned."""
        for template in (*_OF_FIRST, *_OF_LAST):
            count = self._number(template)
            start = 0 if template in _OF_FIRST else self.n_layers - count
            n_pruned = sum(start <= layer < start + count for layer in self.pruning.pruned)
            if n_pruned:
                self.new[self._key(template)] = Value.u32(count - n_pruned)

    def _deepstack(self) -> Iterator[str]:
        n_first = self._number(keys.N_DEEPSTACK_LAYERS)
        if any(layer < n_first for layer in self.pruning.pruned):
            key = self._key(keys.N_DEEPSTACK_LAYERS)
            yield f"{key} is {n_first}: what images add to the pruned layers goes to the ones after them"

    def _other_kinds(self, period: _Period) -> Iterator[str]:
        """Keep layers of a kind that llama.cpp tells from their number."""
        flags = None if period.flags is None else self._key(period.flags)
        said = self.old.get(flags or "")
        if said is not None and isinstance(said.data, tuple):
            return  # flags that went with their layers
        n = self._number(period.key) if period.key else 0
        n = n or period.defaults.get(self.architecture, 0)
        if not n or (period.needs and not self._number(period.needs)):
            return
        place = 0 if self.architecture in period.first else period.place % n

        def is_common(layer: int) -> bool:
            return layer % n != place

        trunk = [layer for layer in self.kept if layer < self.n_trunk]
        changed = [layer for number, layer in enumerate(trunk) if is_common(number) != is_common(layer)]
        if not changed:
            return
        if flags is not None:
            kinds = [layer < self.n_trunk and is_common(layer) for layer in self.kept]
            self._set_last(flags, Value.bools(kinds))
            return
        where = f"{self._key(period.key)} is {n}, so" if period.key else f"{self.architecture} has"
        numbers = ", ".join(map(str, changed))
        text = f"{where} one layer in {n} {period.what}: with their new numbers, layers {numbers} change kind"
        if not period.loads:
            raise BadRequest(f"can't prune these layers: {text}; prune {n} in a row, or a multiple of that")
        yield text
