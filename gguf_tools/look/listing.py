"""Output of `gguf-tools show`: a file's metadata, tensors and totals, as plain data and as text.

The totals are computed here: weights with their size label, and bytes of KV cache for each token of context.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.argument_types import checked
from gguf_tools.choices import filled
from gguf_tools.files.named_files import AnyPath
from gguf_tools.format.hparams import Size, architecture_of, known_hparams
from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.format.shown import MAX_ITEMS, types_table, value_text
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import MAX_WIDTH, bytes_text, printable, table

_LEAST_WIDTH = 30
"""Width that a value may take however long its key is, in columns."""


@dataclass(frozen=True, repr=False)
class Description:
    """Contents of the header of a file or split set; no weight is read for it.

    path        as given
    version     of the format: 2 or 3
    endian      byte order: "little" or "big"
    alignment   of tensor data, in bytes
    size_bytes  of all files together
    metadata    key -> Value, in file order
    tensors     name -> TensorInfo, in file order
    places      name of a tensor -> the file that has it, and where in that its data begin, in bytes
    kv_cache    bytes that a token of context takes
    missing     which parts of the set are not there; "" for a whole one
    """

    path: Path
    version: int
    endian: str
    alignment: int
    size_bytes: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, tuple[Path, int]]
    kv_cache: KVCache
    missing: str

    @classmethod
    def of(cls, source: GGUFSet) -> Description:
        """Describe an open file or split set."""
        places = {name: (source.file_of(name).path, source.data_offset(name)) for name in source.tensors}
        return filled(cls, source, places=places, kv_cache=kv_cache(source))

    @property
    def n_elems(self) -> int:
        """How many weights all tensors have."""
        return sum(info.n_elems for info in self.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors' data, without padding between them."""
        return sum(info.n_bytes for info in self.tensors.values())

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of all tensors by weights; None for a file without tensors."""
        return 8 * self.tensor_bytes / self.n_elems if self.n_elems else None

    def __repr__(self) -> str:
        bits = f", {self.bits_per_weight:.4g} bits per weight" if self.n_elems else ""
        return f"<Description of {self.path.name}: {len(self.tensors)} tensors{bits}>"

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.tensors.values())

    def to_json(self, *, full: bool = False) -> dict[str, Any]:
        """Return everything as plain data.

        full  keep long arrays whole; otherwise they are cut to their first items, and their length is added
        """
        data = {
            "path": str(self.path),
            "version": self.version,
            "endian": self.endian,
            "alignment": self.alignment,
            "size_bytes": self.size_bytes,
            "metadata": {key: _value_data(value, full) for key, value in self.metadata.items()},
            "tensors": [self._tensor_data(info) for info in self.tensors.values()],
            "types": type_totals(self.tensors.values()),
            "parameters": self.n_elems,
            "tensor_bytes": self.tensor_bytes,
            "bits_per_weight": self.bits_per_weight,
            "kv_cache_bytes_per_token": {"plain": self.kv_cache.plain, "mla": self.kv_cache.mla},
        }
        return data | ({"missing": self.missing} if self.missing else {})

    def _tensor_data(self, info: TensorInfo) -> dict[str, Any]:
        file, offset = self.places[info.name]
        return {
            "name": info.name,
            "shape": list(info.shape),
            "type": info.type.name,
            "file": file.name,
            "offset": offset,
            "bytes": info.n_bytes,
            "bits_per_weight": 8 * info.n_bytes / info.n_elems,
        }

    def lines(self, *, full: bool = False) -> list[str]:
        """Return everything as text; `full`: long arrays and texts whole."""
        tensors = list(self.tensors.values())
        lines = [
            f"{self.path}: GGUF version {self.version}, {self.endian} endian, "
            f"alignment {self.alignment}, {bytes_text(self.size_bytes)}"
        ]
        if self.metadata:
            lines += ["", f"Metadata ({len(self.metadata)} keys)", *_metadata_text(self.metadata, full)]
        if tensors:
            lines += ["", f"Tensors ({len(tensors)})", *_tensors_text(tensors)]
            lines += ["", "Totals", *_totals_text(tensors)]
            notes = {info.type.name: info.type.note for info in tensors if info.type.note}
            lines += [f"{name}: {note}" for name, note in notes.items()]
        lines += _kv_cache_text(self.kv_cache)
        return [*lines, f"note: this is one part: {self.missing}"] if self.missing else lines


@checked
def show(file: AnyPath) -> Description:
    """Read what a GGUF file says of itself, as `gguf-tools show` prints it; any part opens a split set.

        show("lite-Q4_K_M.gguf").bits_per_weight

    raises  GGUFError for a damaged file, MissingModel for one that isn't there
    """
    with open_gguf(file, may_lack_parts=True) as source:
        return Description.of(source)


def type_totals(tensors: Iterable[TensorInfo]) -> list[dict[str, Any]]:
    """Return tensors, elements and bytes of every type, the type with the most bytes first."""
    totals: dict[str, dict[str, Any]] = {}
    for info in tensors:
        entry = totals.setdefault(
            info.type.name, {"type": info.type.name, "tensors": 0, "elements": 0, "bytes": 0}
        )
        entry["tensors"] += 1
        entry["elements"] += info.n_elems
        entry["bytes"] += info.n_bytes
    return sorted(totals.values(), key=lambda entry: -entry["bytes"])


def _tensors_text(tensors: Sequence[TensorInfo]) -> list[str]:
    rows = [("name", "shape (rows first)", "type", "bits/weight", "bytes")]
    rows += [
        (
            info.name,
            " x ".join(map(str, info.shape)),
            info.type.name,
            f"{8 * info.n_bytes / info.n_elems:.4g}",
            f"{info.n_bytes:,}",
        )
        for info in tensors
    ]
    return table(rows, right=(3, 4))


def _metadata_text(metadata: Metadata, full: bool) -> list[str]:
    """Return a line for each key, of at most MAX_WIDTH columns where its name leaves enough of them."""
    heads = [(printable(key), value.type_name) for key, value in metadata.items()]
    taken = sum(min(max(map(len, column)), MAX_WIDTH) + 2 for column in zip(*heads, strict=True))
    width = max(MAX_WIDTH - taken, _LEAST_WIDTH)
    values = (value_text(value, full=full, width=width) for value in metadata.values())
    return table([(*head, text) for head, text in zip(heads, values, strict=True)])


def _totals_text(tensors: list[TensorInfo]) -> list[str]:
    totals = type_totals(tensors)
    whole = {
        "type": "all",
        "tensors": len(tensors),
        "elements": sum(entry["elements"] for entry in totals),
        "bytes": sum(entry["bytes"] for entry in totals),
    }
    rows = [("type", "tensors", "weights", "bytes", "of all", "bits/weight")]
    rows += [
        (
            entry["type"],
            str(entry["tensors"]),
            f"{entry['elements']:,}",
            f"{entry['bytes']:,}",
            f"{100 * entry['bytes'] / whole['bytes']:.1f} %",
            f"{8 * entry['bytes'] / entry['elements']:.4g}",
        )
        for entry in [*totals, whole]
    ]
    return table(rows, right=range(1, 6))


def _kv_cache_text(cache: KVCache) -> list[str]:
    lines = []
    if cache.mla is not None:
        lines.append(f"MLA              {bytes_text(cache.mla)}")
    if cache.plain is not None:
        lines.append(f"plain attention  {bytes_text(cache.plain)}")
    return ["", "KV cache per token, 16 bits a number", *lines] if lines else []


def _value_data(value: Value, full: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"type": value.type_name, "value": value.plain}
    if isinstance(value.data, tuple):
        data["length"] = len(value.data)
        if not full and len(value.data) > MAX_ITEMS:
            data["value"] = Value(value.kind, value.data[:MAX_ITEMS], value.item).plain
            data["shortened"] = True
    return data


BYTES_PER_NUMBER = 2
"""Size of a number in a 16-bit cache."""


@dataclass(frozen=True)
class KVCache:
    """Bytes per token of a 16-bit cache; None where it is not known, or doesn't apply.

    plain  of attention that keeps the keys and values of every KV head; layers with a state of fixed size in
           its place count nothing
    mla    of multi-head latent attention, which keeps one latent vector for all heads, from which keys and
           values are computed, and the rotated part of the key. DeepSeek-V3: 61 layers x (512 + 64) numbers,
           against 61 x 128 heads x (192 + 128) if it kept its heads
    """

    plain: int | None
    mla: int | None


def kv_cache(source: GGUFSource) -> KVCache:
    """Return the bytes per token, computed from the hyper-parameters in the metadata."""
    architecture = architecture_of(source.metadata)
    if architecture is None:
        return KVCache(None, None)
    hparams = known_hparams(source.metadata, architecture)
    n_blocks = _positive(hparams.block_count)
    if n_blocks is None or hparams.attention_causal is False:  # an encoder sees a text at once
        return KVCache(None, None)
    n_layers = max(0, n_blocks - (_positive(hparams.nextn_predict_layers) or 0))
    n_layers -= sum((hparams.flags("recurrent_layers", n_layers) or ())[:n_layers])
    lora_rank, rope_dims = _positive(hparams.kv_lora_rank), _positive(hparams.rope_dimension_count)
    n_heads = _positive(hparams.head_count)
    key_length, value_length = _positive(hparams.key_length), _positive(hparams.value_length)

    if lora_rank and rope_dims:
        # With 3-D MLA tensors key_length is that of the cache, and key_length_mla that of a head.
        head_key = _positive(hparams.key_length_mla) or key_length
        head_value = _positive(hparams.value_length_mla) or value_length
        mla = n_layers * (lora_rank + rope_dims) * BYTES_PER_NUMBER
        if not (n_heads and head_key and head_value):
            return KVCache(None, mla)
        return KVCache(n_layers * n_heads * (head_key + head_value) * BYTES_PER_NUMBER, mla)

    embedding = _positive(hparams.embedding_length)
    if n_heads and embedding:
        key_length = key_length or embedding // n_heads
        value_length = value_length or embedding // n_heads
    has_kv_heads = hparams.key("head_count_kv") in source.metadata
    heads = hparams.head_count_kv if has_kv_heads else n_heads
    if not key_length or not value_length or heads is None:
        return KVCache(None, None)
    pattern = hparams.sliding_window_pattern
    windows = pattern if isinstance(pattern, tuple) else ()
    lengths = key_length, value_length
    swa = hparams.key_length_swa, hparams.value_length_swa
    in_window = [_positive(size) or length for size, length in zip(swa, lengths, strict=True)]
    # The last layers of some Gemmas attend to keys of others.
    n_own = max(0, n_layers - (_positive(hparams.shared_kv_layers) or 0))
    # Only layers of which the file lists something are gone through: their number may be anything.
    by_layer = heads if isinstance(heads, tuple) else (heads,) * min(n_own, len(windows))
    numbers = sum(
        n_kv_heads * sum(in_window if layer < len(windows) and windows[layer] else lengths)
        for layer, n_kv_heads in enumerate(by_layer[:n_own])
    )
    if not isinstance(heads, tuple):
        numbers += (n_own - len(by_layer)) * heads * sum(lengths)
    return KVCache(numbers * BYTES_PER_NUMBER, None)


def _positive(size: Size) -> int | None:
    """Return a size that holds for all layers, None for any other or for 0."""
    return size if isinstance(size, int) and size > 0 else None


@dataclass(frozen=True)
class ParameterCounts:
    """Weights of a model, as its size label needs them.

    total      all weights
    shared     weights outside of routed experts
    expert     weights of one routed expert, over all layers
    n_experts  routed experts of a layer; 0 for a dense model
    """

    total: int = 0
    shared: int = 0
    expert: int = 0
    n_experts: int = 0

    @property
    def size_label(self) -> str:
        """Return `16x5.7M`: number of experts, and size of one with the shared weights; `1.5B` if dense."""
        if self.n_experts:
            return f"{self.n_experts}x{rounded(self.shared + self.expert)}"
        return rounded(self.total)


def count_parameters(tensors: Iterable[tuple[str, Sequence[int]]]) -> ParameterCounts:
    """Return the counts of GGUF tensors given as (name, shape), shapes rows first as in numpy.

    Routed experts are the stacked tensors `..._exps.weight` (experts, rows, columns) and
    `..._exps.bias` (experts, columns).
    """
    total = shared = expert = 0
    experts_of_tensors: list[int] = []
    for name, shape in tensors:
        n_elems = math.prod(shape)
        total += n_elems
        if "_exps." in name and len(shape) >= 3:
            n_experts = shape[-2] if ".bias" in name else shape[-3]
            expert += n_elems // n_experts
            experts_of_tensors.append(n_experts)
        else:
            shared += n_elems
    n_experts = sum(experts_of_tensors) // len(experts_of_tensors) if experts_of_tensors else 0
    return ParameterCounts(total, shared, expert, n_experts)


def rounded(n_params: int) -> str:
    """Return a number of weights with at least two digits: 671026419200 -> 671B, 5700000 -> 5.7M."""
    units = ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M"), (0, 1e-3, "K"))
    scale, suffix = next((scale, suffix) for limit, scale, suffix in units if n_params > limit or not limit)
    scaled = n_params * scale
    n_digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - n_digits, 0)}f}{suffix}"
