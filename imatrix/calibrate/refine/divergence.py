"""The divergence of a model's predictions from another's, and the way back from there to the last layer.

KL(p || q) of p, the original's next-token probabilities, and q, the file's, has the gradient q - p at the
file's logits. The vocabulary is swept in slices as in imatrix/forward/logits.py, so all logits of a text are
never in memory. A first sweep finds the logarithm of the sum of exponentials of each position, a second all
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from imatrix.forward.device import to_cpu
from imatrix.forward.gradients.backward import through_norm
from imatrix.forward.hidden_states import States
from imatrix.forward.logits import Head, Positions, slices
from imatrix.forward.workers import Workers

TakeProduct = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Is given the first row of a slice of the head, what that multiplies, and the gradient at the product."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of an original and of a file at the same positions.

    positions  of the tokens of both heads
    sums       of both, float64 (n_positions,) on the CPU, see `log_sums`
    """

    original: Head
    file: Head
    positions: Positions
    sums: tuple[torch.Tensor, torch.Tensor]

    def divergences(self, workers: Workers) -> torch.Tensor:
        """Compute KL(p || q) of each position, float64 (n_positions,)."""
        found = torch.zeros(len(self.positions.tokens), dtype=torch.float64)
        for at, _, here in self._sweep(workers, lambda chunk, first, weight, by_logit: None):
            found[at] += here
        return found

    def gradients(self, workers: Workers, into: States, take: TakeProduct) -> torch.Tensor:
        """Compute the divergences, and fill `into` with gradients of their mean at the last hidden states.

        into  float32, as large as the file's hidden states
        take  is called for every slice and chunk, in order
        """
        n_behind = self.file.load.tensor(self.file.matrix).shape[-1]
        n_positions = len(self.positions.tokens)

        def take_slice(chunk: int, first: int, weight: torch.Tensor, by_logit: torch.Tensor) -> torch.Tensor:
            at = self.positions.place(chunk)
            at_logits = by_logit.div_(n_positions).to(weight.device, weight.dtype)
            at_x = to_cpu((at_logits @ weight).float())
            at_x = at_x if first == 0 else at_x + into.read(at.start, at.stop)[:, :n_behind]
            into.write(at.start, pad(at_x, (0, into.n_cols - n_behind)))
            return at_logits

        found = torch.zeros(n_positions, dtype=torch.float64)
        for at, (first, at_logits), here in self._sweep(workers, take_slice):
            found[at] += here
            x = self.file.norm(self.file.states.rows(self.positions.tokens[at]).to(self.file.load.device))
            take(first, x, at_logits)
        through_norm(self.file, self.positions, into, n_behind, workers)
        return found

    def _sweep(
        self, workers: Workers, make: Callable[[int, int, torch.Tensor, torch.Tensor], Any]
    ) -> Iterator[tuple[slice, tuple[int, Any], torch.Tensor]]:
        """Yield, slice by slice and chunk by chunk, the positions, what `make` makes, and divergences.

        make  is given the chunk, the slice's first row, the file's rows and the gradient at their products
        """
        for first, stop in slices(self.file.vocab_size):
            weights = self.original.read(first, stop), self.file.read(first, stop)

            def take_chunk(
                chunk: int, first: int = first, weights: tuple[torch.Tensor, torch.Tensor] = weights
            ) -> tuple[slice, tuple[int, Any], torch.Tensor]:
                at = self.positions.place(chunk)
                tokens, sums = self.positions.tokens[at], [each[at, None].float() for each in self.sums]
                expected = to_cpu(self.original.logits(tokens, weights[0])).sub_(sums[0])
                logits = to_cpu(self.file.logits(tokens, weights[1]))
                slope = self.file.rule.slope(logits)
                found = logits.sub_(sums[1])
                p, q = expected.exp(), found.exp()
                here = (p * expected.sub_(found)).sum(-1).double()
                return at, (first, make(chunk, first, weights[1], q.sub_(p).mul_(slope))), here

            yield from workers.each(take_chunk, range(self.positions.n_chunks))
