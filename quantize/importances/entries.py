"""Importances: which columns of a weight matter.

An importance matrix holds, for each column of every weight that multiplies activations, the sum of the
squared activations of that column over the rows seen. Quantization searches weigh an error in column c by the
mean of that sum, so columns that carry large activations keep more precision.

How a tensor finds its entry, and the multi-head latent attention of DeepSeek in particular:

  1. By exact name. The entry has one row of values per matrix of a stack (expert, or attention head), or
     one row for all of them. A file may hold the rows end to end with a single count.
  2. `attn_v_b` without an entry takes `attn_kv_b`'s, and the other way round: `attn_v_b` is the second half
     of each head's rows of `attn_kv_b`, so both multiply the same compressed keys and values. What
     `attn_v_b` has seen may be kept per head, because the absorbed form of attention mixes tokens before it
     multiplies. `attn_kv_b` multiplies each token once for all heads, so it gets the mean over the heads:
     the total of their sums over the total of their counts.
     In the same way `attn_qkv` and `ffn_gate_up` (of experts, too) serve the matrices whose rows they hold,
     and these serve them.
  3. `attn_k_b`, `attn_v_b` and `attn_kv_b` as one 2-D matrix hold the heads one below the other, so an
     entry with a row per head (for `attn_k_b`: qk_nope_head_dim x n_head values) weighs each head's rows by
     its own.
  4. `attn_output_a` of DeepSeek V4 holds the matrices of groups of heads one below the other. An entry with a
     row per group, as from llama-imatrix, weighs each group's rows by its own.
  5. A matrix that no token was routed to gets neutral weights (1 everywhere, as in llama-quantize).

A size that fits none of these is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import BadArgument, BadImportance
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import html_table, in_layer_ranges
from quantize.importances.text_sketch import TextSketch
from quantize.importances.weighting import ColumnWeights, Weighting
from quantize.roles import Role, has_row_groups, siblings_with_same_activations, tensor_role

ONE_ROW_FOR_ALL = "one row for all"

_MLA = frozenset({Role.ATTN_K_B, Role.ATTN_V_B, Role.ATTN_KV_B})


class ImportanceEntry(ABC):
    """Summed squared activations of one weight, in memory or in a file.

    counts  float32 (n_mats,): how many rows each sum was taken over (0: never routed to)

    Sums are asked for with `read`: those of a stored entry come from its file each time, and a model with 256
    experts a layer has a gigabyte of them. So nothing holds the sums of many entries, and `shape`, `row` and
    `in_rows` read nothing that is not needed.
    """

    counts: npt.NDArray[np.float32]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """n_mats and n_cols; (1, all values) where the rows of all matrices stand end to end."""

    @abstractmethod
    def read(self) -> npt.NDArray[np.float32]:
        """Return the sums, float32 (n_mats, n_cols): a row per expert, per MLA head, or a single one."""

    @abstractmethod
    def part(self, first: int, shape: tuple[int, int], counts: npt.NDArray[np.float32]) -> ImportanceEntry:
        """Return sums from number `first` on, counted through all rows, as an entry of this shape."""

    def row(self, index: int) -> ImportanceEntry:
        """Return one row of sums with its count."""
        n_cols = self.shape[1]
        return self.part(index * n_cols, (1, n_cols), self.counts[index : index + 1])

    def in_rows(self, counts: npt.NDArray[np.float32]) -> ImportanceEntry:
        """Return the same sums as one row for each of `counts`."""
        return self.part(0, (len(counts), self.n_values // len(counts)), counts)

    @property
    def n_values(self) -> int:
        n_mats, n_cols = self.shape
        return n_mats * n_cols

    def weights(self) -> npt.NDArray[np.float32]:
        """Return mean squared activations, float32 (n_mats, n_cols), as llama-quantize feeds them to ggml:

        sum / count, rounded once to float32, with counts rounded to whole numbers; 1 where nothing
        was counted.
        """
        sums, counts = self.read(), self.whole_counts()[:, np.newaxis]
        return np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)

    def whole_counts(self) -> npt.NDArray[np.float32]:
        """Return the counts rounded to whole numbers, halves away from zero."""
        exact = self.counts.astype(np.float64)
        return np.trunc(exact + np.copysign(0.5, exact)).astype(np.float32)


@dataclass(frozen=True)
class Importance(ImportanceEntry):
    """An entry in memory.

    values  float32 (n_mats, n_cols): one row per expert or per MLA head, or a single row. A single row may
            hold the rows of all matrices end to end, when they share a count.
    counts  float32 (n_mats,): how many rows each sum was taken over (0: never routed to)
    """

    values: npt.NDArray[np.float32]
    counts: npt.NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        n_mats, n_cols = self.values.shape
        return n_mats, n_cols

    def read(self) -> npt.NDArray[np.float32]:
        return self.values

    def part(self, first: int, shape: tuple[int, int], counts: npt.NDArray[np.float32]) -> Importance:
        return Importance(self.values.reshape(-1)[first : first + prod(shape)].reshape(shape), counts)


Importances = Mapping[str, ImportanceEntry]
"""Entries by the name of their weight."""

ImportanceFormat = Literal["gguf", "dat"]


@dataclass(frozen=True)
class ResizedImportance(ImportanceEntry):
    """An entry whose rows have been given another length: zeros at their end, or without them.

    stored      the entry as it is; its rows may stand end to end
    counts      of it
    n_cols      columns of its matrices as they are
    n_new_cols  columns as they shall be
    """

    stored: ImportanceEntry
    counts: npt.NDArray[np.float32]
    n_cols: int
    n_new_cols: int

    @classmethod
    def of(cls, stored: ImportanceEntry, n_cols: int, n_new_cols: int) -> ResizedImportance:
        return cls(stored, stored.counts, n_cols, n_new_cols)

    @property
    def shape(self) -> tuple[int, int]:
        n_rows, n_values = self.stored.shape
        return n_rows, n_values // self.n_cols * self.n_new_cols

    def read(self) -> npt.NDArray[np.float32]:
        rows = self.stored.read().reshape(-1, self.n_cols)
        kept = min(self.n_cols, self.n_new_cols)
        resized = np.zeros((len(rows), self.n_new_cols), np.float32)
        resized[:, :kept] = rows[:, :kept]
        return resized.reshape(self.shape)

    def part(self, first: int, shape: tuple[int, int], counts: npt.NDArray[np.float32]) -> ResizedImportance:
        start, n_cols = (number // self.n_new_cols * self.n_cols for number in (first, shape[1]))
        stored = self.stored.part(start, (shape[0], n_cols), counts)
        return ResizedImportance.of(stored, self.n_cols, self.n_new_cols)


@dataclass(frozen=True)
class PromisedImportance(ImportanceEntry):
    """An entry whose numbers will be known when its tensor is encoded.

    counts  float32 (n_mats,), ones
    """

    n_cols: int
    counts: npt.NDArray[np.float32]

    @classmethod
    def of(cls, tensor: TensorInfo) -> PromisedImportance:
        """Promise one row for each matrix of a tensor."""
        return cls(tensor.n_cols, np.ones(tensor.n_mats, np.float32))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.counts), self.n_cols

    def read(self) -> NoReturn:
        raise BadImportance("importances were asked for before a calibration could know them")

    def part(self, first: int, shape: tuple[int, int], counts: npt.NDArray[np.float32]) -> PromisedImportance:
        return PromisedImportance(shape[1], counts)


@dataclass(frozen=True)
class ImportanceFile:
    """Contents of an importance matrix file.

    entries      by name of the weight. From `.dat`: one row each, the experts end to end, counted in chunks
    datasets     names of the calibration texts
    chunk_count  chunks seen
    chunk_size   tokens per chunk; 0 when unknown, as in `.dat`
    path         where it was read, None for one made in memory
    format       "gguf", or "dat" for llama.cpp's old one
    sketch       of the calibration text, if it is known
    """

    entries: Importances
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 0
    path: Path | None = None
    format: ImportanceFormat = field(default="gguf", compare=False)
    sketch: TextSketch | None = None

    def __repr__(self) -> str:
        return f"<ImportanceFile: {len(self.entries)} entries, {self.chunk_count} chunks>"

    def _repr_html_(self) -> str:
        kinds: dict[tuple[int, int], list[str]] = {}
        for name, entry in self.entries.items():
            kinds.setdefault(entry.shape, []).append(name)
        rows = [
            (folded, str(n_mats), f"{n_cols:,}")
            for (n_mats, n_cols), names in kinds.items()
            for folded in in_layer_ranges(names)
        ]
        return html_table(repr(self), ("weights", "matrices", "columns"), rows)


@dataclass(frozen=True)
class ResolvedImportance:
    """The importances of one tensor, fitted to its rows.

    entry             name of the entry that is used
    matrix            sums (n_groups, n_cols) and counts (n_groups,)
    rows_per_weights  how many of the tensor's rows (counted over all matrices) share a row of values:
                      row r uses number r // rows_per_weights
    n_neutral         how many of the groups have seen nothing and weigh every column alike
    reason            how the tensor found that entry, in a phrase
    """

    entry: str
    matrix: ImportanceEntry
    rows_per_weights: int
    n_neutral: int
    reason: str

    def weights(self) -> npt.NDArray[np.float32]:
        """Return the weights of all groups, float32 (n_groups, n_cols)."""
        return self.matrix.weights()

    def weightings(self) -> Iterator[Weighting]:
        """Yield the weighting of each group of rows, in their order; all are read at once."""
        for values in self.weights():
            yield ColumnWeights(values)

    def weighting_of_row(self, row: int) -> Weighting:
        """Return the weighting of the tensor's row number `row`."""
        return ColumnWeights(self.matrix.row(row // self.rows_per_weights).weights()[0])


def resolve(
    tensor: TensorInfo, importances: Importances, n_heads: int | None = None
) -> ResolvedImportance | None:
    """Return the importances of a tensor, or None when there are none.

    tensor   as in the importance matrix: under its name before pruning
    n_heads  attention heads of the model, for MLA matrices that stack their heads in one 2-D matrix
    raises   BadImportance, with both sizes, when the entry of that name fits no rule. For token_embd alone,
             which is looked up and not multiplied, such an entry is ignored, as in llama-quantize.
    """
    names = (tensor.name, *siblings_with_same_activations(tensor.name))
    entry = next((name for name in names if name in importances), None)
    if entry is None:
        return None
    stored = importances[entry]
    role = tensor_role(tensor.name, tensor.shape).role
    n_groups, rest = divmod(stored.n_values, tensor.n_cols)
    served = _possible_groups(role, tensor, n_heads, n_groups)
    if rest or n_groups not in served:
        if role is Role.TOKEN_EMBD:
            return None
        raise BadImportance(_misfit(tensor, entry, stored, served))
    serves = served[n_groups]
    n_neutral = _count_neutral(stored, n_groups)
    fitted = _in_groups(entry, stored, n_groups)
    if role is Role.ATTN_KV_B and entry != tensor.name and n_groups > 1:
        fitted, serves, n_groups, n_neutral = _mean_over_groups(fitted), "mean over heads", 1, 0
    return ResolvedImportance(
        entry=entry,
        matrix=fitted,
        rows_per_weights=tensor.n_rows // n_groups,
        n_neutral=n_neutral,
        reason=", ".join(part for part in ("" if entry == tensor.name else f"from {entry}", serves) if part),
    )


def _possible_groups(role: Role, tensor: TensorInfo, n_heads: int | None, n_stored: int) -> dict[int, str]:
    """Return how many rows of values the tensor can use, and for each number what one row is for.

    n_stored  rows that there are; no key that llama-quantize reads says how many groups of rows a matrix has
    """
    per_matrix = "one row per head" if role in _MLA else "one row per matrix"
    if tensor.n_mats > 1:
        return {1: ONE_ROW_FOR_ALL, tensor.n_mats: per_matrix}
    if role in _MLA and n_heads is not None and n_heads > 1 and tensor.n_rows % n_heads == 0:
        return {1: "" if role is Role.ATTN_KV_B else ONE_ROW_FOR_ALL, n_heads: per_matrix}
    if has_row_groups(tensor.name) and n_stored > 1 and tensor.n_rows % n_stored == 0:
        return {1: ONE_ROW_FOR_ALL, n_stored: "one row per group of rows"}
    return {1: ""}


def _in_groups(entry: str, stored: ImportanceEntry, n_groups: int) -> ImportanceEntry:
    """Return the entry as (n_groups, n_cols) with a count for each group."""
    if stored.counts.size == n_groups:
        return stored.in_rows(stored.counts)
    if stored.counts.size == 1:
        return stored.in_rows(np.broadcast_to(stored.counts, (n_groups,)))
    raise BadImportance(f"{entry}: found {stored.counts.size} counts for {n_groups} rows of importances")


def _count_neutral(stored: ImportanceEntry, n_groups: int) -> int:
    """Return how many groups have seen nothing.

    With one count for all, as in a `.dat` file, such a group is stored as weights of exactly 1.
    """
    empty = stored.whole_counts() <= 0
    if stored.counts.size == n_groups:
        return int(np.count_nonzero(empty))
    return int(np.count_nonzero((stored.weights().reshape(n_groups, -1) == 1).all(axis=1)))


def _mean_over_groups(grouped: ImportanceEntry) -> Importance:
    """Return all groups as one: their sums and their counts added up."""
    seen = grouped.whole_counts() > 0
    sums = grouped.read()[seen].sum(axis=0, dtype=np.float64, keepdims=True)
    counts = grouped.whole_counts()[seen].sum(dtype=np.float64, keepdims=True)
    if sums.max(initial=0) > np.finfo(np.float32).max:  # a mean is never larger than what it is of
        sums, counts = sums / counts, np.ones(1)
    return Importance(sums.astype(np.float32), counts.astype(np.float32))


def _misfit(tensor: TensorInfo, entry: str, stored: ImportanceEntry, served: dict[int, str]) -> str:
    sizes = (f"{n * tensor.n_cols}{f' ({serves})' if serves else ''}" for n, serves in served.items())
    whose = "its" if entry == tensor.name else f"{entry}'s"
    return (
        f"{tensor.name}: {whose} importances have {stored.n_values} values, expected {' or '.join(sizes)}"
        f" for shape {' x '.join(map(str, tensor.shape))}; was the matrix made for another model?"
    )


def select(
    importances: Importances, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> dict[str, ImportanceEntry]:
    """Return the entries whose name contains one of `include` (all, when empty), or none of `exclude`.

    raises  BadRequest when both are given
    """
    wanted, unwanted = tuple(include), tuple(exclude)
    if wanted and unwanted:
        raise BadArgument("--include-weights and --exclude-weights can't be used together")
    return {
        name: importance
        for name, importance in importances.items()
        if (not wanted or any(part in name for part in wanted)) and not any(part in name for part in unwanted)
    }


_NUMBERS = "biufOV"
"""Kinds of arrays that may be real numbers: objects and what other libraries define, too."""


def checked_weights(importances: npt.ArrayLike, name: str = "") -> npt.NDArray[np.float32]:
    """Read how much columns count as float32.

    name    of the tensor, for messages
    raises  BadImportance for what is no array of numbers, is negative or no finite number
    """
    where = f"{name}: " if name else ""
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(importances)
            if found.dtype.kind not in _NUMBERS:
                raise TypeError
            weights = np.array(found, np.float32, order="C", ndmin=1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadImportance(
            f"{where}found a {type(importances).__name__} as importances, expected an array of numbers"
        ) from error
    good = np.isfinite(weights) & (weights >= 0)
    if not good.all():
        at = int(np.argmin(good))
        raise BadImportance(
            f"{where}the importance of column {at % weights.shape[-1]} is {weights.reshape(-1)[at]},"
            " expected a finite number of at least 0 that fits float32"
        )
    return weights


def refuse_nonfinite(importances: Importances) -> None:
    """Raise BadImportance, naming the first entry with a NaN or an infinity in its values or counts."""
    for name, importance in importances.items():
        for what, numbers in (("values", importance.read()), ("counts", importance.counts)):
            finite = np.isfinite(numbers)
            if not finite.all():
                at = int(np.argmin(finite))
                raise BadImportance(
                    f"{name}: importance {what} number {at} is {numbers.reshape(-1)[at]},"
                    " expected a finite number; collect the importance matrix again"
                )
