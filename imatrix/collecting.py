"""Collect importances from a model: every layer's weights are read once, for all chunks of text.

Between layers a hidden state per token is kept, in memory or in a file when it is above the budget. The rest
of the memory is one layer's attention and, per thread, a chunk's activations and one or two experts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

from forward.options import require_torch
from forward.text.quality import admit
from forward.text.tokens import Text, read_text
from forward.work.run_identity import run_identity
from gguf_tools.choices import with_choices
from gguf_tools.errors import BadImportance
from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.named_files import output_path
from imatrix.merge import merge
from imatrix.options import CollectChoices, Collected, CollectOptions, CollectReporter, NoCollectReport
from imatrix.progress import CollectBar
from quantize.importances.entries import ImportanceFile, refuse_nonfinite

if TYPE_CHECKING:
    from forward.open import ModelSource

_CHOSEN = (
    "tokens attend to {n_chosen} positions, whose choice depends on rounding: what is attended to is rounded"
    " to F16, as in llama.cpp's cache"
)
"""Note on models with an indexer, for chunks in which it chooses."""


def collect(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    options: CollectOptions | None = None,
    *,
    progress: bool = False,
    **choices: Unpack[CollectChoices],
) -> Collected:
    """Return the importances that a text gives the weights of a model, and save them.

        matrix = collect("DeepSeek-V2-Lite", "calibration.txt", "lite.imatrix.gguf").importances

    model     Hugging Face folder, or GGUF file
    text      path of a UTF-8 text
    output    where to save them; until then, finished layers are kept beside it, and the same call resumes
              after an interruption. None: nothing is saved
    options   what to collect, and how
    progress  show a bar on standard error
    choices   fields of CollectOptions, and of the Cut and ForwardOptions in it, as keyword arguments:
              n_chunks=8, chunk_size=512, device="cpu". They replace those of `options`
    raises    ToolkitError, for instance without torch
    """
    from forward.work.work_folder import forget
    from imatrix.store import save

    options = with_choices(options or CollectOptions(), choices)
    report = CollectBar(0, _save_nothing, quiet=not progress)
    with TemporaryDirectory() as nowhere, report:
        place = Path(nowhere) / "none" if output is None else output_path(output)
        collected = collect_beside(Path(model), Path(text), place, options, report)
        if output is not None:
            save(place, collected.importances)
            forget(place)
    return collected


def _save_nothing(contents: ImportanceFile) -> None:
    raise AssertionError("a bar that never saves was asked to")


def collect_beside(
    model: Path, text: Path, output: Path, options: CollectOptions, report: CollectReporter | None = None
) -> Collected:
    """Return the importances that `text` gives the weights of `model`.

    output  where they will be saved. The folder beside it keeps finished layers until
            `forward.work.work_folder.forget` deletes it
    raises  ToolkitError; finished layers stay for the next run
    """
    require_torch("collecting importances")
    import torch

    from forward.open import open_model
    from forward.work.work_folder import WorkFolder
    from imatrix.run import run

    if options.forward.n_threads is not None:
        torch.set_num_threads(options.forward.n_threads)
    with open_model(model) as source:
        chunks = read_text(text, source.vocab(), source.network.vocab_size, options.cut)
        report = report or NoCollectReport()
        quality = admit(chunks, str(text), report.tell, any_text=options.any_text)
        notes = tuple(finding.text for finding in quality.findings())
        n_chosen = source.network.n_chosen
        if n_chosen is not None and n_chosen < chunks.chunk_size and options.forward.dtype == "float32":
            options = replace(options, forward=replace(options.forward, half_cache=True))
            notes += (_CHOSEN.format(n_chosen=n_chosen),)
        _refuse_others(options.earlier, source)
        about = _about(source.watch, chunks, options)
        with WorkFolder(output, about, watch=source.watch, restart=options.restart) as folder:
            dataset = options.dataset or text.name
            collected = run(source, chunks, options, folder, report, dataset)
            source.watch.refuse_changed()
    refuse_nonfinite(collected.importances.entries)
    merged = merge([*options.earlier, collected.importances])
    return replace(collected, importances=merged.importances, notes=(*notes, *collected.notes, *merged.notes))


def _refuse_others(earlier: Sequence[ImportanceFile], source: ModelSource) -> None:
    """Raise BadImportance, before anything is computed, for importances of another model."""
    if earlier:
        merge(earlier)
    for file in earlier:
        for name, entry in file.entries.items():
            tensor = source.tensors.get(name)
            if tensor is not None and entry.n_values % tensor.shape[-1]:
                raise BadImportance(
                    f"{file.path}: {name} has {entry.n_values} values, and the rows of {source.path} have"
                    f" {tensor.shape[-1]} columns; of another model?"
                )


def _about(inputs: InputWatch, text: Text, options: CollectOptions) -> dict[str, Any]:
    """Return what decides the numbers of a run."""
    return {
        "model": inputs.recognised_by(),
        **run_identity(text, options.forward),
        "all_experts": options.forward.all_experts,
        **({"half_cache": True} if options.forward.half_cache else {}),
    }
