"""Reads the configuration of an encoder back from its file, as llama.cpp takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convert.architectures.base import Architecture
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.metadata import read_decoder
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata
from gguf_tools.text import quoted

_GELU, _SILU = "gelu", "silu"


@dataclass(frozen=True)
class EncoderFile(DecoderConfig):
    """Configuration of an encoder's file; its norms are LayerNorms.

    has_positions  whether positions have embeddings; else queries and keys are rotated
    post_normed    whether norms stand behind attention and block, not before them
    has_silu       whether blocks have SiLU in place of GELU
    moe_every      every so many layers one has experts, the second one first; 0 for none
    """

    has_positions: bool = False
    post_normed: bool = False
    has_silu: bool = False
    moe_every: int = 0


def read_encoder(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> EncoderFile:
    """Return the configuration of a file; see `read_decoder`.

    raises  UnsupportedCheckpoint for one whose tokens see no later ones, or for another activation
    """
    hparams = read_hparams(metadata, family.gguf_name, path)
    if hparams.attention_causal is not False:
        raise UnsupportedCheckpoint(
            f"{path}: {hparams.key('attention_causal')} is {quoted(hparams.attention_causal)}, expected"
            " false: the forward pass computes encoders alone for this architecture"
        )
    plain = read_decoder(family, metadata, shapes, path)
    stated = metadata.get(keys.HIDDEN_ACTIVATION.format(arch=family.gguf_name))
    activation = _SILU if family.gguf_name == "nomic-bert" else _GELU if stated is None else stated.data
    if activation not in (_GELU, _SILU):
        raise UnsupportedCheckpoint(f"{path}: blocks with {quoted(activation)}, expected {_GELU} or {_SILU}")
    fields = vars(plain) | {"rms_norm_eps": hparams.number("layer_norm_epsilon", 1e-12)}
    period = hparams.sliding_window_pattern
    if plain.sliding_layers and not isinstance(period, tuple):
        # The first layer of each period sees everything, and not the last one, as in decoders.
        step = 3 if period is None else period
        fields["sliding_layers"] = tuple(n for n in range(plain.num_hidden_layers) if not step or n % step)
    return EncoderFile(
        **fields | {"centred_norms": True},
        has_positions=family.makes("position_embd.weight"),
        post_normed=family.makes("blk.{layer}.attn_output_norm.weight"),
        has_silu=activation == _SILU,
        moe_every=hparams.size("moe_every_n_layers", 0),
    )
