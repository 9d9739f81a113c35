"""Where in an ordinary decoder a rule applies: once, or in which layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.rules import Where


def once(config: DecoderConfig, options: Any) -> Iterable[int | None]:
    return (None,)


def untied(config: DecoderConfig, options: Any) -> Iterable[int | None]:
    return () if config.tie_word_embeddings else (None,)


def tied(config: DecoderConfig, options: Any) -> Iterable[int | None]:
    return (None,) if config.tie_word_embeddings else ()


def layers(config: DecoderConfig, options: Any) -> range:
    """Return the layers that the file has: the model's own, then the MTP layers that are kept."""
    return range(config.num_hidden_layers + n_mtp_layers(config, options))


def n_mtp_layers(config: DecoderConfig, options: Any) -> int:
    """Return how many MTP layers are kept: all, unless an option of the family leaves them out."""
    return 0 if getattr(options, "mtp", None) is False else config.num_nextn_predict_layers or 0


def mtp_layers(config: DecoderConfig, options: Any) -> range:
    return layers(config, options)[config.num_hidden_layers :]


def dense_layers(config: DecoderConfig, options: Any) -> range:
    every = layers(config, options)
    return every[: config.first_k_dense_replace] if config.num_experts else every


def moe_layers(config: DecoderConfig, options: Any) -> range:
    every = layers(config, options)
    return every[config.first_k_dense_replace :] if config.num_experts else every[:0]


def layers_if(flag: str, where: Where = layers) -> Where:
    """Return where a rule applies that holds only for models whose configuration has `flag`."""
    return lambda config, options: where(config, options) if getattr(config, flag) else ()
