"""MiniMax-M3: experts with gpt-oss's gate, and attention to blocks of positions that an indexer chooses.

The leading layers have a dense block and attend to all positions; all others have experts and an indexer.
Norms are stored less one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    FULL,
    DecoderConfig,
    decoder_fields,
    expert_fields,
    layers_of_kind,
    leading_dense_layers,
    with_defaults,
)
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    DENSE_LAYERS,
    EXPERT_NORM,
    EXPERT_SCALE,
    EXPERT_WIDTH,
    ROTATED_COLS,
    SHARED_EXPERTS,
    read_decoder,
)
from convert.architectures.decoder.rules import (
    attention,
    biased_router,
    dense_blocks,
    dense_layers,
    ends,
    expert_stacks,
    gate_rows,
    in_layer,
    moe_layers,
    norm_of_blocks,
    respelled,
    shared_experts,
    up_rows,
)
from convert.architectures.gemma.gemma3 import vision_drops
from convert.architectures.options import NoOptions
from convert.architectures.rules import Drop, Output, OutputTensor, Rule, Where, plus_one
from convert.tokenizer.files import Quirks
from gguf_tools.errors import FormatError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32, GGMLType
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata, Value

_CLASS = "MiniMaxM3VLForCausalLM"
"""The class of transformers whose defaults count under every name of the model."""

_INDEXED = "minimax_m3_sparse"
"""Value of layer_types for a layer with an indexer."""

_WHY = "llama.cpp's minimax-m3 has no other"


@dataclass(frozen=True)
class BlockIndexer:
    """The indexer of a layer: it chooses blocks of positions, for each head of keys its own.

    n_heads      of queries, one for each head of keys; they share one key
    head_dim     columns of a head
    block_size   positions of a block
    n_chosen     blocks that a token attends to
    n_local      of these, the token's own block and those just before it, whatever their scores
    """

    n_heads: int
    head_dim: int
    block_size: int
    n_chosen: int
    n_local: int

    @property
    def n_positions(self) -> int:
        """Positions that a token attends to at most."""
        return self.block_size * self.n_chosen

    def problem(self, n_kv_heads: int, rotated_cols: int) -> str | None:
        """Say what is wrong with the sizes in a model; None where llama.cpp takes them."""
        if self.n_heads != n_kv_heads:
            heads = f"the indexer has {self.n_heads} heads (index_n_heads)"
            return f"{heads}, expected {n_kv_heads}, as keys have (num_key_value_heads)"
        if self.head_dim < rotated_cols:
            cols = f"the indexer's heads have {self.head_dim} columns (index_head_dim)"
            return f"{cols}, expected {rotated_cols} at least: so many are rotated"
        if not self.block_size or not self.n_chosen or self.n_local > self.n_chosen:
            return (
                f"the indexer chooses {self.n_chosen} blocks of {self.block_size} positions, and"
                f" {self.n_local} of them in any case, expected no more in any case than in all"
                " (index_local_blocks, index_topk_blocks)"
            )
        return None


@dataclass(frozen=True)
class BlockIndexedConfig(DecoderConfig):
    """Configuration of a model whose layers with experts have an indexer."""

    indexer: BlockIndexer = BlockIndexer(4, 128, 128, 16, 1)

    @property
    def index_q_rows(self) -> int:
        """Rows of the indexer's queries."""
        return self.indexer.n_heads * self.indexer.head_dim

    @property
    def index_head_dim(self) -> int:
        """Columns of a head of the indexer, and rows of its keys."""
        return self.indexer.head_dim

    @property
    def both_shared_rows(self) -> int:
        """Rows of the shared experts' gate and up stored as one."""
        return 2 * self.shared_intermediate_size


def read_config(raw: Mapping[str, Any], path: str | Path) -> BlockIndexedConfig:
    """Return the configuration of a MiniMax-M3."""
    stated = ConfigReader(raw, path)
    stated.choice("hidden_act", ("swigluoai", "silu"))  # transformers computes the one for either
    sparse = raw.get("sparse_attention_config") or {}
    if not isinstance(sparse, dict):
        raise stated.bad("sparse_attention_config", "an object")
    kinds = {
        "mlp_layer_types": _by_flags(raw.get("moe_layer_freq"), "dense", "sparse"),
        "layer_types": _by_flags(sparse.get("sparse_attention_freq"), FULL, _INDEXED),
    }
    unsaid = {key: flags for key, flags in kinds.items() if raw.get(key) is None}
    read = with_defaults(merged(raw, {**unsaid, "hidden_act": "silu"}), path, name=_CLASS)
    for key, value in (
        ("swiglu_alpha", 1.702), ("swiglu_limit", 7.0), ("use_gemma_norm", True), ("use_qk_norm", True),
        ("qk_norm_type", "per_head"), ("attention_output_gate", False), ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
    ):  # fmt: skip
        read.fixed(key, value, _WHY)
    read.overruled("num_nextn_predict_layers", "num_mtp_modules")
    fields = {**decoder_fields(read, theta=5e6), **expert_fields(read)}
    rotated, width = fields["rotated_cols"], fields["intermediate_size"]
    if stated.size_or_null("rotary_dim", None) not in (None, rotated):
        share = "partial_rotary_factor in rope_parameters, or rope_scaling"
        raise stated.bad("rotary_dim", f"{rotated}, as head_dim and {share}, have it")
    n_layers, shared = fields["num_hidden_layers"], read.size("shared_intermediate_size")
    n_shared = read.size("n_shared_experts", shared // width if width else 0)
    if n_shared * width != shared:
        raise read.bad("shared_intermediate_size", f"n_shared_experts ({n_shared}) times intermediate_size")
    n_dense = leading_dense_layers(read, n_layers, 0)
    indexed = layers_of_kind(read, n_layers, lambda layer: False, _INDEXED)
    if indexed != tuple(range(n_dense, n_layers)):
        raise read.bad(
            "layer_types", f"{_INDEXED!r} where mlp_layer_types is 'sparse', and there alone: {_WHY}"
        )
    return BlockIndexedConfig(
        **{**fields, "intermediate_size": read.size("dense_intermediate_size")},
        qk_norm=True,
        moe_intermediate_size=width,
        num_shared_experts=n_shared,
        first_k_dense_replace=n_dense,
        scoring_func="sigmoid",
        routed_scaling_factor=read.number("routed_scaling_factor"),
        indexer=_read_indexer(read, ConfigReader(sparse, path, "sparse_attention_config."), fields),
    )


def _by_flags(flags: Any, without: str, with_it: str) -> Any:
    """Return kinds of layers for a flag each, as they are published; what is no list stays for a message."""
    return [with_it if flag else without for flag in flags] if isinstance(flags, list) else flags


def _read_indexer(read: ConfigReader, sparse: ConfigReader, fields: Mapping[str, Any]) -> BlockIndexer:
    """Return the sizes of the indexer: those of sparse_attention_config count before those beside it."""
    sparse.fixed("use_sparse_attention", True, _WHY)
    sparse.fixed("sparse_score_type", "max", _WHY)
    sparse.fixed("sparse_init_block", 0, _WHY)
    sparse.overruled("sparse_disable_index_value")  # without it, the checkpoint has weights for such values

    def size(name: str, published: str, least: int = 1) -> int:
        return sparse.size(published, read.size(name, least=least), least=least)

    indexer = BlockIndexer(
        n_heads=size("index_n_heads", "sparse_num_index_heads"),
        head_dim=size("index_head_dim", "sparse_index_dim"),
        block_size=size("index_block_size", "sparse_block_size"),
        n_chosen=size("index_topk_blocks", "sparse_topk_blocks"),
        n_local=size("index_local_blocks", "sparse_local_block", 0),
    )
    problem = indexer.problem(fields["num_key_value_heads"], fields["rotated_cols"])
    if problem is not None:
        raise UnsupportedCheckpoint(f"{read.path}: {problem}")
    return indexer


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> BlockIndexedConfig:
    """Return the configuration in a file, see `read_decoder`, with the indexer's."""
    plain = read_decoder(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    indexer = BlockIndexer(
        n_heads=hparams.size("indexer_head_count"),
        head_dim=hparams.size("indexer_key_length"),
        block_size=hparams.size("indexer_block_size"),
        n_chosen=hparams.size("indexer_top_k"),
        n_local=hparams.size("indexer_local_blocks"),
    )
    problem = indexer.problem(plain.num_key_value_heads, plain.rotated_cols)
    if problem is not None:
        raise FormatError(f"{path}: {problem}")
    return BlockIndexedConfig(**vars(plain), indexer=indexer)


def _apart_or_fused(
    rules: tuple[Rule, ...], where: Where, block: str, kind: str, sizes: str
) -> Iterator[Rule]:
    """Yield rules of a block whose gate and up are stored apart, or by transformers' text class as one.

    block  what it is called within the layer
    kind   end of the names of its tensors: "_shexp"
    sizes  of the one matrix
    """
    both = f"model.layers.{{layer}}.{block}.gate_up_proj.weight"
    for rule in rules:
        yield rule if "ffn_down" in rule.outputs[0].name else replace(rule, unless=(both,))
    yield Rule(where, tuple(
        Output(f"blk.{{layer}}.ffn_{part}{kind}.weight", both, sizes, arrange)
        for part, arrange in (("gate", gate_rows), ("up", up_rows))
    ), when=(both,))  # fmt: skip


def _indexer_rules() -> Iterator[Rule]:
    for part, sizes in (("q", "index_q_rows hidden_size"), ("k", "index_head_dim hidden_size")):
        source = f"self_attn.indexer.{part}"
        yield in_layer(moe_layers, f"indexer.{part}_proj.weight", f"{source}_proj.weight", sizes)
        yield in_layer(
            moe_layers, f"indexer.{part}_norm.weight", f"{source}_norm.weight", "index_head_dim", plus_one
        )


_canonical_name = respelled(
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".block_sparse_moe.", ".mlp."),
    (".self_attn.index_", ".self_attn.indexer."),
)
"""Published parts of names -> those of transformers."""


_MTP = Drop(
    lambda name: re.search(r"(^|\.)mtp\.", name) is not None,
    "multi-token prediction layer; llama.cpp's minimax-m3 has none",
)


def _forced_type(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return the type that llama.cpp's converter writes an indexer in; None for other tensors."""
    return F32 if ".indexer." in tensor.name else None


def _drops(config: BlockIndexedConfig, options: NoOptions) -> tuple[Drop, ...]:
    return (*vision_drops(config, options), _MTP)


_MINIMAX_M3 = decoder(
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3VLForConditionalGeneration",
    _CLASS,
    gguf_name="minimax-m3",
    read_config=read_config,
    rules=(
        *ends(plus_one, needs_output=True),
        *attention(norm=plus_one),
        norm_of_blocks(arrange=plus_one),
        *_apart_or_fused(dense_blocks(), dense_layers, "mlp", "", "both_rows hidden_size"),
        *biased_router(),
        *expert_stacks(moe_layers, down="w2", gate="w1", up="w3", order="gate down up"),
        *_apart_or_fused(shared_experts(moe_layers), moe_layers, "mlp.shared_experts", "_shexp",
                         "both_shared_rows hidden_size"),
        *_indexer_rules(),
    ),
    drops=_drops,
    metadata=(
        *COMMON, EXPERT_WIDTH, ROTATED_COLS, SHARED_EXPERTS, EXPERT_SCALE, EXPERT_NORM,
        Key(keys.INDEXER_HEAD_COUNT, Value.u32, lambda c, o: c.indexer.n_heads),
        Key(keys.INDEXER_KEY_LENGTH, Value.u32, lambda c, o: c.indexer.head_dim),
        Key(keys.INDEXER_TOP_K, Value.u32, lambda c, o: c.indexer.n_chosen),
        Key(keys.INDEXER_BLOCK_SIZE, Value.u32, lambda c, o: c.indexer.block_size),
        Key(keys.INDEXER_LOCAL_BLOCKS, Value.u32, lambda c, o: c.indexer.n_local),
        DENSE_LAYERS,
    ),
    canonical_name=_canonical_name,
    quirks=Quirks(pre_tokenizers={"gpt-4o": "minimax-m2"}),
    forced_type=_forced_type,
    reader=_read_file,
    says_norm=True,
    clamped=True,
)  # fmt: skip

FAMILIES = (_MINIMAX_M3,)
