"""A forward and a backward pass over a text, and their two work folders in that of an output.

OUT.work/forward.work     hidden states after every layer
OUT.work/backward.work    gradients at the hidden states, and what observers keep of every layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forward.device import device_name, fast_products
from forward.gradients.backward import BackwardPass, backward_pass
from forward.observe import Observer, Silent
from forward.open import ModelSource
from forward.options import ForwardOptions
from forward.run import forward_pass
from forward.text.tokens import Text
from forward.work.work_folder import EMBEDDING, WorkFolder, WorkParts
from forward.workers import give_back
from gguf_tools.files.early_checks import refuse_small_disk
from gguf_tools.files.inputs import InputWatch
from gguf_tools.progress import Reporter

BACKWARD_WORK = 4
"""Work of a layer in the backward pass, over that in the forward pass: computed again and differentiated."""

_DRAWING_WORK = 3
"""Work of drawing labels, over that of the logits of all tokens: two sweeps, and products on the way back."""


@dataclass(frozen=True)
class Folders:
    """The two work folders of an output; `back` counts steps, see `BackwardPass`."""

    there: WorkFolder
    back: WorkFolder


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
        parts = _parts(output)
        parts.make()
        there, back = parts.paths
        yield Folders(
            opened.enter_context(WorkFolder(there, about, restart=restart, keep_all=True, watch=watch)),
            opened.enter_context(WorkFolder(back, about, restart=restart, watch=watch)),
        )


def forget_folders(output: Path) -> None:
    """Delete the work folders of `output`."""
    _parts(output).forget()


def is_unfinished(output: Path) -> bool:
    """Return whether a run for `output` has left one of its work folders."""
    return _parts(output).is_unfinished


def state_bytes(source: ModelSource, text: Text) -> int:
    """Return the size of the files of hidden states and gradients, at most."""
    network, n_tokens = source.network, text.inputs.size
    # Hidden states before and after every layer, two sets of gradients, and three of scratch.
    return 4 * n_tokens * (network.state_size * (network.n_layers + 1 + 2) + network.hidden_size * 3)


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
    observe: Callable[[], Observer] = Silent,
) -> Iterator[BackwardPass]:
    """Compute the layers that are not done, and give the pass that goes back.

    observe  returns an observer for a layer of the forward pass
    """
    n_layers, drawing = source.network.n_layers, _DRAWING_WORK * source.head_layers
    is_drawn = folders.back.done >= EMBEDDING
    done = max(0, folders.there.done + 1) + BACKWARD_WORK * min(n_layers, max(0, folders.back.done + 1))
    report.start(n_layers * (1 + BACKWARD_WORK) + drawing, done + drawing * is_drawn)
    with ExitStack() as opened:
        opened.enter_context(fast_products(device_name(forward.device)))
        passing = forward_pass(source, text.chunks, forward, folders.there, report.advance)
        there = opened.enter_context(passing)
        for _ in there.layers(observe):
            give_back()
        there.states.let_go()  # the way back takes as much again, and reads files
        told = replace(there.execution, advance=lambda share: report.advance(BACKWARD_WORK * share))
        there = replace(there, execution=told)
        report.remark("drawing labels")
        backward = opened.enter_context(backward_pass(there, folders.back, seed, forward.memory_bytes))
        report.advance(0.0 if is_drawn else drawing)
        report.remark("gradients")
        yield backward


def _parts(output: Path) -> WorkParts:
    return WorkParts(output, ("forward", "backward"))
