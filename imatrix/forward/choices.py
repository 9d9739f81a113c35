"""The fields of Cut and ForwardOptions as keyword arguments, for functions that compute a model on a text."""

from __future__ import annotations

from typing import Literal, TypedDict

from gguf_tools.cluster.address import Address
from gguf_tools.number_types import Bytes, Count, Natural, Threads
from imatrix.forward.options import DType, Rounded


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
