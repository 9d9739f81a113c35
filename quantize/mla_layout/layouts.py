"""Layouts of multi-head latent attention: which tensors and metadata keys a file of each has.

A checkpoint has one matrix a layer, kv_b_proj: for every head its key rows (`nope` of them, the part of a key
that is not rotated), then its value rows, each of `kv_lora` columns. A GGUF file holds it as

    split  attn_k_b (heads, kv_lora, nope), the key rows transposed head by head, and attn_v_b (heads, value,
           kv_lora); its metadata describe the one compressed head that is cached. For llama.cpp
    both   attn_kv_b (heads*(nope+value), kv_lora), which is kv_b_proj, and the two others as one matrix each;
           its metadata describe the heads before compression. For ik_llama.cpp
    none   attn_kv_b alone, metadata as with both. Either program runs it as plain attention

The converters of both programs write it so; the tests compare ours with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.hparams import known_hparams
from gguf_tools.format.shown import value_text
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.look.listing import count_parameters
from quantize.roles import LAYOUTS, MLALayout, Role, layer_of, tensor_role

ARCHITECTURE = "deepseek2"

_ROLES: Mapping[MLALayout, tuple[Role, ...]] = {
    "split": (Role.ATTN_K_B, Role.ATTN_V_B),
    "both": (Role.ATTN_KV_B, Role.ATTN_K_B, Role.ATTN_V_B),
    "none": (Role.ATTN_KV_B,),
}

LayerTensors = dict[Role, TensorInfo]
"""The tensors of latent attention in one layer, by role."""


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of a model's attention.

    n_heads  query heads
    nope     elements of a head's key that are not rotated
    rope     elements of a key that are, shared by all heads
    value    elements of a head's value
    kv_lora  elements of the latent that keys and values are made of
    """

    n_heads: int
    nope: int
    rope: int
    value: int
    kv_lora: int

    @classmethod
    def from_metadata(cls, metadata: Metadata, path: Path) -> HeadSizes:
        """Return the sizes that the metadata of the file at `path` give, in whichever layout it is.

        raises  BadRequest for another architecture, or a number that is missing or makes no sense
        """
        name = metadata.get(keys.ARCHITECTURE)
        if name is None or name.data != ARCHITECTURE:
            found = "missing" if name is None else value_text(name)
            raise BadRequest(
                f"{path}: {keys.ARCHITECTURE} is {found}, expected {ARCHITECTURE}: only its attention has"
                " these layouts"
            )

        hparams = known_hparams(metadata, ARCHITECTURE)

        def number(*fields: str) -> int:
            """Return the size in the first of the fields that has a key."""
            field = next((field for field in fields if hparams.key(field) in metadata), fields[-1])
            key, size = hparams.key(field), getattr(hparams, field)
            if isinstance(size, tuple) and len(set(size)) == 1:  # one number per layer
                size = size[0]
            if not isinstance(size, int) or size <= 0:
                shown = value_text(metadata[key]) if key in metadata else "missing"
                raise BadRequest(f"{path}: {key} is {shown}, expected a positive whole number")
            return size

        rope = number("rope_dimension_count")
        key_length = number("key_length_mla", "key_length")
        if key_length <= rope:
            raise BadRequest(
                f"{path}: a head's key has {key_length} elements and rope.dimension_count is {rope}, expected"
                " fewer rotated elements than there are"
            )
        return cls(
            n_heads=number("head_count"),
            nope=key_length - rope,
            rope=rope,
            value=number("value_length_mla", "value_length"),
            kv_lora=number("kv_lora_rank"),
        )

    @property
    def head_rows(self) -> int:
        """Rows of one head in attn_kv_b."""
        return self.nope + self.value

    def head_shape(self, role: Role) -> tuple[int, int]:
        """Return (rows, columns) of one head's matrix in attn_kv_b, attn_k_b or attn_v_b."""
        return {
            Role.ATTN_KV_B: (self.head_rows, self.kv_lora),
            Role.ATTN_K_B: (self.kv_lora, self.nope),
            Role.ATTN_V_B: (self.value, self.kv_lora),
        }[role]

    def shape(self, role: Role, layout: MLALayout) -> tuple[int, ...]:
        """Return the shape of the tensor of that role in a file of that layout."""
        n_rows, n_cols = self.head_shape(role)
        return (self.n_heads, n_rows, n_cols) if layout == "split" else (self.n_heads * n_rows, n_cols)


def tensor_name(layer: int, role: Role) -> str:
    """Return the name of a layer's tensor.

    >>> tensor_name(3, Role.ATTN_K_B)
    'blk.3.attn_k_b.weight'
    """
    return f"blk.{layer}.{role.value}.weight"


def roles_in(layout: MLALayout) -> tuple[Role, ...]:
    """Return the tensors that every layer has in a layout, in the order in which a converter writes them."""
    return _ROLES[layout]


def place_of(info: TensorInfo) -> tuple[int, Role] | None:
    """Return (layer, role) of a tensor of latent attention, None for any other."""
    role, layer = tensor_role(info.name, info.shape).role, layer_of(info.name)
    if layer is None or role not in _ROLES["both"] or info.name != tensor_name(layer, role):
        return None
    return layer, role


def tensors_by_layer(tensors: Iterable[TensorInfo], sizes: HeadSizes, path: Path) -> dict[int, LayerTensors]:
    """Return the tensors of latent attention by layer, in the order in which layers first appear.

    raises  BadRequest when there are none, for one whose shape the metadata contradict, or for a layer that
            lacks a half of its heads
    """
    layers: dict[int, LayerTensors] = {}
    for info in tensors:
        place = place_of(info)
        if place is None:
            continue
        layer, role = place
        n_rows, n_cols = sizes.head_shape(role)
        if (info.n_rows, info.n_cols) != (sizes.n_heads * n_rows, n_cols):
            raise BadRequest(
                f"{path}: {info.name} has shape {' x '.join(map(str, info.shape))}, expected {sizes.n_heads}"
                f" heads of {n_rows} x {n_cols} by the metadata (head_count, key_length, value_length,"
                " kv_lora_rank, rope.dimension_count)"
            )
        layers.setdefault(layer, {})[role] = info
    if not layers:
        names = ", ".join(role.value for role in _ROLES["both"])
        raise BadRequest(f"{path}: has none of {names}, so there is no latent attention to change")
    for layer, present in layers.items():
        if len(present) == 1 and Role.ATTN_KV_B not in present:
            missing = Role.ATTN_V_B if Role.ATTN_K_B in present else Role.ATTN_K_B
            raise BadRequest(
                f"{path}: {tensor_name(layer, missing)} is missing, and {tensor_name(layer, Role.ATTN_KV_B)}"
                " that it could be made of; the file is incomplete"
            )
    return layers


def layout_of(layers: Mapping[int, LayerTensors], sizes: HeadSizes) -> MLALayout | None:
    """Return the layout that every layer has, or None when it is a mixture or none of the three."""
    return next(
        (layout for layout in LAYOUTS if all(_is_in(layout, layer, sizes) for layer in layers.values())), None
    )


def _is_in(layout: MLALayout, tensors: LayerTensors, sizes: HeadSizes) -> bool:
    expected = {role: sizes.shape(role, layout) for role in roles_in(layout)}
    return {role: info.shape for role, info in tensors.items()} == expected


# ---- metadata


def metadata_in(
    metadata: Metadata, found: MLALayout | None, wanted: MLALayout, sizes: HeadSizes
) -> dict[str, Value]:
    """Return the metadata of the file in the layout `wanted`; new keys stand where the converter has them."""
    compressed = wanted == "split"
    changed = dict(metadata)
    _set(changed, keys.HEAD_COUNT_KV, 1 if compressed else sizes.n_heads, after=keys.HEAD_COUNT)
    key_length = (sizes.kv_lora if compressed else sizes.nope) + sizes.rope
    _set(changed, keys.KEY_LENGTH, key_length, after=keys.KV_LORA_RANK)
    value_length = sizes.kv_lora if compressed else sizes.value
    _set(changed, keys.VALUE_LENGTH, value_length, after=keys.KEY_LENGTH)
    if compressed:  # by these two llama.cpp knows that the heads are compressed
        _set(changed, keys.KEY_LENGTH_MLA, sizes.nope + sizes.rope, after=keys.KV_LORA_RANK)
        _set(changed, keys.VALUE_LENGTH_MLA, sizes.value, after=keys.KEY_LENGTH_MLA)
    else:
        changed.pop(_key(keys.KEY_LENGTH_MLA), None)
        changed.pop(_key(keys.VALUE_LENGTH_MLA), None)
    # Without the key it is false for both programs; only ik_llama.cpp's converter says so.
    norm = _key(keys.EXPERT_WEIGHTS_NORM)
    if wanted == "both" and found != "both" and norm not in changed:
        _insert(changed, norm, Value.bool_(False), after=_key(keys.EXPERT_WEIGHTS_SCALE))
    elif found == "both" and wanted != "both" and norm in changed and not changed[norm].data:
        del changed[norm]
    return changed


def _key(template: str) -> str:
    return template.format(arch=ARCHITECTURE)


def _set(metadata: dict[str, Value], template: str, number: int, after: str) -> None:
    """Set a key to a number: in its place, or behind the key `after` when it is new."""
    key = _key(template)
    if key not in metadata:
        _insert(metadata, key, Value.u32(number), _key(after))
    elif metadata[key].plain != number:
        metadata[key] = Value.u32(number)


def _insert(metadata: dict[str, Value], key: str, value: Value, after: str) -> None:
    """Add a new key behind another; at the end when that is missing."""
    items = list(metadata.items())
    place = next((i for i, (name, _) in enumerate(items, 1) if name == after), len(items))
    metadata.clear()
    metadata.update([*items[:place], (key, value), *items[place:]])


def relabelled(metadata: Metadata, old: Iterable[TensorInfo], new: Iterable[TensorInfo]) -> dict[str, Value]:
    """Return the metadata with the label of the tensors `new`, if the one there is that of `old`.

    It counts attn_kv_b besides attn_k_b and attn_v_b, so it follows the layout. A label that somebody wrote
    by hand, into a model card for instance, does not, and is kept.
    """
    changed = dict(metadata)
    if keys.SIZE_LABEL in changed and changed[keys.SIZE_LABEL].data == _size_label(old):
        changed[keys.SIZE_LABEL] = Value.string(_size_label(new))
    return changed


def _size_label(tensors: Iterable[TensorInfo]) -> str:
    return count_parameters((info.name, info.shape) for info in tensors).size_label
