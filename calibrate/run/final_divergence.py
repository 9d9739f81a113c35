"""Measures how far the finished model has diverged from the original on the calibration text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from calibrate.run.context import RunContext
from forward.logits import Head, sweep_vocabulary
from forward.network import Network
from forward.text.tokens import Text
from quality.divergence import Estimate, mean_of
from quality.visitor import DivergenceVisitor

_LEAST_TOKENS = 4
"""Number of tokens that a chunk must have for its second half to be measured."""


@dataclass(frozen=True)
class FinalDivergence:
    """Mean divergence of the model that was written from the original, in nats.

    summed  on the chunks that it was encoded under
    held    on the held-out chunks
    """

    summed: Estimate
    held: Estimate

    def lines(self) -> Iterator[str]:
        yield (
            f"divergence from the original on the calibration text: KLD {self.summed.value:.5f} +/-"
            f" {self.summed.error:.5f}, on chunks held back {self.held.value:.5f} +/- {self.held.error:.5f}"
        )


def final_divergence(
    context: RunContext, network: Network, text: Text, n_threads: int
) -> FinalDivergence | None:
    """Return how far the models' predictions are apart; None where there is one model, or chunks are short.

    raises  BadActivation for logits with NaN or infinity
    """
    if not context.is_followed or text.chunk_size < _LEAST_TOKENS:
        return None
    heads = [
        Head(
            model.load,
            model.stream.after(network.n_layers - 1),
            network.load_end(model.load),
            network.output,
        )
        for model in context.models
    ]
    paths = [model.load.path for model in context.models]
    visitor = DivergenceVisitor(text, paths, context.device, lambda chunk, n_chunks: None)
    sweep_vocabulary(heads, visitor.positions, [visitor], n_threads)
    by_chunk = visitor.values(1).kld
    summed = np.array([context.holdout.is_summed(chunk) for chunk in range(text.n_chunks)])
    held = np.isin(np.arange(text.n_chunks), context.holdout.held)
    return FinalDivergence(mean_of(by_chunk[summed].ravel()), mean_of(by_chunk[held].ravel()))
