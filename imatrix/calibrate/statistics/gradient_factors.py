"""Gradients in use: factors of the covariances at a matrix's outputs, and how much each token counts.

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

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadMoments
from gguf_tools.format.tensors import TensorInfo
from imatrix.calibrate.statistics.conditions import Trust
from imatrix.calibrate.statistics.gradients import Gradients, LayerGradients
from imatrix.calibrate.statistics.inputs import HoldoutSplit, Statistics, WeightsOf, unweighed
from imatrix.forward.device import to_torch
from imatrix.texts.tokens import Text
from quantize.formats.base import Floats32
from quantize.roles import layer_of
from quantize.rounding.two_sided import OutputFactor

GRADIENT_TOKENS = 16384
"""Number of tokens that gradients are taken of, at most: one costs five times as much as going forward. With
28672 the sample model at Q2_K came out the same: KLD 0.0111 and 0.0113 in two runs, 0.0113 with these."""


_MOST_LABELS = 4
"""Number of labels that are drawn for a token of a short text, at most. The sample model at Q2_K, 4 chunks:
KLD 0.0172 with one, 0.0148 with 4 and 0.0152 with 10; 8 chunks: 0.0144 with one and 0.0134 with 4."""


@dataclass(frozen=True)
class OutputBlock:
    """Some rows of a matrix, and the covariance of the gradients at their products.

    start, stop  the rows, counted from the matrix' first
    factor       of the covariance, damped
    covariance   float32 (stop - start, stop - start), scaled to a mean diagonal of 1
    mean_square  of the gradient of a token at one of these products: what was divided by
    """

    start: int
    stop: int
    factor: OutputFactor
    covariance: Floats32
    mean_square: float


@dataclass
class GradientFactors:
    """The gradient factors of a run; one layer's covariances are in memory at a time.

    gradients  None for a method that does not read them
    trust      how far they are trusted
    """

    gradients: Gradients | None
    trust: Trust = field(default_factory=Trust)
    _layer: int = -1
    _covariances: LayerGradients | None = None
    _shared: dict[str, list[OutputBlock]] = field(default_factory=dict)

    def open(self, name: str) -> None:
        """Read the covariances of the tensor's layer; its blocks can be asked for then."""
        layer = layer_of(name)
        if layer is not None:
            self._open_layer(layer)

    def layer(self, layer: int) -> LayerGradients | None:
        """Return the known gradients of a layer; None without any."""
        self._open_layer(layer)
        return self._covariances

    def _open_layer(self, layer: int) -> None:
        if self.gradients is not None and layer != self._layer:
            self._layer, self._covariances, self._shared = layer, None, {}  # frees those of the layer before
            self._covariances = self.gradients.layer(layer)

    def blocks(self, info: TensorInfo, first: int, n_rows: int) -> list[OutputBlock]:
        """Return the blocks that `n_rows` rows from `first` on are made of; empty where none are known.

        Several threads may ask for blocks of the layer that is open.

        first  row of the tensor, counted through its matrices
        """
        if self._covariances is None or layer_of(info.name) != self._layer:
            return []
        if info.name in self._shared:
            return self._shared[info.name]
        stacked = len(info.shape) > 2
        index = first // info.shape[-2] if stacked else None
        origin = 0 if stacked else first
        blocks = []
        n_tokens = self._covariances.n_tokens(info.name, index)
        for block in self._covariances.blocks(info.name, index):
            if origin <= block.start and block.stop <= origin + n_rows:
                damp = self.trust.output_damp(block.covariance, block.fourth, n_tokens)
                start, stop = block.start - origin, block.stop - origin
                made = _output_block(start, stop, block.covariance, damp, n_tokens)
                if made is None:
                    return []
                blocks.append(made)
        if stacked and self._covariances.is_shared(info.name):
            self._shared[info.name] = blocks
        return blocks if sum(block.stop - block.start for block in blocks) == n_rows else []


def _output_block(
    start: int, stop: int, covariance: np.ndarray, damp: float, n_tokens: int
) -> OutputBlock | None:
    """Return a block; None where its covariance, the sum over `n_tokens`, can't be used.

    Rows without any gradient, such as those of heads of padding, count alike when they are rounded, and for
    nothing when encodings are compared.
    """
    mean = float(np.diagonal(covariance).mean())
    if mean == 0:
        alike = OutputFactor.of(np.eye(stop - start))
        return OutputBlock(start, stop, alike, covariance.astype(np.float32), 0.0)
    scaled = (covariance / mean).astype(np.float32)
    try:
        factor = OutputFactor.of(scaled, damp)
    except BadMoments:
        return None
    return OutputBlock(start, stop, factor, scaled, mean / n_tokens)


def embedding_statistics(gradients: Gradients) -> Statistics:
    """Return the statistics that the rows of the embedding are encoded under.

    The rows go into the hidden states as they are, so the covariance of the gradients there takes the place
    of second moments. Where they are the output matrix, too, the second moments of its inputs are added. Both
    are sums of squares of the loss' derivatives by weights of the same rows, so they add up as they are.
    """
    n_tokens, moments = gradients.n_tokens, gradients.embedding()
    tied = gradients.tied_output()
    return Statistics(moments if tied is None else moments + tied, None, n_tokens, n_tokens)


def gradient_chunks(text: Text) -> tuple[int, ...]:
    """Choose the chunks of a text that gradients are taken of, none of them held out.

    Those of a short text come several times, and other labels are drawn each time.
    """
    holdout = HoldoutSplit.of(text.n_chunks, text.chunk_size, text.classes)
    chunks = [chunk for chunk in range(text.n_chunks) if holdout.is_summed(chunk)]
    n_wanted = max(1, GRADIENT_TOKENS // text.chunk_size)
    n_times = max(1, min(_MOST_LABELS, n_wanted // len(chunks)))
    return tuple(chunks[:n_wanted] * n_times)


def gradient_text(text: Text) -> Text:
    """Return the part of a text that gradients are taken of."""
    return text.only(gradient_chunks(text))


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
