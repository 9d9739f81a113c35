"""Definition of a calibration method: a rounding algorithm with a name, its needs, and what it takes.

The life of a method in a run:

  1. Its needs are met. Every method gets the second moments of the inputs of each matrix, damped and factored
     (`Factor`). One with `needs_gradients` gets the factor of the covariance of the gradients at the outputs,
     too, for which the run makes a backward pass first.
  2. `encode` turns rows into bytes. The rows are the original's, with the correction for the drift of the
     inputs added. Threads call it with other rows at the same time.
  3. The run compares the bytes with the stock encoder's: first what the rows cost under these moments, then
     their errors on held-out rows. It keeps the better. So a method does not have to be better everywhere,
     and a type that it can't encode stays stock.
  4. `describe` becomes part of the run's identity: a run resumes only under the same description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.base import Bytes, Floats32
from quantize.rounding.factor import Factor
from quantize.rounding.two_sided import OutputFactor


@dataclass(frozen=True)
class Matrix:
    """Rows to encode, and what is known of their outputs.

    rows     float32 (n_rows, n_cols), finite
    outputs  factor of the covariance of the gradients at the n_rows outputs; None where it is not known
    """

    rows: Floats32
    outputs: OutputFactor | None = None


@dataclass(frozen=True)
class Rates:
    """How long rounding takes on one core, in microseconds for each weight, and each of its row's columns.

    The judge's look at the costs counts in: 0.01 for each weight, and 1.1e-5 for each column.
    """

    weight: float
    column: float

    def seconds(self, info: TensorInfo) -> float:
        """Return how long a tensor takes."""
        return 1e-6 * info.n_elems * (self.weight + self.column * info.n_cols)


@dataclass(frozen=True)
class Method:
    """A rounding algorithm.

    name             as the table and `Calibration.method` have it
    version          goes up whenever the method could give other bytes
    can_encode       whether it has bytes for a type
    encode           (matrices with the same input, type, factor of the input's second moments) -> the bytes
                     of each matrix, uint8 (n_rows, row bytes). A matrix's bytes depend on nothing but these
                     three: not on the matrices beside it, on threads or on the machine
    rates            of a type, for estimates
    needs_gradients  whether `Matrix.outputs` is read
    weight_bytes     memory of a weight while it is encoded, at most, for estimates
    settings         whatever else decides the bytes, as JSON data
    """

    name: str
    version: int
    can_encode: Callable[[GGMLType], bool]
    encode: Callable[[Sequence[Matrix], GGMLType, Factor], list[Bytes]]
    rates: Callable[[GGMLType], Rates]
    needs_gradients: bool = False
    weight_bytes: int = 24
    settings: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Return the facts that decide the method's bytes, as JSON data."""
        return {"name": self.name, "version": self.version, **self.settings}
