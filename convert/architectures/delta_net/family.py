"""Parts that the families with gated delta nets have in common: MTP layers, notes, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.rules import INV_FREQ, check_mtp, keep_mtp_of, n_mtp_layers
from convert.architectures.delta_net.config import DeltaNetConfig
from convert.architectures.delta_net.metadata import METADATA
from convert.architectures.delta_net.rules import DROP_MTP, DROP_VISION, MTP_PROJECTION, rules
from convert.architectures.options import MTPOptions
from convert.architectures.rules import Drop, OutputTensor, Rule
from gguf_tools.format.ggml_types import F32, GGMLType


def family(
    *hf_names: str,
    gguf_name: str,
    read_config: Callable[[Mapping[str, Any], Path], DeltaNetConfig],
    delta_nets: tuple[Rule, ...],
    **differences: Any,
) -> Architecture:
    """Return a family whose delta nets have the rules `delta_nets`; `differences` as `decoder` takes them."""
    return decoder(
        *hf_names,
        gguf_name=gguf_name,
        read_config=read_config,
        rules=rules(delta_nets),
        metadata=METADATA,
        options=MTPOptions,
        check=check_mtp,
        resolve_options=partial(keep_mtp_of, MTP_PROJECTION),
        drops=_drops,
        notes=lambda config, options: (*decoder_notes(config), *_norm_notes(config)),
        forced_type=float32_kernels,
        **differences,
    )


_EPS = 1e-6
"""Epsilon that transformers adds before a delta net's queries and keys are divided by lengths (l2norm)."""


def _norm_notes(config: DeltaNetConfig) -> tuple[str, ...]:
    if config.rms_norm_eps == _EPS:
        return ()
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: llama.cpp adds it to lengths of queries and keys of delta"
        f" nets, too, where the original adds {_EPS:g}",
    )


def _drops(config: DeltaNetConfig, options: MTPOptions) -> tuple[Drop, ...]:
    return INV_FREQ, DROP_VISION, *(() if n_mtp_layers(config, options) else (DROP_MTP,))


def float32_kernels(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return F32 for the kernels of convolutions, as llama.cpp's converter stores them."""
    return F32 if tensor.name.endswith("ssm_conv1d.weight") else None
