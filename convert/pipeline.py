"""Convert a Hugging Face folder into a GGUF file: decide, lay out, fill, publish.

`prepare` reads headers, config.json and the tokenizer, and decides everything, down to the exact size of the
output, without reading a weight. `plan_run` does the same for a path and returns a Run, which can be looked
at or executed; `convert` executes it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from convert.architectures import find_architecture
from convert.architectures.base import Architecture, Conversion, build, metadata_of
from convert.architectures.config_reader import with_known_class
from convert.architectures.options import DENSE_MODULES, make_options
from convert.architectures.rules import OutputTensor
from convert.architectures.vision import find_tower
from convert.checkpoint.adapted_folder import CONFIG_NAME
from convert.checkpoint.checkpoint import Checkpoint, config_path, read_config
from convert.embedding_files import read_embedding_files
from convert.general_metadata import GeneralMetadata, general_metadata
from convert.model_names import fill_outfile_template
from convert.options import ConvertChoices, ConvertOptions
from convert.tokenizer.tokenizer import Tokenizer, read_tokenizer
from convert.weights import open_weights
from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import output_path
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.header import Endian
from gguf_tools.format.shards import group_tensors
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from gguf_tools.hub.names import cached_name
from gguf_tools.look.listing import count_parameters
from quantize.fill.encode import RowSources
from quantize.fill.filling import Output
from quantize.fill.sources import Described, SourceTensor
from quantize.grids import lost_grids, with_grids
from quantize.options import begun
from quantize.padding.choose import Decide, decide_padded
from quantize.plan.converter_types import is_outtype, outtype_plan, resolve_outtype
from quantize.plan.plan import Plan, in_file_order
from quantize.plan.recipe_files import Mixture, find_mixture, only_in_ik
from quantize.plan.recipes import find_recipe
from quantize.prepare import (
    QUANTIZATION_VERSION,
    Preparation,
    decide_file,
    lay_out,
    row_sources,
    source_bytes,
)
from quantize.run import Result, Run
from quantize.run_options import RunOptions
from quantize.type_names import FileType, OutType

_NONE: Mapping[str, object] = MappingProxyType({})

ADAPTER_KEY = "gguf_tools.adapter"
"""Metadata key: which adapter was merged into the weights, and how it was scaled."""


@contextmanager
def open_conversion(
    folder: str | os.PathLike[str],
    choices: Mapping[str, object] = _NONE,
    *,
    allow_pickle: bool = False,
    mmproj: bool = False,
) -> Iterator[Conversion]:
    """Open a folder and match its weights to tensors, which can be read inside the block.

    choices       for the family's options, as `build` takes them
    allow_pickle  as `Checkpoint` takes it
    mmproj        take the vision tower, not the text part
    raises        what `architecture_of`, `open_weights` and `build` raise
    """
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        yield build(architecture_of(checkpoint, mmproj=mmproj), open_weights(checkpoint), choices)


def architecture_of(checkpoint: Checkpoint, *, mmproj: bool) -> Architecture:
    """Find the family of a checkpoint's text part, or its vision tower; raises what `find_tower` raises."""
    find = find_tower if mmproj else find_architecture
    return find(checkpoint.config, checkpoint.config_path, checkpoint.names())


@contextmanager
def open_tensors(
    folder: str | os.PathLike[str], *, allow_pickle: bool, mmproj: bool = False
) -> Iterator[dict[str, SourceTensor]]:
    """Give all tensors that a folder can become, in every layout of attention; see `open_conversion`."""
    with Checkpoint(folder, allow_pickle=allow_pickle) as checkpoint:
        architecture = architecture_of(checkpoint, mmproj=mmproj)
        choices = {"mla": "both"} if has_layouts(architecture) else {}
        conversion = build(architecture, open_weights(checkpoint), choices)
        yield {tensor.name: tensor for tensor in conversion.tensors}


def has_layouts(architecture: Architecture) -> bool:
    """Return whether a family's attention can be written in several layouts."""
    return any(field.name == "mla" for field in fields(architecture.options))


@dataclass(frozen=True)
class CheckpointSources:
    """The tensors that the checkpoint in a folder becomes.

    folder, allow_pickle  as `Checkpoint` takes them
    choices               for the family's options, as `build` takes them
    mmproj                take the vision tower, not the text part
    names                 name in the output -> name of the tensor that `build` makes
    """

    folder: str | os.PathLike[str]
    allow_pickle: bool
    choices: Mapping[str, object]
    mmproj: bool
    names: Mapping[str, str]

    @contextmanager
    def open(self) -> Iterator[Mapping[str, SourceTensor]]:
        """Open the folder and match its weights to tensors; raises what `convert` raises for the folder."""
        opened = open_conversion(
            self.folder, self.choices, allow_pickle=self.allow_pickle, mmproj=self.mmproj
        )
        with opened as conversion:
            tensors = {tensor.name: tensor for tensor in conversion.tensors}
            yield {name: tensors[made] for name, made in self.names.items()}


@checked
def convert(
    folder: str | os.PathLike[str],
    outfile: str | os.PathLike[str] | None = None,
    outtype: OutType | FileType | str | Mixture | None = None,
    options: ConvertOptions | None = None,
    run: RunOptions | None = None,
    **choices: Unpack[ConvertChoices],
) -> Result:
    """Convert the checkpoint in `folder`, and write `outfile`.

        convert("DeepSeek-V2-Lite", "lite-bf16.gguf", "bf16")

    outfile  a file, in whose name {ftype} stands for the type; or a folder, in which the file gets a name
             made of what is known of the model. None: `folder` itself
    outtype  "f32", "f16", "bf16", "q8_0", "auto", a file type such as Q4_K_M, or a recipe file; it replaces
             the field of ConvertOptions
    options  what to make: ConvertOptions
    run      how to run: RunOptions
    choices  fields of both as keyword arguments; they replace those of `options` and `run`
    raises   ToolkitError. The old output then stays as it was, and finished work is kept for the next run
    """
    options, run = with_choices(choices, options or ConvertOptions(), run or RunOptions())
    if outtype is not None:
        options = replace(options, outtype=outtype)
    with plan_run(folder, outfile, options) as planned:
        return planned.execute(run)


@contextmanager
def plan_run(
    folder: str | os.PathLike[str],
    outfile: str | os.PathLike[str] | None,
    options: ConvertOptions,
    *,
    allow_problems: bool = False,
) -> Iterator[Run]:
    """Open `folder` and decide what it becomes; see `convert`. The run can be executed inside the block.

    allow_problems  yield even a run that can't be executed, as a dry run does; its plan says why
    raises          CheckpointError for a folder that can't be converted, BadRequest for options that don't
                    fit it, and what `build_plan` does
    """
    started = time.monotonic()
    path = Path(folder)
    if options.mmproj and (options.vocab_only or options.pre_tokenizer):
        raise BadRequest("a vision tower (mmproj) has no tokenizer: leave vocab_only and pre_tokenizer out")
    if options.vocab_only:
        if options.adapted(folder) is not folder:
            raise BadRequest("an adapter changes weights, and vocab_only writes none: leave lora out")
        yield Run(prepare_vocab(path, outfile, options), RowSources({}, {}), (), started)
        return
    with Checkpoint(options.adapted(folder), allow_pickle=options.allow_pickle) as checkpoint:
        calibration = begun(options.calibration)
        options = replace(options, calibration=calibration)
        preparation, rows = prepare(checkpoint, outfile, options, allow_problems=allow_problems)
        remote = checkpoint.remote()
        if checkpoint.adapter is not None and not options.provenance:
            # Nothing in the file's header tells which adapter it was.
            remote[CONFIG_NAME] = checkpoint.adapter.identity
        rows = replace(rows, remote=remote)
        yield Run(preparation, rows, checkpoint.inputs(), started, calibration)


def _metadata(
    file_type: str,
    general: GeneralMetadata,
    family: Metadata,
    architecture: str,
    tokenizer: Tokenizer | None,
    embedding: Metadata,
) -> dict[str, Value]:
    """Return all keys of a file: the general keys, the family's, those of embeddings and the tokenizer.

    file_type  the recipe whose number is its general.file_type
    tokenizer  None for a tower, which has no text
    """
    number = {keys.FILE_TYPE: Value.u32(_file_type(file_type))}
    of_tokens = {key: value for key, value in family.items() if key.startswith("tokenizer.")}
    family = {key: value for key, value in family.items() if key not in of_tokens}
    return {
        keys.ARCHITECTURE: Value.string(architecture),
        **general.metadata(),
        # llama.cpp's converter writes a tower's number before the family's keys.
        **({**family, **number} if tokenizer else {**number, **family}),
        **embedding,
        keys.QUANTIZATION_VERSION: Value.u32(QUANTIZATION_VERSION),
        **of_tokens,
        **(tokenizer.metadata() if tokenizer else {}),
    }


def _file_type(recipe: str) -> int:
    """Look up the number of a recipe."""
    number = find_recipe(recipe).file_type
    assert number is not None, f"{recipe} has no number"
    return number


def prepare(
    checkpoint: Checkpoint,
    outfile: str | os.PathLike[str] | None,
    options: ConvertOptions,
    *,
    allow_problems: bool = False,
) -> tuple[Preparation, RowSources]:
    """Decide what the checkpoint becomes and lay the output out, without reading a weight.

    allow_problems  see `build_plan`: a dry run wants the plan even when it can't be run
    """
    folder = checkpoint.folder
    architecture = architecture_of(checkpoint, mmproj=options.mmproj)
    weights = open_weights(checkpoint)
    options, notes = _for_program(options, architecture)
    conversion = build(architecture, weights, options.family_choices)
    infos = [TensorInfo(tensor.name, tensor.shape, tensor.type) for tensor in conversion.tensors]
    general = general_metadata(
        folder,
        checkpoint.config,
        model_name=options.model_name,
        metadata_file=options.metadata_file,
        counts=count_parameters((info.name, info.shape) for info in infos),
        type_="mmproj" if options.mmproj else "model",
    )
    tokenizer = None
    if not options.mmproj:
        tokenizer = _tokenizer(checkpoint.tokenizer_folder, checkpoint.config, options, architecture, general)
    gguf_name = conversion.architecture.gguf_name
    embedding: Metadata = {}
    unused: tuple[str, ...] = ()
    if tokenizer:
        embedding, unused = _embedding(folder, architecture, conversion.metadata, checkpoint.config, options)
    known = _metadata(F32.name, general, conversion.metadata, gguf_name, tokenizer, embedding)
    if checkpoint.adapter is not None and options.provenance:
        known[ADAPTER_KEY] = Value.string(checkpoint.adapter.identity)
    sources = {tensor.name: tensor for tensor in conversion.tensors}
    if options.keep_grid:
        options = replace(options, types=with_grids(options.types, sources))
    decide = _decider(
        options,
        architecture,
        conversion.tensors,
        infos if checkpoint.adapter is None else [weights.weight(name) for name in weights.names()],
        decoded=weights.is_quantized and not options.mmproj,
        allow_problems=allow_problems,
    )
    made = decide_padded(known, infos, options.pad, decide, str(folder), hidden=options.pad_hidden)
    plan, metadata, padding = made.plan, made.metadata, made.padding
    said = (*conversion.notes, *general.notes, *(tokenizer.notes if tokenizer else ()), *unused)
    plan = replace(plan, notes=(*notes, *said, *plan.notes))
    path = _output_path(folder, outfile, general, plan.file_type, vocab_only=False)
    lost = lost_grids(sources, options.types.grids) if options.keep_grid and options.types else ()
    plan = replace(plan, notes=(*plan.notes, *_encoded_again(plan, sources), *lost))
    spec = partial(
        CheckpointSources, checkpoint.source, options.allow_pickle, options.family_choices, options.mmproj
    )
    rows = row_sources(plan, sources, spec, padding)
    outputs = _outputs(path, metadata, plan, options)
    return Preparation(plan, outputs, source_bytes(plan, infos), padding), rows


def _tokenizer(
    folder: Path,
    config: Mapping[str, Any],
    options: ConvertOptions,
    architecture: Architecture,
    general: GeneralMetadata,
) -> Tokenizer:
    return read_tokenizer(
        folder,
        config,
        pre_tokenizer=options.pre_tokenizer,
        quirks=architecture.quirks,
        model_name=str(general.facts[keys.NAME]),
    )


def _for_program(
    options: ConvertOptions, architecture: Architecture
) -> tuple[ConvertOptions, tuple[str, ...]]:
    """Return the options with the layout of attention that the file's program wants, and a note about it.

    A layout that the user has named wins, and a family without latent attention has none.
    """
    if not has_layouts(architecture) or "mla" in options.family_choices:
        return options, ()
    outtype = options.outtype
    if isinstance(outtype, str) and is_outtype(outtype):
        return options, ()
    mixture = find_mixture(outtype) if isinstance(outtype, str) else outtype
    type_ = only_in_ik(mixture.with_options(options.types))
    if (options.program or ("llama.cpp" if type_ is None else "ik_llama.cpp")) == "llama.cpp":
        return options, ()
    why = "" if type_ is None else f", the only program that reads {type_}"
    note = f"attention has layout both, as ik_llama.cpp wants it{why} (--mla names another)"
    return replace(options, mla="both"), (note,)


def _encoded_again(plan: Plan, sources: Mapping[str, OutputTensor]) -> Iterator[str]:
    """Yield a note for each type that the checkpoint has too, where its own codes can't be kept."""
    lost: dict[str, list[str]] = {}
    for tensor in plan.tensors:
        source, target = sources[tensor.source_name], tensor.target_type
        if source.stored_as == target.name and source.type != target:
            lost.setdefault(target.name, []).append(tensor.name)
    for name, tensors in lost.items():
        yield (
            f"{len(tensors)} tensors ({tensors[0]} ...) are {name} in the checkpoint and are encoded again:"
            f" {name} of GGUF has no factor for a matrix, and can't hold codes of a transposed or a mixed one"
        )


def _decider(
    options: ConvertOptions,
    architecture: Architecture,
    tensors: Sequence[OutputTensor],
    stored: Sequence[Described],
    *,
    decoded: bool,
    allow_problems: bool,
) -> Decide:
    """Return the decider for the file: like the converter, or like converting to F32 and quantizing.

    stored          tensors or weights as they are stored, by which "auto" decides
    decoded         whether the checkpoint is quantized
    allow_problems  see `build_plan`
    """
    outtype = options.outtype
    if not isinstance(outtype, str) or not is_outtype(outtype):
        mixture = find_mixture(outtype) if isinstance(outtype, str) else outtype
        return lambda metadata, infos: decide_file(
            metadata, in_file_order(infos), mixture, options, allow_problems=allow_problems, as_if=F32
        )
    grids = {} if options.types is None else options.types.grids

    def decide(metadata: Metadata, infos: Sequence[TensorInfo]) -> tuple[Plan, Metadata]:
        wanted = resolve_outtype(outtype, stored, decoded=decoded)
        types = ((tensor.name, architecture.forced_type(tensor, wanted)) for tensor in tensors)
        forced = {name: type_ for name, type_ in types if type_ is not None}
        plan = outtype_plan(infos, wanted, architecture.kept, forced, grids)
        return plan, {**metadata, keys.FILE_TYPE: Value.u32(_file_type(plan.file_type))}

    return decide


def _embedding(
    folder: Path,
    architecture: Architecture,
    family: Metadata,
    config: Mapping[str, Any],
    options: ConvertOptions,
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Return keys and notes of the files of sentence-transformers; see read_embedding_files."""
    is_declared = any(field.name == DENSE_MODULES for field in fields(architecture.options))
    return read_embedding_files(
        folder,
        architecture.gguf_name,
        family,
        config=config,
        ranks=architecture.ranks,
        dense=bool(options.family_choices.get(DENSE_MODULES)) if is_declared else None,
    )


def prepare_vocab(
    folder: Path, outfile: str | os.PathLike[str] | None, options: ConvertOptions
) -> Preparation:
    """Decide what a file without tensors holds: the tokenizer, and what config.json says of the model."""
    config, path_of_config = read_config(folder), config_path(folder)
    architecture = find_architecture(config, path_of_config)
    general = general_metadata(
        folder, config, model_name=options.model_name, metadata_file=options.metadata_file
    )
    tokenizer = _tokenizer(folder, config, options, architecture, general)
    known = with_known_class(config, architecture.hf_names)
    model_config = architecture.read_config(known, path_of_config)
    choices = make_options(architecture.options, options.family_choices, config["architectures"][0])
    family = metadata_of(
        architecture, model_config, architecture.resolve_options(model_config, choices, None)
    )
    embedding, unused = _embedding(folder, architecture, family, config, options)
    named = isinstance(options.outtype, str) and is_outtype(options.outtype)
    outtype = str(options.outtype) if named else "auto"
    plan = outtype_plan((), resolve_outtype(outtype, ()))
    plan = replace(plan, notes=(*general.notes, *tokenizer.notes, *unused))
    path = _output_path(folder, outfile, general, plan.file_type, vocab_only=True)
    metadata = _metadata(plan.file_type, general, family, architecture.gguf_name, tokenizer, embedding)
    return Preparation(plan, _outputs(path, metadata, plan, options), 0)


def _outputs(path: Path, metadata: Metadata, plan: Plan, options: ConvertOptions) -> tuple[Output, ...]:
    groups = group_tensors(
        plan.infos, max_bytes=options.split_max_bytes, max_tensors=options.split_max_tensors
    )
    if not options.tensor_first_split and plan.tensors:
        groups = [[], *groups]
    endian: Endian = "big" if options.big_endian else "little"
    return lay_out(path, metadata, groups, endian)


def _output_path(
    folder: Path,
    outfile: str | os.PathLike[str] | None,
    general: GeneralMetadata,
    type_name: str,
    *,
    vocab_only: bool,
) -> Path:
    # The Hub's cache is the client's own: an output there would be lost with it.
    default = folder if cached_name(folder) is None else Path()
    target = default if outfile is None else output_path(outfile, may_be_folder=True)
    if target.is_dir():
        return target / general.default_outfile(type_name, vocab_only=vocab_only)
    if not target.parent.is_dir():
        raise BadRequest(f"--outfile {target}: there is no folder {target.parent}; create it first")
    return target.with_name(fill_outfile_template(target.name, type_name))
