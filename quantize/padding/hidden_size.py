"""The hidden size padded: columns of what reads hidden states, embeddings too, and rows of what writes them.

A norm divides by the root of the mean square of n elements plus epsilon. With zeros behind them there are n',
so the mean is n / n' of what it was. Epsilon times n / n', and norm weights times sqrt(n / n'), give the same
again: to the last bit where n' is 4 n, else to float32's rounding. Heads of zeros are added where all heads
together are no whole blocks either; they come with their share of key heads, which the cache has to hold.

Graphs use the epsilon for every norm, and some use the hidden size for other things: to scale embeddings, or
for the length of a head. So there is a list of architectures in which nothing else depends on it, and a model
whose queries and keys are normed is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.hparams import architecture_of, known_hparams
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.padding.inner_sizes import UNIT, UNPADDED
from quantize.padding.padding import NO_PADDING, Padding, SizeChange
from quantize.padding.resized import Extent, Resize

_ARCHITECTURES = ("gpt-oss", "llama", "qwen2")

_NORM = re.compile(r"output_norm\.weight|blk\.\d+\.(attn|ffn|post_attention)_norm\.weight")
_READS = re.compile(r"(token_embd|output|blk\.\d+\.ffn_(gate_inp|gate|up|gate_exps|up_exps))\.weight")
_WRITES = re.compile(r"blk\.\d+\.ffn_down(_exps)?\.weight")
_ADDED = re.compile(r"blk\.\d+\.(attn_output|ffn_down|ffn_down_exps)\.bias")
_HEADS = re.compile(r"blk\.\d+\.attn_(q|k|v)\.(weight|bias)")
_OUTPUT = re.compile(r"blk\.\d+\.attn_output\.weight")
_PER_HEAD = re.compile(r"blk\.\d+\.attn_sinks\.weight")
_OF_OTHER_SIZES = re.compile(r"rope_freqs\.weight|blk\.\d+\.ffn_(gate_inp|gate|up|gate_exps|up_exps)\.bias")


@dataclass(frozen=True)
class HiddenSize:
    """The hidden size of a model, and its heads.

    width      elements of a hidden state
    n_heads    query heads
    n_kv_heads key heads
    length     elements of a head
    """

    width: int
    n_heads: int
    n_kv_heads: int
    length: int

    @property
    def aligned(self) -> HiddenSize:
        """The least sizes at which hidden states, and all heads together, are whole blocks."""
        group = self.n_heads // self.n_kv_heads
        n_kv_heads = self.n_kv_heads
        while group * n_kv_heads * self.length % UNIT:
            n_kv_heads += 1
        width = -(-self.width // UNIT) * UNIT
        return HiddenSize(width, group * n_kv_heads, n_kv_heads, self.length)


def hidden_padding(metadata: Metadata, tensors: Iterable[TensorInfo], path: str) -> Padding:
    """Pad the hidden size of a model to whole blocks; no change where it is.

    raises  BadRequest for an architecture that isn't in the list, norms of another size, tensors that are
            unknown, and sizes that differ by layer or are missing
    """
    old = read_hidden_size(metadata, path)
    return _change(metadata, tensors, old, old.aligned, path)


def read_hidden_size(metadata: Metadata, path: str) -> HiddenSize:
    """Read the hidden size and the heads of a model; raises BadRequest as `hidden_padding`."""
    architecture = architecture_of(metadata) or ""
    if architecture not in _ARCHITECTURES:
        raise BadRequest(
            f"{path}: {keys.ARCHITECTURE} is {architecture}; the hidden size can be padded for"
            f" {', '.join(_ARCHITECTURES)}, where nothing else depends on it"
        )
    hparams = known_hparams(metadata, architecture)

    def number(name: str, default: int | None = None) -> int:
        size = getattr(hparams, name)
        size = default if size is None else size
        if not isinstance(size, int) or size <= 0:
            raise BadRequest(f"{path}: {hparams.key(name)} is {size}, expected one positive number")
        return size

    width, n_heads = number("embedding_length"), number("head_count")
    n_kv_heads = number("head_count_kv", n_heads)
    length = number("key_length", width // n_heads)
    if number("value_length", width // n_heads) != length or n_heads % n_kv_heads:
        raise BadRequest(f"{path}: heads of {length} elements, and values or groups of another size")
    return HiddenSize(width, n_heads, n_kv_heads, length)


def _change(
    metadata: Metadata, tensors: Iterable[TensorInfo], old: HiddenSize, new: HiddenSize, path: str
) -> Padding:
    if new.width == old.width:
        return NO_PADDING
    resized = {info.name: resize for info in tensors if (resize := _resize(info, old, new, path))}
    architecture = architecture_of(metadata)
    numbers = {
        keys.EMBEDDING_LENGTH: (old.width, new.width),
        keys.HEAD_COUNT: (old.n_heads, new.n_heads),
        keys.HEAD_COUNT_KV: (old.n_kv_heads, new.n_kv_heads),
    }
    changes = []
    for template, (before, after) in numbers.items():
        key = template.format(arch=architecture)
        if before != after:
            value = metadata.get(key, Value.u32(before))
            changes.append(
                SizeChange(key, value, Value(value.kind, after), metadata.get(UNPADDED + key, value))
            )
    key = keys.LAYERNORM_RMS_EPS.format(arch=architecture)
    if key not in metadata:
        raise BadRequest(f"{path}: {key} is missing, expected a number")
    epsilon = metadata[key]
    scaled = Value.f32(float(epsilon.data) * old.width / new.width)
    changes.append(SizeChange(key, epsilon, scaled, metadata.get(UNPADDED + key, epsilon)))
    lengths = (keys.KEY_LENGTH.format(arch=architecture), keys.VALUE_LENGTH.format(arch=architecture))
    added = {name: Value.u32(old.length) for name in lengths if name not in metadata}
    return Padding(tuple(changes), resized, added)


def _resize(info: TensorInfo, old: HiddenSize, new: HiddenSize, path: str) -> Resize | None:
    """Say how a tensor changes; raises BadRequest for one that is unknown or has another size."""
    width = Extent(old.width, new.width)
    heads = Extent(old.n_heads * old.length, new.n_heads * new.length)
    kv_heads = Extent(old.n_kv_heads * old.length, new.n_kv_heads * new.length)
    name = info.name
    if _OF_OTHER_SIZES.fullmatch(name):
        return None
    if _NORM.fullmatch(name):
        resize = Resize(cols=width, factor=math.sqrt(old.width / new.width))
    elif _READS.fullmatch(name) or _ADDED.fullmatch(name):
        resize = Resize(cols=width)
    elif name.endswith("ffn_gate_inp.bias"):
        return None
    elif _WRITES.fullmatch(name):
        resize = Resize(rows=width)
    elif _OUTPUT.fullmatch(name):
        resize = Resize(rows=width, cols=heads)
    elif _PER_HEAD.fullmatch(name):
        resize = Resize(cols=Extent(old.n_heads, new.n_heads))
    elif match := _HEADS.fullmatch(name):
        own = heads if match[1] == "q" else kv_heads
        resize = Resize(own, width) if match[2] == "weight" else Resize(cols=own)
    else:
        raise BadRequest(f"{path}: what {name} has to do with the hidden size is not known here")
    n_rows = info.n_rows // info.n_mats
    fits = (resize.rows is None or n_rows == resize.rows.old) and info.n_cols == (
        resize.cols or Extent(info.n_cols, 0)
    ).old
    if not fits:
        shape = " x ".join(map(str, info.shape))
        raise BadRequest(f"{path}: {name} has shape {shape}, which contradicts the sizes in the metadata")
    return resize


def hidden_size_without(metadata: Metadata, tensors: Iterable[TensorInfo], path: str) -> Padding:
    """The shapes of a file without the padding of its hidden size; no change where it has none."""
    if not pads_hidden_size(metadata):
        return NO_PADDING
    real = {key: metadata.get(UNPADDED + key, value) for key, value in metadata.items()}
    return _change(metadata, tensors, read_hidden_size(metadata, path), read_hidden_size(real, path), path)


def pads_hidden_size(metadata: Metadata) -> bool:
    """Whether a file says that its hidden size is padded."""
    architecture = architecture_of(metadata)
    return UNPADDED + keys.EMBEDDING_LENGTH.format(arch=architecture) in metadata


def n_hidden_zeros(metadata: Metadata) -> int:
    """Count the columns of zeros behind the hidden states of a file."""
    key = keys.EMBEDDING_LENGTH.format(arch=architecture_of(metadata))
    return int(metadata[key].data - metadata[UNPADDED + key].data) if pads_hidden_size(metadata) else 0


def cost_text(metadata: Metadata, padding: Padding, path: str) -> str:
    """Say what a padded hidden size costs."""
    old = read_hidden_size(metadata, path)
    new = read_hidden_size(padding.metadata(metadata), path)
    more = 100 * (new.width / old.width - 1)
    cache = 100 * (new.n_kv_heads / old.n_kv_heads - 1)
    return (
        f"hidden size {old.width} -> {new.width}: about {more:.1f} % more to read and to multiply for each"
        f" token, and {f'a cache {cache:.1f} % larger' if cache else 'a cache of the same size'}"
    )
