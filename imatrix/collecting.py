"""Collect importances from a model and a text, and save them; what needs torch is in `imatrix.run`."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from gguf_tools.argument_types import checked
from gguf_tools.choices import with_choices
from gguf_tools.files.early_checks import refuse_early, refuse_to_replace
from gguf_tools.files.leftovers import forget
from gguf_tools.files.named_files import output_path
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.run_lock import in_use
from gguf_tools.progress import NO_REPORT, Reporter, Shown, reporting
from imatrix.forward.options import require_torch
from imatrix.options import LABEL, CollectChoices, Collected, CollectOptions, LayerDone


@checked
def collect(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    options: CollectOptions | None = None,
    *,
    progress: Shown = None,
    **choices: Unpack[CollectChoices],
) -> Collected:
    """Collect the importances that a text gives the weights of a model, and save them.

        matrix = collect("DeepSeek-V2-Lite", "calibration.txt", "lite.imatrix.gguf").importances

    model     Hugging Face folder, or GGUF file
    text      path of a UTF-8 text, or of a folder, of which every file and every folder in it is a class
    output    where to save them; until then, finished layers are kept beside it, and the same call resumes
              after an interruption. None: nothing is saved
    options   what to collect, and how
    progress  True, a function, a bar of tqdm or rich, or a CancelToken
    choices   fields of CollectOptions, and of the Cut and ForwardOptions in it, as keyword arguments:
              n_chunks=8, chunk_size=512, device="cpu". They replace those of `options`
    raises    ToolkitError, for instance without torch, or OutputError for an output that is there already
    """
    from imatrix.store import save

    options = with_choices(choices, options or CollectOptions())
    with TemporaryDirectory() as nowhere, reporting(progress, LABEL) as report:
        place = Path(nowhere) / "none" if output is None else output_path(output)
        refuse_early([place], [Path(text)], [Path(model)], folders=True)
        refuse_to_replace([place], force=options.force)
        with in_use(work_path(place)):
            collected = collect_beside(Path(model), Path(text), place, options, report)
            if output is not None:
                save(place, collected.importances, force=True)
            forget(work_path(place))
    return collected


def collect_beside(
    model: Path,
    text: Path,
    output: Path,
    options: CollectOptions,
    report: Reporter = NO_REPORT,
    layer_done: LayerDone = lambda layer, contents: None,
) -> Collected:
    """Collect the importances that `text` gives the weights of `model`, without saving them.

    output  where they will be saved. The folder beside it keeps finished layers until
            `gguf_tools.files.leftovers.forget` deletes it; hold it with `in_use` until then
    raises  ToolkitError; finished layers stay for the next run
    """
    require_torch("collecting importances")
    from imatrix.run import collect_from

    return collect_from(model, text, output, options, report, layer_done)
