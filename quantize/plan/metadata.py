"""The metadata of a quantized file: the source's, with what a plan changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gguf_tools.format import keys
from gguf_tools.format.shards import SPLIT_KEYS
from gguf_tools.format.values import Metadata, Value
from quantize.fill.provenance import PROVENANCE_KEY
from quantize.importances.entries import ImportanceFile
from quantize.plan.plan import Plan, PlanOptions
from quantize.plan.recipe import Recipe
from quantize.roles import layer_of

QUANTIZATION_VERSION = 2
"""GGML_QNT_VERSION: the generation of ggml's block layouts that we write."""


def output_metadata(
    source: Metadata,
    recipe: Recipe,
    importances: ImportanceFile | None,
    kv_overrides: Iterable[tuple[str, Value]],
    plan: Plan,
    options: PlanOptions,
) -> dict[str, Value]:
    """Return the source's metadata with the changes, in the order in which llama-quantize writes them: a key
    that is set moves to the end."""
    metadata = {key: value for key, value in source.items() if key not in (*SPLIT_KEYS, PROVENANCE_KEY)}

    def set_last(key: str, value: Value) -> None:
        metadata.pop(key, None)
        metadata[key] = value

    set_last(keys.QUANTIZATION_VERSION, Value.u32(QUANTIZATION_VERSION))
    if recipe.file_type is not None:
        set_last(keys.FILE_TYPE, Value.u32(recipe.file_type))
    elif keys.FILE_TYPE in metadata:
        set_last(keys.FILE_TYPE, metadata[keys.FILE_TYPE])
    for key, value in (*kv_overrides, *_importance_metadata(importances)):
        set_last(key, value)
    if options.prune_layers:
        architecture = metadata[keys.ARCHITECTURE].data
        layers = {layer for tensor in plan.tensors if (layer := layer_of(tensor.name)) is not None}
        set_last(keys.BLOCK_COUNT.format(arch=architecture), Value.u32(len(layers)))
        # llama-quantize leaves this one alone, and a model without its dense layer no longer loads.
        leading = keys.LEADING_DENSE_BLOCK_COUNT.format(arch=architecture)
        if leading in metadata:
            n_dense = metadata[leading].data
            pruned = sum(layer < n_dense for layer in set(options.prune_layers))
            metadata[leading] = Value.u32(n_dense - pruned)
    return metadata


def _importance_metadata(importances: ImportanceFile | None) -> Iterable[tuple[str, Value]]:
    """Yield the metadata of a quantized file about its importance matrix.

    Only the name of the matrix file is kept: its folder says nothing about the model.
    """
    if not importances or not importances.entries:
        return
    if importances.path is not None:
        yield keys.QUANTIZE_IMATRIX_FILE, Value.string(importances.path.name)
    if importances.datasets:
        yield keys.QUANTIZE_IMATRIX_DATASET, Value.string(Path(importances.datasets[0]).name)
    yield keys.QUANTIZE_IMATRIX_ENTRIES_COUNT, Value.u32(len(importances.entries))
    if importances.chunk_count > 0:
        yield keys.QUANTIZE_IMATRIX_CHUNKS_COUNT, Value.u32(importances.chunk_count)
