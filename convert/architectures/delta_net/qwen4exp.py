"""Qwen4Exp: delta nets as in Qwen 3.5, attention to chosen blocks, strands, and embeddings of n-grams.

Hidden states are several strands, which gates mix in place of norms before parts of a layer and before the
output matrix. In one layer, a table adds rows for each token's last n-grams. Which rows these are follows
from numbers of 64 bits, which the checkpoint stores as tensors and the file as keys. The table is stored in
parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import FULL, with_defaults
from convert.architectures.decoder.family import decoder, decoder_notes
from convert.architectures.decoder.rules import INV_FREQ, ends, in_layer, layers, once, one
from convert.architectures.delta_net.arrange import squeezed
from convert.architectures.delta_net.config import LINEAR, METADATA, DeltaNetConfig, read_delta_net_file
from convert.architectures.delta_net.family import (
    DROP_VISION,
    EXPERTS,
    TILED,
    float32_kernels,
    full_layers,
    gated_attention,
    norm_notes,
    read_qwen35,
)
from convert.architectures.rules import (
    Arrange,
    Drop,
    Output,
    OutputTensor,
    Rule,
    Stacked,
    common_type,
    plus_one,
)
from convert.architectures.stored_names import Renaming
from convert.weights.base import Weight, rows_and_cols
from gguf_tools.errors import CheckpointError, FormatError, UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.hparams import HParams, read_hparams
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import quoted
from quantize.fill.sources import HeadRows

INDEXED = "indexed_attention"
"""Value of layer_types in transformers for what published files call FULL."""


@dataclass(frozen=True)
class Qwen4Config(DeltaNetConfig):
    """Configuration of a model; names as in config.json.

    hc_count, hc_lowrank    strands of hidden states, and the rank of the matrix that mixes them
    indexer_budget          positions in the blocks that a token attends to at most
    indexer_compress_ratio  positions of a block
    ple_layers              layers that add embeddings of n-grams, counted from 0: one at most
    ngram_size              tokens of the longest n-gram
    ngram_cols              columns of a row of the table
    split_ngram_parts       parts of the table in the checkpoint
    ple_eos, ple_eos_last   token that n-grams do not reach across: the first and the last of eos_token_id
    image_token_id          token that stands for an image; None where nothing says so
    multipliers, offsets, head_sizes  numbers that say which rows an n-gram has; () where they are not known
    """

    hc_count: int = 4
    hc_lowrank: int = 320
    indexer_n_heads: int = 1
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4
    ple_layers: tuple[int, ...] = ()
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_cols: int = 0
    split_ngram_parts: int = 512
    ple_eos: int = 0
    ple_eos_last: int = 0
    image_token_id: int | None = None
    multipliers: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    head_sizes: tuple[int, ...] = ()

    @property
    def hc_cols(self) -> int:
        """Columns of all strands of a token."""
        return self.hc_count * self.hidden_size

    @property
    def indexer_rows(self) -> int:
        """Rows of the indexer's queries and its key, which are stored as one."""
        return (self.indexer_n_heads + 1) * self.indexer_head_dim

    @property
    def n_ngram_heads(self) -> int:
        """Rows of the table that a token has."""
        return (self.ngram_size - 1) * self.heads_per_ngram


def read_qwen4exp(raw: Mapping[str, Any], path: str | Path) -> Qwen4Config:
    """Read a configuration.

    raises  BadConfig, UnsupportedCheckpoint, naming file and key
    """
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        raw = merged(raw, {"layer_types": [FULL if kind == INDEXED else kind for kind in kinds]})
    read = with_defaults(raw, path)
    read.overruled("mtp_num_hidden_layers")
    read.fixed("norm_topk_prob", True, "llama.cpp's qwen4exp normalises the weights of experts")
    gate = read.raw.get("output_gate_type") or read.raw.get("hidden_act")
    if gate != "sigmoid":
        raise read.bad(
            "output_gate_type", "'sigmoid' (without one, hidden_act counts), as llama.cpp computes"
        )
    read.fixed("indexer_kv_heads", 1, "llama.cpp's indexer has one head of keys")
    config = read_qwen35(merged(raw, {"mtp_num_hidden_layers": 0}), path)
    budget, ratio = read.size("indexer_budget"), read.size("indexer_compress_ratio")
    if budget % ratio:
        raise read.bad("indexer_budget", f"a multiple of indexer_compress_ratio ({ratio})")
    # llama.cpp ends at an assertion where a head has less columns than the sections name.
    least = max(config.rotated_cols, sum(config.mrope_section or ()))
    cols = read.size("indexer_head_dim")
    if cols < least:
        raise read.bad("indexer_head_dim", f"{least} at least, as rotated columns and mrope_section say")
    return Qwen4Config(
        **vars(config),
        hc_count=read.size("hc_count", least=2),
        hc_lowrank=read.size("hc_lowrank"),
        indexer_n_heads=read.size("indexer_n_heads"),
        indexer_head_dim=cols,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        **_ngram_fields(read, config),
    )


def _ngram_fields(read: ConfigReader, config: DeltaNetConfig) -> dict[str, Any]:
    """Return the fields about embeddings of n-grams."""
    listed = read.raw.get("ple_layer_ids") or []
    read.overruled("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by")
    known = range(1, config.num_hidden_layers + 1)
    if not isinstance(listed, list) or not all(type(layer) is int and layer in known for layer in listed):
        raise read.bad("ple_layer_ids", f"a list of layers, from 1 to {config.num_hidden_layers}")
    ple_layers = tuple(sorted({layer - 1 for layer in listed}))
    if len(ple_layers) > 1 or not {*ple_layers} <= {*config.linear_layers}:
        raise UnsupportedCheckpoint(
            f"{read.path}: ple_layer_ids is {listed}, expected one layer of {LINEAR}: llama.cpp adds"
            " embeddings of n-grams in one such layer"
        )
    size, heads = read.size("ngram_size", least=2), read.size("heads_per_ngram")
    cols = read.size_or_null("ple_embed_dim", None) or config.hidden_size
    if ple_layers and cols != config.hidden_size:
        read.fixed("ple_embed_dim", config.hidden_size, "llama.cpp's matrices have hidden_size columns")
    if ple_layers and cols % ((size - 1) * heads):
        raise read.bad("heads_per_ngram", f"{size - 1} times as many are a divisor of ple_embed_dim ({cols})")
    eos = read.raw.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    if ple_layers and not (ids and all(type(each) is int and each >= 0 for each in ids)):
        raise read.bad("eos_token_id", "a token's id, or some: n-grams do not reach across it")
    return {
        "ple_layers": ple_layers,
        "ple_conv_kernel_size": read.size("ple_conv_kernel_size"),
        "ngram_size": size,
        "heads_per_ngram": heads,
        "ngram_cols": cols // ((size - 1) * heads) if ple_layers else 0,
        "split_ngram_parts": read.size("split_ngram_parts"),
        "ple_eos": ids[0] if ple_layers else 0,
        "ple_eos_last": ids[-1] if ple_layers else 0,
        "image_token_id": read.raw.get("image_token_id"),
    }


# ---- numbers of n-grams, and their table

_PLE = "model.layers.{layer}.ple."
_NUMBERS = {
    "multipliers": "layer_multipliers", "offsets": "ngram_heads_offsets",
    "head_sizes": "ngram_heads_vocab_sizes",
}  # fmt: skip


def _with_numbers(config: Qwen4Config, weights: Renaming) -> Qwen4Config:
    """Return the configuration with the numbers that the checkpoint stores of n-grams."""
    if not config.ple_layers:
        return config
    place = _PLE.format(layer=config.ple_layers[0]) + "ple_embedding."
    n_parts = sum(name.startswith(f"{place}ngram_embedding.shard_") for name in weights.names())
    if n_parts != config.split_ngram_parts:
        raise CheckpointError(
            f"{weights.checkpoint.folder}: {place}ngram_embedding has {n_parts} parts, expected"
            f" {config.split_ngram_parts}, as split_ngram_parts of config.json says"
        )
    found: dict[str, tuple[int, ...]] = {}
    for field, name in _NUMBERS.items():
        numbers = weights.numbers(place + name)
        count = config.ngram_size if field == "multipliers" else config.n_ngram_heads
        if numbers.shape != (count,) or numbers.min() < (field != "offsets"):
            raise CheckpointError(
                f"{weights.checkpoint.folder}: {place}{name}: found shape {numbers.shape} and numbers from"
                f" {numbers.min()}, expected {count} numbers of n-grams"
            )
        found[field] = tuple(map(int, numbers))
    return Qwen4Config(**{**vars(config), **found})


def _table(name: str, weights: Sequence[Weight], config: Qwen4Config) -> OutputTensor:
    """Return the table of n-grams, whose parts are all as long as the first but for a shorter last one."""
    counts = [rows_and_cols(weight.shape)[0] for weight in weights]
    n_rows = sum(counts)
    needed = max(map(sum, zip(config.offsets, config.head_sizes, strict=True)))
    is_whole = all(weight.shape[1:] == (config.ngram_cols,) for weight in weights)
    if not is_whole or {*counts[:-1]} - {counts[0]} or counts[-1] > counts[0] or n_rows < needed:
        raise CheckpointError(
            f"{weights[0].name}: parts of {sorted({*counts})} rows, {n_rows} in all, expected {needed} or"
            f" more of {config.ngram_cols} columns (ple_embed_dim by the heads), in parts of one length"
        )
    return Stacked(name, (n_rows, config.ngram_cols), common_type(weights), tuple(weights))


def _index_rows(is_key: bool) -> Arrange:
    """Return a picker of the indexer's key, or of its queries, in front of it."""

    def picked(name: str, weights: Sequence[Weight], config: Qwen4Config) -> OutputTensor:
        (weight,) = weights
        n_queries = config.indexer_n_heads * config.indexer_head_dim
        first, count = (n_queries, config.indexer_head_dim) if is_key else (0, n_queries)
        return HeadRows(name, (count, weight.shape[-1]), weight, weight.shape[0], first, count)

    return picked


# ---- rules and keys


def _ple_layers(config: Qwen4Config, options: Any) -> Iterable[int]:
    return config.ple_layers


def _mixer(where: Any, name: str, source: str) -> tuple[Rule, ...]:
    """Return the rules of what mixes strands into one; `name` and `source` are beginnings of names."""
    return (
        one(where, f"{name}_norm.weight", f"{source}.hc_norm.weight", "hc_cols", plus_one),
        one(where, f"{name}_down.weight", f"{source}.input_mix_weight_down.weight", "hc_lowrank hc_cols"),
        one(where, f"{name}_up.weight", f"{source}.input_mix_weight_up.weight", "hc_cols hc_lowrank"),
    )


def _hyper_connection(part: str, source: str) -> tuple[Rule, ...]:
    name, source = f"hc_{part}", f"{source}_hyper_connection"
    return (
        *_mixer(layers, f"blk.{{layer}}.{name}", f"model.layers.{{layer}}.{source}"),
        in_layer(layers, f"{name}_inject.weight", f"{source}.block_inject_weight.weight", "hc_count hc_cols"),
    )


_INDEXER = "model.layers.{layer}.self_attn.indexer."
_BOTH = f"{_INDEXER}index_qk_proj.weight", "indexer_rows hidden_size"

RULES: tuple[Rule, ...] = (
    *(rule for rule in ends() if rule.outputs[0].name != "output_norm.weight"),
    *_mixer(once, "output_hc", "model.hyper_connection_mixer"),
    *_hyper_connection("attn", "attn"),
    *_hyper_connection("ffn", "mlp"),
    *TILED,
    *gated_attention(),
    Rule(full_layers, (
        Output("blk.{layer}.indexer.q_proj.weight", *_BOTH, _index_rows(False)),
        Output("blk.{layer}.indexer.k_proj.weight", *_BOTH, _index_rows(True)),
    )),
    one(full_layers, "blk.{layer}.indexer.q_norm.weight", f"{_INDEXER}q_layernorm.weight", "indexer_head_dim",
        plus_one),
    one(full_layers, "blk.{layer}.indexer.k_norm.weight", f"{_INDEXER}k_layernorm.weight", "indexer_head_dim",
        plus_one),
    *EXPERTS,
    Rule(_ple_layers, (
        Output("per_layer_token_embd.weight", f"{_PLE}ple_embedding.ngram_embedding.shard_{{part}}.weight",
               "", _table, parts="split_ngram_parts"),
    )),
    in_layer(_ple_layers, "ple_key.weight", "ple.key_proj.weight", "hc_cols hidden_size"),
    in_layer(_ple_layers, "ple_value.weight", "ple.value_proj.weight", "hidden_size hidden_size"),
    *(in_layer(_ple_layers, f"ple_norm_{part}.weight", f"ple.norm_{part}.weight", "hc_cols", plus_one)
      for part in ("key", "query", "conv")),
    in_layer(_ple_layers, "ple_conv1d.weight", "ple.conv1d.weight", "hc_cols one ple_conv_kernel_size",
             squeezed),
)  # fmt: skip

_u32 = Value.u32


def _u64s(numbers: Iterable[int]) -> Value:
    return Value.array(Value.u64(0).kind, numbers)


def _of_ngrams(field: str) -> Any:
    return lambda c, o: getattr(c, field) if c.ple_layers else None


KEYS: tuple[Key, ...] = (
    *METADATA,
    Key(keys.HYPER_CONNECTION_COUNT, _u32, lambda c, o: c.hc_count),
    Key(keys.HYPER_CONNECTION_LOW_RANK, _u32, lambda c, o: c.hc_lowrank),
    Key(keys.INDEXER_HEAD_COUNT, _u32, lambda c, o: c.indexer_n_heads),
    Key(keys.INDEXER_KEY_LENGTH, _u32, lambda c, o: c.indexer_head_dim),
    Key(keys.INDEXER_TOP_K, _u32, lambda c, o: c.indexer_budget),
    Key(keys.COMPRESS_RATIOS, Value.i32s, lambda c, o: [
        0 if layer in c.linear_layers else c.indexer_compress_ratio for layer in layers(c, o)
    ]),
    Key(keys.PLE_LAYERS, Value.i32s, lambda c, o: c.ple_layers or None),
    Key(keys.PLE_NGRAM_SIZE, _u32, _of_ngrams("ngram_size")),
    Key(keys.PLE_HEADS_PER_NGRAM, _u32, _of_ngrams("heads_per_ngram")),
    Key(keys.PLE_CONV_KERNEL, _u32, _of_ngrams("ple_conv_kernel_size")),
    Key(keys.PLE_EOS_TOKEN_ID, _u32, _of_ngrams("ple_eos")),
    Key(keys.PLE_IMAGE_TOKEN_ID, _u32, _of_ngrams("image_token_id")),
    Key(keys.EMBEDDING_LENGTH_PER_LAYER_INPUT, _u32, _of_ngrams("ngram_cols")),
    Key(keys.PLE_LAYER_MULTIPLIERS, _u64s, lambda c, o: c.multipliers or None),
    Key(keys.PLE_HEAD_OFFSETS, _u64s, lambda c, o: c.offsets or None),
    Key(keys.PLE_HEAD_VOCAB_SIZES, _u64s, lambda c, o: c.head_sizes or None),
)  # fmt: skip


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> Qwen4Config:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    hparams = read_hparams(metadata, family.gguf_name, path)
    size, config = hparams.size, read_delta_net_file(family, metadata, shapes, path)
    ratios = {*hparams.by_layer("compress_ratios", config.num_hidden_layers)} - {0}
    ple_layers = hparams.ple_layers if isinstance(hparams.ple_layers, tuple) else ()
    if len(ratios) != 1 or min(ratios) < 1 or len(ple_layers) > 1:
        raise FormatError(
            f"{path}: blocks of {sorted(ratios)} positions and embeddings of n-grams in layers {ple_layers}:"
            f" expected a {family.gguf_name} model"
        )
    fields = _ngram_fields_of(hparams) if ple_layers else {}
    return Qwen4Config(
        **vars(config),
        hc_count=size("hyper_connection_count"),
        hc_lowrank=size("hyper_connection_low_rank"),
        indexer_n_heads=size("indexer_head_count"),
        indexer_head_dim=size("indexer_key_length"),
        indexer_budget=size("indexer_top_k"),
        indexer_compress_ratio=ratios.pop(),
        ple_layers=ple_layers,
        **fields,
    )


def _ngram_fields_of(hparams: HParams) -> dict[str, Any]:
    """Return the fields about n-grams; of too many numbers the first, as llama.cpp takes them."""
    size = hparams.size
    n_tokens, per_size = size("ple_ngram_size"), size("ple_heads_per_ngram")
    n_heads, numbers = (n_tokens - 1) * per_size, {}
    for field, name, count in (
        ("multipliers", "ple_layer_multipliers", n_tokens),
        ("offsets", "ple_head_offsets", n_heads),
        ("head_sizes", "ple_head_vocab_sizes", n_heads),
    ):
        stated = getattr(hparams, name)
        if n_tokens < 2 or per_size < 1 or not isinstance(stated, tuple) or len(stated) < count:
            raise FormatError(
                f"{hparams.path}: {hparams.key(name)} is {quoted(stated)}, expected {count} numbers for"
                f" n-grams of 2 to {n_tokens} tokens with {per_size} heads each"
            )
        numbers[field] = stated[:count]
    if min(numbers["head_sizes"]) < 1:
        raise FormatError(f"{hparams.path}: {hparams.key('ple_head_vocab_sizes')} has a head without rows")
    return {
        "ple_conv_kernel_size": size("ple_conv_kernel"),
        "ngram_size": n_tokens,
        "heads_per_ngram": per_size,
        "ngram_cols": size("embedding_length_per_layer_input"),
        "ple_eos": size("ple_eos_token_id"),
        **numbers,
    }


_DROPS = (
    INV_FREQ,
    DROP_VISION,
    Drop(lambda name: name.startswith("mtp."), "multi-token prediction layer, which llama.cpp has not"),
    Drop(lambda name: name.endswith(tuple(_NUMBERS.values())), "numbers of n-grams: keys of the file"),
)


def _notes(config: Qwen4Config, options: Any) -> tuple[str, ...]:
    ends_of_text: tuple[str, ...] = ()
    if config.ple_eos != config.ple_eos_last:
        ends_of_text = (
            f"eos_token_id has several tokens: n-grams begin again after {config.ple_eos}, the first of them,"
            f" as in transformers; llama.cpp's converter writes {config.ple_eos_last}, the last",
        )
    return (*decoder_notes(config), *norm_notes(config), *ends_of_text)


FAMILIES = (
    decoder(
        "Qwen4ExpForConditionalGeneration",
        "Qwen4ExpForCausalLM",
        gguf_name="qwen4exp",
        read_config=read_qwen4exp,
        rules=RULES,
        metadata=KEYS,
        with_stored=_with_numbers,
        drops=lambda config, options: _DROPS,
        notes=_notes,
        forced_type=float32_kernels,
        tiled=True,
        reader=_read_file,
    ),
)
