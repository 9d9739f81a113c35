"""Network: a model as the forward pass sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from imatrix.forward.layer import Layer
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rope, Rotation

BuildLayer = Callable[[Loader, int, Rotation], Layer]
"""Reads a layer: is given its number, and the rotation of the positions of a chunk."""


@dataclass(frozen=True)
class LogitRule:
    """Rule that makes logits of the product of the output matrix.

    scale    what it is multiplied by
    softcap  the size that logits can't reach: softcap * tanh(logit / softcap); None for no bound
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Return the logits, of the shape of the products; these are used up."""
        logits = products if self.scale == 1.0 else products.mul_(self.scale)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Return how much each logit grows with its product."""
        if self.softcap is None:
            return self.scale
        return (1 - (logits / self.softcap).square()) * self.scale


Pooling = Literal["mean", "cls", "last"]
"""Vector of a text: the mean of its tokens', that of the first one, or that of the last one."""

_PROJECTIONS = ("dense_2.weight", "dense_3.weight")
"""Matrices that vectors of texts are multiplied by, in this order, where a model has them."""

AS_THEY_ARE = LogitRule()
"""The rule of most models."""

EMBEDDINGS, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
OUTPUT_BIAS = "output.bias"


class End(Protocol):
    """The end of a model, up to its output matrix."""

    def __call__(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """Return float32 (n_tokens, hidden_size) of the last hidden states, (n_tokens, state_size)."""


@dataclass(frozen=True)
class Network:
    """A model as the forward pass sees it.

    n_layers    layers up to the output matrix
    output      name of the matrix that makes logits of hidden states
    norm_eps    epsilon of the norm before it
    output_norm name of that norm
    n_normed    strands that its weight has columns for
    build       (loader, layer number, rotation) -> the layer with its weights
    n_chosen    positions that a token attends to at most, where indexers choose them or windows of them;
                None: all
    n_strands   strands of hidden states side by side
    n_handed    columns behind them: what layers hand on (WithSidecar of imatrix.forward.layers.residual, for
                example)
    hands_tokens  whether the first of them is the token's id
    latent_cols columns of the sum of latent experts; 0 where experts work in those of hidden states
    embedding_scale  what embeddings are multiplied by on their way in
    logits      what becomes of the output matrix's product
    end         (loader, norm before the output matrix) -> what makes of the last hidden states what that
                matrix multiplies; None: the norm itself
    n_mtp       layers for multi-token prediction behind those, 0 or 1; see imatrix/forward/mtp.py
    builds_mtp  whether `build` takes the number of such a layer
    n_stored_mtp  layers for multi-token prediction that the model has by its keys
    trained_context  tokens of the longest texts that the model was trained with; 0 where nothing says so
    own_scales  parts whose scales are read by the layers themselves, and don't scale weights
    has_output_bias  whether something is added to the output matrix's product
    encodes     whether tokens see later ones, too, so that none is predicted
    n_positions tokens of the longest text that it takes; None for any
    pooling     how a text gets one vector; None for a model that is for predictions
    """

    n_layers: int
    hidden_size: int
    vocab_size: int
    output: str
    norm_eps: float
    rope: Rope
    build: BuildLayer
    n_chosen: int | None = None
    n_strands: int = 1
    n_handed: int = 0
    hands_tokens: bool = False
    latent_cols: int = 0
    output_norm: str = OUTPUT_NORM
    n_normed: int = 1
    embedding_scale: float = 1.0
    logits: LogitRule = AS_THEY_ARE
    end: Callable[[Loader, RMSNorm], End] | None = None
    n_mtp: int = 0
    builds_mtp: bool = True
    n_stored_mtp: int = 0
    trained_context: int = 0
    own_scales: Collection[str] = ()
    has_output_bias: bool = False
    encodes: bool = False
    n_positions: int | None = None
    pooling: Pooling | None = None

    @property
    def n_all_layers(self) -> int:
        """Layers up to the output matrix, and the MTP layer behind them."""
        return self.n_layers + self.n_mtp

    def leaves_out(self, layer: int | None) -> bool:
        """Return whether a layer is one for multi-token prediction that is not computed."""
        return layer is not None and self.n_all_layers <= layer < self.n_layers + self.n_stored_mtp

    @property
    def state_size(self) -> int:
        """Columns of a token's hidden states, those of all strands, and of what is handed on with them."""
        return self.n_strands * self.hidden_size + self.n_handed

    def scratch_bytes(self, itemsize: int) -> int:
        """Return the bytes of what stands between the sweeps of a layer, for each token.

        itemsize  of the type that matrices are multiplied in
        """
        return itemsize * self.hidden_size + 4 * self.latent_cols

    def at_embeddings(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return gradients at embeddings, (n_tokens, hidden_size), for those at the first hidden states.

        gradients  (n_tokens, state_size): every strand begins with the embedding
        """
        strands = gradients[:, : self.n_strands * self.hidden_size].unflatten(-1, (self.n_strands, -1))
        return strands.sum(1) * self.embedding_scale

    def load_end(self, load: Loader) -> End:
        """Load the transform from the last hidden states to the output matrix's input."""
        n_cols = self.n_normed * self.hidden_size
        norm = RMSNorm(load.float32(self.output_norm, n_cols), self.norm_eps)
        if self.end is not None:
            return self.end(load, norm)
        return norm if not self.n_handed else lambda states: norm(states[:, : self.hidden_size])

    def load_output_bias(self, load: Loader) -> torch.Tensor | None:
        """Load what is added to the output matrix's product, float32 (vocab_size,); None for nothing."""
        return load.float32(OUTPUT_BIAS, self.vocab_size) if self.has_output_bias else None

    def load_projections(self, load: Loader) -> list[torch.Tensor]:
        """Load the matrices that vectors of texts are multiplied by, in their order."""
        names = filter(load.has, _PROJECTIONS if self.pooling is not None else ())
        return [load.matrix(name, *load.tensor(name).shape) for name in names]

    @property
    def is_tied(self) -> bool:
        """Whether the embeddings are the output matrix, too."""
        return self.output == EMBEDDINGS
