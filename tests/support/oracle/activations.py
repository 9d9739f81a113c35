"""What llama.cpp's matrices multiply: sums of squares of each column, as llama-imatrix adds them up."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.oracle.library import Signatures, declared
from tests.support.oracle.model import Model


class Tensor(c.Structure):
    """struct ggml_tensor, up to its name"""


Tensor._fields_ = [
    ("type", c.c_int),
    ("buffer", c.c_void_p),
    ("ne", c.c_int64 * 4),
    ("nb", c.c_size_t * 4),
    ("op", c.c_int),
    ("op_params", c.c_int32 * 16),
    ("flags", c.c_int32),
    ("src", c.POINTER(Tensor) * 10),
    ("view_src", c.c_void_p),
    ("view_offs", c.c_size_t),
    ("data", c.c_void_p),
    ("name", c.c_char * 64),
]

CALLBACK = c.CFUNCTYPE(c.c_bool, c.POINTER(Tensor), c.c_bool, c.c_void_p)
"""Type of cb_eval: asked whether it wants a node's values, then shown the node."""

SIGNATURES: Signatures = {"ggml_op_name": (c.c_char_p, [c.c_int])}


@dataclass
class Sums:
    """What a matrix, or a stack of them, has multiplied.

    squares  float64 (n_mats, n_cols)
    counts   int64 (n_mats,): rows seen
    """

    squares: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    def add(self, mat: int, rows: npt.NDArray[np.float32]) -> None:
        self.squares[mat] += np.einsum("ij,ij->j", rows, rows)
        self.counts[mat] += len(rows)


def observed(model: Model, token_ids: Sequence[int], *, n_threads: int = 2, **how: Any) -> dict[str, Sums]:
    """Return what each matrix of a model multiplies while llama.cpp decodes tokens as one chunk.

    how  options of `Model.logits`
    """
    how["n_threads"] = n_threads
    return sums_by_matrix(lambda observe: model.logits(token_ids, observe=observe, **how))


def sums_by_matrix(run: Callable[[Any], object]) -> dict[str, Sums]:
    """Return what each matrix multiplies in what `run` has llama.cpp compute.

    run  is given the callback that is to observe it
    """
    sums: dict[str, Sums] = {}
    product, by_expert = _operation(b"MUL_MAT"), _operation(b"MUL_MAT_ID")

    def take(node: Any, ask: bool, _user: object) -> bool:
        found = node.contents
        if found.op not in (product, by_expert):
            return False
        matrix = found.src[0].contents
        name = matrix.name.decode()
        if ask or not name.endswith(".weight"):
            return name.endswith(".weight")
        n_mats = int(matrix.ne[2])
        if name not in sums:
            sums[name] = Sums(np.zeros((n_mats, matrix.ne[0])), np.zeros(n_mats, np.int64))
        rows = _array(found.src[1].contents, np.float32)[0]
        if found.op == by_expert:
            experts = _array(found.src[2].contents, np.int32)[0, 0]
            for expert in range(n_mats):
                tokens, slots = np.nonzero(experts == expert)
                sums[name].add(expert, rows[tokens, slots % rows.shape[1]])
        else:
            for mat, some in enumerate(rows):
                sums[name].add(mat % n_mats, some)
        return True

    run(CALLBACK(take))
    return sums


@cache
def _operation(name: bytes) -> int:
    """Return the number of a kind of node."""
    lib = declared(SIGNATURES)
    return next(number for number in range(200) if lib.ggml_op_name(number) == name)


def _array(tensor: Any, dtype: Any) -> npt.NDArray[Any]:
    """Return a tensor's values where they lie, last axis first: (ne[3], ne[2], ne[1], ne[0])."""
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    n_bytes = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + strides[-1]
    data = (c.c_char * n_bytes).from_address(tensor.data)
    return np.ndarray(shape, dtype, buffer=data, strides=strides)
