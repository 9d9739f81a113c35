"""Weights that several models have in common are decoded once, and no longer kept than they are wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.format.ggml_types import F32, Q4_K, Q8_0, GGMLType
from quantize.formats import get_format

torch = pytest.importorskip("torch")

from imatrix.forward.layers.load import Loader, SharedWeights  # noqa: E402

NAME = "blk.0.attn_output.weight"


@dataclass
class Stored:
    """A tensor in memory that counts how many rows it has decoded."""

    name: str
    type: GGMLType
    values: np.ndarray
    n_decoded: int = 0
    by_rows: bool = True
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.values.shape
        raw = self.values if self.type == F32 else get_format(self.type).encode(self.values, None)
        self._raw = np.ascontiguousarray(raw).view(np.uint8).reshape(len(self.values), -1)

    def raw_rows(self, start: int, stop: int) -> np.ndarray:
        return self._raw[start:stop].ravel()

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        self.n_decoded += stop - start
        if self.type == F32:
            return self.values[start:stop]
        return get_format(self.type).decode(self._raw[start:stop], self.shape[-1])


def some_values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((8, 256)).astype(np.float32)


def loaders(tensors: list[Stored], max_bytes: int = 1 << 20) -> tuple[SharedWeights, list[Loader]]:
    models = [{tensor.name: tensor} for tensor in tensors]
    shared = SharedWeights(models, max_bytes)
    cpu = torch.device("cpu")
    return shared, [Loader(Path("m"), model, cpu, torch.float32, shared=shared) for model in models]


def test_what_is_the_same_is_decoded_once_and_then_forgotten() -> None:
    tensors = [Stored(NAME, Q8_0, some_values(seed)) for seed in (1, 2, 2, 2, 1)]
    shared, models = loaders(tensors)
    found = [load.matrix(NAME, 8, 256) for load in models]
    for tensor, rows in zip(tensors, found, strict=True):
        np.testing.assert_array_equal(rows, tensor.read_rows(0, 8))
        tensor.n_decoded -= 8
    # The last one equals the first, whose rows made room for those of the second.
    assert [tensor.n_decoded for tensor in tensors] == [8, 8, 0, 0, 8]
    assert shared.n_bytes == 0


def test_other_types_shapes_and_floats_are_not_kept() -> None:
    tensors = [
        Stored(NAME, Q8_0, some_values(1)),
        Stored(NAME, Q4_K, some_values(1)),
        Stored("blk.0.attn_q.weight", Q8_0, some_values(1)),
        Stored(NAME, Q8_0, some_values(1)[:4]),
        Stored(NAME, F32, some_values(1)),
        Stored(NAME, F32, some_values(1)),
    ]
    shared, models = loaders(tensors)
    for load, tensor in zip(models, tensors, strict=True):
        load.matrix(tensor.name, *tensor.shape)
        assert shared.n_bytes == 0
    assert all(tensor.n_decoded == len(tensor.values) for tensor in tensors)


def test_what_is_kept_stays_within_the_budget_and_can_be_forgotten() -> None:
    tensors = [Stored(NAME, Q8_0, some_values(1)) for _ in range(2)]
    part = 4 * 256 * 4 + Q8_0.tensor_bytes((4, 256))
    shared, (first, second) = loaders(tensors, max_bytes=part)
    for load in (first, second):
        for start in (0, 4):
            load.weight(load.tensor(NAME), start, start + 4)
            assert shared.n_bytes <= part
    assert [tensor.n_decoded for tensor in tensors] == [8, 4]
    shared.forget()
    assert shared.n_bytes == 0


def test_rows_of_other_dtypes_are_decoded_for_themselves() -> None:
    tensors = [Stored(NAME, Q8_0, some_values(1)) for _ in range(2)]
    _, (first, second) = loaders(tensors)
    first.matrix(NAME, 8, 256)
    half = Loader(second.path, second.tensors, second.device, torch.bfloat16, shared=second.shared)
    assert half.matrix(NAME, 8, 256).dtype == torch.bfloat16
    assert tensors[1].n_decoded == 8
