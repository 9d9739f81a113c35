"""Where in a decoder a rule applies: once, or in which layers.

A configuration says how many layers there are (`num_hidden_layers`, `num_nextn_predict_layers`), which have
experts (`num_experts`, `first_k_dense_replace`), and whether the embeddings are the output matrix
(`tie_word_embeddings`). The option `mtp`, where a family has it, says whether MTP layers are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from convert.architectures.rules import Drop, Where
from gguf_tools.errors import BadRequest


def once(config: Any, options: Any) -> Iterable[int | None]:
    return (None,)


def untied(config: Any, options: Any) -> Iterable[int | None]:
    return () if config.tie_word_embeddings else (None,)


def tied(config: Any, options: Any) -> Iterable[int | None]:
    return (None,) if config.tie_word_embeddings else ()


def layers(config: Any, options: Any) -> range:
    """Return the layers that the file has: the model's own, then the MTP layers that are kept."""
    return range(config.num_hidden_layers + n_mtp_layers(config, options))


def n_mtp_layers(config: Any, options: Any) -> int:
    """Return how many MTP layers are kept: all, unless an option of the family leaves them out."""
    return 0 if getattr(options, "mtp", None) is False else config.num_nextn_predict_layers or 0


def mtp_layers(config: Any, options: Any) -> range:
    return layers(config, options)[config.num_hidden_layers :]


def dense_layers(config: Any, options: Any) -> range:
    every = layers(config, options)
    return every[: config.first_k_dense_replace] if config.num_experts else every


def moe_layers(config: Any, options: Any) -> range:
    every = layers(config, options)
    return every[config.first_k_dense_replace :] if config.num_experts else every[:0]


def layers_if(flag: str, where: Where = layers) -> Where:
    """Return where a rule applies that holds only for models whose configuration has `flag`."""
    return lambda config, options: where(config, options) if getattr(config, flag) else ()


def check_mtp(config: Any, options: Any) -> None:
    """Raise BadRequest for an MTP layer that the model doesn't have."""
    if options.mtp and not config.num_nextn_predict_layers:
        raise BadRequest(
            "--mtp: config.json has no num_nextn_predict_layers, so there is no MTP layer to keep"
        )


def drop_mtp(config: Any, kept: str) -> Drop:
    """Return the rule that leaves the MTP layers out; `kept` says what would keep them."""
    return Drop(
        lambda name: _layer_of(name) >= config.num_hidden_layers, f"multi-token prediction layer; kept {kept}"
    )


def _layer_of(name: str) -> int:
    """Return the layer that a weight belongs to, -1 for none."""
    match = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return int(match[1]) if match else -1
