"""Model families that can be computed.

They are those of `convert.architectures` that read their configuration back from a file's metadata. Of a
folder, the metadata are those that its conversion would have. A row of OWN makes a `Network` of a family's
configuration; without one, a family is an ordinary decoder. All that follows sees the network alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convert.architectures import families, find_by_gguf_name
from convert.architectures.base import Architecture
from convert.architectures.vision.tower import CLIP
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import quoted
from imatrix.forward.families.decoder import decoder_network
from imatrix.forward.families.deepseek2 import deepseek2_network
from imatrix.forward.families.deepseek4 import deepseek4_network
from imatrix.forward.families.encoder import encoder_network
from imatrix.forward.families.gemma3n import gemma3n_network
from imatrix.forward.families.gemma4 import gemma4_network
from imatrix.forward.families.kimi import (
    glm5_next_network,
    kimi_k3_network,
    kimi_linear_network,
    ling3_network,
)
from imatrix.forward.families.nemotron_h import nemotron_network
from imatrix.forward.families.qwen4exp import qwen4exp_network
from imatrix.forward.network import Network

OWN: Mapping[str, Callable[[Any], Network]] = {
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa"), deepseek2_network),
    "deepseek4": deepseek4_network,
    "bailingmoe3": ling3_network,
    **dict.fromkeys(("bert", "modern-bert", "nomic-bert", "nomic-bert-moe"), encoder_network),
    "gemma3n": gemma3n_network,
    "gemma4": gemma4_network,
    "glm5-next": glm5_next_network,
    "kimi-k3": kimi_k3_network,
    "kimi-linear": kimi_linear_network,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), nemotron_network),
    "qwen4exp": qwen4exp_network,
}
"""Makers of the networks of families that are no ordinary decoders, by the name in general.architecture."""


def find_family(path: Path, name: object) -> Architecture:
    """Find the family that GGUF files call `name`; UnsupportedCheckpoint if it can't be computed."""
    if name == CLIP:
        raise UnsupportedCheckpoint(
            f"{path}: a vision tower, which predicts no text; give the file of the model's text part"
        )
    family = find_by_gguf_name(name) if isinstance(name, str) else None
    if family is not None and family.reader is None:
        raise UnsupportedCheckpoint(
            f"{path}: general.architecture is {quoted(name)}: convert-hf-to-gguf and quantize take such a"
            " model, and commands that compute predictions do not"
        )
    if family is None:
        computed = dict.fromkeys(each.gguf_name for each in families() if each.reader is not None)
        known = " or ".join(map(repr, computed))
        raise UnsupportedCheckpoint(f"{path}: general.architecture is {quoted(name)}, expected {known}")
    return family


def network_of_family(family: Architecture, config: Any) -> Network:
    """Build the network of a model of a family by its configuration."""
    own = OWN.get(family.gguf_name)
    return decoder_network(family, config) if own is None else own(config)
