"""Effect of errors of weights on predictions, to second order, from gradients of the predictions.

An error E of a matrix moves its product by E x at every token, and all that follows sees the sum of these.
The loss is the sum of -log p(label) over a chunk, its labels drawn from the model's own predictions. With g
its gradient at the product, the divergence of the chunk is on average

    (sum over its tokens of g^T E x)^2 / 2

The errors of two rows of E have nothing to do with each other, so the rows count one by one. With D the sum
of g x^T over the chunk, which is the gradient at the matrix,

    sensitivity = sum over the rows of (e . d)^2 / 2

of which a sample of rows tells enough. Tokens count together, as they must: the inputs of a matrix have much
in common, so its errors move all tokens alike, and attention adds that up.

Two tensors are special. The errors of token_embd enter the hidden states as they are, so d is the sum of the
gradients wherever a token is looked up in the chunk. Rows of the output matrix count as often as the model
expects their token: with labels drawn from p, the mean of (1 - p(label)) (e_label x)^2 / 2 is the sum over
the vocabulary of p (1 - p) (e x)^2 / 2.

A ratio is the share of a tensor's sensitivity that calibrated encoding leaves. Some rows of one matrix of
every tensor are encoded with feedback under the second moments of what the matrix multiplies. The divergence
that they add, over what the stock encoder's add, is the ratio. The moments are those of every other chunk,
and the divergence is that of the chunks between: what fits the text alone does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadActivation, BadMoments
from gguf_tools.format.ggml_types import IQ4_NL, Q3_K, GGMLType
from imatrix.forward.device import to_cpu, to_numpy, to_torch
from imatrix.forward.gradients.backward import BackwardPass
from imatrix.forward.hidden_states import States
from imatrix.forward.network import EMBEDDINGS, Network
from imatrix.forward.observe import Arrays, Observer, ObservesGradients, Silent
from imatrix.forward.work_folder import EMBEDDING
from imatrix.sensitivities.type_errors import (
    BlockErrors,
    RowLengths,
    TypeErrors,
    errors_of,
    read_rows,
    spread,
)
from imatrix.texts.chunks import Chunks
from quantize.fill.sources import SourceTensor
from quantize.formats import get_decoder
from quantize.formats.base import Bytes
from quantize.rounding.factor import Factor
from quantize.rounding.feedback import encode_compensated
from quantize.rounding.judge import choose_cheaper
from quantize.rounding.methods.diagonal import encode_stock

_RATIO = "ratio:"
"""Prefix of arrays' names in the work folder; a tensor's name follows."""

_ROWS = 32
"""Number of rows that are encoded."""

_MOST_COLS = 8192
"""Number of columns up to which there is a ratio: moments of so many take 512 MB in float64."""

Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]


class Ratios(Silent):
    """An observer of a differentiated layer that measures the ratio of each tensor on its middle matrix.

    sources     tensors that would be encoded, by name
    chunk_size  tokens per chunk of the text
    lengths     of rows
    """

    def __init__(
        self, sources: Mapping[str, SourceTensor], chunk_size: int, lengths: RowLengths | None = None
    ) -> None:
        self._sources, self._chunk_size, self._lengths = sources, chunk_size, lengths or RowLengths()
        self._chunks: list[int] = []
        self._sizes: list[int] = []
        self._rows: dict[str, npt.NDArray[np.int64]] = {}
        self._moments: dict[str, torch.Tensor] = {}
        self._gradients: dict[tuple[str, int], torch.Tensor] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        chunks, counts = torch.unique_consecutive(numbers // self._chunk_size, return_counts=True)
        self._chunks, self._sizes = chunks.tolist(), counts.tolist()

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        number = n_blocks // 2 - first
        n_tokens, n_some, n_rows = gradient.shape
        if name not in self._sources or not 0 <= number < n_some or self._type(name, x.shape[-1]) is None:
            return
        rows = spread(n_rows, _ROWS)
        self._rows[name] = n_blocks // 2 * n_rows + rows
        multiplied = x[:, number if x.shape[1] > 1 else 0].float()
        g = gradient[:, number, to_torch(rows, gradient.device)].float()
        # A call may be about a part of the only chunk.
        sizes = self._sizes if n_tokens == sum(self._sizes) else [n_tokens]
        parts = zip(self._chunks, g.split(sizes), multiplied.split(sizes), strict=True)
        for chunk, theirs, inputs in parts:
            if chunk % 2:
                _add(self._gradients, (name, chunk), theirs.T @ inputs)
            else:
                _add(self._moments, name, (inputs.T @ inputs).double())

    def fresh(self) -> Self:
        return type(self)(self._sources, self._chunk_size, self._lengths)

    def merge(self, other: Self) -> None:
        self._rows |= other._rows
        for name, moments in other._moments.items():
            _add(self._moments, name, moments)
        for key, product in other._gradients.items():
            _add(self._gradients, key, product)

    def arrays(self) -> Arrays:
        """Return the ratios as `ratios_of` takes them."""
        known = self._moments.keys() & {name for name, _ in self._gradients}
        return ratio_arrays({name: self._ratio(name) for name in self._rows if name in known})

    def _ratio(self, name: str) -> float:
        gradients = [to_numpy(product) for key, product in self._gradients.items() if key[0] == name]

        def sensitivity(errors: Floats32) -> float:
            moved = [(errors * each).sum(-1, dtype=np.float64) for each in gradients]
            return float(np.sum(np.square(moved)))

        moments = to_numpy(self._moments[name])
        n_cols = len(moments)
        weights, n_real = read_rows(self._sources[name], self._rows[name]), self._lengths.n_real(name, n_cols)
        return ratio(weights, moments, sensitivity, self._type(name, n_cols), n_real)

    def _type(self, name: str, n_cols: int) -> GGMLType | None:
        lengths = self._lengths
        return type_for(lengths.n_real(name, n_cols), may_pad=lengths.is_padded(name, n_cols))


Key = TypeVar("Key")


def _add(sums: dict[Key, torch.Tensor], key: Key, value: torch.Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


def type_for(n_cols: int, *, may_pad: bool = False) -> GGMLType | None:
    """Return the type that ratios are measured at, None for rows that have none.

    may_pad  whether zeros can be put behind rows that no type fits
    """
    if n_cols > _MOST_COLS:
        return None
    fits = next((type_ for type_ in (Q3_K, IQ4_NL) if n_cols % type_.block_elems == 0), None)
    return Q3_K if fits is None and may_pad else fits


def ratio(
    weights: Floats32,
    moments: Floats64,
    sensitivity: Callable[[Floats32], float],
    type_: GGMLType | None,
    n_real: int,
) -> float:
    """Return the share of the stock encoder's sensitivity that encoding with feedback leaves, 0 to 1.

    weights  float32 (n_rows, n_cols)
    moments  of what they multiply, float64 (n_cols, n_cols)
    sensitivity   of errors, float32 (n_rows, n_cols)
    type_    that they are encoded at, with zeros behind the rows that it doesn't fit. Without one, and where
             the moments can't be used, the share is 1
    n_real   columns that are no padding
    """
    if type_ is None:
        return 1.0
    n_zeros = -n_real % type_.block_elems
    rows = np.pad(weights[:, :n_real], ((0, 0), (0, n_zeros)))
    try:
        factor = Factor.of(np.pad(moments[:n_real, :n_real], (0, n_zeros)), n_real=n_real)
    except BadMoments:
        return 1.0

    def cost(data: Bytes) -> float:
        errors = np.zeros_like(weights)
        errors[:, :n_real] = (rows - get_decoder(type_)(data, rows.shape[1]))[:, :n_real]
        return sensitivity(errors)

    stock, data = encode_stock(rows, type_, factor), encode_compensated(rows, type_, factor)
    whole, left = (cost(each) for each in (stock, choose_cheaper(rows, data, stock, type_, factor)))
    return min(1.0, left / whole) if whole else 1.0


def ratio_arrays(ratios: Mapping[str, float]) -> Arrays:
    """Return ratios for the work folder."""
    return {f"{_RATIO}{name}": np.array(value) for name, value in ratios.items()}


def ratios_of(arrays: Arrays) -> dict[str, float]:
    """Return the ratios in `arrays` by tensor."""
    return {key.removeprefix(_RATIO): float(value) for key, value in arrays.items() if key.startswith(_RATIO)}


class GradientObserver(Observer, ObservesGradients, Protocol):
    """An observer that is shown gradients."""


class Together(Silent):
    """Several observers of a differentiated layer as one."""

    def __init__(self, observers: Sequence[GradientObserver]) -> None:
        self._observers = observers

    def tokens(self, numbers: torch.Tensor) -> None:
        for each in self._observers:
            each.tokens(numbers)

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        for each in self._observers:
            each.gradient(name, first, n_blocks, x, gradient)

    def fresh(self) -> Self:
        return type(self)([each.fresh() for each in self._observers])

    def merge(self, other: Self) -> None:
        for mine, theirs in zip(self._observers, other._observers, strict=True):
            mine.merge(theirs)

    def refuse_nonfinite(self) -> None:
        for each in self._observers:
            each.refuse_nonfinite()

    def arrays(self) -> Arrays:
        return {key: value for each in self._observers for key, value in each.arrays().items()}


_SENSITIVITY, _TYPES = "damage:", "types:"
"""Prefixes of arrays' names in the work folder; a tensor's name follows."""


class SensitivityObserver(Silent):
    """An observer of a differentiated layer that keeps the sensitivity of each tensor at each type.

    errors      of the layer's tensors
    chunk_size  tokens per chunk of the text
    """

    def __init__(self, errors: TypeErrors, chunk_size: int) -> None:
        self._errors, self._chunk_size = errors, chunk_size
        self._sums: dict[str, Floats64] = {}
        self._types: dict[str, list[GGMLType]] = {}
        self._sizes: list[int] = []
        self._open: dict[tuple[str, int], _Open] = {}

    def tokens(self, numbers: torch.Tensor) -> None:
        _, counts = torch.unique_consecutive(numbers // self._chunk_size, return_counts=True)
        self._sizes = counts.tolist()

    def gradient(self, name: str, first: int, n_blocks: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if name not in self._errors.sources:
            return
        if name not in self._types:
            self._types[name] = self._errors.types_of(name, n_blocks)
        if not self._types[name]:
            return
        for number in range(gradient.shape[1]):
            errors = self._errors.of(name, first + number, n_blocks)
            g = gradient[:, number, errors.rows].float()
            rows = x[:, number if x.shape[1] > 1 else 0].float()
            if len(g) == sum(self._sizes):
                chunks = zip(g.split(self._sizes), rows.split(self._sizes), strict=True)
                for part, theirs in chunks:
                    self._add(name, errors.sensitivity(part.T @ theirs))
            else:
                self._take_some((name, first + number), errors, g, rows)

    def fresh(self) -> Self:
        return type(self)(self._errors, self._chunk_size)

    def merge(self, other: Self) -> None:
        self._types |= other._types
        for name, sums in other._sums.items():
            self._add(name, sums)

    def refuse_nonfinite(self) -> None:
        for name, sums in self._sums.items():
            if not np.isfinite(sums).all():
                raise BadActivation(f"{name}: the gradients at its product have NaN or infinity")

    def arrays(self) -> Arrays:
        """Return the sums over the chunks as `sensitivities_of` takes them."""
        return sensitivity_arrays(self._sums, self._types)

    def _take_some(
        self, key: tuple[str, int], errors: BlockErrors, g: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Take in some tokens of a chunk; the others come in later calls."""
        part = self._open.setdefault(key, _Open())
        part.add(g.T @ rows, len(g))
        if part.n_tokens == sum(self._sizes):
            self._add(key[0], errors.sensitivity(self._open.pop(key).product))

    def _add(self, name: str, sums: Floats64) -> None:
        before = self._sums.get(name)
        self._sums[name] = sums if before is None else before + sums


@dataclass
class _Open:
    """The sum of g x^T over the tokens of a chunk that have been seen, and how many these are."""

    product: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    n_tokens: int = 0

    def add(self, product: torch.Tensor, n_tokens: int) -> None:
        self.product = product if not self.n_tokens else self.product + product
        self.n_tokens += n_tokens


def sensitivity_arrays(sums: dict[str, Floats64], types: dict[str, list[GGMLType]]) -> Arrays:
    """Return sums over the tokens for the work folder."""
    names = {f"{_TYPES}{name}": np.array([type_.name for type_ in types[name]]) for name in sums}
    return {**{f"{_SENSITIVITY}{name}": value for name, value in sums.items()}, **names}


def sensitivities_of(arrays: Arrays, n_tokens: int) -> dict[str, dict[str, float]]:
    """Return the sensitivity per token of each tensor in `arrays` at each type."""
    return {
        key.removeprefix(_SENSITIVITY): {
            str(type_): float(value) / n_tokens
            for type_, value in zip(arrays[key.replace(_SENSITIVITY, _TYPES, 1)], sums, strict=True)
        }
        for key, sums in arrays.items()
        if key.startswith(_SENSITIVITY)
    }


def of_embeddings_and_output(
    backward: BackwardPass, states: States, errors: TypeErrors, n_sampled: int
) -> Arrays:
    """Return the sensitivity of the embeddings and of the output matrix.

    states     gradients at the hidden states before the first layer
    n_sampled  tokens of the text whose rows are encoded
    """
    sums: dict[str, Floats64] = {}
    ratios: dict[str, float] = {}
    can_have: dict[str, list[GGMLType]] = {}
    forward, n_tokens = backward.forward, states.n_rows
    for name in dict.fromkeys((EMBEDDINGS, forward.source.network.output)):
        source = errors.sources.get(name)
        if source is None:
            continue
        can_have[name] = errors.types_of(name, 1)
        sums[name] = np.zeros(len(can_have[name]))
        parts: list[_Embeddings | _Output] = []
        if name == EMBEDDINGS:
            parts.append(_Embeddings.of(forward.source.network, forward.chunks, states, n_sampled))
        if name == forward.source.network.output:
            parts.append(_Output.of(backward, spread(n_tokens, n_sampled)))
        for part in parts:
            found = _sampled(part, name, errors, forward.chunks)
            sums[name] += found[0]
            # Where one matrix is both, what it is as the output decides.
            ratios |= found[1]
    return {**sensitivity_arrays(sums, can_have), **ratio_arrays(ratios)}


def of_draft_output(backward: BackwardPass, errors: TypeErrors, n_sampled: int) -> Arrays:
    """Return the sensitivity of the MTP layer's own output matrix; nothing where it takes the model's.

    n_sampled  tokens of the text whose rows are encoded
    """
    name, chunks = backward.head.matrix, backward.forward.chunks
    if name == backward.forward.source.network.output or name not in errors.sources:
        return {}
    part = _Output.of(backward, spread(chunks.n_tokens, n_sampled))
    sums, ratios = _sampled(part, name, errors, chunks)
    return {**sensitivity_arrays({name: sums}, {name: errors.types_of(name, 1)}), **ratio_arrays(ratios)}


def _sampled(
    part: _Embeddings | _Output, name: str, errors: TypeErrors, chunks: Chunks
) -> tuple[Floats64, dict[str, float]]:
    """Return the sensitivity at each type that a tensor can have, over all tokens, and its ratio."""
    source = errors.sources[name]
    weights, types = read_rows(source, part.rows), errors.types_of(name, 1)
    sums = np.zeros(len(types))
    for number, type_ in enumerate(types):
        (each,) = errors_of(weights, [type_], None, errors.n_zeros(name))
        sums[number] = part.sensitivity(each, range(chunks.n_chunks)) * chunks.n_tokens
    odd = range(1, chunks.n_chunks, 2)
    if not odd:
        return sums, {}
    n_cols = source.shape[-1]
    n_real = errors.lengths.n_real(name, n_cols)
    at = type_for(n_real, may_pad=errors.lengths.is_padded(name, n_cols))
    cost = partial(part.sensitivity, chunks=odd)
    return sums, {name: ratio(weights, part.moments(), cost, at, n_real)}


@dataclass(frozen=True)
class _Embeddings:
    """The rows of token_embd that a text looks up, or some of them.

    rows   ascending, int64
    share  of all tokens of the text that have one of the rows
    """

    network: Network
    text: Chunks
    states: States
    rows: npt.NDArray[np.int64]
    share: float

    @classmethod
    def of(cls, network: Network, text: Chunks, states: States, n_sampled: int) -> _Embeddings:
        """Return at most `n_sampled` rows.

        states  gradients at the hidden states before the first layer
        """
        every, counts = np.unique(text.inputs, return_counts=True)
        chosen = spread(len(every), n_sampled)
        return cls(network, text, states, every[chosen], counts[chosen].sum() / text.n_tokens)

    def sensitivity(self, errors: Floats32, chunks: range) -> float:
        """Return the mean sensitivity of the errors of the rows over the tokens of some chunks."""
        total, n_tokens = 0.0, 0
        for chunk in chunks:
            start, stop = self.text.rows(chunk)
            tokens, gradients = self.text.inputs[start:stop], self._gradients(chunk)
            places = np.searchsorted(self.rows, tokens)
            known = self.rows[np.minimum(places, len(self.rows) - 1)] == tokens
            moved = np.zeros(len(self.rows))
            at_tokens = (errors[places[known]] * gradients[known]).sum(-1, dtype=np.float64)
            np.add.at(moved, places[known], at_tokens)
            total += 0.5 * float(np.square(moved).sum())
            n_tokens += len(tokens)
        return total / (self.share * n_tokens)

    def moments(self) -> Floats64:
        """Return the sum of g g^T over the tokens of every other chunk."""
        sums = np.zeros((self.network.hidden_size, self.network.hidden_size))
        for chunk in range(0, self.text.n_chunks, 2):
            gradients = self._gradients(chunk)
            sums += gradients.T @ gradients
        return sums

    def _gradients(self, chunk: int) -> Floats32:
        read = self.states.read(*self.text.rows(chunk))
        gradients: Floats32 = to_numpy(self.network.at_embeddings(read))
        return gradients


@dataclass(frozen=True)
class _Output:
    """Rows of the output matrix, those of the labels of some tokens.

    chunks  of the tokens, int64 (n_sampled,)
    x       what the matrix multiplies there, float32 (n_sampled, hidden_size)
    rows    ascending, int64
    places  of each token's label among the rows
    doubts  1 - p(label), times the square of how much the label's logit grows with the row's product
    """

    chunks: npt.NDArray[np.int64]
    x: Floats32
    rows: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    doubts: Floats64

    @classmethod
    def of(cls, backward: BackwardPass, sample: npt.NDArray[np.int64]) -> _Output:
        """Return those of the tokens with these numbers."""
        forward, head, drawn = backward.forward, backward.head, backward.folder.arrays(EMBEDDING)
        hidden = torch.cat([head.states.rows(torch.tensor([token])) for token in sample.tolist()])
        x = to_numpy(head.norm(hidden.to(forward.load.device)))
        rows, places = np.unique(drawn["labels"][sample], return_inverse=True)
        doubts = -np.expm1(-drawn["losses"][sample])
        weights = forward.load.picked_rows(head.matrix, rows.tolist())
        products = (to_cpu(weights)[to_torch(places)] * to_torch(x)).sum(-1).double()
        slopes = torch.as_tensor(head.rule.slope(head.rule(products)))
        doubts = doubts * to_numpy(slopes.square())
        return cls(forward.chunks.chunk_of(sample), x, rows, places, doubts)

    def sensitivity(self, errors: Floats32, chunks: range) -> float:
        """Return the mean sensitivity of the errors of the rows over the sampled tokens of some chunks."""
        here = np.isin(self.chunks, np.array(chunks))
        moved = (errors[self.places[here]] * self.x[here]).sum(-1, dtype=np.float64)
        return 0.5 * float(self.doubts[here] @ np.square(moved)) / max(1, int(here.sum()))

    def moments(self) -> Floats64:
        """Return the sum of x x^T over the sampled tokens of every other chunk."""
        even = self.x[self.chunks % 2 == 0]
        return (even.T @ even).astype(np.float64)
