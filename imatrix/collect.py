"""Collect importances from a model: every layer's weights are read once, for all chunks of text.

Between layers a hidden state per token is kept, in memory or in a file when it is above the budget. The rest
of the memory is one layer's attention and, per thread, a chunk's activations and one or two experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from forward.device import device_name, require_torch
from forward.text import Text, read_text
from imatrix.merge import merge
from imatrix.options import Collected, CollectOptions, NoReport, Reporter
from quantize.importance import refuse_nonfinite


def collect(
    model: Path, text: Path, output: Path, options: CollectOptions, report: Reporter | None = None
) -> Collected:
    """Return the importances that `text` gives the weights of `model`.

    output  where they will be saved. The folder beside it keeps finished layers until
            `forward.work_folder.forget` deletes it
    raises  ToolkitError; finished layers stay for the next run
    """
    require_torch("collecting importances")
    import torch

    from forward.open import open_model
    from forward.work_folder import WorkFolder
    from imatrix.run import run

    if options.forward.n_threads is not None:
        torch.set_num_threads(options.forward.n_threads)
    with open_model(model) as source:
        chunks = read_text(text, source.vocab(), source.network.vocab_size, options.cut)
        about = _about(source.paths, chunks, options)
        with WorkFolder(output, about, restart=options.restart) as folder:
            dataset = options.dataset or text.name
            collected = run(source, chunks, options, folder, report or NoReport(), dataset)
    refuse_nonfinite(collected.importances.entries)
    merged = merge([*options.earlier, collected.importances])
    return replace(collected, importances=merged.importances, notes=(*collected.notes, *merged.notes))


def _about(paths: tuple[Path, ...], text: Text, options: CollectOptions) -> dict[str, Any]:
    """Return what decides the numbers of a run."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return {
        "model": files,
        "text": text.digest(),
        "chunks": text.n_chunks,
        "context": text.chunk_size,
        "dtype": options.forward.dtype,
        "device": device_name(options.forward.device),
        "all_experts": options.forward.all_experts,
    }
