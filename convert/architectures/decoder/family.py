"""An ordinary decoder as a family, and what to know before running one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.metadata import COMMON, read_decoder
from convert.architectures.decoder.rope import RopeConfig, Yarn, paired
from convert.architectures.decoder.rules import INV_FREQ
from convert.architectures.rules import Rule

WINDOWS, LLAMA3, RAMP = "windows", "llama3", "ramp"
"""Facts that the files of some families state and those of others don't: which positions a layer sees; the
rotation of Llama 3, as a tensor; beta_fast and beta_slow, whose keys the loader reads in
src/models/mistral3.cpp and grok.cpp alone."""


def decoder(
    *hf_names: str,
    gguf_name: str,
    read_config: Callable[[Mapping[str, Any], Path], DecoderConfig],
    rules: tuple[Rule, ...],
    metadata: tuple[Key, ...] = COMMON,
    says: frozenset[str] = frozenset(),
    **differences: Any,
) -> Architecture:
    """Return a family of ordinary decoders, with the rotation for which `rules` arrange its queries and keys.

    says         of WINDOWS, LLAMA3 and RAMP: what llama.cpp reads in its files and does not read in others
    differences  other fields of Architecture
    """
    shared: dict[str, Any] = {
        "n_experts": lambda config: config.num_experts,
        "drops": lambda config, options: (INV_FREQ,),
        "notes": lambda config, options: decoder_notes(config, says),
        "reader": read_decoder,
        "rotation": "pairs" if any(output.arrange is paired for rule in rules for output in rule.outputs)
        else "halves",
    }  # fmt: skip
    return Architecture(hf_names, gguf_name, read_config, rules, metadata, **shared | differences)


def decoder_notes(config: DecoderConfig, says: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return a note for each way in which llama.cpp computes something else than the original.

    says  see `decoder`
    """
    return (*(() if WINDOWS in says else window_notes(config)), *rope_notes(config.rope, says))


def window_notes(config: DecoderConfig) -> tuple[str, ...]:
    """Return a note for windows that llama.cpp leaves out."""
    window = config.sliding_window
    if window is None or not config.sliding_layers or window >= config.max_position_embeddings:
        return ()
    return (
        f"sliding window: {len(config.sliding_layers)} layers of the original see the last {window}"
        " positions; the file has no place for that, and llama.cpp lets them see all",
    )


def rope_notes(rope: RopeConfig, says: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return a note for a rotation that llama.cpp computes otherwise; `says` as in `decoder`."""
    if rope.kind == "dynamic":
        return (
            "RoPE of type dynamic: a GGUF file can't say this, so beyond max_position_embeddings llama.cpp"
            " rotates differently",
        )
    if rope.kind == "longrope":
        return ("RoPE of type longrope: the file names it without its factors, and llama.cpp uses none",)
    if rope.kind == "llama3" and LLAMA3 not in says:
        return ("RoPE of type llama3: llama.cpp has no place for it in this family, and stretches nothing",)
    return () if rope.yarn is None else yarn_notes(rope.yarn, says)


def yarn_notes(yarn: Yarn, says: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return a note for the ends of YaRN's ramp where llama.cpp reads no key for them."""
    notes = []
    if RAMP not in says and (yarn.beta_fast, yarn.beta_slow) != (32.0, 1.0):
        fast = f" --yarn-beta-fast {yarn.beta_fast:g}" if yarn.beta_fast != 32.0 else ""
        slow = f" --yarn-beta-slow {yarn.beta_slow:g}" if yarn.beta_slow != 1.0 else ""
        notes.append(
            f"YaRN with beta_fast {yarn.beta_fast:g} and beta_slow {yarn.beta_slow:g}: llama.cpp takes them"
            f" for 32 and 1 whatever the file says, which gives other logits; run it with{fast}{slow}"
        )
    if not yarn.truncate:
        notes.append(
            "YaRN with truncate false: llama.cpp rounds the ends of the ramp to whole pairs of columns, and"
            " rotates some otherwise"
        )
    return tuple(notes)
