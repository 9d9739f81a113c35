"""The fields of Cut and ForwardOptions as keyword arguments, for functions that compute a model on a text."""

from __future__ import annotations

from typing import Literal, TypedDict

from forward.options import DType, Rounded


class CutChoices(TypedDict, total=False):
    """The fields of Cut as keyword arguments."""

    chunk_size: int
    from_chunk: int
    n_chunks: int | None
    parse_special: bool


class ForwardChoices(TypedDict, total=False):
    """The fields of ForwardOptions as keyword arguments."""

    device: str | None
    dtype: DType
    n_threads: int | None
    memory_bytes: int
    all_experts: bool
    like: Literal["llama.cpp"] | None
    half_cache: bool
    rounded: Rounded | None
    scheduler: str | None
