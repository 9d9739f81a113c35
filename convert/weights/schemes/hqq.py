"""HQQ: codes of 1 to 8 bits with a float scale and a float zero point per group.

    X.W_q           codes, packed (below)
    X.scale, X.zero float: (n_groups, 1) for axis 1, (1, n_groups) for axis 0
    X.nbits, X.axis, X.shape, X.group_size ...   the meta data, one small tensor each

    weight = (code - zero) * scale

in float32, with one rounding in the difference, which is not a whole number, and one in the product.

Groups are made on the matrix as one run of elements, row after row. For axis 1 a group is `group_size`
consecutive elements. For axis 0 the run is cut into `group_size` equal pieces, and a group has the element at
the same place of each.

Packing works on that run too. It is cut into sections (2 for 4 bits, 4 for 2, 8 for 1, 10 for 3), the first
of which is in the highest bits. Codes of 3 bits lie in 32-bit words, the others in bytes; codes of 5 and more
bits take a byte each. The last section may be padded. So a row range reads one short range of `W_q`, or two
where it crosses from one section into the next, and its scales (for axis 0 all scales, 1 / `group_size` of
the matrix).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, WeightsLoader
from convert.weights.scales import SCALE_DTYPES, scaled
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import quoted


@dataclass(frozen=True, slots=True)
class HqqPacking:
    """A way in which codes share an element: its bytes, its sections, and the bits of a section."""

    bytes: int
    sections: int
    bits: int


PACKINGS = {
    "8bit_u8": HqqPacking(1, 1, 8),
    "4bit_u8": HqqPacking(1, 2, 4),
    "3bit_32": HqqPacking(4, 10, 3),
    "2bit_u8": HqqPacking(1, 4, 2),
    "1bit_u8": HqqPacking(1, 8, 1),
}
_OF_BITS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


@dataclass(frozen=True, slots=True)
class HqqWeight(Decoded):
    """A matrix in HQQ's packing.

    group_size   for axis 1, elements in a group; for axis 0, into how many pieces the run is cut
    """

    codes: RawTensor
    scales: RawTensor
    zeros: RawTensor
    packing: HqqPacking
    bits: int
    axis: int
    group_size: int

    @property
    def stored_as(self) -> str:
        return f"HQQ {self.bits} bits in groups of {self.group_size} along axis {self.axis}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        n_cols = self.shape[1]
        first, last = start * n_cols, stop * n_cols
        if self.axis == 0:
            return self._read_across(first, last).reshape(stop - start, n_cols)
        # Decode whole groups, then cut out the wanted elements.
        first_group, last_group = first // self.group_size, -(-last // self.group_size)
        from_element = first_group * self.group_size
        codes = self._read_codes(from_element, last_group * self.group_size).reshape(-1, self.group_size)
        scales = self.scales.read_elements(first_group, last_group).astype(np.float32)[:, None]
        zeros = self.zeros.read_elements(first_group, last_group).astype(np.float32)[:, None]
        rows = scaled(codes, zeros, scales, self.group_size).reshape(-1)
        return rows[first - from_element : last - from_element].reshape(stop - start, n_cols)

    def _read_across(self, first: int, last: int) -> np.ndarray:
        """Return elements `first` to `last` where groups go across the pieces of the run."""
        codes = self._read_codes(first, last)
        scales = self.scales.read().reshape(-1).astype(np.float32)
        zeros = self.zeros.read().reshape(-1).astype(np.float32)
        out = np.empty(last - first, np.float32)
        position = first
        while position < last:
            group = position % scales.size
            count = min(last - position, scales.size - group)
            done = slice(position - first, position - first + count)
            np.subtract(codes[done], zeros[group : group + count], out=out[done])
            out[done] *= scales[group : group + count]
            position += count
        return out

    def _read_codes(self, first: int, last: int) -> np.ndarray:
        """Return the codes of elements `first` to `last`, uint8."""
        size, packing = self.codes.n_bytes // self.packing.bytes, self.packing
        # W_q may be stored under a float dtype: its bytes count.
        step = self.codes.n_bytes // prod(self.codes.shape)
        codes = np.empty(last - first, np.uint8)
        position = first
        while position < last:
            section, place = divmod(position, size)
            count = min(last - position, size - place)
            begin, end = place * packing.bytes, (place + count) * packing.bytes
            data = self.codes.read_elements(begin // step, -(-end // step)).view(np.uint8)
            words = data[begin % step :][: end - begin].view(np.dtype(f"<u{packing.bytes}"))
            shift = (packing.sections - 1 - section) * packing.bits
            mask = (1 << packing.bits) - 1
            codes[position - first : position - first + count] = (words >> shift) & mask
            position += count
        return codes


def _load(module: Module) -> HqqWeight:
    codes, scales, zeros = module[".W_q"], module[".scale"], module[".zero"]
    for key in (".quant_scale", ".quant_zero"):
        flag = module.get(key)
        if flag is not None and flag.read().any():
            raise UnsupportedCheckpoint(
                f"{flag.path}: {flag.name}: HQQ with quantized scales or zero points is not read"
            )
    shape = tuple(int(size) for size in module[".shape"].read().reshape(-1))
    bits, axis = _number(module, ".nbits"), _number(module, ".axis")
    packing = _packing(module, bits)
    for raw in (scales, zeros):
        if raw.dtype not in SCALE_DTYPES:
            raise module.wrong(raw, raw.dtype, ", ".join(SCALE_DTYPES))
    n_elems, n_groups = prod(shape), prod(scales.shape)
    if len(shape) != 2 or min(shape) <= 0 or axis not in (0, 1) or n_groups == 0 or n_elems % n_groups:
        raise module.wrong(
            codes,
            f"shape {shape}, axis {axis} and {n_groups} scales",
            "groups of equal size along axis 0 or 1",
        )
    if prod(zeros.shape) != n_groups:
        raise module.wrong(zeros, f"shape {zeros.shape}", f"{scales.shape} as the scales")
    if codes.n_bytes // packing.bytes * packing.sections < n_elems or codes.n_bytes % packing.bytes:
        raise module.wrong(codes, f"{codes.n_bytes} bytes", f"{n_elems} codes of {bits} bits")
    return HqqWeight(module.name, shape, codes, scales, zeros, packing, bits, axis, n_elems // n_groups)


def _number(module: Module, suffix: str) -> int:
    raw = module[suffix]
    if prod(raw.shape) != 1 or raw.dtype not in ("I32", "I64", "U8"):
        raise module.wrong(raw, f"{raw.dtype} {raw.shape}", "one integer")
    return int(raw.read().reshape(-1)[0])


def _packing(module: Module, bits: int) -> HqqPacking:
    raw = module.get(".packing")
    name = (
        raw.read().tobytes().decode("ascii", "replace")
        if raw is not None
        else _OF_BITS.get(bits, f"{bits} bits")
    )
    packing = PACKINGS.get(name)
    if packing is None:
        where = raw or module[".nbits"]
        raise UnsupportedCheckpoint(
            f"{where.path}: {where.name}: HQQ packed as {quoted(name)} is not read"
            f" (read: {', '.join(PACKINGS)})"
        )
    return packing


_META = (
    "nbits", "axis", "shape", "group_size", "packing", "view_as_float", "unpack_view_dtype", "compute_dtype",
    "channel_wise", "optimize", "round_zero", "quant_scale", "quant_zero", "offload_meta",
    "encoded_state_dict", "stores_quant_config",
)  # fmt: skip
_SIDES = (".scale", ".zero", *(f".{name}" for name in _META))

LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("HQQ", ("hqq",), ".W_q", _SIDES, _load),
)  # fmt: skip
