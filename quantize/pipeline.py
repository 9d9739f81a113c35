"""Quantize a GGUF file: decide, lay out, fill, publish.

`prepare` reads the header and decides everything, down to the exact size of the output, without reading a
weight. `plan_run` does the same for a path and returns a Run, which can be looked at or executed; `quantize`
executes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadArgument
from gguf_tools.files.inputs import gguf_inputs
from gguf_tools.files.named_files import output_path
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.hub.names import cached_name
from quantize.fill.sources import GGUFSources, GGUFTensor, stored_tensors
from quantize.grids import with_grids
from quantize.options import QuantizeChoices, QuantizeOptions, begun
from quantize.padding.choose import decide_padded, refuse_overridden_sizes
from quantize.plan.overrides import fit_kv_overrides
from quantize.plan.plan import PlanOptions, in_file_order
from quantize.plan.recipe_files import Mixture, find_mixture
from quantize.prepare import Preparation, decide_file, lay_out, parts_of, row_sources, source_bytes
from quantize.run import Result, Run, execute_together
from quantize.run_options import RunOptions
from quantize.type_names import FileType


@checked
def quantize(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    file_type: FileType | str | Mixture,
    options: QuantizeOptions | PlanOptions | None = None,
    run: RunOptions | None = None,
    **choices: Unpack[QuantizeChoices],
) -> Result:
    """Quantize the GGUF file `source`, or the split set it belongs to, and write `output`.

        quantize("model-bf16.gguf", "model-Q4_K_M.gguf", "Q4_K_M", importances=matrix, n_threads=8)

    output     {ftype} in its name stands for the type, {FTYPE} for it in capitals. None:
               ggml-model-TYPE.gguf beside the source
    file_type  a name that llama-quantize knows (Q4_K_M, Q8_0, COPY ...), or a recipe file: mine.yaml
    options    what to make: QuantizeOptions, or only their `types`
    run        how to run: RunOptions
    choices    fields of both as keyword arguments; they replace those of `options` and `run`
    raises     ToolkitError. The old output then stays as it was, and finished work is kept for the next run
    """
    options, run = _merged(options, run, choices)
    with plan_run(source, output, file_type, options) as planned:
        return planned.execute(run)


@checked
def quantize_many(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    file_types: FileType | str | Mixture | Iterable[FileType | str | Mixture],
    options: QuantizeOptions | PlanOptions | None = None,
    run: RunOptions | None = None,
    **choices: Unpack[QuantizeChoices],
) -> list[Result]:
    """Quantize `source` to several types at once: its rows are read and decoded once for all of them.

        quantize_many("model-bf16.gguf", "model-{FTYPE}.gguf", ["Q4_K_M", "Q5_K_M"], importances=matrix)

    output  a name in which {ftype} stands for the type, {FTYPE} for it in capitals
    The rest is as in `quantize`, and so are the files, byte for byte. A run that was interrupted resumes with
    all of its outputs, or one by one.
    """
    options, run = _merged(options, run, choices)
    options = replace(options, calibration=begun(options.calibration))
    several = [file_types] if isinstance(file_types, str | Mixture) else file_types
    with ExitStack() as stack:
        runs = [stack.enter_context(plan_run(source, output, file_type, options)) for file_type in several]
        return execute_together(runs, run)


def _merged(
    options: QuantizeOptions | PlanOptions | None, run: RunOptions | None, choices: QuantizeChoices
) -> tuple[QuantizeOptions, RunOptions]:
    if isinstance(options, PlanOptions):
        options = QuantizeOptions(types=options)
    return with_choices(choices, options or QuantizeOptions(), run or RunOptions())


@contextmanager
def plan_run(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    file_type: FileType | str | Mixture,
    options: QuantizeOptions | None = None,
    *,
    allow_problems: bool = False,
) -> Iterator[Run]:
    """Open `source` and decide what it becomes; see `quantize`. The run can be executed inside the block.

    allow_problems  yield even a run that can't be executed, as a dry run does; its plan says why
    raises  PlanError, NeedsImportance, BadImportance (see `build_plan`); QuantError for a type without codec
    """
    started = time.monotonic()
    mixture = file_type if isinstance(file_type, Mixture) else find_mixture(file_type)
    options = options or QuantizeOptions()
    calibration = begun(options.calibration)
    options = replace(options, calibration=calibration)
    path = Path(source)
    target = default_output(path, mixture.name) if output is None else output_path(output)
    target = target.with_name(fill_template(target.name, mixture.name))
    with open_gguf(path) as opened:
        preparation = prepare(opened, target, mixture, options, allow_problems=allow_problems)
        sources = {name: GGUFTensor(opened, name) for name in opened.tensors}

        def spec(names: Mapping[str, str]) -> GGUFSources:
            return GGUFSources(path, partial(stored_tensors, names=names))

        rows = row_sources(preparation.plan, sources, spec, preparation.padding)
        yield Run(preparation, rows, gguf_inputs(opened), started, calibration)


def fill_template(name: str, type_name: str) -> str:
    """Put the type into a file's name in place of {ftype} (in small letters) or {FTYPE} (in capitals)."""
    return name.replace("{ftype}", type_name.lower()).replace("{FTYPE}", type_name.upper())


def default_output(source: Path, type_name: str) -> Path:
    """The place of an output without a name: llama-quantize's, or here for a file in the Hub's cache."""
    name = f"ggml-model-{type_name}.gguf"
    return source.with_name(name) if cached_name(source.parent) is None else Path(name)


def prepare(
    source: GGUFSet,
    output: Path,
    mixture: Mixture,
    options: QuantizeOptions | None = None,
    *,
    allow_problems: bool = False,
) -> Preparation:
    """Decide what becomes of every tensor of `source`, and lay the output out; see `plan_run`."""
    options = options or QuantizeOptions()
    kv_overrides = fit_kv_overrides(options.kv_overrides, source.metadata)
    tensors = tuple(source.tensors.values())
    if not options.keep_split:
        tensors = tuple(in_file_order(tensors))
    if options.keep_grid:
        if options.types is not None and options.types.prune_layers:
            raise BadArgument("--keep-grid and --prune-layers can't be used together; prune in a run before")
        weights = {info.name: GGUFTensor(source, info.name) for info in tensors}
        options = replace(options, types=with_grids(options.types, weights))
    decide = partial(
        decide_file,
        mixture=mixture,
        options=options,
        kv_overrides=kv_overrides,
        allow_problems=allow_problems,
    )
    made = decide_padded(
        source.metadata, tensors, options.pad, decide, str(source.path), hidden=options.pad_hidden
    )
    refuse_overridden_sizes(made.padding, kv_overrides)
    plan, metadata = made.plan, made.metadata
    if source.endian == "big":
        note = f"{source.path} is for big-endian machines, the output for little-endian ones"
        plan = replace(plan, notes=(*plan.notes, note))
    origins = ((tensor.info, tensor.source_name) for tensor in plan.tensors)
    parts = parts_of(source, origins, keep_split=options.keep_split)
    if options.keep_split:  # pruning may leave a part empty
        parts = [part for part in parts if part]
    return Preparation(plan, lay_out(output, metadata, parts), source_bytes(plan, tensors), made.padding)
