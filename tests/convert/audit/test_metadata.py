"""What is said of metadata that differ."""

from __future__ import annotations

import pytest

from convert.audit.metadata import KEYS, metadata_findings
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value

BASE: Metadata = {
    keys.ARCHITECTURE: Value.string("llama"),
    keys.NAME: Value.string("A model"),
    "llama.block_count": Value.u32(2),
    "llama.context_length": Value.u32(4096),
    "llama.rope.freq_base": Value.f32(10000.0),
    "llama.attention.head_count_kv": Value.u32(2),
    "llama.expert_gating_func": Value.u32(2),
    keys.TOKENIZER_PRE: Value.string("llama-bpe"),
    keys.TOKENIZER_TOKENS: Value.strings(["a", "b", "<|end|>", "c"]),
    keys.TOKENIZER_TOKEN_TYPE: Value.i32s([1, 1, 3, 1]),
    keys.TOKENIZER_EOS_ID: Value.u32(2),
    keys.TOKENIZER_PAD_ID: Value.u32(3),
    keys.TOKENIZER_CHAT_TEMPLATE: Value.string("{{ messages }}"),
}


def found(changes: dict[str, Value | None]) -> list[tuple[str, str]]:
    changed = {**BASE, **changes}
    metadata = {key: value for key, value in changed.items() if value is not None}
    return [(str(each.level), each.text) for each in metadata_findings(metadata, BASE, "")]


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        (
            {keys.TOKENIZER_TOKENS: Value.strings(["b", "a", "<|end|>", "c"])}, "bad",
            "vocabulary: 2 tokens are in another order: token 0 is 'b', the base's 'a'; token 1 is 'a', the"
            " base's 'b'",
        ),
        (
            {keys.TOKENIZER_TOKENS: Value.strings(["a", "b"])}, "bad",
            "vocabulary: 2 tokens, fewer than the base's 4",
        ),
        (
            {keys.TOKENIZER_TOKEN_TYPE: Value.i32s([1, 1, 1, 1])}, "bad",
            "vocabulary: added tokens: token 2 '<|end|>' is normal, the base's is control",
        ),
        ({keys.TOKENIZER_EOS_ID: Value.u32(1)}, "bad", "special token: is 1, the base's is 2"),
        ({keys.TOKENIZER_PAD_ID: None}, "warning", "special token: missing, the base's is 3"),
        ({keys.TOKENIZER_EOT_ID: Value.u32(2)}, "note", "special token: is 2, the base has none"),
        (
            {keys.TOKENIZER_PRE: Value.string("default")}, "bad",
            "pre-tokenizer: is 'default', the base's is 'llama-bpe'",
        ),
        (
            {keys.TOKENIZER_CHAT_TEMPLATE: Value.string("{{ message }}")}, "bad",
            "chat template: 13 characters, the base has 14; they differ from character 10 on",
        ),
        ({"llama.rope.freq_base": Value.f32(5e5)}, "bad", "rope: is 500000, the base's is 10000"),
        ({"llama.rope.scaling.factor": Value.f32(4.0)}, "bad", "rope: is 4, the base has none"),
        ({"llama.expert_gating_func": None}, "bad", "experts and their gating: missing, the base's is 2"),
        ({"llama.context_length": Value.u32(8192)}, "warning", "context: is 8192, the base's is 4096"),
        ({"mine.key": Value.u32(1)}, "note", "another key: is 1, the base has none"),
    ],
)  # fmt: skip
def test_a_difference_is_told(changes: dict[str, Value | None], level: str, text: str) -> None:
    assert found(changes) == [(level, text)]


@pytest.mark.parametrize(
    "changes",
    [
        {keys.NAME: Value.string("Another name"), "general.author": Value.string("me")},
        {keys.FILE_TYPE: Value.u32(15), keys.QUANTIZATION_VERSION: Value.u32(2)},
        {"quantize.imatrix.file": Value.string("m.imatrix"), "split.count": Value.u16(3)},
        {"llama.attention.head_count_kv": Value.u32s([2, 2])},
        {"llama.rope.freq_base": Value.f32(10000.001)},
    ],
)
def test_what_may_differ(changes: dict[str, Value | None]) -> None:
    assert found(changes) == []


def test_every_key_has_a_row() -> None:
    assert KEYS[-1].pattern == "*"
    assert len({row.pattern for row in KEYS}) == len(KEYS)
