"""Checks of a header as llama.cpp would read it: kinds and sizes of metadata, tensors, the vocabulary.

Its loader refuses a number of another width or sign than it asks for, so a file with a key of another kind
was never loaded, or was made for another program. It counts the tensors that it has used and refuses a file
with more, so a tensor without a place means a file for another program, or a hiding place.

llama.cpp stops the whole process on many sizes that are out of range or contradictory, and trusts others.
What contradicts a tensor is bad for the architectures that this project writes, and a warning for others,
whose tensors may mean something else.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf_tools.findings import Finding, Level, listed
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Metadata

_IS_NO_MODEL = ("imatrix", "adapter", "mmproj")
"""Values of general.type in files that may lack an architecture."""

_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_WHOLE_KINDS = frozenset((
    Kind.UINT8, Kind.INT8, Kind.UINT16, Kind.INT16, Kind.UINT32, Kind.INT32, Kind.UINT64, Kind.INT64,
))  # fmt: skip
_REAL_KINDS = frozenset((Kind.FLOAT32, Kind.FLOAT64))

# What llama.cpp has room for (512 layers, 1024 experts), or many times what any model has.
_RANGES: Mapping[str, tuple[int, int]] = {
    keys.VOCAB_SIZE: (1, 1 << 24),
    keys.CONTEXT_LENGTH: (1, 1 << 30),
    keys.EMBEDDING_LENGTH: (1, 1 << 20),
    keys.BLOCK_COUNT: (1, 512),
    keys.LEADING_DENSE_BLOCK_COUNT: (0, 512),
    keys.NEXTN_PREDICT_LAYERS: (0, 512),
    keys.FEED_FORWARD_LENGTH: (0, 1 << 24),
    keys.EXPERT_FEED_FORWARD_LENGTH: (0, 1 << 24),
    keys.EXPERT_COUNT: (0, 1024),
    keys.EXPERT_USED_COUNT: (0, 1024),
    keys.EXPERT_SHARED_COUNT: (0, 1024),
    keys.EXPERT_GROUP_COUNT: (0, 1024),
    keys.EXPERT_GROUP_USED_COUNT: (0, 1024),
    keys.HEAD_COUNT: (0, 1 << 16),
    keys.HEAD_COUNT_KV: (0, 1 << 16),
    keys.KEY_LENGTH: (0, 1 << 16),
    keys.VALUE_LENGTH: (0, 1 << 16),
    keys.KEY_LENGTH_MLA: (0, 1 << 16),
    keys.VALUE_LENGTH_MLA: (0, 1 << 16),
    keys.Q_LORA_RANK: (0, 1 << 16),
    keys.KV_LORA_RANK: (0, 1 << 16),
    keys.ROPE_DIMENSION_COUNT: (0, 1 << 16),
    keys.ROPE_SCALING_ORIG_CTX_LEN: (1, 1 << 30),
}
_POSITIVE_REALS = (keys.LAYERNORM_RMS_EPS, keys.ROPE_FREQ_BASE)


def check_kinds(metadata: Metadata) -> Iterator[Finding]:
    """Report values of another kind than the loader's, arrays of arrays, and a missing architecture."""
    architecture = architecture_of(metadata) or ""
    kind_of_file, part = metadata.get(keys.TYPE), metadata.get(keys.SPLIT_NO)
    is_later_part = part is not None and part.data != 0
    is_model = kind_of_file is None or kind_of_file.data not in _IS_NO_MODEL
    if keys.ARCHITECTURE not in metadata and is_model and not is_later_part:
        text = "is missing: no program can tell what the file is"
        yield Finding("kind", text, Level.BAD, (keys.ARCHITECTURE,))
    for key, value in metadata.items():
        expected = keys.expected_kinds(key, architecture)
        if expected and value.type_name not in expected:
            level = Level.BAD if keys.is_loaded(key, architecture) else Level.WARNING
            text = f"is {value.type_name}, llama.cpp expects {' or '.join(expected)}"
            yield Finding("kind", text, level, (key,))
        if value.item is Kind.ARRAY:
            yield Finding("kind", "is an array of arrays, which llama.cpp refuses", Level.WARNING, (key,))


@dataclass(frozen=True)
class Sizes:
    """The whole numbers of a model's keys; None for a key that is missing or holds something else."""

    metadata: Metadata
    architecture: str

    def key(self, template: str) -> str:
        return template.replace("{arch}", self.architecture)

    def all_of(self, template: str) -> tuple[int, ...]:
        """Return one number, or one for every layer; () for a missing key."""
        value = self.metadata.get(self.key(template))
        if value is None:
            return ()
        if value.kind in _WHOLE_KINDS:
            return (value.data,)
        return tuple(value.data) if value.item in _WHOLE_KINDS else ()

    def one(self, template: str) -> int | None:
        """Return the largest of a key's numbers."""
        return max(self.all_of(template), default=None)


def check_numbers(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Report sizes that are impossible, contradict each other, or differ from those of the tensors."""
    sizes = Sizes(metadata, architecture_of(metadata) or "")
    yield from _check_ranges(sizes)
    for template, text, level in (*_of_experts(sizes), *_of_layers_and_heads(sizes)):
        yield Finding("contradiction", text, level, (sizes.key(template),))
    level = Level.BAD if sizes.architecture in PLACES else Level.WARNING
    if tensors:
        for where, text in _contradictions(sizes, tensors):
            yield Finding("contradiction", text, level, (where,))


def _check_ranges(sizes: Sizes) -> Iterator[Finding]:
    for template, (low, high) in _RANGES.items():
        outside = [number for number in sizes.all_of(template) if not low <= number <= high]
        if outside:
            text = f"is {outside[0]:,}, expected {low} to {high:,}"
            yield Finding("range", text, Level.BAD, (sizes.key(template),))
    for template in _POSITIVE_REALS:
        value = sizes.metadata.get(sizes.key(template))
        if value is not None and value.kind in _REAL_KINDS and math.isfinite(value.data) and value.data <= 0:
            text = f"is {value.data:g}, expected a positive number"
            yield Finding("range", text, Level.BAD, (sizes.key(template),))
    for key, value in sizes.metadata.items():
        if value.kind in _REAL_KINDS and not math.isfinite(value.data):
            yield Finding("range", f"is {value.data}, expected a finite number", Level.WARNING, (key,))


def _of_experts(sizes: Sizes) -> Iterator[tuple[str, str, Level]]:
    experts = sizes.one(keys.EXPERT_COUNT) or 0
    used = sizes.one(keys.EXPERT_USED_COUNT)
    groups = sizes.one(keys.EXPERT_GROUP_COUNT) or 0
    used_groups = sizes.one(keys.EXPERT_GROUP_USED_COUNT) or 0
    if used is not None and used > experts:
        yield keys.EXPERT_USED_COUNT, f"{used:,} of {experts:,} experts are used", Level.BAD
    elif used == 0 and experts:
        yield keys.EXPERT_USED_COUNT, f"none of {experts:,} experts is used", Level.BAD
    if groups > 1 and experts % groups:
        yield keys.EXPERT_GROUP_COUNT, f"{experts:,} experts can't be dealt to {groups:,} groups", Level.BAD
    if used_groups > max(groups, 1):
        text = f"{used_groups:,} of {groups:,} groups of experts are used"
        yield keys.EXPERT_GROUP_USED_COUNT, text, Level.BAD


def _of_layers_and_heads(sizes: Sizes) -> Iterator[tuple[str, str, Level]]:
    layers = sizes.one(keys.BLOCK_COUNT)
    for template, what, level in (
        (keys.LEADING_DENSE_BLOCK_COUNT, "dense layers", Level.WARNING),
        (keys.NEXTN_PREDICT_LAYERS, "prediction layers", Level.BAD),
    ):
        count = sizes.one(template)
        if layers is not None and count is not None and count > layers:
            yield template, f"{count:,} {what} in a model of {layers:,} layers", level
    heads, kv_heads = sizes.one(keys.HEAD_COUNT), sizes.one(keys.HEAD_COUNT_KV)
    if heads and kv_heads and kv_heads > heads:
        text = f"{kv_heads:,} heads of keys and values, but {heads:,} of queries"
        yield keys.HEAD_COUNT_KV, text, Level.WARNING
    width = sizes.one(keys.EMBEDDING_LENGTH)
    head = sizes.one(keys.KEY_LENGTH_MLA) or sizes.one(keys.KEY_LENGTH)
    if not head and width and heads:
        head = width // heads
    rotated = sizes.one(keys.ROPE_DIMENSION_COUNT)
    if head and rotated and rotated > head:
        text = f"{rotated:,} columns of each head are rotated, but it has {head:,}"
        yield keys.ROPE_DIMENSION_COUNT, text, Level.BAD


def _contradictions(sizes: Sizes, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each size that differs from that of the tensors."""
    yield from _layer_contradictions(sizes, tensors)
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) >= 2:
        width = sizes.one(keys.EMBEDDING_LENGTH)
        if width is not None and width != embedding.n_cols:
            text = f"is {width:,}, token_embd.weight has {embedding.n_cols:,} columns"
            yield sizes.key(keys.EMBEDDING_LENGTH), text
        tokens = sizes.metadata.get(keys.TOKENIZER_TOKENS)
        if tokens is not None and tokens.kind is Kind.ARRAY and len(tokens.data) != embedding.n_rows:
            text = f"{len(tokens.data):,} tokens, token_embd.weight has {embedding.n_rows:,} rows"
            yield keys.TOKENIZER_TOKENS, text
        vocab_size = sizes.one(keys.VOCAB_SIZE)
        if vocab_size is not None and vocab_size != embedding.n_rows:
            text = f"is {vocab_size:,}, token_embd.weight has {embedding.n_rows:,} rows"
            yield sizes.key(keys.VOCAB_SIZE), text
    experts = sizes.one(keys.EXPERT_COUNT)
    for info in tensors.values():
        stacked = info.name.endswith("_exps.weight") and len(info.shape) == 3
        if stacked and experts is not None and info.n_mats != experts:
            yield sizes.key(keys.EXPERT_COUNT), f"is {experts:,}, {info.name} holds {info.n_mats:,}"
            return


def _layer_contradictions(sizes: Sizes, tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    layers = sizes.one(keys.BLOCK_COUNT)
    present = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if layers is None or not present:
        return
    if max(present) >= layers:
        yield sizes.key(keys.BLOCK_COUNT), f"is {layers:,}, but there is a tensor of layer {max(present):,}"
    # A file may leave the prediction layers out and still count them.
    needed = layers - (sizes.one(keys.NEXTN_PREDICT_LAYERS) or 0)
    n_missing = needed - len([layer for layer in present if layer < needed])
    if n_missing > 0:
        yield sizes.key(keys.BLOCK_COUNT), f"is {layers:,}, but {n_missing:,} layers have no tensor"


_SCALE_SUFFIX = re.compile(r"\.(?:input_)?scale$")  # of a whole matrix, beside an NVFP4 weight

_NORMS = ("attn_norm", "attn_q_a_norm", "attn_kv_a_norm", "ffn_norm")
_ATTENTION = (
    "attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_k_b", "attn_v_b", "attn_output",
)  # fmt: skip
_FFN = (
    "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
    "ffn_gate_up_exps", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip
_NEXTN = tuple(
    f"nextn.{part}"
    for part in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head_norm", "shared_head_head")
)

#: Names by architecture: outside of the layers, and within one.
PLACES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "deepseek2": (
        frozenset(("token_embd.weight", "output_norm.weight", "output.weight")),
        frozenset(f"{part}.weight" for part in (*_NORMS, *_ATTENTION, *_FFN, *_NEXTN)) | {"exp_probs_b.bias"},
    ),
}


def check_tensors(architecture: str, tensors: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Report tensors without a place, if the architecture is known, and types that are not llama.cpp's."""
    if architecture in PLACES:
        for name in tensors:
            if not _has_place(name, *PLACES[architecture]):
                text = f"no part of a {architecture} model has such a tensor"
                yield Finding("tensor", text, Level.WARNING, (name,))
    by_type: dict[GGMLType, list[str]] = {}
    for info in tensors.values():
        by_type.setdefault(info.type, []).append(info.name)
    for type_, names in by_type.items():
        if remark := _remark(type_):
            level, text = remark
            yield Finding("type", f"{type_.name}, of {len(names):,} tensors, {text}", level, (names[0],))


def _has_place(name: str, outside: frozenset[str], in_layer: frozenset[str]) -> bool:
    match = _LAYER.match(name)
    name = _SCALE_SUFFIX.sub(".weight", name)
    return name[match.end() :] in in_layer if match else name in outside


def _remark(type_: GGMLType) -> tuple[Level, str] | None:
    if type_.is_internal or "removed" in type_.note:
        return Level.WARNING, f"is in no file that a program of today writes: {type_.note}"
    if type_.is_only_in_ik:
        return Level.NOTE, "is a type of ik_llama.cpp's; llama.cpp refuses the file"
    return None


_TOKEN_TYPES = range(7)
_BYTE_LEVEL_BPE = "gpt2"


def check_vocabulary(metadata: Metadata) -> Iterator[Finding]:
    """Report what contradicts the list of tokens; nothing for a file without one."""
    tokens = items_of(metadata, keys.TOKENIZER_TOKENS, Kind.STRING)
    if not tokens:
        return
    known = frozenset(tokens)
    if len(known) < len(tokens):
        twice = [text for text, count in Counter(tokens).items() if count > 1]
        text = f"{len(twice):,} tokens appear twice, at which llama.cpp stops: {listed(twice)}"
        yield Finding("vocabulary", text, Level.BAD, (keys.TOKENIZER_TOKENS,))
    yield from _check_lists(metadata, len(tokens))
    yield from _check_ids(metadata, len(tokens))
    model = metadata.get(keys.TOKENIZER_MODEL)
    if model is not None and model.data == _BYTE_LEVEL_BPE:
        yield from _check_merges(metadata, known)


def items_of(metadata: Metadata, key: str, item: Kind) -> tuple[Any, ...]:
    """Return the items of an array of this kind, () when there is no such array."""
    value = metadata.get(key)
    return value.data if value is not None and value.item is item else ()


def _check_lists(metadata: Metadata, n_tokens: int) -> Iterator[Finding]:
    for key in (keys.TOKENIZER_SCORES, keys.TOKENIZER_TOKEN_TYPE):
        value = metadata.get(key)
        if value is not None and value.kind is Kind.ARRAY and len(value.data) != n_tokens:
            text = f"has {len(value.data):,} items for {n_tokens:,} tokens"
            level = Level.BAD if len(value.data) < n_tokens else Level.WARNING
            yield Finding("vocabulary", text, level, (key,))
    scores = items_of(metadata, keys.TOKENIZER_SCORES, Kind.FLOAT32)
    if n_bad := sum(not math.isfinite(score) for score in scores):
        text = f"{n_bad:,} scores are NaN or infinite"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_SCORES,))
    types = items_of(metadata, keys.TOKENIZER_TOKEN_TYPE, Kind.INT32)
    if unknown := sorted({kind for kind in types if kind not in _TOKEN_TYPES}):
        text = f"holds {unknown[0]}, expected 0 to {_TOKEN_TYPES[-1]}"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_TOKEN_TYPE,))


def _check_ids(metadata: Metadata, n_tokens: int) -> Iterator[Finding]:
    for key, value in metadata.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if is_id and isinstance(value.data, int) and not 0 <= value.data < n_tokens:
            text = f"is {value.data:,}, outside of the {n_tokens:,} tokens"
            yield Finding("vocabulary", text, Level.WARNING, (key,))


def _check_merges(metadata: Metadata, known: frozenset[str]) -> Iterator[Finding]:
    merges = items_of(metadata, keys.TOKENIZER_MERGES, Kind.STRING)
    malformed, missing = [], []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            malformed.append(merge)
        elif left not in known or right not in known or left + right not in known:
            missing.append(merge)
    if malformed:
        text = f"{len(malformed):,} merges are not two texts with a space between: {listed(malformed)}"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_MERGES,))
    if missing:
        text = f"{len(missing):,} merges join or make something that is no token: {listed(missing)}"
        yield Finding("vocabulary", text, Level.WARNING, (keys.TOKENIZER_MERGES,))
