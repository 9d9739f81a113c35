"""V4Config: what config.json says about a DeepSeek V4, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from convert.architectures.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from convert.architectures.decoder.rope import RopeConfig, read_rope
from gguf_tools.errors import BadConfig, UnsupportedCheckpoint

NAME = "DeepseekV4ForCausalLM"
OVERLAPPING = 4
"""The ratio whose windows overlap, so that keys and gates have twice the columns, and which has indexers."""


@dataclass(frozen=True)
class V4Config:
    """What a model is made of; names as in config.json.

    compress_ratios  per layer how many positions are compressed to one; 0 where none are
    mtp_ratios       the same for what comes after the model's own layers, as far as config.json goes
    heavy_ratio      the ratio of compressing layers without an indexer; 1 where there are none
    intermediate_size  None where config.json has none, as in the published models
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int | None
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    qk_rope_head_dim: int
    max_position_embeddings: int
    sliding_window: int
    rms_norm_eps: float
    rope: RopeConfig
    compress_rope_theta: float
    compress_ratios: tuple[int, ...]
    heavy_ratio: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    tie_word_embeddings: bool
    mtp_ratios: tuple[int, ...] = ()

    light_ratio: ClassVar[int] = OVERLAPPING
    hc_scales: ClassVar[int] = 3
    hc_head_scales: ClassVar[int] = 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: str | Path = "config.json") -> V4Config:
        """Return the configuration in `raw`, the content of `path`.

        raises  BadConfig naming file and key, UnsupportedCheckpoint for what no file can say
        """
        read = ConfigReader(raw, path)
        read.architecture((NAME,))
        read.fixed("hidden_act", "silu", "llama.cpp's deepseek4 has no other activation")
        read.fixed("attention_bias", False, "llama.cpp's deepseek4 has no attention biases")
        n_layers = read.size("num_hidden_layers", most=MAX_LAYERS)
        n_experts = read.size("n_routed_experts", most=MAX_EXPERTS)
        heads, head_dim = read.size("num_attention_heads"), read.size("head_dim")
        groups = read.size("o_groups", 8)
        if heads % groups:
            raise read.bad("o_groups", f"a divisor of num_attention_heads ({heads})")
        context = read.size("max_position_embeddings")
        rope = read_rope(read, context)
        if rope.kind not in ("default", "yarn"):
            raise UnsupportedCheckpoint(
                f"{path}: rope_scaling: RoPE of type {rope.kind!r}, expected 'default' or 'yarn'"
            )
        return cls(
            vocab_size=read.size("vocab_size"),
            hidden_size=read.size("hidden_size"),
            intermediate_size=read.size_or_null("intermediate_size", None),
            moe_intermediate_size=read.size("moe_intermediate_size"),
            num_hidden_layers=n_layers,
            num_attention_heads=heads,
            num_key_value_heads=read.size("num_key_value_heads", 1, most=1),
            head_dim=head_dim,
            q_lora_rank=read.size("q_lora_rank"),
            o_lora_rank=read.size("o_lora_rank"),
            o_groups=groups,
            qk_rope_head_dim=read.size("qk_rope_head_dim", most=head_dim),
            max_position_embeddings=context,
            sliding_window=read.size("sliding_window"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope=rope,
            compress_rope_theta=read.number("compress_rope_theta", 160000.0),
            **_ratios(read, n_layers),
            n_routed_experts=n_experts,
            n_shared_experts=read.size("n_shared_experts", 1),
            num_experts_per_tok=read.size("num_experts_per_tok", most=n_experts),
            num_hash_layers=read.size("num_hash_layers", 3, least=0, most=n_layers),
            scoring_func=read.choice("scoring_func", ("sqrtsoftplus", "softmax", "sigmoid")),
            norm_topk_prob=read.flag("norm_topk_prob", True),
            routed_scaling_factor=read.number("routed_scaling_factor", 1.5),
            swiglu_limit=read.number("swiglu_limit", 10.0),
            index_n_heads=read.size("index_n_heads"),
            index_head_dim=read.size("index_head_dim"),
            index_topk=read.size("index_topk"),
            hc_mult=read.size("hc_mult", 4),
            hc_sinkhorn_iters=read.size("hc_sinkhorn_iters", 20),
            hc_eps=read.number("hc_eps", 1e-6),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
        )

    @property
    def q_rows(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def o_cols(self) -> int:
        """Columns of wo_a: a group's share of all heads."""
        return self.q_rows // self.o_groups

    @property
    def o_rows(self) -> int:
        """Rows of wo_a, columns of wo_b: what all groups are compressed to."""
        return self.o_groups * self.o_lora_rank

    @property
    def two_heads(self) -> int:
        """Columns of compressed keys where windows overlap."""
        return 2 * self.head_dim

    @property
    def two_index_heads(self) -> int:
        return 2 * self.index_head_dim

    @property
    def index_q_rows(self) -> int:
        return self.index_n_heads * self.index_head_dim

    @property
    def hc_cols(self) -> int:
        """Columns of the hyper-connections' matrices: all streams of hidden states."""
        return self.hc_mult * self.hidden_size

    @property
    def hc_rows(self) -> int:
        """What a hyper-connection mixes: one weight a stream before and after, and streams with streams."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def shared_intermediate_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size


def _ratios(read: ConfigReader, n_layers: int) -> dict[str, Any]:
    """Return compress_ratios of the model's layers, the heavy one among them, and those of MTP layers."""
    ratios = read.raw.get("compress_ratios")
    are_numbers = isinstance(ratios, list) and all(type(ratio) is int and ratio >= 0 for ratio in ratios)
    if not isinstance(ratios, list) or not are_numbers or len(ratios) < n_layers:
        found = str(ratios)[:80]
        raise BadConfig(
            f"{read.path}: compress_ratios is {found}, expected a number for each of {n_layers} layers"
        )
    own = tuple(ratios[:n_layers])
    heavy = {ratio for ratio in own if ratio not in (0, OVERLAPPING)}
    if len(heavy) > 1:
        raise read.bad("compress_ratios", f"0, {OVERLAPPING} and at most one other ratio")
    return {
        "compress_ratios": own,
        "heavy_ratio": heavy.pop() if heavy else 1,
        "mtp_ratios": tuple(ratios[n_layers:]),
    }
