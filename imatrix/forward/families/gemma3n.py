"""The network of Gemma 3n: streams of hidden states, LAuReL beside attention, keys of other layers.

The embeddings, as one more strand, and the token's id stand beside the streams. In models whose last layers
attend to keys of others, these keys follow: those of a layer with a window, then those of a full layer.
"""

from __future__ import annotations

from dataclasses import replace

from convert.architectures.gemma.gemma3n import DEVIATIONS, SPARSE, Gemma3nConfig
from imatrix.forward.families.gemma4 import load_handing_attention
from imatrix.forward.families.parts import network_of, rope_of, unstretched
from imatrix.forward.layer import Attention, Layer
from imatrix.forward.layers.activations import GatedGELU, SparseGELU
from imatrix.forward.layers.altup import (
    StreamBlock,
    StreamEntry,
    StreamMean,
    StreamSpread,
    load_altup,
    load_laurel,
)
from imatrix.forward.layers.attention.shared_keys import (
    HandedKeyAttention,
    HandedKeys,
    HeadSizes,
)
from imatrix.forward.layers.ffn import BlockNames, load_ffn
from imatrix.forward.layers.gemma4 import load_layer_embedding
from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.layers.rope import Rope, Rotation
from imatrix.forward.network import End, LogitRule, Network


def gemma3n_network(config: Gemma3nConfig) -> Network:
    rope = rope_of(config.rope, config.rotated_cols, halves=True)
    shape = config.added_streams, config.hidden_size, config.hidden_size

    def build(load: Loader, number: int, rotate: Rotation) -> Layer:
        attention = _attention(load, number, config, rope, rotate)
        spread = StreamSpread(load.matrix("altup_proj.weight", *shape)) if not number else None
        return _layer(load, number, config, attention, spread)

    def end(load: Loader, norm: RMSNorm) -> End:
        return StreamMean(load.matrix("altup_unembd_proj.weight", *shape), norm)

    shared = config.num_kv_shared_layers and sum(_handed(config, kind).width for kind in (True, False))
    return network_of(
        config,
        rope,
        build,
        n_strands=config.streams + 1,
        n_handed=1 + shared,
        hands_tokens=True,
        end=end,
        embedding_scale=config.hidden_size**0.5,
        logits=LogitRule(softcap=config.final_logit_softcapping),
    )


def _handed(config: Gemma3nConfig, sliding: bool) -> HandedKeys:
    """Return where the keys of a kind of layers stand in what the attention sees."""
    first = HandedKeys(config.hidden_size + 1, config.num_key_value_heads, config.head_dim)
    return first if sliding else replace(first, first=first.first + first.width)


def _attention(load: Loader, number: int, config: Gemma3nConfig, rope: Rope, rotate: Rotation) -> Attention:
    sliding = number in config.sliding_layers
    sizes = HeadSizes(
        hidden=config.hidden_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rotated=config.rotated_cols,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        unit_values=True,
    )
    if sliding:
        local = unstretched(rope, config.sliding_theta or config.rope.theta)
        rotate = local.rotation(len(rotate.turns), load.device)
    return load_handing_attention(load, number, config, sizes, rotate, _handed(config, sliding))


def _layer(
    load: Loader, number: int, config: Gemma3nConfig, attention: Attention, spread: StreamSpread | None
) -> Layer:
    name, hidden, eps = f"blk.{number}", config.hidden_size, config.rms_norm_eps
    altup = load_altup(load, number, hidden, config.streams, eps)
    laurel = load_laurel(load, number, hidden, config.laurel_rank, eps)
    activation = SparseGELU(DEVIATIONS) if number < SPARSE else GatedGELU("tanh")
    block = load_ffn(load, BlockNames.of(number), hidden, config.intermediate_size, activation=activation)
    block = replace(block, post_norm=_norm(load, f"{name}.post_ffw_norm", config))
    norm = _norm(load, f"{name}.ffn_norm", config)
    scale = load.float32(f"{name}.altup_correct_scale.weight", hidden)
    table = config.vocab_size, config.all_layers_input
    added = load_layer_embedding(load, number, table, hidden, config.hidden_size_per_layer_input, eps)
    shows = isinstance(attention, HandedKeyAttention)
    return Layer(
        name,
        attention,
        norm,
        None,
        None,
        StreamEntry(altup, laurel, _norm(load, f"{name}.attn_norm", config), spread, shows),
        StreamBlock(altup, norm, block, scale, added),
    )


def _norm(load: Loader, name: str, config: Gemma3nConfig) -> RMSNorm:
    return RMSNorm(load.float32(f"{name}.weight", config.hidden_size), config.rms_norm_eps)
