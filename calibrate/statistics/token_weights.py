"""How much each token counts in the second moments of inputs.

An error E of a matrix moves a token's loss by g E x, with x what the matrix multiplies and g the gradient at
its product. The sum of (g E x)^2 over the tokens is tr(G E H E^T) only if the sizes of g and x have nothing
to do with each other. In trained models they have. In some layers the first token of a chunk has inputs a
thousand times as large as the others, and it hardly matters to the predictions. So each token is weighed by
the size of its gradient.

The nearest product of two matrices, by least squares, has x x^T weighed by |g|^2 (Van Loan and Pitsianis,
1993). With one drawn label a token, |g|^2 is mostly noise. |g| has less of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from calibrate.statistics.gradient_factors import GradientFactors
from forward.device import to_torch


@dataclass(frozen=True)
class TokenWeights:
    """The weights of a text's tokens, layer by layer.

    gradients   of the predictions of some chunks
    chunks      which chunks of the text these are; one that comes several times has the mean of its sizes
    chunk_size  in tokens
    n_tokens    of the whole text
    """

    gradients: GradientFactors
    chunks: tuple[int, ...]
    chunk_size: int
    n_tokens: int

    def roots(self, layer: int) -> torch.Tensor | None:
        """Compute the root of each token's weight in a layer, float32 (n_tokens,); None without gradients.

        Tokens with a gradient weigh 1 in the mean, and so does each of the others. A layer without any
        gradient weighs all tokens alike.
        """
        sizes = self.gradients.sizes(layer)
        mean = 0.0 if sizes is None else float(sizes.mean(dtype=np.float64))
        if sizes is None or not mean:
            return None
        weights = np.ones((self.n_tokens // self.chunk_size, self.chunk_size), np.float32)
        by_chunk = (sizes / mean).reshape(-1, self.chunk_size)
        for chunk in set(self.chunks):
            weights[chunk] = by_chunk[np.equal(self.chunks, chunk)].mean(axis=0)
        return to_torch(np.sqrt(weights).reshape(-1))
