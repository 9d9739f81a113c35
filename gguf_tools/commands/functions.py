"""The commands as functions: what `gguf_tools.quantize`, `gguf_tools.cook` and their like are.

    import gguf_tools

    gguf_tools.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16")
    gguf_tools.quantize("lite-bf16.gguf", "lite-Q4_K_M.gguf", "Q4_K_M")

A model is a GGUF file, a Hugging Face folder, or OWNER/NAME on the Hub, as on the command line. Here are the
functions that need more than one floor, or that the library has in parts; the others are the library's own.
Only force=True replaces an output that is there, and one that is as asked is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from convert.sources import SourceChoices
from gguf_tools.argument_types import Count, PositiveBytes, checked, described
from gguf_tools.choices import refuse_unknown, with_choices
from gguf_tools.errors import BadArgument, BadRequest, WrongType
from gguf_tools.files.named_files import AnyPath, Paths, paths_of
from gguf_tools.progress import BYTES, Bar, Shown
from imatrix.calibrate.options import CalibrationChoices
from quantize.run_options import RunOptions

if TYPE_CHECKING:
    from convert.checkpoint.streamed import StreamedFolder
    from convert.sources import SourceOptions
    from gguf_tools.hub.upload import Upload
    from imatrix.forward.options import ForwardOptions
    from imatrix.texts.tokens import Cut
    from quantize.padding import PadChoice
    from quantize.plan.recipe_files import Mixture
    from quantize.plan.sensitivities import Sensitivities
    from quantize.run import Result
    from quantize.type_names import FileType


class CalibrateChoices(SourceChoices, CalibrationChoices, total=False):
    """Keyword arguments of `calibrate`: those of `quantize`, and how to calibrate."""


class CookChoices(TypedDict, total=False):
    """Other fields of CookRequest as keyword arguments."""

    calibrate: bool
    cut: Cut
    held_out_cut: Cut
    forward: ForwardOptions
    restart: bool
    force: bool
    repo: str | None
    quantized_by: str | None


@checked
def quantize(
    model: AnyPath,
    output: AnyPath | None,
    file_type: FileType | str | Mixture,
    options: SourceOptions | None = None,
    run: RunOptions | None = None,
    *,
    losses: AnyPath | Sensitivities | None = None,
    **choices: Unpack[SourceChoices],
) -> Result:
    """Quantize a GGUF file, a Hugging Face folder or a model of the Hub, as the command does.

        quantize("DeepSeek-V2-Lite", "lite-Q4_K_M.gguf", "Q4_K_M", importances="lite.imatrix.gguf")
        quantize("lite-bf16.gguf", "lite.gguf", "3.4bpw", losses="lite.losses.json")

    output     {ftype} in its name stands for the type. None: beside the model
    file_type  Q4_K_M, a recipe file, or with `losses` a size: 3.4bpw, 12GiB
    options    what to make: SourceOptions
    run        how to run: RunOptions
    losses     divergence that each tensor adds at each type: a file of `sensitivity`, or what it returns
    choices    fields of both as keyword arguments; they replace those of `options` and `run`
    raises     ToolkitError. Finished work is kept for the next run
    """
    from convert.sources import SourceOptions, plan_source, source_folder
    from quantize.options import begun
    from quantize.size.parse import names_size

    options, run = with_choices(choices, options or SourceOptions(), run or RunOptions())
    options = replace(options, calibration=begun(options.calibration))
    source = source_folder(os.fspath(model), quiet=True)

    if isinstance(file_type, str) and names_size(file_type):
        file_type, options = _of_size(file_type, losses, source, output, options)
    elif losses is not None:
        raise BadArgument(f"losses choose types for a size, such as 3.4bpw; {file_type} has its own")
    with plan_source(source, output, file_type, options) as planned:
        return planned.execute(run)


@checked
def calibrate(
    model: AnyPath,
    output: AnyPath | None,
    file_type: FileType | str | Mixture,
    text: AnyPath,
    run: RunOptions | None = None,
    *,
    losses: AnyPath | Sensitivities | None = None,
    **choices: Unpack[CalibrateChoices],
) -> Result:
    """Quantize a model so that it errs little on a text, as `quantize --calibrate` does.

        calibrate("DeepSeek-V2-Lite", "lite-Q4_K_M.gguf", "Q4_K_M", "calibration.txt", n_chunks=40)

    text     UTF-8 file, or folder of which every file and every folder in it is a class of text
    choices  fields of `Calibration`, and of the Cut and ForwardOptions in it, and what `quantize` takes, as
             keyword arguments: progress=True, force=True, importances=...
    The rest is as in `quantize`.
    """
    from imatrix.calibrate.calibration import Calibration

    refuse_unknown(choices, CalibrateChoices.__annotations__.keys() - {"calibration"})
    asked: dict[str, Any] = dict(choices)
    how = {name: asked.pop(name) for name in CalibrationChoices.__annotations__ if name in asked}
    asked["calibration"] = with_choices(how, Calibration(text))
    return quantize(model, output, file_type, run=run, losses=losses, **asked)


@checked
def cook(
    model: AnyPath,
    text: AnyPath,
    types: FileType | str | Iterable[str],
    folder: AnyPath,
    *,
    evaluate: AnyPath | None = None,
    name: str | None = None,
    progress: Shown = None,
    **more: Unpack[CookChoices],
) -> Path:
    """Make importances, files, their divergence, a card and checksums in one run, as the command does.

        cook("DeepSeek-V2-Lite", "calibration.txt", ["Q4_K_M", "3.4bpw"], "lite", evaluate="wiki.txt")

    types     file types, recipe files and sizes
    evaluate  text to measure the divergence on, which should be another one; None: it isn't measured
    name      what the files are called; None: as the model
    progress  True, a function, a bar of tqdm or rich, or a CancelToken
    more      other fields of CookRequest: calibrate=True, cut=Cut(...), forward=ForwardOptions(...)
    raises    ToolkitError; what is finished stays for the next call. Returns the folder
    """
    from imatrix.forward.options import require_torch

    require_torch("cooking")
    from convert.sources import source_folder
    from gguf_tools.commands.cook.request import CookRequest, model_name, parse_wanted
    from gguf_tools.commands.cook.run import cook as cook_request

    several = [types] if isinstance(types, str) else list(types)
    for each in several:
        if not isinstance(each, str):
            raise WrongType(f"types: found {described(each)} among them, expected str")
    source = Path(source_folder(os.fspath(model), quiet=progress is not True))
    request = CookRequest(
        source=source,
        text=Path(text),
        wanted=parse_wanted(",".join(several)),
        folder=Path(folder),
        name=name or model_name(source),
        held_out=None if evaluate is None else Path(evaluate),
        progress=progress,
        **more,
    )
    cook_request(request)
    return request.folder


@checked
def card(
    files: Paths,
    *,
    source: AnyPath | None = None,
    base_model: str | None = None,
    quantized_by: str | None = None,
    repository: str | None = None,
    report: AnyPath | None = None,
    output: AnyPath | None = None,
    force: bool = False,
) -> Path:
    """Write README.md for files of a model, for the Hub; return its path.

        card(["lite-Q4_K_M.gguf"], base_model="deepseek-ai/DeepSeek-V2-Lite", report="lite.json")

    source      folder or file that the files were made of
    repository  OWNER/NAME of the files on the Hub, for the commands that get them
    report      what `evaluate` has written as JSON; with matplotlib, the card gets its chart
    output      None: README.md beside the files
    force       replace a card that somebody else has written
    raises      BadRequest for a report on other files, or a card that is not ours
    """
    from convert.card.write import CardRequest
    from gguf_tools.commands.arguments.card import write_charted_card

    paths = paths_of("files", files)
    request = CardRequest(
        None if source is None else Path(source),
        base_model,
        quantized_by,
        None if report is None else Path(report),
        home=repository,
    )
    return write_charted_card(paths, request, None if output is None else Path(output), force=force)


@checked
def upload(
    files: Paths,
    repository: str,
    *,
    private: bool = False,
    force: bool = False,
    include: str | Sequence[str] = (),
    progress: Shown = None,
) -> list[str]:
    """Upload files, or what belongs to a model in a folder, to the Hub; return their names there.

        upload("lite", "me/DeepSeek-V2-Lite-GGUF", private=True)

    repository  OWNER/NAME[@BRANCH], made if it isn't there
    include     a pattern, or several, of more files to take from folders; those with a leading dot, or
                what may be a secret, only by a pattern with that dot, or by the whole name
    progress    True, a function, or a bar of tqdm or rich, which moves with each file
    raises      HubError; the same call goes on with what is missing. OutputError for a file that is there
                with another content, without `force`
    """
    from gguf_tools.hub.names import parse_hub_name
    from gguf_tools.hub.upload import plan_upload
    from gguf_tools.hub.upload import upload as send

    name = parse_hub_name(repository)
    if name is None:
        raise BadRequest(f"{repository}: expected OWNER/NAME")
    paths = paths_of("files", files)
    uploads: Sequence[Upload] = plan_upload(paths, include)[0]
    if not uploads:
        raise BadRequest(f"{paths[0]}: nothing to upload")
    with Bar(f"uploading to {name}", BYTES, progress) as bar:
        advance = bar.start(sum(each.n_bytes for each in uploads))
        send(
            uploads, name, private=private, force=force, bars=False,
            done=lambda each, is_new: advance(each.n_bytes),
        )  # fmt: skip
    return [each.name for each in uploads]


@checked
def split(
    model: AnyPath,
    prefix: AnyPath,
    *,
    max_bytes: PositiveBytes | None = None,
    max_tensors: Count | None = None,
    force: bool = False,
    progress: Shown = None,
) -> list[Path]:
    """Split a GGUF file into PREFIX-00001-of-0000N.gguf and so on; return their paths.

        split("lite-Q8_0.gguf", "parts/lite-Q8_0", max_bytes=4 << 30)

    max_bytes, max_tensors  limits of a part; neither: 128 tensors
    progress                True, a function, a bar of tqdm or rich, or a CancelToken
    raises                  GGUFError, and OutputError for parts that are there without `force`
    """
    from gguf_tools.edit.rewrite import write_files
    from gguf_tools.edit.split import split_files
    from gguf_tools.files.early_checks import refuse_to_replace
    from gguf_tools.format.shards import open_gguf

    with open_gguf(model) as source:
        files = split_files(source, Path(prefix), max_bytes=max_bytes, max_tensors=max_tensors)
        refuse_to_replace([file.path for file in files], force=force)
        with Bar("splitting", show=progress) as bar:
            write_files(files, source.paths, bar)
    return [file.path for file in files]


@checked
def merge(part: AnyPath, output: AnyPath, *, force: bool = False, progress: Shown = None) -> Path:
    """Merge a split set, given any of its parts, into one file; return its path.

        merge("parts/lite-Q8_0-00001-of-00003.gguf", "lite-Q8_0.gguf")

    progress  True, a function, or a bar of tqdm or rich
    raises  BadRequest for a file that is whole, GGUFError, and OutputError for an output that is there
            without `force`
    """
    from gguf_tools.edit.rewrite import write_files
    from gguf_tools.edit.split import merged_file
    from gguf_tools.format.shards import open_gguf

    with open_gguf(part) as source:
        file = merged_file(source, Path(output), replace=force)
        with Bar("merging", show=progress) as bar:
            write_files([file], source.paths, bar)
    return file.path


def _of_size(
    size: str,
    losses: AnyPath | Sensitivities | None,
    source: Path | StreamedFolder,
    output: AnyPath | None,
    options: SourceOptions,
) -> tuple[Mixture, SourceOptions]:
    """Choose the mixture of a size, and the padding that goes with it, as the command does."""
    from convert.sources import plan_source
    from quantize.plan.sensitivities import Sensitivities, read_sensitivities
    from quantize.size.parse import parse_size
    from quantize.size.solve import Planner, SizeRequest, size_padded

    if losses is None:
        raise BadArgument(f"a size ({size}) needs the losses of all tensors: losses=..., from `sensitivity`")
    known = losses if isinstance(losses, Sensitivities) else read_sensitivities(Path(losses))
    request = SizeRequest(known, parse_size(size), calibrated=options.calibration is not None)
    options = replace(options, program=options.program or request.rules.target)

    def planner_of(pad: PadChoice | None) -> Planner:
        padded = replace(options, pad=pad)
        return lambda mixture: plan_source(source, output, mixture, padded, allow_problems=True)

    sized, pad = size_padded(planner_of, request, options.pad)
    return sized.mixture, replace(options, pad=pad)
