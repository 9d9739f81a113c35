"""A backward pass over a whole text: from the model's own predictions down to the embeddings.

    last hidden states -> drawn labels -> gradients at the hidden states -> last layer -> ... -> layer 0

It follows a forward pass that kept the hidden states after every layer (`WorkFolder(..., keep_all=True)`),
and reads every layer's weights once more. Gradients at the hidden states are kept as hidden states are: in
memory, or above the budget in files of the backward pass' own work folder. There, finished layers stay, and
an interrupted pass resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch

from forward.gradients.differentiate import BackwardStates, differentiate_layer
from forward.gradients.drawn_labels import draw_labels
from forward.hidden_states import FileStates, MemoryStates, States
from forward.layer_states import LayerStates
from forward.logits import Head
from forward.malloc_trim import give_back
from forward.network import Network
from forward.observe import Arrays, Observer
from forward.run import ForwardPass
from forward.work.work_folder import WorkFolder
from gguf_tools.errors import BadActivation


@dataclass(frozen=True)
class BackwardPass:
    """Gradients on their way back through a model.

    Its work folder counts steps: the one before step 0 draws the labels, step 0 is the last layer, and the
    one after layer 0 is what the caller keeps of the embeddings.

    forward           the pass that it follows; all layers are done
    middle_gradients  scratch, float32
    """

    forward: ForwardPass
    folder: WorkFolder
    states: LayerStates
    middle_gradients: States

    def layers(self, observe: Callable[[int], Observer], at_once: int | None = None) -> Iterator[int]:
        """Differentiate the layers that are not done, the last one first, and yield each once it is on disk.

        observe  returns an observer for a layer; what it keeps goes to the work folder
        at_once  chunks in memory, at most; None: as many as threads can use
        raises   BadActivation naming layer and tensor for NaN or infinity; finished layers stay
        """
        sweep, execution = self.forward.sweep, self.forward.execution
        n_layers = self.forward.source.network.n_layers
        for step in range(self.folder.done + 1, n_layers):
            layer = n_layers - 1 - step
            observer = observe(layer)
            hidden, rows = self.forward.states.stored(layer - 1), self.states.around(step)
            states = BackwardStates(hidden, rows.before, rows.after, rows.middle, self.middle_gradients)
            try:
                differentiate_layer(sweep, execution, layer, states, observer, at_once)
            except BadActivation as error:
                kept = f"the {step} layers after stay in {self.folder.folder}"
                raise BadActivation(f"{error}; {kept}") from error
            self.states.finish(step, observer.arrays())
            del observer
            give_back()
            yield layer

    def finish_embeddings(self, take: Callable[[States], Arrays]) -> None:
        """Have `take` make something of the gradients at the embeddings, unless an earlier run has."""
        n_layers = self.forward.source.network.n_layers
        if self.folder.done < n_layers:
            self.folder.finish_layer(n_layers, take(self.states.after(n_layers - 1)))


def gradient_bytes(n_tokens: int, network: Network, dtype: torch.dtype) -> int:
    """Count the bytes of gradients in memory: two sets, and scratch of both kinds."""
    return n_tokens * (2 * 4 * network.state_size + (4 + dtype.itemsize) * network.hidden_size)


@contextmanager
def backward_pass(
    forward: ForwardPass, folder: WorkFolder, seed: int, memory_bytes: int
) -> Iterator[BackwardPass]:
    """Give the pass that goes back where `forward` has come, which resumes what the work folder has.

    seed          decides which labels are drawn
    memory_bytes  budget for gradients; beyond it they are kept in files
    raises        BadActivation for NaN or infinity in the logits
    """
    source, dtype = forward.source, forward.load.dtype
    network, n_tokens = source.network, forward.text.inputs.size
    size, inner = (n_tokens, network.state_size), (n_tokens, network.hidden_size)
    in_memory = gradient_bytes(n_tokens, network, dtype) <= memory_bytes

    def draw(gradients: States) -> Arrays:
        last = forward.states.stored(network.n_layers - 1)
        head = Head(forward.load, last, forward.output_norm(), network.output)
        drawn = draw_labels(head, forward.text.chunk_size, seed, gradients, forward.n_workers)
        return drawn.arrays()

    with ExitStack() as opened:
        states = LayerStates(
            folder, size, dtype, in_memory=in_memory, opened=opened, inner=network.hidden_size
        )
        states.begin(draw)
        scratch: States
        if in_memory:
            scratch = MemoryStates(*inner)
        else:
            path = folder.middle_path.with_name("middle.gradients")
            scratch = opened.enter_context(closing(FileStates(path, *inner)))
        yield BackwardPass(forward, folder, states, scratch)
