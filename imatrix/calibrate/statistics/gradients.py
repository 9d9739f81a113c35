"""Gradients of a model's predictions, for rounding that knows what its errors do to them.

One forward and one backward pass over a text, layer by layer, with labels drawn from the model's own
predictions. For every layer the covariances of the gradients at the products of its matrices, sums of
g g^T / |g| over the tokens, are kept in a work folder, and at the end that at the embeddings:

    with open_model(path) as source:
        text = read_text(text_path, source.vocab(), source.network.vocab_size, cut)
        with collect_gradients(source, text, output, GradientOptions()) as gradients:
            layer = gradients.layer(3)                              # read from the folder when it is its turn
            layer.blocks("blk.3.attn_q_b.weight")                   # heads, each with its rows
            layer.blocks("blk.3.attn_k_b.weight", head)
            gradients.embedding()                                   # float64 (hidden_size, hidden_size)
    forget(work_path(output))                                       # once nobody needs them

All are sums over the text's tokens. A rounding under them needs no other scale. An interrupted run resumes
after the last layer that is done, on its way there and on its way back. The same text, seed and model give
the same numbers for any number of threads.

g is the gradient of -log p(label) at a product. With the second moments H of what the matrix multiplies, an
error E costs about tr(G E H E^T) / 2 per token. A matrix with many rows has its covariance G in blocks along
the rows: heads are blocks of their own, and no block is larger than BLOCK_ROWS. Matrices of experts that
write hidden states (ffn_down_exps) share one, the sum over all experts. Those that write an expert's inner
columns have nothing to share, because columns of one expert mean nothing to another. They have one each where
these are small, else none.

The output matrix has none: it would be as large as the square of the vocabulary. The embeddings' covariance G
belongs to the columns of token_embd: an error e in a row costs e G e^T. The error is the same wherever a
chunk looks the token up, so the gradients there are added up before they are multiplied. On the sample model
that leaves a fifth less divergence of an embedding rounded to Q2_K under G than place by place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadActivation
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.progress import NO_REPORT, Reporter
from imatrix.calibrate.shapes import Shapes, is_expert
from imatrix.forward.device import to_cpu, to_numpy, to_torch
from imatrix.forward.gradients.backward import (
    BackwardPass,
    Folders,
    forward_backward,
    refuse_full_disk,
    state_bytes,
    work_folders,
)
from imatrix.forward.hidden_states import States
from imatrix.forward.network import Network
from imatrix.forward.observe import Arrays, Silent
from imatrix.forward.open import ModelSource
from imatrix.forward.options import ForwardOptions
from imatrix.forward.work_folder import EMBEDDING, WorkFolder, run_identity
from imatrix.forward.workers import give_back
from imatrix.texts.chunks import Chunks
from imatrix.texts.tokens import Text
from quantize.roles import Role, layer_of, tensor_role

_SIZES = "gradient sizes"
"""Name of the array of `LayerGradients.sizes`."""

BLOCK_ROWS = 2048
"""Largest number of rows in a block: its covariance takes 16 MB in float32."""

_STEP = 16
"""Number that a block's rows are a multiple of where a matrix is cut: rows are encoded as many at a time."""

_STRIP_ROWS = 256
"""Number of rows of a covariance that are computed at a time."""

_ROW_BYTES = 8
"""Memory for each row of a layer's matrices and token of a chunk while it is differentiated: the product and
its gradient."""

_SCORE_BYTES = 16
"""Memory for each head and pair of tokens: scores, what the softmax makes of them, and both gradients."""

_CHUNKS_BYTES = 512 << 20
"""Memory for each thread that chunks on the way back may take, beyond that of two."""

Floats64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RowBlock:
    """The covariance of some rows of a matrix.

    A token's g g^T is divided by |g| and multiplied by the mean of |g|, because the second moments of inputs
    are weighed by the size of gradients already, see gradient_factors.py.

    start, stop  the rows, counted from the matrix' first
    covariance   float64 (stop - start, stop - start): the sum over the tokens
    fourth       the sum of the squares of the traces of what is added up, which tells how noisy it is
    """

    start: int
    stop: int
    covariance: Floats64
    fourth: float


_NO_GRADIENT = 1e-30
"""Norm up to which a gradient counts as zero."""

_Key = tuple[str, int]
"""A tensor, and the first row of a piece of its blocks."""


class Covariances(Silent):
    """An observer of a differentiated layer that keeps the covariances of its gradients.

    expert_bytes  how large the covariances of a stack's experts may be all together, in float32
    """

    def __init__(self, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._n_blocks: dict[str, int] = {}  # of a tensor, as the pass shows them; 1 where they share one
        self._parts: dict[tuple[str, int, int], torch.Tensor] = {}
        self._counts: dict[tuple[str, int, int], int] = {}
        self._squares: dict[tuple[str, int, int], torch.Tensor] = {}
        self._sums: dict[_Key, torch.Tensor] = {}
        self._square_sums: dict[_Key, npt.NDArray[np.float64]] = {}
        self._rows: dict[str, npt.NDArray[np.int64]] = {}
        self._n_tokens = 0
        self._sizes: dict[str, list[torch.Tensor]] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        """Keep how many tokens there are. Observers are merged in their order."""
        self._n_tokens = len(numbers)

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        n_tokens, _, n_rows = gradient.shape
        role = tensor_role(name, (n_blocks, n_rows, x.shape[-1])).role
        if n_blocks > 1 and role in (Role.FFN_GATE, Role.FFN_UP):
            if n_blocks * covariance_bytes(n_rows) > self._expert_bytes:
                return
        elif n_blocks > 1 and role == Role.FFN_DOWN:
            first, n_blocks = 0, 1
        elif n_tokens == self._n_tokens:
            self._sizes[name] = [to_cpu(torch.linalg.vector_norm(gradient.float(), dim=(1, 2)))]
        self._n_blocks.setdefault(name, n_blocks)
        for start, stop in row_pieces(n_rows):
            part = gradient[:, :, start:stop].transpose(0, 1).float()
            sizes = torch.linalg.vector_norm(part, dim=2, keepdim=True)
            product = _symmetric(part, part / sizes.clamp_min(_NO_GRADIENT))
            squares = sizes.double().square().sum((1, 2))
            self._put((name, first, start), product, squares, n_tokens)

    def fresh(self) -> Self:
        return type(self)(self._expert_bytes)

    def merge(self, other: Self) -> None:
        self._n_blocks = {**other._n_blocks, **self._n_blocks}
        for name, pieces in other._sizes.items():
            self._sizes.setdefault(name, []).extend(pieces)
        for (name, first, start), product in other._parts.items():
            n_blocks, (n_some, size, _) = self._n_blocks[name], product.shape
            sums = self._sums.get((name, start))
            if sums is None:
                sums = torch.zeros((n_blocks, size, size), device=product.device)
                self._sums[name, start] = sums
                self._square_sums[name, start] = np.zeros(n_blocks)
            sums[first : first + n_some] += product
            self._square_sums[name, start][first : first + n_some] += to_numpy(
                other._squares[name, first, start]
            )
            if start == 0:
                rows = self._rows.setdefault(name, np.zeros(n_blocks, np.int64))
                rows[first : first + n_some] += other._counts[name, first, start]

    def refuse_nonfinite(self) -> None:
        for (name, _), sums in self._sums.items():
            if not bool(torch.isfinite(sums.sum())):
                raise BadActivation(f"{name}: the gradients at its product have NaN or infinity")

    def arrays(self) -> Arrays:
        """Return the sums for `LayerGradients`."""
        arrays: dict[str, npt.NDArray[Any]] = {
            f"covariance:{name}:{start}": to_numpy(sums) for (name, start), sums in self._sums.items()
        }
        arrays |= {f"squares:{name}:{start}": sums for (name, start), sums in self._square_sums.items()}
        arrays |= {f"sizes:{name}": to_numpy(torch.cat(pieces)) for name, pieces in self._sizes.items()}
        return arrays | {f"rows:{name}": rows for name, rows in self._rows.items()}

    def _put(
        self, key: tuple[str, int, int], product: torch.Tensor, squares: torch.Tensor, n_tokens: int
    ) -> None:
        if key in self._parts:
            product, squares = self._parts[key] + product, self._squares[key] + squares
        self._parts[key], self._squares[key] = product, squares
        self._counts[key] = self._counts.get(key, 0) + n_tokens


def _symmetric(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply left^T right of stacks (n_blocks, n_tokens, n_rows) where the products are symmetric.

    Strips of rows are computed from the diagonal on, and the rest is copied.
    """
    n_blocks, _, n_rows = left.shape
    product = left.new_empty((n_blocks, n_rows, n_rows))
    for start in range(0, n_rows, _STRIP_ROWS):
        strip = slice(start, start + _STRIP_ROWS)
        product[:, strip, start:] = torch.bmm(left[:, :, strip].transpose(1, 2), right[:, :, start:])
        product[:, strip.stop :, strip] = product[:, strip, strip.stop :].transpose(1, 2)
    return product


@dataclass(frozen=True)
class LayerGradients:
    """The covariances of a layer, as `Covariances.arrays` returned them.

    Rows are those of the tensor as it is stored, matrices of a stack counted from 0. The gradients of
    attn_kv_b, and those of attn_k_b and attn_v_b, are all there, whatever layout the model has that was
    differentiated.
    """

    arrays: Arrays

    def blocks(self, name: str, index: int | None = None) -> list[RowBlock]:
        """Return the covariance of a matrix, in blocks of rows; an empty list where there is none.

        index  the matrix in a stack, an expert or a head; None: the whole tensor, its matrices end to end,
               which is also how to ask for a tensor that is not stacked
        """
        starts = self._starts(name)
        if not starts:
            return []
        stacks = [
            (self.arrays[f"covariance:{name}:{start}"], self.arrays[f"squares:{name}:{start}"])
            for start in starts
        ]
        n_blocks, n_rows = len(stacks[0][0]), sum(stack.shape[1] for stack, _ in stacks)
        wanted: range = range(n_blocks)
        if index is not None:
            wanted = range(index, index + 1) if n_blocks > 1 else range(1)
        blocks = []
        for place, block in enumerate(wanted):
            for start, (stack, squares) in zip(starts, stacks, strict=True):
                sums, at = stack[block].astype(np.float64), place * n_rows + start
                mean = float(np.trace(sums)) / max(1, self.n_tokens(name, block))
                blocks.append(RowBlock(at, at + len(sums), mean * sums, mean**2 * float(squares[block])))
        return blocks

    def is_shared(self, name: str) -> bool:
        """Whether all matrices of a stack share one covariance."""
        starts = self._starts(name)
        return bool(starts) and len(self.arrays[f"covariance:{name}:{starts[0]}"]) == 1

    def sizes(self) -> npt.NDArray[np.float32]:
        """Return the norm of each token's gradient at the hidden states after the layer, (n_tokens,)."""
        sizes: npt.NDArray[np.float32] = self.arrays[_SIZES]
        return sizes

    def sizes_at(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return the norm of each token's gradient at the product of a matrix, (n_tokens,); None if unknown.

        It is known where a product is shown with all tokens of a chunk at once. Those of experts are not.
        """
        return self.arrays.get(f"sizes:{name}")

    def n_tokens(self, name: str, index: int | None = None) -> int:
        """Return the number of gradients that were added up, those of all experts for what they share."""
        rows = self.arrays.get(f"rows:{name}")
        if rows is None:
            return 0
        return int(rows[0 if index is None or len(rows) == 1 else index])

    def _starts(self, name: str) -> list[int]:
        prefix = f"covariance:{name}:"
        return sorted(int(key.removeprefix(prefix)) for key in self.arrays if key.startswith(prefix))


def covariance_bytes(n_rows: int) -> int:
    """Return the size of the covariance of a matrix of `n_rows` rows, in float32."""
    return sum(4 * (stop - start) ** 2 for start, stop in row_pieces(n_rows))


def layer_bytes(infos: Iterable[TensorInfo]) -> int:
    """Count the bytes of the covariances of a layer's tensors in memory."""
    total = 0
    for info in infos:
        of_all = _own_bytes(info)
        if is_expert(info) and tensor_role(info.name, info.shape).role != Role.FFN_DOWN:
            of_all *= info.n_mats
            if of_all > GradientOptions.expert_bytes:
                continue
        total += of_all
    return total


def chunk_bytes(infos: Iterable[TensorInfo], n_heads: int, chunk_size: int) -> int:
    """Count the bytes of a chunk while a layer of these tensors is differentiated.

    They are products, their gradients, and the covariances of these.
    """
    every = [info for info in infos if not is_expert(info) and len(info.shape) > 1]
    of_rows = _ROW_BYTES * chunk_size * sum(info.n_rows for info in every)
    return of_rows + _SCORE_BYTES * n_heads * chunk_size**2 + sum(map(_own_bytes, every))


def chunks_at_once(shapes: Shapes, chunk_size: int, n_threads: int) -> int:
    """Count the chunks in memory on the way back: one more than are at work, or fewer.

    Of large models a chunk takes a gigabyte or two. The number changes nothing that is computed.
    """
    of_chunk = max(chunk_bytes(infos, shapes.n_heads, chunk_size) for infos in shapes.by_layer())
    return max(2, min(n_threads + 1, n_threads * _CHUNKS_BYTES // max(1, of_chunk)))


def _own_bytes(info: TensorInfo) -> int:
    """Count the bytes of a tensor's covariances in memory; of experts, of those that one has or all share."""
    if len(info.shape) < 2 or tensor_role(info.name, info.shape).kept_as is not None:
        return 0
    return covariance_bytes(info.n_rows // info.n_mats) * (1 if is_expert(info) else info.n_mats)


def stored_bytes(n_mats: int, n_rows: int) -> int:
    """Return the size of the covariances of a stack in the work folder, at most."""
    return 4 * n_mats * n_rows * min(n_rows, BLOCK_ROWS)


def row_pieces(n_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces that a block of `n_rows` rows is cut into: a few of about the same size.

    >>> list(row_pieces(7168))
    [(0, 1792), (1792, 3584), (3584, 5376), (5376, 7168)]
    """
    n_pieces = -(-n_rows // BLOCK_ROWS)
    size = -(-n_rows // (n_pieces * _STEP)) * _STEP
    for start in range(0, n_rows, size):
        yield start, min(start + size, n_rows)


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are collected.

    forward       how the model is computed; `memory_bytes` is for hidden states, and then for gradients
    seed          decides which labels are drawn
    expert_bytes  how large, in float32, the covariances of all experts of ffn_gate_exps in a layer may be
                  together, and those of ffn_up_exps. Larger ones are left out
    restart       start over instead of resuming
    at_once       chunks in memory on the way back, at most; None: as many as threads can use. It changes no
                  number
    """

    forward: ForwardOptions = field(default_factory=ForwardOptions)
    seed: int = 0
    expert_bytes: int = 128 << 20
    restart: bool = False
    at_once: int | None = None


@dataclass(frozen=True)
class Gradients:
    """Collected gradients, in their work folders.

    draft     that of the MTP layer, which stands behind the n_layers
    n_tokens  how many tokens they are sums over
    """

    n_layers: int
    n_tokens: int
    folder: WorkFolder
    draft: WorkFolder

    def layer(self, number: int) -> LayerGradients:
        """Return the covariances of a layer, read from the folder."""
        if number >= self.n_layers:
            return LayerGradients(self.draft.arrays(0))
        return LayerGradients(self.folder.arrays(self.n_layers - 1 - number))

    def embedding(self) -> Floats64:
        """Return the sum of g g^T at the embeddings, float64 (hidden_size, hidden_size).

        g is the sum of the gradients at all places of a token in a chunk.
        """
        covariance: Floats64 = self.folder.arrays(self.n_layers)["covariance"]
        return covariance

    def tied_output(self) -> Floats64 | None:
        """Return the share of tied embeddings that is the output matrix; None where they are not tied.

        float64 (hidden_size, hidden_size): the sum over tokens of |g|^2 x x^T, g the gradient at the logits
        and x what the matrix multiplies
        """
        tied: Floats64 | None = self.folder.arrays(self.n_layers).get("tied output")
        return tied


@contextmanager
def collect_gradients(
    source: ModelSource, text: Text, output: Path, options: GradientOptions, report: Reporter = NO_REPORT
) -> Iterator[Gradients]:
    """Give the gradients of `source` on `text`; what an earlier run has left is not computed again.

    output  the file that they are for: their work folders are beside it, until they are forgotten
    raises  BadActivation naming layer and tensor for NaN or infinity; OutputError for a disk that is too
            small, before anything is computed; BadRequest when another run has the folders, or began them
            with another model, text or options. Finished layers stay for the next run
    """
    about = {"model": source.watch.recognised_by(), **run_identity(text.chunks, options.forward)}
    about |= {"seed": options.seed, "expert_bytes": options.expert_bytes}
    about["keeps"] = "covariances by size, their noise, sizes at products, too"
    network, n_tokens = source.network, text.inputs.size
    with work_folders(output, about, source.watch, restart=options.restart) as folders:
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        refuse_full_disk(folders, disk_bytes(network, shapes, n_tokens, options.expert_bytes))
        gradients = Gradients(network.n_layers, n_tokens, folders.back, folders.draft)
        if folders.back.done < gradients.n_layers:
            _collect(source, text, options, folders, report)
            give_back()
        yield gradients


def _collect(
    source: ModelSource, text: Text, options: GradientOptions, folders: Folders, report: Reporter
) -> None:
    """Fill the folders. Nothing that was needed for it stays in memory."""

    def collect(backward: BackwardPass) -> None:
        chunks = backward.forward.chunks
        layers = backward.layers(
            lambda layer: Covariances(options.expert_bytes),
            options.at_once,
            lambda gradients: {_SIZES: _sizes(chunks, gradients)},
        )
        for _ in layers:
            pass

    passes = source, text, options.forward, options.seed, folders, report
    with forward_backward(*passes, collect) as backward:
        collect(backward)
        backward.finish(lambda states: embedding_arrays(backward, states))


def _sizes(chunks: Chunks, gradients: States) -> npt.NDArray[np.float32]:
    """Compute the norm of each token's gradient, float32 (n_tokens,)."""
    by_chunk = (gradients.read(*chunks.rows(chunk)) for chunk in range(chunks.n_chunks))
    return np.concatenate([to_numpy(torch.linalg.vector_norm(each, dim=1)) for each in by_chunk])


def embedding_arrays(backward: BackwardPass, states: States) -> Arrays:
    """Compute the arrays that are kept of the embeddings.

    states  the gradients at the hidden states before the first layer
    returns covariance, float64 (hidden_size, hidden_size), and the sums of `Gradients.tied_output` where the
            embeddings are the output matrix, too
    """
    forward, network = backward.forward, backward.forward.source.network
    covariance = np.zeros((network.hidden_size, network.hidden_size))
    for chunk in range(forward.chunks.n_chunks):
        start, stop = forward.chunks.rows(chunk)
        gradients = network.at_embeddings(states.read(start, stop))
        every, places = np.unique(forward.chunks.inputs[start:stop], return_inverse=True)
        sums = torch.zeros((len(every), network.hidden_size))
        sums = sums.index_add_(0, to_torch(places), gradients).to(forward.load.device)
        covariance += to_numpy(torch.matmul(sums.T, sums))
    tied = {"tied output": _at_output(backward)} if network.is_tied else {}
    return {"covariance": covariance, **tied}


def _at_output(backward: BackwardPass) -> Floats64:
    """Return the sum over tokens of |g|^2 x x^T, see `Gradients.tied_output`."""
    forward, norm = backward.forward, backward.forward.output_norm()
    roots = to_torch(np.sqrt(backward.folder.arrays(EMBEDDING)["squares"])).float()
    last, n_cols = forward.last(), forward.source.network.hidden_size
    total = np.zeros((n_cols, n_cols))
    for chunk in range(forward.chunks.n_chunks):
        rows = slice(*forward.chunks.rows(chunk))
        x = norm(last.read(rows.start, rows.stop).to(forward.load.device))
        weighed = x * roots[rows, None].to(x.device)
        total += to_numpy(torch.matmul(weighed.T, weighed))
    return total


def disk_bytes(
    network: Network, shapes: Mapping[str, tuple[int, ...]], n_tokens: int, expert_bytes: int
) -> int:
    """Count the bytes of the work folders, at most.

    shapes        of the model's tensors, by name
    n_tokens      of the text
    expert_bytes  see `GradientOptions`
    """
    total = state_bytes(network, n_tokens) + 8 * network.hidden_size**2
    for name, shape in shapes.items():
        layer = layer_of(name)
        is_computed = layer is not None and layer < network.n_all_layers
        if not is_computed or tensor_role(name, shape).kept_as is not None:
            continue
        n_rows = prod(shape[:-1]) if len(shape) < 3 else shape[1]
        n_mats = prod(shape[:-1]) // n_rows
        of_stack = stored_bytes(n_mats, n_rows)
        if n_mats > 1 and of_stack > expert_bytes:
            of_stack = stored_bytes(1, n_rows)
        total += of_stack + 4 * n_tokens  # sizes of the tokens' gradients
    return total
