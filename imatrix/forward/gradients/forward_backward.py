"""A forward and a backward pass over a text, and their work folders in that of an output.

OUT.work/forward.work     hidden states after every layer
OUT.work/backward.work    gradients at the hidden states, and what observers keep of every layer
OUT.work/draft.work       the same of the MTP layer, of models that have one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_tools.files.early_checks import refuse_small_disk
from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.run_lock import in_use
from gguf_tools.progress import Reporter
from imatrix.forward.device import device_name, fast_products
from imatrix.forward.gradients.backward import BackwardPass, backward_pass
from imatrix.forward.network import Network
from imatrix.forward.observe import Observer, Silent
from imatrix.forward.open import ModelSource
from imatrix.forward.options import ForwardOptions
from imatrix.forward.run import ForwardPass, forward_pass
from imatrix.forward.work_folder import EMBEDDING, WorkFolder, paths_of_parts
from imatrix.forward.workers import give_back
from imatrix.texts.tokens import Text

BACKWARD_WORK = 4
"""Work of a layer in the backward pass, over that in the forward pass: computed again and differentiated."""

_DRAWING_WORK = 3
"""Work of drawing labels, over that of the logits of all tokens: two sweeps, and products on the way back."""


@dataclass(frozen=True)
class Folders:
    """The work folders of an output; `back` and `draft` count steps, see `BackwardPass`."""

    there: WorkFolder
    back: WorkFolder
    draft: WorkFolder


@contextmanager
def work_folders(
    output: Path, about: Mapping[str, Any], watch: InputWatch, *, restart: bool
) -> Iterator[Folders]:
    """Give the work folders of `output`.

    about   what decides the numbers of the run, as JSON data
    watch   of the model
    raises  BadRequest when another run has them, or began them with another `about`
    """
    with ExitStack() as opened:
        opened.enter_context(in_use(work_path(output)))
        there, *back = paths_of_parts(output, "forward", "backward", "draft")
        yield Folders(
            opened.enter_context(WorkFolder(there, about, restart=restart, keep_all=True, watch=watch)),
            *(opened.enter_context(WorkFolder(each, about, restart=restart, watch=watch)) for each in back),
        )


def state_bytes(network: Network, n_tokens: int) -> int:
    """Count the bytes of the files of hidden states and gradients, at most."""
    # Hidden states before and after every layer, two sets of gradients, and three of scratch.
    return 4 * n_tokens * (network.state_size * (network.n_all_layers + 1 + 2) + network.hidden_size * 3)


def refuse_full_disk(folders: Folders, n_bytes: int) -> None:
    """Raise OutputError unless the disk has room for work folders of `n_bytes` all together."""
    paths = folders.back.folder, folders.there.folder
    refuse_small_disk(paths, n_bytes, "hidden states and gradients", "use fewer chunks, or another disk")


@contextmanager
def forward_backward(
    source: ModelSource,
    text: Text,
    forward: ForwardOptions,
    seed: int,
    folders: Folders,
    report: Reporter,
    take_draft: Callable[[BackwardPass], object],
    observe: Callable[[], Observer] = Silent,
) -> Iterator[BackwardPass]:
    """Compute the layers that are not done, and give the pass that goes back.

    take_draft  is given the pass of the MTP layer first, unless an earlier run has been through it
    observe     returns an observer for a layer of the forward pass
    """
    network, drawing = source.network, _DRAWING_WORK * source.head_layers
    passes = [(folders.draft, network.n_mtp), (folders.back, network.n_layers)]
    done = [min(n_layers, max(0, folder.done + 1)) for folder, n_layers in passes]
    n_drawn = sum(folder.done >= EMBEDDING for folder, n_layers in passes if n_layers)
    report.start(
        network.n_all_layers * (1 + BACKWARD_WORK) + drawing * (1 + network.n_mtp),
        max(0, folders.there.done + 1) + BACKWARD_WORK * sum(done) + drawing * n_drawn,
    )
    with ExitStack() as opened:
        opened.enter_context(fast_products(device_name(forward.device)))
        passing = forward_pass(source, text.chunks, forward, folders.there, report.advance)
        there = opened.enter_context(passing)
        for _ in there.layers(observe):
            give_back()
        there.states.let_go()  # the way back takes as much again, and reads files
        told = replace(there.execution, advance=lambda share: report.advance(BACKWARD_WORK * share))
        there = replace(there, execution=told)

        def begun(folder: WorkFolder, *, of_draft: bool) -> AbstractContextManager[BackwardPass]:
            return _begun(there, folder, seed, forward.memory_bytes, report, drawing, of_draft=of_draft)

        if folders.draft.done <= network.n_mtp - 1 and network.n_mtp:
            with begun(folders.draft, of_draft=True) as draft:
                take_draft(draft)
        yield opened.enter_context(begun(folders.back, of_draft=False))


@contextmanager
def _begun(
    there: ForwardPass,
    folder: WorkFolder,
    seed: int,
    memory_bytes: int,
    report: Reporter,
    drawing: float,
    *,
    of_draft: bool,
) -> Iterator[BackwardPass]:
    """Draw the labels of a pass that goes back, and give it; `drawing` is the work of that."""
    is_drawn = folder.done >= EMBEDDING
    report.remark("drawing labels")
    with backward_pass(there, folder, seed, memory_bytes, of_draft=of_draft) as backward:
        report.advance(0.0 if is_drawn else drawing)
        report.remark("gradients")
        yield backward
