"""How a forward pass is computed, and that it needs torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, TypedDict

from gguf_tools.argument_types import Bytes, CheckedFields, Count, Natural, Threads
from gguf_tools.cluster.address import Address
from gguf_tools.errors import BadRequest
from gguf_tools.system.files import absolute

DType = Literal["float32", "bfloat16"]

Rounded = Literal["weights", "activations"]


@dataclass(frozen=True)
class ForwardOptions(CheckedFields):
    """How a forward pass is computed.

    device        "cpu", "cuda" ...; None: CUDA where there is one, else the CPU
    dtype         the type that matrices are multiplied in
    n_threads     threads that torch uses; None: torch decides
    memory_bytes  budget for hidden states; beyond it they are kept in a file
    all_experts   show the observer every token for every expert; what the model computes stays the same
    like          "llama.cpp": round activations as its CPU kernels do; None: they stay as they are
    half_cache    round to F16 what later tokens attend to, as llama.cpp's cache does; only with float32
    rounded       compute the model as another file of it would be; only with float32. "weights": matrices are
                  rounded to BF16, as in a file that the converter makes. "activations": the weights stay, but
                  what matrices multiply is rounded as llama.cpp's CPU kernels do for quantized ones, and the
                  cache is F16
    scheduler     address of a Dask scheduler whose workers compute layers, or local:N for N processes here
    """

    device: str | None = None
    dtype: DType = "float32"
    n_threads: Threads | None = None
    memory_bytes: Bytes = 4 << 30
    all_experts: bool = False
    like: Literal["llama.cpp"] | None = None
    half_cache: bool = False
    rounded: Rounded | None = None
    scheduler: Address | None = None


class CutChoices(TypedDict, total=False):
    """The fields of Cut as keyword arguments."""

    chunk_size: Count
    from_chunk: Natural
    n_chunks: Count | None
    parse_special: bool


class ModelChoices(TypedDict, total=False):
    """The fields of ForwardOptions as keyword arguments, but for those that a run has, too."""

    device: str | None
    dtype: DType
    memory_bytes: Bytes
    all_experts: bool
    like: Literal["llama.cpp"] | None
    half_cache: bool
    rounded: Rounded | None


class ForwardChoices(ModelChoices, total=False):
    """The fields of ForwardOptions as keyword arguments."""

    n_threads: Threads | None
    scheduler: Address | None


def require_torch(purpose: str) -> None:
    """Raise BadRequest saying what to install where torch is missing; `purpose` begins the message.

    raises  MissingFile, too, where the working directory is gone: MKL would end the process
    """
    absolute(".")
    if importlib.util.find_spec("torch") is None:
        raise BadRequest(f"{purpose} needs torch: pip install 'gguf-tools[torch]', or '.[torch]' in a clone")
