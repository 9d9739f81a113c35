"""AltUp and LAuReL of Gemma 3n: streams of hidden states, of which a layer computes with the first.

A layer predicts all streams by small matrices of coefficients, takes the first through attention and block,
and corrects each stream by what came out, times a coefficient of its own. The first layer makes the other
streams of the first one, and the end of the model puts them together. LAuReL is a low-rank matrix beside the
attention.

A layer leaves, and the next one reads, side by side:

    streams | embeddings | token's id, and keys that layers hand on

Between attention and block, the first stream stands alone in front, so that the attention's output, and the
keys behind it, are added where they belong:

    first stream and LAuReL | token's id, and keys | embeddings | predicted streams

Facts of transformers' modeling_gemma3n.py and llama.cpp's src/models/gemma3n.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.attention.shared_keys import Projection, load_projection
from imatrix.forward.layers.ffn import FeedForward, through
from imatrix.forward.layers.gemma4 import LayerEmbedding
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import ResidualStream, RMSNorm
from imatrix.forward.observe import Observer

_LEAST = 1e-5
"""Least mean square of what is scaled to the size of another row."""


@dataclass(frozen=True)
class AltUp:
    """The coefficients of a layer. Its matrices are float32.

    router   makes a number for each stream, (n_streams, hidden_size)
    norm     of what it multiplies
    predict  makes of these numbers what each stream takes of all, (n_streams * n_streams, n_streams)
    correct  makes of them how much each stream is corrected, (n_streams, n_streams)
    """

    router: Projection
    norm: RMSNorm
    predict: Projection
    correct: Projection

    @property
    def n_streams(self) -> int:
        return len(self.router.weight)

    def predictions(self, streams: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the predictions of all streams; both (n_tokens, n_streams, hidden_size)."""
        coefficients = _observed(self.predict, self._numbers(streams[:, 0], observer), observer)
        return streams + torch.matmul(coefficients.unflatten(-1, (self.n_streams, -1)), streams)

    def corrected(self, predicted: torch.Tensor, activated: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the corrected streams.

        activated  float32 (n_tokens, hidden_size): the first stream behind attention and block
        """
        shares = _observed(self.correct, self._numbers(activated, observer), observer) + 1
        return predicted + shares[:, :, None] * (activated - predicted[:, 0])[:, None]

    def _numbers(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return a number for each stream, (n_tokens, n_streams)."""
        return torch.tanh(_observed(self.router, self.norm(x) / x.shape[-1], observer))


@dataclass(frozen=True)
class LAuReL:
    """Low-rank matrix beside the attention, whose output is normed; left and right are its factors."""

    left: Projection
    right: Projection
    norm: RMSNorm

    def __call__(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Add the output to `x`, (n_tokens, hidden_size) in the type of the matrices; return float32."""
        low = _observed(self.left, x, observer)
        return x.float() + self.norm(_observed(self.right, low, observer))


def _observed(projection: Projection, x: torch.Tensor, observer: Observer) -> torch.Tensor:
    observer.rows((projection.name,), x)
    return projection(x, observer)


def _sized_as(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Scale rows to the mean square of those of another tensor, float32."""
    size = other.square().mean(-1, keepdim=True).sqrt()
    return rows * size / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()


@dataclass(frozen=True)
class StreamSpread:
    """Step that makes all streams of one: matrices (n_streams - 1, hidden_size, hidden_size)."""

    matrices: torch.Tensor

    def __call__(self, first: torch.Tensor) -> torch.Tensor:
        """Return the streams, float32 (n_tokens, n_streams, hidden_size)."""
        x = first.to(self.matrices.dtype)
        others = (_sized_as(linear(x, matrix).float(), first) for matrix in self.matrices)
        return torch.stack((first, *others), 1)


@dataclass(frozen=True)
class StreamMean:
    """Input of the output matrix: the norm of the mean of the streams, which matrices turn back.

    matrices  (n_streams - 1, hidden_size, hidden_size)
    """

    matrices: torch.Tensor
    norm: RMSNorm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the output matrix's input, float32 (n_tokens, hidden_size)."""
        n_cols, n_streams = self.matrices.shape[-1], 1 + len(self.matrices)
        first, *others = hidden[:, : n_streams * n_cols].chunk(n_streams, -1)
        back = (linear(x.to(m.dtype), m).float() for x, m in zip(others, self.matrices, strict=True))
        return self.norm(sum((_sized_as(rows, first) for rows in back), first) / n_streams)


@dataclass(frozen=True)
class StreamEntry:
    """Residual around attention, which sees the predicted first stream.

    norm    of that, before LAuReL
    spread  makes the streams in the first layer, where all are embeddings; None in others
    shows   whether the attention sees the token's id and the keys, too
    """

    altup: AltUp
    laurel: LAuReL
    norm: RMSNorm
    spread: StreamSpread | None
    shows: bool

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Predict the streams; see the module for what stands where."""
        n_streams, n_cols = self.altup.n_streams, self.norm.weight.numel()
        flat, embeddings, beside = hidden.tensor_split((n_streams * n_cols, (n_streams + 1) * n_cols), -1)
        streams = flat.unflatten(-1, (n_streams, n_cols))
        if self.spread is not None:
            streams = self.spread(streams[:, 0])
        predicted = self.altup.predictions(streams, observer)
        active = predicted[:, 0]
        first = active + self.laurel(self.norm(active).to(self.laurel.left.weight.dtype), observer)
        rest = torch.cat((first, beside, embeddings, predicted.flatten(1)), -1)
        return ResidualStream(torch.cat((active, beside), -1) if self.shows else active, rest)


@dataclass(frozen=True)
class StreamBlock:
    """Second half of a layer: block, correction of the streams, and the layer's embedding.

    norm   before the block
    scale  what the first stream is multiplied by before it is the gate of the embedding, (hidden_size,)
    added  to all streams but the first
    """

    altup: AltUp
    norm: RMSNorm
    block: FeedForward
    scale: torch.Tensor
    added: LayerEmbedding

    def enter(self, hidden: torch.Tensor, observer: Observer) -> ResidualStream:
        """Compute block, correction and embedding; see the module for what stands where."""
        n_streams, n_cols = self.altup.n_streams, self.norm.weight.numel()
        behind = hidden.shape[1] - (n_streams + 1) * n_cols
        first, beside, embeddings, flat = hidden.tensor_split((n_cols, behind, behind + n_cols), -1)
        first = first * 0.5**0.5
        first = first + through(self.block, self.norm(first).to(self.block.down.dtype), observer)
        streams = self.altup.corrected(flat.unflatten(-1, (n_streams, n_cols)), first, observer)
        active, others = streams[:, 0], streams[:, 1:]
        change = self.added(active * self.scale, torch.cat((embeddings, beside), -1), observer)
        others = others + change[:, None]
        return ResidualStream(active, torch.cat((active, others.flatten(1), embeddings, beside), -1))


def load_altup(load: Loader, layer: int, hidden: int, n_streams: int, eps: float) -> AltUp:
    """Read the coefficients of a layer; eps is that of norms."""
    name, exact = f"blk.{layer}.altup", replace(load, dtype=torch.float32)
    return AltUp(
        router=load_projection(exact, f"{name}_router.weight", n_streams, hidden),
        norm=RMSNorm(load.float32(f"{name}_router_norm.weight", hidden), eps),
        predict=load_projection(exact, f"{name}_predict_coef.weight", n_streams**2, n_streams),
        correct=load_projection(exact, f"{name}_correct_coef.weight", n_streams, n_streams),
    )


def load_laurel(load: Loader, layer: int, hidden: int, rank: int, eps: float) -> LAuReL:
    """Read the low-rank matrix of a layer; eps is that of norms."""
    name = f"blk.{layer}.laurel"
    return LAuReL(
        left=load_projection(load, f"{name}_l.weight", rank, hidden),
        right=load_projection(load, f"{name}_r.weight", hidden, rank),
        norm=RMSNorm(load.float32(f"{name}_post_norm.weight", hidden), eps),
    )
