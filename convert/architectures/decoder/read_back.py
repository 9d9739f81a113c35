"""The configuration of an ordinary decoder out of a GGUF file: the inverse of metadata.COMMON.

Keys and tensors can't say everything that config.json says. What they leave open is what llama.cpp computes:

    norm_topk_prob   true, but for glm4moe, whose files say it, and deepseek, which never does
    scoring_func     by expert_gating_func; without one, sigmoid for glm4moe and minimax-m2, softmax otherwise
    sliding layers   the even ones of gpt-oss; other families have no window in their files
    truncate         false for gpt-oss, all of whose models say so
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.rope import RopeConfig
from convert.architectures.gating import GATING_FUNCTIONS, scoring_function
from gguf_tools.errors import FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata

_SIGMOID = ("glm4moe", "minimax-m2")
"""Architectures whose routers have sigmoids where no key says otherwise."""

_SAY_NORM = ("glm4moe", "deepseek")
"""Architectures that normalise the weights of experts where expert_weights_norm says so."""

_SCALED = {"linear": "linear", "yarn": "yarn", "longrope": "longrope", "none": "default"}


def read_decoder(
    architecture: str, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> DecoderConfig:
    """Return what the keys and tensors of a GGUF file say about the model.

    architecture  what general.architecture says
    shapes        tensor name -> shape, rows first
    path          the file, for messages
    raises        FormatError, MissingTensor, UnsupportedCheckpoint, naming the file and the key
    """
    hparams = read_hparams(metadata, architecture, path)
    size = hparams.size
    n_mtp = size("nextn_predict_layers", 0)
    heads, hidden = size("head_count"), size("embedding_length")
    if not heads or not hidden or size("block_count") <= n_mtp:
        raise FormatError(
            f"{path}: {size('block_count') - n_mtp} layers of {hidden} columns and {heads} heads:"
            f" expected a {architecture} model"
        )
    if "token_embd.weight" not in shapes:
        raise MissingTensor(f"{path}: no tensor token_embd.weight")
    n_experts = size("expert_count", 0)
    kv_heads = size("head_count_kv", heads) or heads
    head_dim = size("key_length", hidden // heads)
    q_norm = shapes.get("blk.0.attn_q_norm.weight")
    n_layers = size("block_count") - n_mtp
    is_gpt_oss = architecture == "gpt-oss"
    if heads % kv_heads or head_dim < 2 or head_dim % 2:
        raise FormatError(f"{path}: {heads} heads with {kv_heads} keys of {head_dim} columns")
    return DecoderConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=size("feed_forward_length", 0),
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        stated_head_dim=hparams.first("key_length"),
        max_position_embeddings=size("context_length", 0),
        rms_norm_eps=hparams.number("layer_norm_rms_epsilon", 1e-6),
        rope=_rope(hparams, truncate=not is_gpt_oss),
        rotated_cols=size("rope_dimension_count", head_dim),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        qk_norm=q_norm is not None,
        norms_all_heads=q_norm is not None and q_norm[-1] != head_dim,
        sliding_window=size("sliding_window", 0) or None if is_gpt_oss else None,
        sliding_layers=tuple(range(0, n_layers, 2)) if is_gpt_oss else (),
        num_experts=n_experts,
        num_experts_per_tok=size("expert_used_count", 0),
        moe_intermediate_size=size("expert_feed_forward_length", size("feed_forward_length", 0)),
        num_shared_experts=size("expert_shared_count", 0),
        first_k_dense_replace=size("leading_dense_block_count", 0),
        n_group=size("expert_group_count", 1) or 1,
        topk_group=size("expert_group_used_count", 1) or 1,
        scoring_func=scoring_function(
            hparams, GATING_FUNCTIONS, unset="sigmoid" if architecture in _SIGMOID else "softmax"
        )
        if n_experts
        else None,
        norm_topk_prob=bool(hparams.expert_weights_norm) if architecture in _SAY_NORM else True,
        # llama.cpp takes 0 for "no scaling" too.
        routed_scaling_factor=hparams.number("expert_weights_scale", 1.0) or 1.0,
        num_nextn_predict_layers=n_mtp,
    )


def _rope(hparams: HParams, *, truncate: bool) -> RopeConfig:
    """Return the rotation that the keys describe. Llama 3's is a tensor, and no key tells of it.

    yarn_attn_factor is left out: config.json calls it attn_factor, and neither program computes with it.
    """
    theta = hparams.number("rope_freq_base", 10000.0)
    kind = hparams.rope_scaling_type or "none"
    if kind not in _SCALED:
        raise UnsupportedCheckpoint(
            f"{hparams.path}: RoPE scaled by {kind!r:.40}, expected {', '.join(_SCALED)}"
        )
    context = hparams.size("context_length", 4096)
    return RopeConfig(
        theta,
        _SCALED[kind],
        factor=hparams.rope_scaling_factor,
        original_context=hparams.size("rope_scaling_original_context_length", context) or context,
        beta_fast=hparams.rope_scaling_yarn_beta_fast,
        beta_slow=hparams.rope_scaling_yarn_beta_slow,
        truncate=truncate,
    )
