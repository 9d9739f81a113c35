"""Where in a DeepSeek model a rule applies: once, or in which layers."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from convert.architectures.deepseek2.config import GLM_DSA, GLM_LITE, V32, DeepseekConfig
from convert.architectures.options import LatentOptions
from convert.architectures.rules import Where

KEEPS_MTP = (GLM_LITE, GLM_DSA, V32)
"""Architectures whose multi-token-prediction layers llama.cpp's converter keeps."""


def resolve_options(
    config: DeepseekConfig, options: LatentOptions, names: Container[str] | None
) -> LatentOptions:
    """Return `options` with mtp decided: by the user, else by architecture, if the checkpoint has the layer.

    names  of the checkpoint's weights; None where they aren't known, which counts as having them
    """
    if options.mtp is not None or not config.num_nextn_predict_layers:
        return options
    norm = f"model.layers.{config.num_hidden_layers}.input_layernorm.weight"
    there = names is None or norm in names
    return replace(options, mtp=there and config.architecture in KEEPS_MTP)


def once(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    return (None,)


def layers(config: DeepseekConfig, options: LatentOptions) -> range:
    """Return the layers that the file has: the model's own, then the MTP layers if they are kept."""
    return range(config.num_hidden_layers + (config.num_nextn_predict_layers if options.mtp else 0))


def mtp_layers(config: DeepseekConfig, options: LatentOptions) -> range:
    return layers(config, options)[config.num_hidden_layers :]


def dense_layers(config: DeepseekConfig, options: LatentOptions) -> range:
    return layers(config, options)[: config.first_k_dense_replace]


def moe_layers(config: DeepseekConfig, options: LatentOptions) -> range:
    return layers(config, options)[config.first_k_dense_replace :]


def biased_moe_layers(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    return moe_layers(config, options) if config.topk_method == "noaux_tc" else ()


def lora_q_layers(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    return () if config.q_lora_rank is None else layers(config, options)


def full_q_layers(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    return layers(config, options) if config.q_lora_rank is None else ()


def layers_with(mla: str) -> Where:
    return lambda config, options: layers(config, options) if options.mla == mla else ()


def untied(config: DeepseekConfig, options: LatentOptions) -> Iterable[int | None]:
    return () if config.tie_word_embeddings else (None,)
