"""A backward pass over a whole text: from the model's own predictions down to the embeddings.

    last hidden states -> drawn labels -> gradients at the hidden states -> last layer -> ... -> layer 0

An MTP layer has a pass of its own, from the draft's predictions: the model's layers are not made for these.

It follows a forward pass that kept the hidden states after every layer (`WorkFolder(..., keep_all=True)`),
and reads every layer's weights once more. Gradients at the hidden states are kept as hidden states are: in
memory, or above the budget in files of the backward pass' own work folder. There, finished layers stay, and
an interrupted pass resumes.

The loss of a token is -log p(label), and its label is drawn from the p that the model gives. The covariance
of such gradients is Fisher's information F: to second order an error e causes a divergence of e F e^T / 2.
The text's own next tokens would not do.

A label needs one random number per position: the first token at which the running sum of p exceeds it. The
number depends on the seed and on the position alone. The vocabulary is swept twice in slices. The first
sweep finds the logarithm of the sum of exponentials, the second the labels and the gradient (p - label) W.

`forward_backward` goes both ways. The work folders of the passes are in that of an output:

    OUT.work/forward.work     hidden states after every layer
    OUT.work/backward.work    gradients at the hidden states, and what observers keep of every layer
    OUT.work/draft.work       the same of the MTP layer, of models that have one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from gguf_tools.errors import BadActivation
from gguf_tools.files.early_checks import refuse_small_disk
from gguf_tools.files.inputs import InputWatch
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.run_lock import in_use
from gguf_tools.progress import Reporter
from imatrix.forward.device import device_name, fast_products, to_cpu, to_numpy, to_torch
from imatrix.forward.gradients.differentiate import BackwardStates, differentiate_layer
from imatrix.forward.hidden_states import FileStates, MemoryStates, States
from imatrix.forward.logits import Head, OutputRows, Positions, every_position, log_sums, slices
from imatrix.forward.network import Network
from imatrix.forward.observe import Arrays, Observer, Silent
from imatrix.forward.open import ModelSource
from imatrix.forward.options import ForwardOptions
from imatrix.forward.run import ForwardPass, LayerStates, forward_pass
from imatrix.forward.work_folder import EMBEDDING, WorkFolder, paths_of_parts
from imatrix.forward.workers import Workers, give_back
from imatrix.texts.chunks import Chunks
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
    # Hidden states before and after every layer, three sets of gradients, and three of scratch.
    scratch = 4 * network.hidden_size + 2 * network.scratch_bytes(4)
    return n_tokens * (4 * network.state_size * (network.n_all_layers + 1 + 3) + scratch)


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


_SLACK = 1 - 2.0**-20
"""Factor of random numbers. The p of a token add up to one but for the rounding of logits, and a number above
their sum would have no label."""


def draw_labels(head: Head, chunks: Chunks, seed: int, gradients: States, n_workers: int = 1) -> Arrays:
    """Draw a label for every position, and fill `gradients` with those of the loss at the last hidden states.

    gradients  float32, as large as the head's hidden states
    Returns, for the work folder,
        labels   int64 (n_tokens,)
        losses   float64 (n_tokens,): -log p(label)
        squares  float64 (n_tokens,): the square of the norm of the gradient at the logits
    raises     BadActivation for logits with NaN or infinity
    """
    n_tokens, positions = chunks.n_tokens, every_position(chunks)
    (sums,) = log_sums([head], positions, n_workers)
    if not bool(torch.isfinite(sums).all()):
        raise BadActivation(f"{head.matrix}: the logits have NaN or infinity")
    numbers = to_torch(uniform(seed, n_tokens) * _SLACK, head.load.device)
    drawing = _Drawing(head, positions, sums, numbers, gradients)
    with Workers(n_workers) as workers:
        drawing.sweep(workers)
        through_norm(head, positions, gradients, drawing.n_behind, workers)
    numbers_of = {"labels": drawing.labels, "losses": drawing.losses, "squares": drawing.squares}
    return {name: to_numpy(values) for name, values in numbers_of.items()}


def uniform(seed: int, count: int) -> npt.NDArray[np.float64]:
    """Return random numbers from 0 to below 1; the one at a position depends on seed and position alone.

    They are the outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), whose constants these are.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    start = _mixed(np.array([seed], np.uint64))
    mixed = _mixed(start + step * np.arange(1, count + 1, dtype=np.uint64))
    numbers: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def through_norm(
    head: Head, positions: Positions, gradients: States, n_behind: int, workers: Workers
) -> None:
    """Take gradients from behind the norm at a model's end to before it, in place.

    n_behind  columns of what the output matrix multiplies, which is where gradients stand at first
    """

    def take_chunk(chunk: int) -> None:
        rows, tokens = positions.place(chunk), positions.of_chunk(chunk)
        device = head.load.device
        hidden = head.states.rows(tokens).to(device).detach().requires_grad_()
        behind = gradients.read(rows.start, rows.stop)[:, :n_behind].to(device)
        (gradient,) = torch.autograd.grad(head.norm(hidden), hidden, behind)
        gradients.write(rows.start, to_cpu(gradient))

    for _ in workers.each(take_chunk, range(positions.n_chunks), gradients=True):
        pass


class _Drawing:
    """The second sweep.

    log_sums, numbers  float64 (n_tokens,)
    labels, losses, squares  see `draw_labels`
    n_behind  columns of what the output matrix multiplies
    """

    def __init__(
        self,
        head: Head,
        positions: Positions,
        log_sums: torch.Tensor,
        numbers: torch.Tensor,
        gradients: States,
    ) -> None:
        self.head, self.positions, self.gradients = head, positions, gradients
        self.log_sums, self.numbers = log_sums, numbers
        self.labels = torch.full(numbers.shape, -1, device=numbers.device)
        self.losses, self.squares = torch.zeros_like(numbers), torch.zeros_like(numbers)
        self._sums = torch.zeros_like(numbers)  # of p over the slices so far
        self.n_behind = head.load.tensor(head.matrix).shape[-1]

    def sweep(self, workers: Workers) -> None:
        """Find the labels, and put the gradients at what the output matrix multiplies in `gradients`.

        Where hidden states have several strands, they stand in the first columns.
        """
        for first, stop in slices(self.head.vocab_size):
            read = self.head.read(first, stop)

            def take_chunk(chunk: int, first: int = first, read: OutputRows = read) -> None:
                self._take_slice(chunk, first, read)

            for _ in workers.each(take_chunk, range(self.positions.n_chunks)):
                pass

    def _take_slice(self, chunk: int, first: int, read: OutputRows) -> None:
        """Take in one slice of a chunk."""
        rows, tokens = self.positions.place(chunk), self.positions.of_chunk(chunk)
        logits, weight = self.head.logits(tokens, read).double(), read.weight
        slope = self.head.rule.slope(logits)
        logs = logits.sub_(self.log_sums[rows, None])
        at_logits = logs.exp()
        running = at_logits.cumsum(-1).add_(self._sums[rows, None])
        numbers = self.numbers[rows]
        here = (self.labels[rows] < 0) & (running[:, -1] > numbers)
        columns = torch.searchsorted(running[here], numbers[here, None], right=True)[:, 0]
        self.labels[rows][here] = columns + first
        self.losses[rows][here] = -logs[here, columns]
        self._sums[rows] = running[:, -1]
        at_logits[here, columns] -= 1
        at_logits *= slope
        self.squares[rows] += at_logits.square().sum(-1)
        at_x = to_cpu((at_logits.to(weight.dtype) @ weight).float())
        at_x = at_x if first == 0 else at_x + self.gradients.read(rows.start, rows.stop)[:, : self.n_behind]
        self.gradients.write(rows.start, pad(at_x, (0, self.gradients.n_cols - self.n_behind)))


@dataclass(frozen=True)
class BackwardPass:
    """Gradients on their way back through a model.

    Its work folder counts steps: the one before step 0 draws the labels, step 0 is the last layer, and the
    one after the first layer is what the caller keeps of what comes before: of the embeddings, if that is
    layer 0. The pass of an MTP layer ends with that layer.

    forward           the pass that it follows; all layers are done
    numbers           of the layers, the last one first
    head              the end from which it comes
    middle_gradients  scratch, float32
    """

    forward: ForwardPass
    numbers: range
    head: Head
    folder: WorkFolder
    states: LayerStates
    middle_gradients: States

    def layers(
        self,
        observe: Callable[[int], Observer],
        at_once: int | None = None,
        take: Callable[[States], Arrays] = lambda _: {},
    ) -> Iterator[int]:
        """Differentiate the layers that are not done, the last one first, and yield each once it is recorded.

        observe  returns an observer for a layer; what it keeps goes to the work folder
        at_once  chunks in memory, at most; None: as many as threads can use
        take     makes something of the gradients at the hidden states after a layer, to be kept beside it
        raises   BadActivation naming layer and tensor for NaN or infinity; finished layers stay
        """
        sweep, execution = self.forward.sweep, self.forward.execution
        for step in range(self.folder.done + 1, len(self.numbers)):
            layer = self.numbers[step]
            observer = observe(layer)
            hidden, rows = self.forward.states.stored(layer - 1), self.states.around(step)
            states = BackwardStates(
                hidden, rows.before, rows.after, rows.middle, self.middle_gradients, rows.latent
            )
            try:
                differentiate_layer(sweep, execution, layer, states, observer, at_once)
            except BadActivation as error:
                kept = f"the {step} layers after stay in {self.folder.folder}"
                raise BadActivation(f"{error}; {kept}") from error
            self.states.finish(step, {**observer.arrays(), **take(states.after_gradients)})
            del observer
            give_back()
            yield layer

    def finish(self, take: Callable[[States], Arrays]) -> None:
        """Have `take` make something of the gradients before the first layer, unless an earlier run has."""
        n_steps = len(self.numbers)
        if self.folder.done < n_steps:
            self.folder.finish_layer(n_steps, take(self.states.after(n_steps - 1)))


def gradient_bytes(n_tokens: int, network: Network, dtype: torch.dtype) -> int:
    """Count the bytes of gradients in memory: two sets, and scratch of both kinds."""
    scratch = 4 * network.hidden_size + network.scratch_bytes(dtype.itemsize)
    return n_tokens * (2 * 4 * network.state_size + scratch)


@contextmanager
def backward_pass(
    forward: ForwardPass, folder: WorkFolder, seed: int, memory_bytes: int, *, of_draft: bool = False
) -> Iterator[BackwardPass]:
    """Give the pass that goes back where `forward` has come, which resumes what the work folder has.

    seed          decides which labels are drawn
    memory_bytes  budget for gradients; beyond it they are kept in files
    of_draft      go through the MTP layer, from what it predicts, and no further
    raises        BadActivation for NaN or infinity in the logits
    """
    source, dtype = forward.source, forward.load.dtype
    network, n_tokens = source.network, forward.chunks.n_tokens
    size, inner = (n_tokens, network.state_size), (n_tokens, network.hidden_size)
    in_memory = gradient_bytes(n_tokens, network, dtype) <= memory_bytes
    last = forward.states.stored(network.n_layers - 1)
    head = forward.draft_head() if of_draft else Head.of(network, forward.load, last)
    every = range(network.n_all_layers - 1, -1, -1)
    numbers = every[: network.n_mtp] if of_draft else every[network.n_mtp :]

    def draw(gradients: States) -> Arrays:
        return draw_labels(head, forward.chunks, seed, gradients, forward.n_workers)

    with ExitStack() as opened:
        states = LayerStates(
            folder,
            size,
            dtype,
            in_memory=in_memory,
            opened=opened,
            inner=network.hidden_size,
            latent=network.latent_cols,
        )
        states.begin(draw)
        scratch: States
        if in_memory:
            scratch = MemoryStates(*inner)
        else:
            path = folder.middle_path.with_name("middle.gradients")
            scratch = opened.enter_context(closing(FileStates(path, *inner)))
        yield BackwardPass(forward, numbers, head, folder, states, scratch)
