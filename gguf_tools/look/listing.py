"""What `gguf-tools show` prints: a file's metadata, tensors and totals, as plain data and as text."""

from __future__ import annotations

from typing import Any

from gguf_tools.format.reader import GGUFSource
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.look.kv_cache import KVCache, kv_cache
from gguf_tools.text import MAX_ITEMS, MAX_WIDTH, bytes_text, printable, table, value_text

_LEAST_WIDTH = 30
"""Width that a value may take however long its key is, in columns."""


def describe(source: GGUFSource, *, full: bool = False) -> dict[str, Any]:
    """Return a description of a file or split set, as data for JSON.

    full  keep long arrays whole; otherwise they are cut to their first items, and their length is added
    """
    tensors = list(source.tensors.values())
    n_elems = sum(info.n_elems for info in tensors)
    n_bytes = sum(info.n_bytes for info in tensors)
    cache = kv_cache(source)
    return {
        "path": str(source.path),
        "version": source.version,
        "endian": source.endian,
        "alignment": source.alignment,
        "size_bytes": source.size_bytes,
        "metadata": {key: _value_data(value, full) for key, value in source.metadata.items()},
        "tensors": [_tensor_data(source, info) for info in tensors],
        "types": type_totals(tensors),
        "parameters": n_elems,
        "tensor_bytes": n_bytes,
        "bits_per_weight": 8 * n_bytes / n_elems if n_elems else None,
        "kv_cache_bytes_per_token": {"plain": cache.plain, "mla": cache.mla},
    }


def type_totals(tensors: list[TensorInfo]) -> list[dict[str, Any]]:
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


def show_text(source: GGUFSource, *, full: bool = False) -> list[str]:
    """Return the same as lines of text."""
    tensors = list(source.tensors.values())
    lines = [
        f"{source.path}: GGUF version {source.version}, {source.endian} endian, "
        f"alignment {source.alignment}, {bytes_text(source.size_bytes)}"
    ]
    if source.metadata:
        lines += ["", f"Metadata ({len(source.metadata)} keys)", *_metadata_text(source.metadata, full)]
    if tensors:
        rows_of_tensors = [("name", "shape (rows first)", "type", "bits/weight", "bytes")]
        rows_of_tensors += [
            (
                printable(info.name),
                " x ".join(map(str, info.shape)),
                info.type.name,
                f"{8 * info.n_bytes / info.n_elems:.4g}",
                f"{info.n_bytes:,}",
            )
            for info in tensors
        ]
        lines += ["", f"Tensors ({len(tensors)})", *table(rows_of_tensors, right=(3, 4))]
        lines += ["", "Totals", *_totals_text(tensors)]
        notes = {info.type.name: info.type.note for info in tensors if info.type.note}
        lines += [f"{name}: {note}" for name, note in notes.items()]
    lines += _kv_cache_text(kv_cache(source))
    return lines


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


def _tensor_data(source: GGUFSource, info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type.name,
        "file": source.file_of(info.name).path.name,
        "offset": source.data_offset(info.name),
        "bytes": info.n_bytes,
        "bits_per_weight": 8 * info.n_bytes / info.n_elems,
    }
