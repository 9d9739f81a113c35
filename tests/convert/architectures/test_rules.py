"""The rule engine by itself, on a family of two rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.architectures.rules import Drop, Output, Renamed, Rule, Stacked, match, stacked
from gguf_tools.errors import CheckpointError, MissingTensor, UnexpectedTensors
from gguf_tools.format.ggml_types import BF16, F16, F32, GGMLType
from quantize.fill.sources import HeadRows, TransposedHeads


@dataclass(frozen=True)
class ArrayWeight:
    """A Weight over an array; counts what is read."""

    name: str
    array: np.ndarray
    type: GGMLType = F32
    read: list[tuple[int, int]] = field(default_factory=list)
    stored_as: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        self.read.append((start, stop))
        return self.array.reshape(-1, self.array.shape[-1])[start:stop]


class FakeCheckpoint:
    folder = Path("folder")
    is_of_mlx = False

    def __contains__(self, name: object) -> bool:
        return False


class FakeLoader:
    """A loader over arrays, in the order given."""

    checkpoint: Any = FakeCheckpoint()
    dropped: Mapping[str, str] = {}
    last: frozenset[str] = frozenset()

    def __init__(self, **arrays: np.ndarray) -> None:
        self.weights = {name.replace("__", "."): ArrayWeight(name, array) for name, array in arrays.items()}

    def names(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def weight(self, name: str) -> Any:
        return self.weights[name]


@dataclass(frozen=True)
class Config:
    rows: int = 2
    cols: int = 3
    n_layers: int = 2


def layers(config: Config, options: Any) -> range:
    return range(config.n_layers)


RULES = (
    Rule(lambda config, options: (None,), (Output("head", "norm", "cols"),)),
    Rule(layers, (
        Output("blk.{layer}.down", "l{layer}.e{expert}.down", "rows cols", stacked),
        Output("blk.{layer}.up", "l{layer}.e{expert}.up", "rows cols", stacked),
    )),
    Rule(layers, (Output("blk.{layer}.gate", "l{layer}.gate", "rows cols"),)),
)  # fmt: skip

VECTOR, MATRIX = np.ones(3, np.float32), np.ones((2, 3), np.float32)
ORDER = ["l0__e0__up", "l0__e0__down", "l0__gate", "l0__e1__up", "l1__gate", "l0__e1__down", "l1__e0__up",
         "l1__e1__up", "l1__e1__down", "l1__e0__down"]  # fmt: skip


def run(loader: Any, drops: tuple[Drop, ...] = ()) -> Any:
    return match(loader, RULES, drops, Config(), None, 2)


def test_outputs_stand_where_their_last_source_stands() -> None:
    tensors, dropped = run(FakeLoader(norm=VECTOR, **dict.fromkeys(ORDER, MATRIX)))
    assert [tensor.name for tensor in tensors] == [
        "head", "blk.0.gate", "blk.1.gate", "blk.0.down", "blk.0.up", "blk.1.down", "blk.1.up",
    ]  # fmt: skip
    assert dropped == {}
    assert isinstance(tensors[0], Renamed)
    assert isinstance(tensors[3], Stacked)
    assert tensors[3].shape == (2, 2, 3)


def test_missing_sources_are_listed_in_the_order_of_the_rules() -> None:
    arrays = dict.fromkeys([name for name in ORDER if "e1" not in name], MATRIX)
    with pytest.raises(MissingTensor) as caught:
        run(FakeLoader(norm=VECTOR, **arrays))
    assert str(caught.value) == (
        "folder: missing 4 tensors: l0.e1.down, l0.e1.up, l1.e1.down, l1.e1.up, which config.json promises"
    )


def test_leftovers_are_listed_unless_dropped() -> None:
    loader = FakeLoader(norm=VECTOR, **dict.fromkeys(ORDER, MATRIX), extra=MATRIX, other=MATRIX)
    with pytest.raises(
        UnexpectedTensors, match="folder: unexpected 2 tensors: extra, other: no rule claims or drops"
    ):
        run(loader)
    _, dropped = run(loader, (Drop(lambda name: name == "extra", "first"), Drop(lambda name: True, "second")))
    # A rule's claim comes before any drop.
    assert dropped == {"extra": "first", "other": "second"}


def test_a_wrong_shape_is_named_with_the_sizes_it_should_have() -> None:
    arrays = dict.fromkeys(ORDER, MATRIX) | {"l1__e1__up": MATRIX.T}
    with pytest.raises(
        CheckpointError, match=r"l1__e1__up: shape \(3, 2\), expected \(2, 3\) .*\(rows, cols\)"
    ):
        run(FakeLoader(norm=VECTOR, **arrays))


# ---- arrangements


def test_a_transposed_head_reads_its_own_rows_only() -> None:
    weight = ArrayWeight("w", np.arange(60, dtype=np.float32).reshape(12, 5))
    tensor = TransposedHeads("t", (3, 5, 2), weight, head_rows=4, first=1, count=2)
    rows = tensor.read_rows(6, 9)
    assert weight.read == [(5, 7)]
    assert np.array_equal(rows, weight.array[5:7].T[1:4])


def test_head_rows_read_no_more_than_asked() -> None:
    weight = ArrayWeight("w", np.arange(60, dtype=np.float32).reshape(12, 5))
    tensor = HeadRows("t", (3, 2, 5), weight, head_rows=4, first=2, count=2)
    assert np.array_equal(tensor.read_rows(1, 5), weight.array[[3, 6, 7, 10]])
    assert weight.read == [(3, 4), (6, 8), (10, 11)]


def test_an_empty_range_has_no_rows_but_columns() -> None:
    weight = ArrayWeight("w", np.ones((4, 5), np.float16), F16)
    for tensor in (
        HeadRows("t", (2, 1, 5), weight, 2, 0, 1),
        TransposedHeads("t", (2, 5, 1), weight, 2, 0, 1),
        stacked("t", [weight, weight], None),
    ):
        rows = tensor.read_rows(1, 1)
        assert rows.shape == (0, tensor.shape[-1])
        assert rows.dtype == np.float16


def test_a_stack_of_several_types_is_float32() -> None:
    halves = ArrayWeight("a", np.ones((2, 3), np.float16), F16)
    floats = ArrayWeight("b", np.full((2, 3), 2, np.float32))
    stack = stacked("t", [halves, floats], None)
    assert stack.type == F32
    assert stack.read_rows(0, 4).dtype == np.float32
    assert stack.read_rows(1, 3).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert stacked("t", [halves, halves], None).type == F16
    assert stack.type != BF16
