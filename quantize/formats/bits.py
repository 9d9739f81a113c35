"""Numbers inside blocks, read and written by the bits that they have, as `BITS` of ggml_types.py tells them.

For all that is not a kernel. Kernels have constants of their own, and a test holds what they decode against
the same table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.format.block_layouts import LAYOUTS
from gguf_tools.format.ggml_types import BITS, GGMLType

Array = npt.NDArray[Any]

_RUN = re.compile(
    r"(?P<field>\w+)(\[(?P<first>\d+):(?P<stop>\d+)\])?"
    r" (?P<bits>\d+)(:(?P<step>\d+))?(x(?P<per>\d+))?(/(?P<stride>\d+))?(@(?P<shift>\d+))?"
)


@dataclass(frozen=True)
class _Run:
    """Bits of numbers in the items of a field: `per` numbers in an item, the next one `stride` items further.

    field       its name
    offset      byte of the first item in a block
    n_items     how many there are
    item_bytes  of each
    bits        of a number
    shift       bit of an item where its first number begins
    step        bits from there to where the next one begins
    """

    field: str
    offset: int
    n_items: int
    item_bytes: int
    bits: int
    per: int
    stride: int
    shift: int
    step: int

    @cached_property
    def shifts(self) -> Array:
        """The bits of an item where its numbers begin, (per, 1), of the type of an item."""
        return (self.shift + self.step * np.arange(self.per)).astype(f"<u{self.item_bytes}")[:, None]

    def positions(self) -> Array:
        items = np.arange(self.n_items).reshape(-1, 1, self.stride)
        begins = 8 * (self.offset + self.item_bytes * items) + self.shifts.astype(np.int64)
        return begins.reshape(-1, 1) + np.arange(self.bits)

    def read(self, blocks: Array) -> Array:
        items = blocks[:, self.offset : self.offset + self.n_items * self.item_bytes]
        if self.item_bytes > 1:
            items = np.ascontiguousarray(items).view(f"<u{self.item_bytes}")
        if self.bits < 8 * self.item_bytes:
            groups = items.reshape(len(blocks), -1, 1, self.stride) >> self.shifts
            items = (groups & (1 << self.bits) - 1).reshape(len(blocks), -1)
        return items.astype(np.uint8 if self.bits <= 8 else np.int64, copy=False)

    def write(self, blocks: Array, numbers: Array) -> None:
        """Put numbers into bits that are 0."""
        groups = numbers.astype(self.shifts.dtype, order="C").reshape(len(blocks), -1, self.per, self.stride)
        groups &= (1 << self.bits) - 1
        groups <<= self.shifts
        written = np.bitwise_or.reduce(groups, axis=2).reshape(len(blocks), -1).view(np.uint8)
        blocks[:, self.offset : self.offset + written.shape[1]] |= written


@dataclass(frozen=True)
class Numbers:
    """Numbers of one kind in the blocks of a type.

    layers     the lowest bits of all of them, then the next ones
    lowest     what is stored as 0
    is_signed  whether a stored number has a sign
    """

    layers: Sequence[Sequence[_Run]]
    lowest: int
    is_signed: bool

    @property
    def highest(self) -> int:
        """The largest number that can be stored."""
        return self.lowest + (1 << sum(runs[0].bits for runs in self.layers)) - 1

    @property
    def fields(self) -> frozenset[str]:
        """The names of the fields that have bits of these numbers."""
        return frozenset(run.field for runs in self.layers for run in runs)

    @property
    def positions(self) -> Array:
        """The bits of each number, int64 (numbers, bits): 8 * i + j is bit j of byte i of a block."""
        return np.hstack([np.concatenate([run.positions() for run in runs]) for runs in self.layers])

    def read(self, blocks: Array) -> Array:
        """Return how far numbers are from the lowest: uint8, or int64 beyond 8 bits, (n, numbers).

        blocks  uint8 (n, bytes)
        """
        lower, *upper = (np.concatenate([run.read(blocks) for run in runs], axis=1) for runs in self.layers)
        bits = self.layers[0][0].bits
        for layer, runs in zip(upper, self.layers[1:], strict=True):
            wide: Array = layer.astype(np.uint8 if bits + runs[0].bits <= 8 else np.int64, copy=False)
            lower = lower | wide << bits
            bits += runs[0].bits
        return lower ^ np.uint8(0x80) if self.is_signed else lower

    def write(self, blocks: Array, numbers: Array) -> None:
        """Put what `read` returns, of any type of integers, into blocks in which these bits are 0."""
        rest = numbers ^ 0x80 if self.is_signed else numbers
        for runs in self.layers:
            first = 0
            for run in runs:
                run.write(blocks, rest[:, first : first + run.n_items * run.per])
                first += run.n_items * run.per
            rest = rest >> runs[0].bits


@cache
def numbers_of(type_: GGMLType) -> Mapping[str, Numbers]:
    """Return the numbers in the blocks of a type by their name; none where `BITS` does not tell them."""
    told = re.findall(r"(\w+) = ([^;]+)", BITS.get(type_.name, ""))
    return {name: _numbers(type_, text) for name, text in told}


def _numbers(type_: GGMLType, text: str) -> Numbers:
    stored, _, above = text.partition(" - ")
    layers = [[_run(type_, run.strip()) for run in layer.split(",")] for layer in stored.split("|")]
    fields = {field.name: field for field in LAYOUTS[type_.name].block}
    is_signed = fields[layers[0][0].field].kind.startswith("i")
    return Numbers(layers, -0x80 if is_signed else -int(above or 0), is_signed)


def _run(type_: GGMLType, text: str) -> _Run:
    match = _RUN.fullmatch(text)
    if match is None:
        raise ValueError(f"{type_.name}: {text!r} is no run of bits")
    field = next(field for field in LAYOUTS[type_.name].block if field.name == match["field"])
    size = 2 if field.kind == "m8" else field.item_bytes
    first, stop = int(match["first"] or 0), int(match["stop"] or field.count * field.item_bytes // size)
    bits, shift = int(match["bits"]), int(match["shift"] or 0)
    return _Run(
        field.name,
        field.offset + first * size,
        stop - first,
        size,
        bits,
        per=int(match["per"] or 1),
        stride=int(match["stride"] or 1),
        shift=shift,
        step=int(match["step"] or bits),
    )
