"""The model that a command line names: where it is, and the plan of a file that is made of it.

A model is a GGUF file or a Hugging Face folder, on this machine or on the Hub. `plan_source` plans either.
What converts folders, and what talks to the Hub, is imported where it is needed: these imports take longer
than quantizing a small file.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.options import AdapterChoices, AdapterOptions, ConvertOptions
from gguf_tools.choices import filled
from gguf_tools.errors import BadArgument, BadRequest
from quantize.options import QuantizeChoices, QuantizeOptions
from quantize.pipeline import plan_run as plan_file
from quantize.plan.recipe_files import Mixture
from quantize.roles import MLALayout, Program
from quantize.run import Run

if TYPE_CHECKING:
    from convert.checkpoint.streamed import StreamedFolder


@dataclass(frozen=True)
class SourceOptions(AdapterOptions, QuantizeOptions):
    """Options for a model that is a GGUF file or a folder: QuantizeOptions, and choices for a folder.

    mla      layout of latent attention: "split" for llama.cpp, "both" for ik_llama.cpp, "none" for plain
             attention; None: as `program` wants it. It is refused for a file, whose layout is what it is
    program  the program that the file is for; None: ik_llama.cpp where a type is named that only it reads,
             llama.cpp otherwise

    A folder refuses `keep_split` and `kv_overrides`, and a file those of AdapterOptions.
    """

    mla: MLALayout | None = None
    program: Program | None = None


class SourceChoices(AdapterChoices, QuantizeChoices, total=False):
    """The fields of SourceOptions and RunOptions as keyword arguments."""

    mla: MLALayout | None
    program: Program | None


def plan_source(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    mixture: str | Mixture,
    options: SourceOptions | None = None,
    *,
    allow_problems: bool = False,
) -> AbstractContextManager[Run]:
    """Plan what a GGUF file or a folder becomes when it is quantized; the run can be executed in the block.

    source          a path, or what `source_folder` returns
    output          as `quantize` takes it for a file, `convert` for a folder
    allow_problems  yield even a run that can't be executed, as a dry run does; its plan says why
    raises          BadArgument for options that don't go with this kind of source; what
                    `quantize.pipeline.plan_run` and `convert.pipeline.plan_run` raise
    """
    options = options or SourceOptions()
    if not Path(source).is_dir():
        if options.mla is not None:
            raise BadArgument("--mla needs a folder; gguf-tools mla-layout changes the layout of a file")
        if options.adapted(source) is not source:
            raise BadArgument(f"--lora needs a folder with the adapter's base, and {source} is none")
        return plan_file(source, output, mixture, options, allow_problems=allow_problems)
    if options.keep_split or options.kv_overrides:
        raise BadArgument("--keep-split and --override-kv need a GGUF file; INPUT is a folder")
    from convert import pipeline

    conversion = filled(ConvertOptions, options, outtype=mixture)
    return pipeline.plan_run(source, output, conversion, allow_problems=allow_problems)


def model_path(text: str, *, quiet: bool = False) -> Path:
    """Find the folder or file that `text` names; one on the Hub is fetched into its cache first.

    raises  BadRequest for an address that names no model, HubError, CheckpointError
    """
    if os.path.exists(text):
        return Path(text)
    from convert.checkpoint import hub

    name = hub.hub_name(text)
    if name is None:
        return Path(text)
    with hub.here_neither(text):
        return hub.fetch(name, quiet=quiet)


def source_folder(
    text: str,
    *,
    stream: bool = False,
    dry_run: bool = False,
    weights: bool = True,
    allow_pickle: bool = False,
    quiet: bool = False,
) -> Path | StreamedFolder:
    """Find the same for a conversion, which may do without fetching a model's weights.

    stream        read them from the Hub as they are used
    dry_run       their headers are enough
    weights       False: config.json and the tokenizer are enough
    allow_pickle  .bin and .pt files may be fetched
    raises        as `model_path`; BadRequest for `stream` with a model that is here
    """
    if os.path.exists(text) and not stream:
        return Path(text)
    from convert.checkpoint import hub

    name = hub.hub_name(text)
    if name is None:
        if stream:
            raise BadRequest(f"--stream reads a model of the Hub, and {text} is a path; leave it out")
        return Path(text)
    with hub.here_neither(text):
        if weights and (stream or (dry_run and not allow_pickle and not hub.is_offline())):
            return hub.stream(name, quiet=quiet)
        return hub.fetch(name, weights=weights, allow_pickle=allow_pickle, quiet=quiet)
