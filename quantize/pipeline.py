"""Quantize a GGUF file: decide, lay out, fill, publish.

`prepare` reads the header and decides everything, down to the exact size of the output, without reading a
weight; `quantize` then has the outputs written (see fill/outputs.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from gguf_tools.errors import BadRequest
from gguf_tools.progress import Progress, no_progress
from gguf_tools.shards import GGUFSet, open_gguf
from gguf_tools.tensors import TensorInfo
from gguf_tools.values import Value
from quantize.fill.outputs import write_outputs
from quantize.fill.sources import GGUFSources, GGUFTensor
from quantize.importance import ImportanceFile, Importances
from quantize.plan.plan import Plan, PlanOptions, in_file_order
from quantize.plan.recipe_files import Mixture, find_mixture
from quantize.plan.recipes import Recipe
from quantize.prepare import (
    Preparation,
    Result,
    decide_file,
    default_threads,
    fill_job,
    lay_out,
    source_bytes,
)


def default_output(source: Path, type_name: str) -> Path:
    """Return where the output goes when no name is given, as llama-quantize has it."""
    return source.with_name(f"ggml-model-{type_name}.gguf")


def prepare(
    source: GGUFSet,
    output: Path,
    recipe: Recipe,
    *,
    importances: ImportanceFile | None = None,
    options: PlanOptions | None = None,
    keep_split: bool = False,
    kv_overrides: Iterable[tuple[str, Value]] = (),
    provenance: bool = True,
    allow_problems: bool = False,
) -> Preparation:
    """Decide what becomes of every tensor of `source`, and lay the output out.

    keep_split      one output per shard of the source, named OUTPUT-00001-of-0000N.gguf
    kv_overrides    metadata that replace or join those of the source, in order
    provenance      leave a place for what tensors are made of, see provenance.py
    allow_problems  see `build_plan`: a dry run wants the plan even when it can't be run
    raises  PlanError, NeedsImportance, BadImportance (see `build_plan`); QuantError for a type without codec
    """
    options = options or PlanOptions()
    tensors = tuple(source.tensors.values())
    if keep_split:
        options = replace(options, keep_order=True)
    else:
        tensors = tuple(in_file_order(tensors))
    plan, metadata = decide_file(
        source.metadata,
        tensors,
        recipe,
        importances=importances,
        options=options,
        kv_overrides=kv_overrides,
        provenance=provenance,
        allow_problems=allow_problems,
    )
    groups = _shard_groups(source, plan) if keep_split else [plan.infos]
    return Preparation(plan, lay_out(output, metadata, groups), source_bytes(plan))


def quantize(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    file_type: str | Mixture,
    *,
    importances: ImportanceFile | Importances | None = None,
    options: PlanOptions | None = None,
    keep_split: bool = False,
    kv_overrides: Iterable[tuple[str, Value]] = (),
    n_threads: int | None = None,
    restart: bool = False,
    reuse: Iterable[str | os.PathLike[str]] = (),
    provenance: bool = True,
    verify: bool = False,
    progress: Callable[[Preparation], Progress] | None = None,
) -> Result:
    """Quantize the GGUF file `source` (or the split set it belongs to) to `file_type`, and write `output`.

    output       None: ggml-model-TYPE.gguf beside the source
    file_type    as llama-quantize has them: Q4_K_M, Q8_0, COPY, ...; or a recipe file: mine.yaml
    importances  from `imatrix.load`, or a mapping tensor name -> Importance
    options      what is set by hand, on top of the recipe file's: see PlanOptions
    n_threads    None: one per core
    restart      forget what an interrupted run has left; it is gone on with otherwise
    reuse        older GGUF files: tensors that were made of the same are copied from there
    provenance   let the output say what its tensors are made of, so that it can be reused
    verify       check a sample of every tensor before the output gets its name
    progress     called once with what was decided; what it returns is called with the bytes of every chunk
    raises  ToolkitError; the old output stays as it was, and what is done stays for the next run
    """
    started = time.monotonic()
    mixture = file_type if isinstance(file_type, Mixture) else find_mixture(file_type)
    mixture = mixture.with_options(options)
    if importances is not None and not isinstance(importances, ImportanceFile):
        importances = ImportanceFile(importances)
    path = Path(source)
    target = default_output(path, mixture.name) if output is None else Path(output)
    with open_gguf(path) as opened:
        preparation = prepare(
            opened,
            target,
            mixture.recipe,
            importances=importances,
            options=mixture.options,
            keep_split=keep_split,
            kv_overrides=kv_overrides,
            provenance=provenance,
        )
        sources = {name: GGUFTensor(opened, name) for name in opened.tensors}
        job = fill_job(preparation.plan, sources, partial(GGUFSources, path))
        report = progress(preparation) if progress else no_progress
        written = write_outputs(
            preparation.outputs,
            job,
            n_threads or default_threads(),
            report,
            inputs=[shard.path for shard in opened.shards],
            restart=restart,
            reuse=map(Path, reuse),
            verify=verify,
        )
    return Result(preparation, written, time.monotonic() - started)


def _shard_groups(source: GGUFSet, plan: Plan) -> list[list[TensorInfo]]:
    """Return the output's tensors by the shard of the source that they come from; a shard left empty by
    pruning goes."""
    if len(source.shards) == 1:
        raise BadRequest(f"{source.path}: --keep-split needs a split source, found a single file")
    groups: dict[Path, list[TensorInfo]] = {shard.path: [] for shard in source.shards}
    for tensor in plan.tensors:
        groups[source.file_of(tensor.source_name).path].append(tensor.info)
    return [group for group in groups.values() if group]
