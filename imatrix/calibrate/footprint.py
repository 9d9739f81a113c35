"""Estimates the memory of a calibrated run from shapes.

A run has two parts, and takes what the larger one does: the gradients, and the layers one by one. Both have
one layer in memory, and what threads work with. The rest is the program, and free memory that the C library
keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gguf_tools.format.hparams import architecture_of, known_hparams
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata
from imatrix.calibrate.options import CalibrationOptions
from imatrix.calibrate.run.context import state_bytes
from imatrix.calibrate.run.encode import MOST_TOGETHER, WEIGHTS_TOGETHER
from imatrix.calibrate.run.experts import experts_at_once
from imatrix.calibrate.statistics.gradient_factors import gradient_text
from imatrix.calibrate.statistics.gradients import GradientOptions, covariance_bytes, row_pieces
from imatrix.calibrate.statistics.inputs import PAIR_BYTES, PIECE_ROWS
from imatrix.forward.gradients.backward import gradient_bytes
from imatrix.forward.network import Network
from imatrix.forward.workers import MOST_HELD
from imatrix.texts.tokens import Text
from quantize.roles import Role, layer_of, tensor_role

_PROGRAM_BYTES = 600 << 20
"""Memory of Python, torch and the kernels, as measured between the two parts of a run."""

_ROW_BYTES = 8
"""Memory for each row of a layer's matrices and token of a chunk while it is differentiated: the product and
its gradient."""

_CHUNKS_BYTES = 512 << 20
"""Memory for each thread that chunks on the way back may take, beyond that of two."""

_SCORE_BYTES = 16
"""Memory for each head and pair of tokens: scores, what the softmax makes of them, and both gradients."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model, as far as an estimate needs them.

    infos    all tensors of the output
    made     those that are calibrated
    n_used   experts per token
    n_heads  of attention; the most where layers differ
    """

    network: Network
    infos: Sequence[TensorInfo]
    made: Sequence[TensorInfo]
    n_used: int
    n_heads: int

    @classmethod
    def of(
        cls, network: Network, infos: Sequence[TensorInfo], made: Sequence[TensorInfo], metadata: Metadata
    ) -> Shapes:
        """Read what the tensors do not tell from a file's metadata."""
        hparams = known_hparams(metadata, architecture_of(metadata) or "")
        heads = hparams.head_count
        n_heads = max(heads) if isinstance(heads, tuple) else hparams.size("head_count")
        return cls(network, infos, made, hparams.size("expert_used_count", 1), n_heads)

    def share(self, info: TensorInfo) -> float:
        """The share of the tokens that one matrix of a tensor sees."""
        return self.n_used / info.n_mats if is_expert(info) else 1.0

    def chunks_at_once(self, chunk_size: int, n_threads: int) -> int:
        """Count the chunks in memory on the way back: one more than are at work, or fewer.

        Of large models a chunk takes a gigabyte or two. The number changes nothing that is computed.
        """
        of_chunk = max((each.chunk_bytes(chunk_size) for each in self.layers()), default=1)
        return max(2, min(n_threads + 1, n_threads * _CHUNKS_BYTES // max(1, of_chunk)))

    def layers(self) -> Iterator[_Layer]:
        """Yield every layer."""
        by_layer: dict[int, list[TensorInfo]] = {}
        for info in self.infos:
            layer = layer_of(info.name)
            if layer is not None and layer < self.network.n_all_layers:
                by_layer.setdefault(layer, []).append(info)
        made = {info.name for info in self.made}
        for infos in by_layer.values():
            yield _Layer(infos, [info for info in infos if info.name in made], self.n_heads)


def is_expert(info: TensorInfo) -> bool:
    """Whether a tensor is a stack of routed experts."""
    return info.n_mats > 1 and tensor_role(info.name, info.shape).role in _BLOCK_ROLES


_BLOCK_ROLES = (Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN)


def memory_bytes(options: CalibrationOptions, shapes: Shapes, text: Text, n_threads: int) -> int:
    """Estimate how much memory a run takes."""
    budget, network = options.forward.memory_bytes, shapes.network
    dtype = getattr(torch, options.forward.dtype)
    in_memory, _ = state_bytes(text, network, dtype, options.n_models)
    states = in_memory if in_memory <= budget else 0
    layers = list(shapes.layers())
    most = states + max((each.making_bytes(options, n_threads) for each in layers), default=0)
    if options.needs_gradients:
        some = gradient_text(text)
        in_memory = gradient_bytes(some.inputs.size, network, dtype)
        states = in_memory if in_memory <= budget else 0
        at_once = shapes.chunks_at_once(some.chunk_size, n_threads)
        of_layers = (each.differentiating_bytes(some.chunk_size, at_once) for each in layers)
        most = max(most, states + max(of_layers, default=0))
    return _PROGRAM_BYTES + MOST_HELD + most


@dataclass(frozen=True)
class _Layer:
    """One layer.

    infos  its tensors
    made   those that are calibrated
    """

    infos: Sequence[TensorInfo]
    made: Sequence[TensorInfo]
    n_heads: int

    def chunk_bytes(self, chunk_size: int) -> int:
        """The memory of a chunk in the backward pass: products, gradients, and their covariances."""
        common = self._common()
        n_rows = sum(info.n_rows for info in common)
        scores = _SCORE_BYTES * self.n_heads * chunk_size**2
        return _ROW_BYTES * chunk_size * n_rows + scores + _covariances_of(common)

    def differentiating_bytes(self, chunk_size: int, at_once: int) -> int:
        """The memory of the layer in the backward pass: weights, sums, and the chunks in memory."""
        experts = 3 * _expert_bytes(self.infos)  # one in use, one read ahead, and one that goes
        weights = _weight_bytes(self._common()) + experts
        return weights + self._covariance_bytes() + at_once * self.chunk_bytes(chunk_size)

    def _common(self) -> list[TensorInfo]:
        """The matrices that every token goes through."""
        return [info for info in self.infos if not is_expert(info) and len(info.shape) > 1]

    def making_bytes(self, options: CalibrationOptions, n_threads: int) -> int:
        """The memory of encoding the layer: its largest step, and what all steps need."""
        attention = [info for info in self.infos if ".attn_" in info.name]
        always = _weight_bytes(attention) + (self._covariance_bytes() if options.needs_gradients else 0)
        block = [info for info in self.infos if _is_block(info)]
        steps = [0]
        for info in self.made:
            # Products go into sums while the weights that make them are there.
            gathered = options.n_models * (
                (_weight_bytes(block) if _is_block(info) else 0)
                + 4 * info.n_cols**2 * (1 if is_expert(info) else info.n_mats)
                + 2 * 4 * PIECE_ROWS * info.n_cols
            )
            steps += [gathered, self._encoding_bytes(info, options, n_threads)]
        others = (options.n_models - 1) * _weight_bytes(attention)
        return always + max(*steps, others)

    def _encoding_bytes(self, info: TensorInfo, options: CalibrationOptions, n_threads: int) -> int:
        """The memory of encoding a tensor, once its inputs are known."""
        n_mats, n_rows = info.n_mats, info.n_rows // info.n_mats
        n_moments, n_weights = n_mats, info.n_elems
        if is_expert(info):
            n_made = experts_at_once(info.n_cols, n_threads)
            n_moments = 1 + n_made  # one that others are shrunk towards
            n_weights = 2 * n_made * n_rows * info.n_cols  # gates and ups
        _, stop = next(row_pieces(n_rows))
        unit = stop * info.n_cols
        together = min(max(unit, WEIGHTS_TOGETHER), MOST_TOGETHER * unit)
        encoded = options.rounding.weight_bytes * min(n_threads * together, n_weights)
        return (
            PAIR_BYTES * info.n_cols**2 * n_moments + encoded + options.n_models * _expert_bytes(self.infos)
        )

    def _covariance_bytes(self) -> int:
        most = GradientOptions().expert_bytes
        total = 0
        for info in self.infos:
            of_all = _covariances_of([info])
            if is_expert(info) and tensor_role(info.name, info.shape).role != Role.FFN_DOWN:
                of_all = of_all * info.n_mats if of_all * info.n_mats <= most else 0
            total += of_all
        return total


def _is_block(info: TensorInfo) -> bool:
    """Whether a tensor is of the block that all tokens go through."""
    return not is_expert(info) and tensor_role(info.name, info.shape).role in _BLOCK_ROLES


def _weight_bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(4 * info.n_elems for info in infos)


def _expert_bytes(infos: Iterable[TensorInfo]) -> int:
    """The size of one expert's weights."""
    return sum(4 * info.n_elems // info.n_mats for info in infos if is_expert(info))


def _covariances_of(infos: Iterable[TensorInfo]) -> int:
    """The size of the covariances of gradients; of experts, those of one."""
    return sum(
        covariance_bytes(info.n_rows // info.n_mats) * (1 if is_expert(info) else info.n_mats)
        for info in infos
        if len(info.shape) > 1 and tensor_role(info.name, info.shape).kept_as is None
    )
