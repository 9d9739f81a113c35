"""An ordinary decoder as a family, and what to know before running one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.metadata import COMMON
from convert.architectures.decoder.rope import RopeConfig
from convert.architectures.decoder.rules import INV_FREQ
from convert.architectures.rules import Rule


def decoder(
    *hf_names: str,
    gguf_name: str,
    read_config: Callable[[Mapping[str, Any], Path], DecoderConfig],
    rules: tuple[Rule, ...],
    metadata: tuple[Key, ...] = COMMON,
    **differences: Any,
) -> Architecture:
    """Return a family of ordinary decoders; `differences` are other fields of Architecture."""
    shared: dict[str, Any] = {
        "n_experts": lambda config: config.num_experts,
        "drops": lambda config, options: (INV_FREQ,),
        "notes": lambda config, options: decoder_notes(config),
    }
    return Architecture(hf_names, gguf_name, read_config, rules, metadata, **shared | differences)


def decoder_notes(config: DecoderConfig) -> tuple[str, ...]:
    """Return a note for each way in which llama.cpp computes something else than the original."""
    return (*window_notes(config), *_rope_notes(config.rope))


def window_notes(config: DecoderConfig) -> tuple[str, ...]:
    """Return a note for windows that llama.cpp leaves out."""
    window = config.sliding_window
    if window is None or not config.sliding_layers or window >= config.max_position_embeddings:
        return ()
    return (
        f"{len(config.sliding_layers)} layers of the original see the last {window} positions; the file has"
        " no place for that, and llama.cpp lets them see all",
    )


def _rope_notes(rope: RopeConfig) -> tuple[str, ...]:
    if rope.kind == "dynamic":
        return (
            "RoPE of type dynamic: the file says nothing of it, so beyond max_position_embeddings llama.cpp"
            " rotates otherwise",
        )
    if rope.kind == "longrope":
        return ("RoPE of type longrope: the file names it without its factors, and llama.cpp uses none",)
    return ()
