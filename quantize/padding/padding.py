"""Change of the sizes of a model: a value that changes metadata, shapes and rows in step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from gguf_tools.errors import BadRequest
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.fill.sources import ChangedSources, SourceSpec, SourceTensor
from quantize.padding import PAD_WORDS
from quantize.padding.inner_sizes import UNPADDED, InnerSize, inner_sizes
from quantize.padding.resized import Resize, resize_tensors


@dataclass(frozen=True)
class SizeChange:
    """A size that becomes another one, or is padded and stays so.

    key     the metadata key that gives it
    before  what it holds in the input
    after   what it will hold
    real    what it would hold without padding
    """

    key: str
    before: Value
    after: Value
    real: Value

    @property
    def pads(self) -> bool:
        return self.after != self.real

    @property
    def real_text(self) -> str:
        return value_range(self.real)

    @property
    def after_text(self) -> str:
        return value_range(self.after)

    def __str__(self) -> str:
        return f"{self.key} {value_range(self.before)} -> {value_range(self.after)}"


@dataclass(frozen=True)
class Padding:
    """Sizes of a model that change.

    changes  of sizes
    resized  tensors that change, by their names in the input
    added    metadata that the input does without
    """

    changes: tuple[SizeChange, ...] = ()
    resized: Mapping[str, Resize] = field(default_factory=dict)
    added: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Iterable[InnerSize], values: Iterable[Value]) -> Padding:
        """Give each size a value."""
        pairs = list(zip(sizes, values, strict=True))
        return cls(
            tuple(
                SizeChange(key, size.value, value, size.real)
                for size, value in pairs
                for key in (size.key, *size.also)
            ),
            {name: resize for size, value in pairs for name, resize in size.resized(value)},
        )

    @property
    def is_needed(self) -> bool:
        """Whether anything changes."""
        return bool(self.resized)

    @property
    def pads(self) -> bool:
        """Whether the result has sizes that are padded."""
        return any(change.pads for change in self.changes)

    def metadata(self, metadata: Metadata) -> dict[str, Value]:
        """Change the sizes in metadata, which say what they were before padding."""
        changed = {**metadata, **self.added}
        for change in self.changes:
            changed[change.key] = change.after
            changed.pop(UNPADDED + change.key, None)
            if change.pads:
                changed[UNPADDED + change.key] = change.real
        return changed

    def then(self, other: Padding) -> Padding:
        """This change and then another one, of other sizes."""
        resized = {
            name: self.resized.get(name, Resize()).joined(other.resized.get(name, Resize()))
            for name in {**self.resized, **other.resized}
        }
        return Padding((*self.changes, *other.changes), resized, {**self.added, **other.added})

    def infos(self, infos: Iterable[TensorInfo]) -> list[TensorInfo]:
        """Change the shapes of tensors."""
        return [self.resized[info.name].info(info) if info.name in self.resized else info for info in infos]

    def refuse(self, infos: Iterable[TensorInfo], path: str) -> None:
        """Raise BadRequest for tensors of the input whose blocks can't be resized as they are stored."""
        for info in infos:
            if info.name in self.resized:
                self.resized[info.name].refuse(info, path)

    def tensors(self, tensors: Mapping[str, SourceTensor]) -> Mapping[str, SourceTensor]:
        """Change tensors of the input, unread."""
        return resize_tensors(tensors, self.resized) if self.is_needed else tensors

    def spec(self, spec: SourceSpec) -> SourceSpec:
        """Let another process open the tensors in the same way."""
        change = partial(resize_tensors, resized=self.resized)
        return ChangedSources(spec, change) if self.is_needed else spec

    def __str__(self) -> str:
        """The sizes that change, for people."""
        return ", ".join(str(change) for change in self.changes if change.before != change.after)


NO_PADDING = Padding()


def is_padded(metadata: Metadata) -> bool:
    """Whether a file says that sizes of its model are padded."""
    return any(key.startswith(UNPADDED) for key in metadata)


def paddings(metadata: Metadata, tensors: Iterable[TensorInfo], path: str) -> tuple[Padding, ...]:
    """List what the sizes of a model can become: first all without padding, last all that can be padded.

    raises  BadRequest as `inner_sizes`
    """
    sizes = inner_sizes(metadata, tensors, path)
    ways = product(*(dict.fromkeys((size.real, size.aligned())) for size in sizes))
    return tuple(Padding.of(sizes, values) for values in ways)


def padding_of(keys: Sequence[str], metadata: Metadata, tensors: Iterable[TensorInfo], path: str) -> Padding:
    """Pad the sizes of some keys alone; see PadChoice.

    raises  BadRequest for a key that gives no inner size, and as `inner_sizes`
    """
    sizes = inner_sizes(metadata, tensors, path)

    def is_named(size: InnerSize, key: str) -> bool:
        return any(each == key or each.endswith(f".{key}") for each in (size.key, *size.also))

    for key in keys:
        if not any(is_named(size, key) for size in sizes):
            found = ", ".join(size.key for size in sizes)
            raise BadRequest(f"{path}: --pad {key}: expected {', '.join(PAD_WORDS)}, or some of {found}")
    return Padding.of(
        sizes,
        (size.aligned() if any(is_named(size, key) for key in keys) else size.real for size in sizes),
    )


def value_range(value: Value) -> str:
    """The number that a value holds; of one for each layer, the least and the largest."""
    data = value.data
    if not isinstance(data, tuple):
        return str(data)
    kinds = sorted(set(data))
    return f"{kinds[0]} to {kinds[-1]}" if len(kinds) > 1 else str(kinds[0])
