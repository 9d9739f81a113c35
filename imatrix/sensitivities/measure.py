"""Measures what each tensor of a model costs at each type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.errors import ToolkitError
from gguf_tools.files.early_checks import refuse_early, refuse_to_replace
from gguf_tools.files.leftovers import forget
from gguf_tools.files.named_files import output_path
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.run_lock import in_use
from gguf_tools.format.ggml_types import by_name
from gguf_tools.progress import Reporter, Shown, reporting
from imatrix.forward.options import require_torch
from imatrix.sensitivities.options import SensitivityChoices, SensitivityOptions
from imatrix.texts.mixture import mixture_sha256
from quantize.formats import get_format
from quantize.plan.overrides import parse_type
from quantize.plan.sensitivities import Sensitivities, read_sensitivities


@checked
def sensitivity(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: SensitivityOptions | None = None,
    progress: Shown | Reporter = None,
    **choices: Unpack[SensitivityChoices],
) -> Sensitivities:
    """Measure the divergence that each tensor of a model adds at each type, and write it to a file.

        losses = sensitivity("DeepSeek-V2-Lite", "calibration.txt", "lite.losses.json", n_chunks=40)
        quantize("DeepSeek-V2-Lite", "lite.gguf", "3.4bpw", losses=losses)

    model    Hugging Face folder, or GGUF file. A folder is seen as the file that the converter makes of it
    text     UTF-8 file, or folder of which every file and every folder in it is a class of text
    output   where the sensitivities go. Work folders beside it keep finished layers until all is done
    progress True, a function, a bar of tqdm or rich, a CancelToken, or a Reporter
    choices  fields of SensitivityOptions, and of the Cut and ForwardOptions in it, as keyword arguments; they
             replace those of `options`
    raises   ToolkitError: BadActivation naming layer and tensor for NaN or infinity, BadRequest for a text or
             options that don't fit, OutputError for a disk that is too small or an output that can't be
             written or holds something else. Finished layers stay for the next run

    An output that is there and holds what would be measured is done: it is read.
    """
    options = with_choices(choices, options or SensitivityOptions())
    text, output = Path(text), output_path(output)
    for name in options.types or ():
        get_format(parse_type(name))  # says now if there is no such type, or no codec
    refuse_early([output], [text], [Path(model)], folders=True)
    there = measured_before(model, text, output, options)
    if there is not None:
        return there
    refuse_to_replace([output], force=options.force)
    require_torch("measuring sensitivities")
    from imatrix.sensitivities.run import measure

    with reporting(progress, "measuring losses") as report, in_use(work_path(output)):
        return measure(model, text, output, options, report)


def measured_before(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: SensitivityOptions,
) -> Sensitivities | None:
    """Read an output that holds what `sensitivity` would measure; None if there is none, or with `force`.

    What a run has left that was killed at its end goes then.
    """
    if options.force or options.restart or not Path(output).is_file():
        return None
    cut = options.cut
    try:
        losses = read_sensitivities(Path(output))
        asked = {
            "sha256": mixture_sha256(Path(text)),
            "context": cut.chunk_size,
            "seed": options.seed,
            "rows": options.rows,
            "pad_hidden": options.hidden_facts.get("pad_hidden"),
            **({} if cut.n_chunks is None else {"chunks": cut.n_chunks}),
        }
        if any(losses.text.get(key) != value for key, value in asked.items()):
            return None
        from imatrix.forward.open import open_model
        from imatrix.sensitivities.type_errors import CANDIDATES

        with open_model(options.adapted(model)) as source:
            is_same = losses.model.get("files") == source.watch.recognised_by()
    except (OSError, ToolkitError):
        return None
    if not is_same or not _has_types(losses, options.types or CANDIDATES):
        return None
    forget(work_path(Path(output)))
    return losses


def _has_types(losses: Sensitivities, wanted: Sequence[str]) -> bool:
    """Whether losses have the wanted types, and no others, as far as rows can have them."""
    found = {name for each in losses.tensors.values() for name in each.by_type}
    lengths = {each.shape[-1] for each in losses.tensors.values()}
    possible = {name for name in wanted if any(n % by_name(name).block_elems == 0 for n in lengths)}
    return found == possible
