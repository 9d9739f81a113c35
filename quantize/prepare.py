"""Steps that all fronts share: deciding a file, laying it out, and what the chunks of a plan refer to.

A front (quantize/pipeline.py, convert/pipeline.py, mla_layout/pipeline.py) knows where tensors come from.
From there on a plan becomes a file in the same way for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import output_path
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.format.hparams import known_hparams
from gguf_tools.format.shards import SPLIT_KEYS, GGUFSet, layouts_of, shard_paths
from gguf_tools.format.shown import types_table
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.fill.chunks import UNKNOWN
from quantize.fill.encode import RowSources
from quantize.fill.filling import Output
from quantize.fill.provenance import PROVENANCE_KEY, provenance_value
from quantize.fill.sources import ChangedSources, SourceSpec, SourceTensor
from quantize.grids import keep_grids
from quantize.importances.entries import ImportanceFile, PromisedImportance, refuse_nonfinite
from quantize.options import METHOD_KEY, FileOptions
from quantize.padding.counterparts import count_weights, fit_importances
from quantize.padding.padding import NO_PADDING, Padding
from quantize.plan.findings import stop_at_errors, without_codec
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import Plan, build_plan, in_file_order
from quantize.plan.recipe import Recipe
from quantize.plan.recipe_files import Mixture
from quantize.plan.recipes import file_type_of
from quantize.roles import layer_of


@dataclass(frozen=True)
class Preparation:
    """All that is decided before a weight is read.

    plan          the type of each tensor, and why
    outputs       one file, or one per shard
    source_bytes  bytes of the tensors that will be read
    padding       sizes of the input that change
    """

    plan: Plan
    outputs: tuple[Output, ...]
    source_bytes: int
    padding: Padding = NO_PADDING

    def __repr__(self) -> str:
        return f"<Preparation of {self.outputs[0].path}: {self.plan.file_type}, {self.total_bytes:,} bytes>"

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.plan.infos)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The outputs' places."""
        return tuple(output.path for output in self.outputs)

    @property
    def total_bytes(self) -> int:
        """Exact size of all output files together."""
        return sum(output.layout.total_bytes for output in self.outputs)


TYPES_CHOSEN_KEY = "gguf_tools.types_chosen"
"""Metadata key of a file whose types were chosen for a size: general.file_type is only the nearest one."""

_TYPES_CHOSEN = "for a size"

TYPES_CHOSEN_BYTES = 8 + len(TYPES_CHOSEN_KEY) + 4 + 8 + len(_TYPES_CHOSEN)
"""Bytes of the key in the header: two lengths, two texts, and the number of a kind."""


def decide_file(
    metadata: Metadata,
    tensors: Sequence[TensorInfo],
    mixture: Mixture,
    options: FileOptions,
    kv_overrides: Sequence[tuple[str, Value]] = (),
    *,
    allow_problems: bool = False,
    as_if: GGMLType | None = None,
) -> tuple[Plan, Metadata]:
    """Decide plan and metadata of what a file with `metadata` and `tensors` becomes.

    kv_overrides           metadata that replace or join those of the source, in order
    allow_problems, as_if  as `build_plan` takes them
    raises                 what `build_plan` does, and QuantError for a type without codec
    """
    types, matrix = options.types_for(mixture), options.matrix
    if matrix is not None:
        refuse_nonfinite(matrix.entries)
    elif options.calibration is not None:
        matrix = options.calibration.begin().promise(metadata, tensors)
    entries = fit_importances(matrix.entries, metadata, tensors) if matrix else {}
    has_layers = any(layer_of(tensor.name) is not None for tensor in tensors)
    facts = ModelFacts.from_metadata(metadata, kv_overrides, has_layers=has_layers)
    plan = build_plan(
        tensors,
        mixture.recipe,
        facts,
        importances=entries,
        options=types,
        allow_problems=allow_problems,
        as_if=as_if,
    )
    if mixture.options.types:  # no file type: it is called by its size
        plan = replace(plan, file_type=mixture.name)
    n_zeros = sum(info.n_elems for info in plan.infos) - count_weights(metadata, plan.infos)
    plan = replace(plan, findings=(*without_codec(plan.tensors), *plan.findings), n_zeros=n_zeros)
    if not allow_problems:
        stop_at_errors(plan.findings)
    output = output_metadata(metadata, tensors, mixture.recipe, matrix, kv_overrides)
    if types.prune_layers:
        from quantize.plan.pruning import Pruning, prune_metadata

        n_layers = known_hparams(metadata, facts.architecture).first("block_count") or facts.n_layers
        output, notes = prune_metadata(output, n_layers, Pruning(frozenset(types.prune_layers)))
        plan = replace(plan, findings=(*plan.findings, *notes))
    if options.provenance and not all(tensor.stays for tensor in plan.tensors):
        output[PROVENANCE_KEY] = provenance_value([UNKNOWN] * len(plan.tensors))
        if matrix is not None and matrix.sketch is not None:
            output |= matrix.sketch.metadata()
            if options.calibration is not None:
                output[METHOD_KEY] = Value.string(options.calibration.label)
        if mixture.options.types:
            output[TYPES_CHOSEN_KEY] = Value.string(_TYPES_CHOSEN)
    return plan, output


def lay_out(
    path: Path, metadata: Metadata, groups: Sequence[Sequence[TensorInfo]], endian: Endian = "little"
) -> tuple[Output, ...]:
    """Lay out one output per group of tensors: `path` itself, or the files of a split set.

    raises  BadArgument, OutputError for a path that no file can be written to
    """
    layouts = layouts_of(metadata, groups, endian=endian)
    paths = shard_paths(output_path(path), len(layouts))
    return tuple(Output(output_path(path), layout) for path, layout in zip(paths, layouts, strict=True))


def parts_of(
    source: GGUFSet, tensors: Iterable[tuple[TensorInfo, str]], *, keep_split: bool
) -> list[list[TensorInfo]]:
    """Divide tensors among outputs: one file, or with `keep_split` as many as the source has.

    tensors  each with the tensor of the source in whose part it stays
    raises   BadRequest for parts of a source that is a single file
    """
    if not keep_split:
        return [[info for info, _ in tensors]]
    if len(source.shards) == 1:
        raise BadRequest(f"{source.path}: --keep-split needs a split source, found a single file")
    parts: list[list[TensorInfo]] = [[] for _ in source.shards]
    for info, origin in tensors:
        parts[source.shard_of(origin)].append(info)
    return parts


def source_bytes(plan: Plan, tensors: Iterable[TensorInfo]) -> int:
    """Count the bytes of the tensors, of those of the input, that a plan reads."""
    read = {tensor.source_name for tensor in plan.tensors}
    return sum(info.n_bytes for info in tensors if info.name in read)


def row_sources(
    plan: Plan,
    tensors: Mapping[str, SourceTensor],
    spec: Callable[[Mapping[str, str]], SourceSpec],
    padding: Padding = NO_PADDING,
) -> RowSources:
    """Find where the rows of a plan's tensors come from.

    tensors  by their name in the input
    spec     (name in the output -> name in the input) -> how another process opens them
    padding  sizes of the input that change
    """
    names = {tensor.name: tensor.source_name for tensor in plan.tensors}
    made_of = padding.tensors({name: tensors[source] for name, source in names.items()})
    on_grid = {tensor.name: tensor.target_type for tensor in plan.tensors if tensor.keeps_codes}
    known = {
        name: resolved
        for name, resolved in plan.weighed.items()
        if not isinstance(resolved.matrix, PromisedImportance)
    }
    opened = padding.spec(spec(names))
    if on_grid:
        keep = partial(keep_grids, types=on_grid)
        made_of, opened = keep(made_of), ChangedSources(opened, keep)
    return RowSources(made_of, known, opened)


QUANTIZATION_VERSION = 2
"""GGML_QNT_VERSION: the generation of ggml's block layouts that we write."""


def output_metadata(
    source: Metadata,
    tensors: Iterable[TensorInfo],
    recipe: Recipe,
    importances: ImportanceFile | None,
    kv_overrides: Iterable[tuple[str, Value]],
) -> dict[str, Value]:
    """Change the source's metadata as llama-quantize does: a key that is set moves to the end.

    tensors  of the source, by which a file type is guessed where it says none
    """
    metadata = {key: value for key, value in source.items() if key not in (*SPLIT_KEYS, PROVENANCE_KEY)}

    def set_last(key: str, value: Value) -> None:
        metadata.pop(key, None)
        metadata[key] = value

    set_last(keys.QUANTIZATION_VERSION, Value.u32(QUANTIZATION_VERSION))
    if recipe.file_type is not None:
        set_last(keys.FILE_TYPE, Value.u32(recipe.file_type))
    else:
        set_last(keys.FILE_TYPE, metadata.get(keys.FILE_TYPE) or _guessed_file_type(tensors))
    for key, value in (*kv_overrides, *_importance_metadata(importances)):
        set_last(key, value)
    return metadata


_GUESSED = 1024
"""LLAMA_FTYPE_GUESSED: added to a file type that the input does not say."""


def _guessed_file_type(tensors: Iterable[TensorInfo]) -> Value:
    """Return the file type of the type that is first to have the most tensors (llama_model_loader)."""
    counts: Counter[str] = Counter()
    most = ""
    for tensor in in_file_order(tensors):
        counts[tensor.type.name] += 1
        if counts[tensor.type.name] > counts[most]:
            most = tensor.type.name
    return Value.u32(_GUESSED | file_type_of(most))


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
