"""The inner sizes of a model's feed-forward blocks: which key gives each, and which tensors have them.

llama.cpp refuses a file with a tensor of another size than its graph expects, and architectures take that
size from different keys. DeepSeek's routed experts have expert_feed_forward_length, its shared experts the
same number times expert_shared_count, and Mixtral's experts feed_forward_length. The keys that a loader reads
say which, but for those in a table, and an architecture that is in neither is refused (facts of llama.cpp,
src/models: load_arch_tensors).

A padded file keeps its sizes without padding in keys of its own: `gguf_tools.unpadded.` and the key's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.loaders import LOADERS
from gguf_tools.format.shown import value_text
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.padding.resized import Extent, Resize
from quantize.roles import FeedForwardPlace, feed_forward_place, is_unknown_feed_forward

UNPADDED = "gguf_tools.unpadded."
"""Beginning of the keys that keep the sizes of the model itself; the name of the padded key follows."""

UNIT = 256
"""Elements of a block of the K- and IQ-types."""


@dataclass(frozen=True)
class SizeRule:
    """Where a graph takes an inner size from: the number under `key`, times the one under `times`.

    also  a key that says the same and that the graph does not ask
    """

    key: str
    times: str | None = None
    also: str | None = None


_DENSE = {"dense": SizeRule(keys.FEED_FORWARD_LENGTH)}
_ROUTED = {**_DENSE, "routed": SizeRule(keys.EXPERT_FEED_FORWARD_LENGTH)}
_COUNTED = {**_ROUTED, "shared": SizeRule(keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_SHARED_COUNT)}
_OWN_SHARED = {**_ROUTED, "shared": SizeRule(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH)}
_MIXTRAL = {**_DENSE, "routed": SizeRule(keys.FEED_FORWARD_LENGTH)}
_GRANITE_EXPERTS = {**_MIXTRAL, "shared": SizeRule(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH)}
_MINIMAX = {"routed": SizeRule(keys.FEED_FORWARD_LENGTH, also=keys.EXPERT_FEED_FORWARD_LENGTH)}

_HUNYUAN = {**_MINIMAX, "shared": SizeRule(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH)}

_RULES: Mapping[str, Mapping[str, SizeRule]] = {
    "bert": _DENSE,
    "modern-bert": _DENSE,
    "nomic-bert": _DENSE,
    "nomic-bert-moe": _MIXTRAL,
    "gemma": _DENSE,
    "gemma-embedding": _DENSE,
    "granite": _DENSE,
    "granitehybrid": _GRANITE_EXPERTS,
    "granitemoe": _GRANITE_EXPERTS,
    "hunyuan-moe": _HUNYUAN,
    "llama": _MIXTRAL,
    "llama4": {**_ROUTED, "shared": SizeRule(keys.EXPERT_FEED_FORWARD_LENGTH)},
    "minimax-m2": _MINIMAX,
    "nemotron_h": _DENSE,
    "nemotron_h_moe": _OWN_SHARED,
    "olmoe": _MIXTRAL,
    "phimoe": _MIXTRAL,
    "qwen2moe": _OWN_SHARED,
}
"""The rules by architecture and part, where the keys that its loader reads don't say them, or no loader is
known. All activations among those of LOADERS, too, give 0 for 0, but xIELU of apertus, which gives -1e-6."""

ARCHITECTURES = tuple(sorted({*_RULES, *LOADERS}))
"""Names of the architectures whose inner sizes can be padded."""


def rules_of(architecture: str) -> Mapping[str, SizeRule]:
    """Return the rules of an architecture by part: experts have the sizes for which it reads a key."""
    loader = LOADERS.get(architecture)
    if architecture in _RULES or loader is None:
        return _RULES.get(architecture, {})
    if loader.reads(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH):
        return _OWN_SHARED
    if loader.reads(keys.EXPERT_SHARED_COUNT):
        return _COUNTED
    return _ROUTED if loader.reads(keys.EXPERT_FEED_FORWARD_LENGTH) else _DENSE


@dataclass(frozen=True)
class InnerTensor:
    """A tensor with an inner size.

    times  its inner size, in units of the key's number
    """

    name: str
    place: FeedForwardPlace
    times: int

    @property
    def is_in_columns(self) -> bool:
        """Whether a row is as long as the inner size; otherwise that many rows are."""
        return self.place.matrix == "down" or self.place.is_bias


@dataclass(frozen=True)
class InnerSize:
    """An inner size of a model.

    key      the metadata key that gives it
    value    what it holds: a number, or one for each layer
    real     what it would hold without padding
    tensors  that have the size
    also     other keys that hold the same
    """

    key: str
    value: Value
    real: Value
    tensors: tuple[InnerTensor, ...]
    also: tuple[str, ...] = ()

    def aligned(self) -> Value:
        """The least value at which every row of a down matrix is whole blocks long, from the real one."""
        step = lcm(*(UNIT // gcd(UNIT, tensor.times) for tensor in self.tensors))
        numbers = tuple(-(-number // step) * step for number in _numbers(self.real))
        data = numbers if isinstance(self.real.data, tuple) else numbers[0]
        return Value(self.real.kind, data, self.real.item)

    def resized(self, value: Value) -> Iterator[tuple[str, Resize]]:
        """Yield the tensors that change when the key holds another value, by name."""
        for tensor in self.tensors:
            layer, times = tensor.place.layer, tensor.times
            extent = Extent(times * number_in(self.value, layer), times * number_in(value, layer))
            if extent.old != extent.new:
                resize = Resize(cols=extent) if tensor.is_in_columns else Resize(rows=extent)
                yield tensor.name, resize


def inner_sizes(metadata: Metadata, tensors: Iterable[TensorInfo], path: str) -> tuple[InnerSize, ...]:
    """Find the inner sizes of a model, by key.

    path    for messages
    raises  BadRequest for an architecture that isn't in the table, for metadata that contradict the tensors
            or lack a size, and for tensors of feed-forward blocks that are unknown
    """
    architecture = architecture_of(metadata)
    rules = rules_of(architecture or "")
    if not rules:
        raise BadRequest(
            f"{path}: {keys.ARCHITECTURE} is {architecture}, and where its graph takes inner sizes from is"
            f" not known here; sizes can be padded for {', '.join(ARCHITECTURES)}"
        )
    found: dict[str, list[InnerTensor]] = {}
    infos = list(tensors)
    places = [feed_forward_place(info.name) for info in infos]
    gated = {(place.layer, place.part) for place in places if place and place.matrix == "gate"}
    for info, place in zip(infos, places, strict=True):
        if place is None:
            if is_unknown_feed_forward(info.name):
                raise BadRequest(f"{path}: what {info.name} has to do with the inner size is not known here")
            continue
        if place.matrix == "down" and place.is_bias:
            continue  # it is added to the product, which has the hidden size
        if place.part not in rules:
            raise BadRequest(f"{path}: {info.name}: {architecture} has no {place.part} experts")
        key, tensor = _inner_tensor(info, place, rules[place.part], metadata, path)
        is_gated = (place.layer, place.part) in gated
        _refuse_other_size(info, tensor, metadata[key], key, is_gated=is_gated, path=path)
        found.setdefault(key, []).append(tensor)
    others = {rule.also.format(arch=architecture) for rule in rules.values() if rule.also is not None}
    return tuple(
        InnerSize(
            key,
            metadata[key],
            _real(metadata, key, path),
            tuple(each),
            tuple(other for other in others if metadata.get(other) == metadata[key]),
        )
        for key, each in found.items()
    )


def _inner_tensor(
    info: TensorInfo, place: FeedForwardPlace, rule: SizeRule, metadata: Metadata, path: str
) -> tuple[str, InnerTensor]:
    """Find the key that gives a tensor's inner size, and how many times it counts."""
    architecture = architecture_of(metadata)
    key = rule.key.format(arch=architecture)
    times = 1
    if rule.times is not None:
        times = _whole(metadata, rule.times.format(arch=architecture), info, path)
    _whole(metadata, key, info, path, place.layer)
    return key, InnerTensor(info.name, place, times)


def _whole(metadata: Metadata, key: str, info: TensorInfo, path: str, layer: int = 0) -> int:
    """Read a positive number; raises BadRequest."""
    try:
        number = number_in(metadata[key], layer) if key in metadata else None
    except IndexError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
        shown = value_text(metadata[key]) if key in metadata else "missing"
        raise BadRequest(f"{path}: {key} is {shown}, expected a positive number for {info.name}")
    return number


def number_in(value: Value, layer: int) -> int:
    """The number that counts in a layer."""
    number: int = value.data[layer] if isinstance(value.data, tuple) else value.data
    return number


def _refuse_other_size(
    info: TensorInfo, tensor: InnerTensor, value: Value, key: str, *, is_gated: bool, path: str
) -> None:
    """Raise BadRequest for a tensor whose inner size is not what the key says.

    A matrix of gate and up has both below each other, and so has an up without a gate in some architectures.
    """
    place, size = tensor.place, tensor.times * number_in(value, tensor.place.layer)
    found = info.n_cols if tensor.is_in_columns else info.n_rows // info.n_mats
    may_be_double = place.matrix == "gate_up" or (place.matrix == "up" and not is_gated)
    allowed = {2 * size} if place.matrix == "gate_up" else {size, 2 * size} if may_be_double else {size}
    if found not in allowed:
        expected = " or ".join(map(str, sorted(allowed)))
        what = "columns" if tensor.is_in_columns else "rows"
        raise BadRequest(f"{path}: {info.name} has {found} {what}, expected {expected} by {key}")
    if tensor.is_in_columns and found != size:
        raise BadRequest(f"{path}: {info.name}: a bias of gate and up in one can't be padded")


def _real(metadata: Metadata, key: str, path: str) -> Value:
    """Read what a key would hold without padding; raises BadRequest for a number that can't be."""
    value, real = metadata[key], metadata.get(UNPADDED + key, metadata[key])
    pairs = list(zip(_numbers(real), _numbers(value), strict=False))
    fits = real.type_name == value.type_name and len(_numbers(real)) == len(_numbers(value))
    if not fits or not all(0 <= a <= b for a, b in pairs):
        raise BadRequest(
            f"{path}: {UNPADDED + key} is {value_text(real)}, expected no more than {key}, which is"
            f" {value_text(value)}"
        )
    return real


def _numbers(value: Value) -> Sequence[int]:
    return value.data if isinstance(value.data, tuple) else (value.data,)
