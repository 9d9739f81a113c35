"""EXL2: groups of inputs with 2 to 8 bits each, inputs sorted by importance.

    X.q_weight     I32  (n_words, n_rows padded to 32)   codes of one output down a column, group after group
    X.q_scale      I32  (n_groups, n_rows padded / 8)    4 bits each, low first
    X.q_scale_max  F16  (n_groups,)
    X.q_groups     I16  (2 * n_groups,)                  bits and first word of every group, unsigned
    X.q_invperm    I32  (n_cols,)                        where column j stands in the sorted order

    weight[i, j] = (code[i, k] - 2^(bits - 1)) * scale[g, i]     k = invperm[j], g the group of k
    scale[g, i]  = (s + 1)^2 * scale_max[g] / 256

Within a group the codes are one stream of bits, low first. The scale is exact in float32, so the product is
the exact value rounded once (exllamav2 itself computes in half precision).

Of the module's tensors only the bias tells how many rows there are without the padding. Where there is no
bias, the sizes in config.json decide if they explain the padding; otherwise the padding counts as rows.

A row range of the weight is a column range of `q_weight` and `q_scale`. Columns are permuted within a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import ClassVar

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import check_matrix
from gguf_tools.errors import CheckpointError

WIDTHS = (2, 3, 4, 5, 6, 8)
PADDED_TO = 32


@dataclass(frozen=True, slots=True)
class Group:
    """Columns `start` to `stop` of the sorted order: they share their scales and have `bits` bits."""

    bits: int
    first_word: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Exl2Weight(Decoded):
    """A matrix in EXL2's packing: q_weight, q_scale, q_scale_max, q_groups and q_invperm."""

    codes: RawTensor
    scales: RawTensor
    scale_max: RawTensor
    groups: RawTensor
    order: RawTensor
    by_rows: ClassVar[bool] = False

    @property
    def stored_as(self) -> str:
        return f"EXL2 {32 * self.codes.shape[0] / self.shape[1]:.2f} bits in {self.scales.shape[0]} groups"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        from convert.weights.kernels import scale_sorted, unpack

        n_rows, n_cols = stop - start, self.shape[1]
        groups = self._read_groups()
        words = np.ascontiguousarray(self.codes.read_columns(start, stop).T)
        codes = np.empty((n_rows, n_cols), np.uint8)
        # Neighbours of the same width are one stream.
        for bits, run in groupby(groups, lambda group: group.bits):
            members = list(run)
            first, last = members[0], members[-1]
            n_codes = last.stop - first.start
            part = words[:, first.first_word : first.first_word - (-n_codes * bits // 32)]
            codes[:, first.start : last.stop] = unpack(part, bits, n_codes)
        starts = np.array([0, *(group.stop for group in groups)])
        middles = np.array([1 << (group.bits - 1) for group in groups], np.float32)
        scales = self._read_scales(start, stop)
        out = np.empty((n_rows, n_cols), np.float32)
        scale_sorted(codes, starts, self._read_order(), middles, scales, np.empty(n_cols, np.float32), out)
        return out

    def _read_scales(self, start: int, stop: int) -> np.ndarray:
        """Return float32 (stop - start, n_groups)."""
        from convert.weights.kernels import unpack

        first = start // 8
        words = self.scales.read_columns(first, -(-stop // 8))
        roots = unpack(words, 4, 8 * words.shape[1])[:, start - 8 * first : stop - 8 * first].T + np.float32(
            1
        )
        return np.ascontiguousarray(
            roots * roots * (self.scale_max.read().astype(np.float32) / np.float32(256))
        )

    def _read_groups(self) -> list[Group]:
        stored = self.groups.read().view(np.uint16).reshape(-1, 2).tolist()
        n_cols, n_words = self.shape[1], self.codes.shape[0]
        groups: list[Group] = []
        start = 0
        for index, (bits, word) in enumerate(stored):
            is_last = index + 1 == len(stored)
            n_group_words = (n_words if is_last else stored[index + 1][1]) - word
            n_codes, rest = divmod(n_group_words * 32, max(1, bits))
            # The very last word needn't be full.
            if is_last and -(-(n_cols - start) * bits // 32) == n_group_words:
                n_codes, rest = n_cols - start, 0
            if bits not in WIDTHS or rest or n_codes <= 0 or (index == 0 and word):
                raise CheckpointError(
                    f"{self.groups.path}: {self.groups.name}: group {index} has {bits} bits from word {word}"
                    f" of {n_words}, expected {', '.join(map(str, WIDTHS))} bits and whole codes"
                )
            groups.append(Group(bits, word, start, start + n_codes))
            start += n_codes
        if start != n_cols:
            raise CheckpointError(
                f"{self.groups.path}: {self.groups.name}: groups of {start} columns, expected {n_cols} as in"
                f" {self.order.name}"
            )
        return groups

    def _read_order(self) -> np.ndarray:
        order = self.order.read()
        if not np.array_equal(np.sort(order), np.arange(order.size)):
            raise CheckpointError(
                f"{self.order.path}: {self.order.name}: no permutation of {order.size} columns"
            )
        return order.astype(np.uint32)


def _load(module: Module) -> Exl2Weight:
    codes, scales, scale_max = module[".q_weight"], module[".q_scale"], module[".q_scale_max"]
    groups, order = module[".q_groups"], module[".q_invperm"]
    check_matrix(module, codes, "I32")
    n_groups = scale_max.shape[0] if scale_max.shape else 0
    for raw, dtypes, shape in (
        (scales, ("I32",), (n_groups, codes.n_cols // 8)),
        (scale_max, ("F16", "BF16", "F32"), (n_groups,)),
        (groups, ("I16", "U16"), (2 * n_groups,)),
        (order, ("I32",), (order.n_cols,)),
    ):
        if raw.dtype not in dtypes or raw.shape != shape:
            raise module.wrong(raw, f"{raw.dtype} {raw.shape}", f"{dtypes[0]} {shape}")
    shape = (_rows(module, codes.n_cols), order.n_cols)
    return Exl2Weight(module.name, shape, codes, scales, scale_max, groups, order)


def _rows(module: Module, padded: int) -> int:
    """Return how many rows there are under the padding to `padded`."""
    bias = module.get(".bias")
    if bias is not None and len(bias.shape) == 1:
        return bias.shape[0]
    keys = _ROWS.get(module.stem.rpartition(".")[2], ())
    sizes = [size for key in keys if isinstance(size := module.settings.model.get(key), int)]
    promised = prod(sizes) if sizes and len(sizes) == len(keys) else padded
    return promised if -(-promised // PADDED_TO) * PADDED_TO == padded else padded


_ROWS: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("num_attention_heads", "head_dim"),
    "k_proj": ("num_key_value_heads", "head_dim"),
    "v_proj": ("num_key_value_heads", "head_dim"),
    "o_proj": ("hidden_size",),
    "gate_proj": ("intermediate_size",),
    "up_proj": ("intermediate_size",),
    "down_proj": ("hidden_size",),
    "lm_head": ("vocab_size",),
}
"""Last part of a module's name -> the keys of config.json whose product is its number of rows."""


_SIDES = (".q_scale", ".q_scale_max", ".q_groups", ".q_invperm", ".q_perm")

LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("EXL2", ("exl2",), ".q_weight", _SIDES, _load),
)  # fmt: skip
