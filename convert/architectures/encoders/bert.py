"""BERT, RoBERTa and XLM-RoBERTa: encoders, which make a vector of a text, or rank texts by a classifier.

llama.cpp computes the layers of all three as `bert`. What predicts masked words is left out. A classifier
takes the first token's vector through a matrix, tanh and a second matrix. BERT calls the first matrix its
pooler. llama.cpp's converter leaves the pooler out, and its files rank without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture, Key
from convert.architectures.decoder.config import with_defaults
from convert.architectures.decoder.metadata import SIZES
from convert.architectures.decoder.rules import layers_if, once, one
from convert.architectures.encoders.files import read_encoder
from convert.architectures.encoders.parts import (
    CLASSIFIER,
    LABELS,
    EncoderConfig,
    encoder_fields,
    every_layer,
    in_full,
    read_labels,
)
from convert.architectures.options import NoOptions
from convert.architectures.rules import Drop, OutputTensor, Rule, renamed
from convert.tokenizer.files import Quirks
from convert.weights.base import Weight
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from quantize.fill.sources import HeadRows


@dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """Configuration of an encoder.

    stored_positions         rows of the matrix of positions
    max_position_embeddings  those that tokens have, the last ones; others are those of padding
    is_classifier            whether the model ranks or classifies texts
    has_pooler               whether the classifier's first matrix is called pooler
    """

    architecture: str
    stored_positions: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    is_classifier: bool
    has_pooler: bool

    @property
    def has_head(self) -> bool:
        """Whether the classifier's first matrix is its own."""
        return self.is_classifier and not self.has_pooler


def _read_encoder(raw: Mapping[str, Any], path: str | Path) -> BertConfig:
    """Return the configuration of a BERT, RoBERTa or XLM-RoBERTa."""
    read = with_defaults(raw, path)
    name = str(raw["architectures"][0])
    is_classifier = name.endswith(CLASSIFIER)
    for key, value, what in (
        ("is_decoder", False, "is no decoder"),
        ("add_cross_attention", False, "has no cross-attention"),
        ("position_embedding_type", "absolute", "adds the embeddings of positions"),
        ("hidden_act", "gelu", "has no other activation"),
    ):
        read.fixed(key, value, f"llama.cpp's bert {what}")
    positions = read.size("max_position_embeddings")
    padding = 0 if name.startswith("Bert") else read.size("pad_token_id", least=0) + 1
    if positions <= padding:
        raise read.bad("max_position_embeddings", f"more than {padding}, which are those of padding")
    return BertConfig(
        architecture=name,
        **encoder_fields(read, rotates=False),
        stored_positions=positions,
        max_position_embeddings=positions - padding,
        type_vocab_size=read.size("type_vocab_size"),
        layer_norm_eps=read.number("layer_norm_eps", 1e-12),
        labels=read_labels(read, is_classifier=is_classifier),
        is_classifier=is_classifier,
        has_pooler=name == f"Bert{CLASSIFIER}",
    )


# ---- tensors


def _pair(name: str, source: str, rows: str, cols: str = "", where: Any = once) -> tuple[Rule, ...]:
    """Return the rules of a matrix, or of a norm where `cols` is "", and of its bias."""
    return (
        one(where, f"{name}.weight", f"{source}.weight", f"{rows} {cols}".strip()),
        one(where, f"{name}.bias", f"{source}.bias", rows),
    )


def _in_layer(name: str, source: str, rows: str, cols: str = "") -> tuple[Rule, ...]:
    return _pair(f"blk.{{layer}}.{name}", f"encoder.layer.{{layer}}.{source}", rows, cols, every_layer)


def _positions(name: str, weights: Sequence[Weight], config: BertConfig) -> OutputTensor:
    """Return the rows of the positions that tokens have."""
    (weight,) = weights
    if config.stored_positions == config.max_position_embeddings:
        return renamed(name, weights, config)
    first, count = config.stored_positions - config.max_position_embeddings, config.max_position_embeddings
    return HeadRows(name, (count, config.hidden_size), weight, config.stored_positions, first, count)


_WIDTH, _INNER = "hidden_size", "intermediate_size"

_RULES: tuple[Rule, ...] = (
    one(once, "token_embd.weight", "embeddings.word_embeddings.weight", f"vocab_size {_WIDTH}"),
    one(once, "position_embd.weight", "embeddings.position_embeddings.weight", f"stored_positions {_WIDTH}",
        _positions),
    one(once, "token_types.weight", "embeddings.token_type_embeddings.weight", f"type_vocab_size {_WIDTH}"),
    *_pair("token_embd_norm", "embeddings.LayerNorm", _WIDTH),
    *_in_layer("attn_q", "attention.self.query", _WIDTH, _WIDTH),
    *_in_layer("attn_k", "attention.self.key", _WIDTH, _WIDTH),
    *_in_layer("attn_v", "attention.self.value", _WIDTH, _WIDTH),
    *_in_layer("attn_output", "attention.output.dense", _WIDTH, _WIDTH),
    *_in_layer("attn_output_norm", "attention.output.LayerNorm", _WIDTH),
    *_in_layer("ffn_up", "intermediate.dense", _INNER, _WIDTH),
    *_in_layer("ffn_down", "output.dense", _WIDTH, _INNER),
    *_in_layer("layer_output_norm", "output.LayerNorm", _WIDTH),
    *_pair("cls", "pooler.dense", _WIDTH, _WIDTH, layers_if("has_pooler", once)),
    *_pair("cls.output", "classifier", "num_labels", _WIDTH, layers_if("has_pooler", once)),
    *_pair("cls", "classifier.dense", _WIDTH, _WIDTH, layers_if("has_head", once)),
    *_pair("cls.output", "classifier.out_proj", "num_labels", _WIDTH, layers_if("has_head", once)),
)  # fmt: skip

_OUTER = re.compile(r"^(?:bert|roberta)\.(?=embeddings\.|encoder\.|pooler\.)")
_OLD_NORM = {"gamma": "weight", "beta": "bias"}


def _canonical_name(name: str) -> str:
    """Return the name in the base class, with the names that norms have today."""
    stem, _, last = _OUTER.sub("", name).rpartition(".")
    return f"{stem}.{_OLD_NORM.get(last, last)}" if stem else last


_HEADS = re.compile(r"^(?:cls\.(?:predictions|seq_relationship)|lm_head)\.")


def _drops(config: BertConfig, options: NoOptions) -> tuple[Drop, ...]:
    return (
        Drop(lambda name: name.endswith("embeddings.position_ids"), "the numbers from 0 on"),
        Drop(lambda name: bool(_HEADS.match(name)), "predicts masked words; a vector of a text needs it not"),
        Drop(lambda name: name.startswith("pooler.dense."), "vectors of texts are pooled without it"),
    )


def _notes(config: BertConfig, options: NoOptions) -> tuple[str, ...]:
    if not config.has_pooler:
        return ()
    return (
        "pooler.dense is the first matrix of the classifier (cls.weight), as in transformers; llama.cpp's"
        " converter leaves it out",
    )


_METADATA: tuple[Key, ...] = (
    Key(keys.BLOCK_COUNT, Value.u32, lambda c, o: c.num_hidden_layers),
    *SIZES,
    Key(keys.LAYERNORM_EPS, Value.f32, lambda c, o: c.layer_norm_eps),
    Key(keys.ATTENTION_CAUSAL, Value.bool_, lambda c, o: False),
    LABELS,
    Key(keys.TOKENIZER_TYPE_COUNT, Value.u32, lambda c, o: c.type_vocab_size),
)

_ENCODER = Architecture(
    (
        "BertModel", "BertForMaskedLM", f"Bert{CLASSIFIER}",
        "RobertaModel", f"Roberta{CLASSIFIER}",
        "XLMRobertaModel", "XLMRobertaForMaskedLM", f"XLMRoberta{CLASSIFIER}",
    ),
    "bert",
    _read_encoder,
    _RULES,
    _METADATA,
    canonical_name=_canonical_name,
    drops=_drops,
    notes=_notes,
    forced_type=in_full,
    reader=read_encoder,
    encodes=True,
    quirks=Quirks(pre_tokenizers={"gpt-2": "roberta-bpe"}),
)  # fmt: skip

FAMILIES = (_ENCODER,)
