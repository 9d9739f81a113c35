"""How much each token counts in the second moments of inputs.

An error E of a matrix moves a token's loss by g E x, with x what the matrix multiplies and g the gradient at
its product. The sum of (g E x)^2 over the tokens is tr(G E H E^T) only if the sizes of g and x have nothing
to do with each other. In trained models they have, above all at the first token of a chunk. It has inputs a
thousand times as large as the others' in some layers, and hardly matters to the predictions there. But half
of what heads attend to is its value, so attn_v has a gradient there that is a hundred times as large as at
another token. So each token is weighed by the size of its gradient at the products in question.

The nearest product of two matrices, by least squares, has x x^T weighed by |g|^2 (Van Loan and Pitsianis,
1993). With one drawn label a token, |g|^2 is mostly noise. |g| has less of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from imatrix.calibrate.statistics.gradient_factors import GradientFactors
from imatrix.calibrate.statistics.inputs import WeightsOf, unweighed
from imatrix.forward.device import to_torch


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

    def of_layer(self, layer: int) -> WeightsOf:
        """Return the weights in a layer; without gradients there are none.

        Those of an input are the mean of what they are for each of its matrices whose gradients are known
        token by token. If there are none, the gradients after the layer stand for them.
        """
        known = self.gradients.layer(layer)
        if known is None:
            return unweighed

        @cache
        def weights_of(names: tuple[str, ...]) -> torch.Tensor | None:
            at_products = [sizes for name in names if (sizes := known.sizes_at(name)) is not None]
            found = map(self._of_sizes, at_products or [known.sizes()])
            weights = [each for each in found if each is not None]
            return to_torch(np.stack(weights).mean(axis=0)) if weights else None

        return weights_of

    def _of_sizes(self, sizes: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
        """Return the weights that go with sizes of gradients, float32 (n_tokens,); None if all are 0.

        Tokens with a gradient weigh 1 in the mean. One without weighs the mean of those at the start of
        their chunk if it is at the start of its, and else that of the others.

        sizes  of the tokens of `chunks`
        """
        mean = float(sizes.mean(dtype=np.float64))
        if not mean:
            return None
        by_chunk = (sizes / mean).reshape(-1, self.chunk_size)
        usual = by_chunk.mean(axis=0, keepdims=True)
        usual[:, 1:] = usual[:, 1:].mean()
        weights = np.repeat(usual, self.n_tokens // self.chunk_size, axis=0)
        for chunk in set(self.chunks):
            weights[chunk] = by_chunk[np.equal(self.chunks, chunk)].mean(axis=0)
        return weights.reshape(-1)
