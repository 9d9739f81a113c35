"""What every front shares: deciding a file, laying it out, and what the chunks of a plan refer to.

A front (quantize/pipeline.py, convert/pipeline.py, mla_layout/pipeline.py) knows where tensors come from.
From there on a plan becomes a file in the same way for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import output_path
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import GGUFSet, layouts_of, shard_paths
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from gguf_tools.text import types_table
from quantize.calibration import PromisedImportance
from quantize.fill.digests import UNKNOWN
from quantize.fill.encode import FillJob
from quantize.fill.provenance import PROVENANCE_KEY, provenance_value
from quantize.fill.session import Output
from quantize.fill.sources import SourceSpec, SourceTensor
from quantize.importances.entries import refuse_nonfinite
from quantize.options import QuantizeOptions
from quantize.plan.findings import stop_at_errors, without_codec
from quantize.plan.metadata import output_metadata
from quantize.plan.model_facts import ModelFacts
from quantize.plan.plan import Plan, build_plan
from quantize.plan.recipe_files import Mixture


@dataclass(frozen=True)
class Preparation:
    """All that is decided before a weight is read.

    outputs       one file, or one per shard
    source_bytes  bytes of the tensors that will be read
    """

    plan: Plan
    outputs: tuple[Output, ...]
    source_bytes: int

    def __repr__(self) -> str:
        return f"<Preparation of {self.outputs[0].path}: {self.plan.file_type}, {self.total_bytes:,} bytes>"

    def _repr_html_(self) -> str:
        return types_table(repr(self), self.plan.infos)

    @property
    def total_bytes(self) -> int:
        """Exact size of all output files together."""
        return sum(output.layout.total_bytes for output in self.outputs)


def decide_file(
    metadata: Metadata,
    tensors: Sequence[TensorInfo],
    mixture: Mixture,
    options: QuantizeOptions,
    *,
    allow_problems: bool = False,
    as_if: GGMLType | None = None,
) -> tuple[Plan, Metadata]:
    """Return plan and metadata of what a file with `metadata` and `tensors` becomes.

    allow_problems, as_if  as `build_plan` takes them
    raises                 what `build_plan` does, and QuantError for a type without codec
    """
    types, matrix, kv_overrides = options.types_for(mixture), options.matrix, tuple(options.kv_overrides)
    if matrix is not None:
        refuse_nonfinite(matrix.entries)
    elif options.calibration is not None:
        matrix = options.calibration.promise(metadata, tensors)
    entries = matrix.entries if matrix else {}
    plan = build_plan(
        tensors,
        mixture.recipe,
        ModelFacts.from_metadata({**metadata, **dict(kv_overrides)}),
        importances=entries,
        options=types,
        allow_problems=allow_problems,
        as_if=as_if,
    )
    plan = replace(plan, findings=(*without_codec(plan.tensors), *plan.findings))
    if not allow_problems:
        stop_at_errors(plan.findings)
    output = output_metadata(metadata, mixture.recipe, matrix, kv_overrides, plan, types)
    if options.provenance and not all(tensor.stays for tensor in plan.tensors):
        output[PROVENANCE_KEY] = provenance_value([UNKNOWN] * len(plan.tensors))
    return plan, output


def lay_out(
    path: Path, metadata: Metadata, groups: Sequence[Sequence[TensorInfo]], endian: Endian = "little"
) -> tuple[Output, ...]:
    """Return one output per group of tensors: `path` itself, or the files of a split set.

    raises  BadArgument, OutputError for a path that no file can be written to
    """
    layouts = layouts_of(metadata, groups, endian=endian)
    paths = shard_paths(output_path(path), len(layouts))
    return tuple(Output(output_path(path), layout) for path, layout in zip(paths, layouts, strict=True))


def parts_of(
    source: GGUFSet, tensors: Iterable[tuple[TensorInfo, str]], *, keep_split: bool
) -> list[list[TensorInfo]]:
    """Return the tensors of each output: of one file, or with `keep_split` of as many as the source has.

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


def source_bytes(plan: Plan) -> int:
    """Return how many bytes of tensors a plan reads."""
    return sum(tensor.source_info.n_bytes for tensor in plan.tensors)


def fill_job(
    plan: Plan, sources: Mapping[str, SourceTensor], spec: Callable[[Mapping[str, str]], SourceSpec]
) -> FillJob:
    """Build the job of a plan, which its chunks refer to.

    sources  by their name in the input
    spec     (name in the output -> name in the input) -> how another process opens them
    """
    names = {tensor.name: tensor.source_name for tensor in plan.tensors}
    tensors = {name: sources[source] for name, source in names.items()}
    known = {
        name: resolved
        for name, resolved in plan.weighed.items()
        if not isinstance(resolved.matrix, PromisedImportance)
    }
    return FillJob(tensors, known, spec(names))
