"""Kinds of metadata values, as llama.cpp's loader asks for them.

It refuses a number of another width or sign than it asks for, so a file with a key of another kind was never
loaded, or was made for another program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.values import Kind, Metadata

_TEXT = ("string",)
_TEXTS = ("array of string",)
_COUNT = ("uint32",)
_COUNTS = ("uint32", "array of uint32", "array of int32")
_REAL = ("float32",)
_FLAG = ("bool",)

#: Keys that the loader reads: what they may be.
LOADED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((
        keys.ARCHITECTURE, keys.NAME, keys.TYPE, keys.TOKENIZER_MODEL, keys.TOKENIZER_PRE,
        keys.TOKENIZER_CHAT_TEMPLATE, keys.ROPE_SCALING_TYPE,
    ), _TEXT),
    **dict.fromkeys((
        keys.FILE_TYPE, keys.QUANTIZATION_VERSION, keys.VOCAB_SIZE, keys.CONTEXT_LENGTH,
        keys.EMBEDDING_LENGTH, keys.BLOCK_COUNT, keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_COUNT,
        keys.EXPERT_SHARED_COUNT, keys.EXPERT_GROUP_COUNT, keys.EXPERT_GROUP_USED_COUNT,
        keys.EXPERT_GATING_FUNC, keys.NEXTN_PREDICT_LAYERS, keys.KEY_LENGTH, keys.VALUE_LENGTH,
        keys.KEY_LENGTH_MLA, keys.VALUE_LENGTH_MLA, keys.Q_LORA_RANK, keys.KV_LORA_RANK,
        keys.ROPE_DIMENSION_COUNT, keys.ROPE_SCALING_ORIG_CTX_LEN,
        keys.TOKENIZER_BOS_ID, keys.TOKENIZER_EOS_ID, keys.TOKENIZER_EOT_ID,
        keys.TOKENIZER_EOM_ID, keys.TOKENIZER_UNK_ID, keys.TOKENIZER_SEP_ID, keys.TOKENIZER_PAD_ID,
        keys.TOKENIZER_MASK_ID,
    ), _COUNT),
    **dict.fromkeys((
        keys.FEED_FORWARD_LENGTH, keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_USED_COUNT, keys.HEAD_COUNT,
        keys.HEAD_COUNT_KV,
    ), _COUNTS),
    **dict.fromkeys((
        keys.EXPERT_WEIGHTS_SCALE, keys.LAYERNORM_RMS_EPS, keys.ROPE_FREQ_BASE, keys.ROPE_SCALING_FACTOR,
        keys.ROPE_SCALING_YARN_LOG_MUL, keys.ROPE_SCALING_YARN_BETA_FAST, keys.ROPE_SCALING_YARN_BETA_SLOW,
    ), _REAL),
    **dict.fromkeys((
        keys.EXPERT_WEIGHTS_NORM, keys.TOKENIZER_ADD_BOS, keys.TOKENIZER_ADD_EOS, keys.TOKENIZER_ADD_SEP,
        keys.TOKENIZER_ADD_PREFIX, keys.TOKENIZER_REMOVE_EXTRA_WS,
    ), _FLAG),
    keys.TOKENIZER_TOKENS: _TEXTS,
    keys.TOKENIZER_MERGES: _TEXTS,
    keys.TOKENIZER_TOKEN_TYPE: ("array of int32",),
    keys.TOKENIZER_SCORES: ("array of float32", "array of int32"),
}  # fmt: skip

#: Keys that programs only show.
SHOWN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((
        keys.AUTHOR, keys.VERSION, keys.ORGANIZATION, keys.FINETUNE, keys.BASENAME, keys.DESCRIPTION,
        keys.QUANTIZED_BY, keys.SIZE_LABEL, keys.LICENSE, keys.LICENSE_NAME, keys.LICENSE_LINK, keys.URL,
        keys.DOI, keys.UUID, keys.REPO_URL, keys.SOURCE_URL, keys.SOURCE_DOI, keys.SOURCE_UUID,
        keys.SOURCE_REPO_URL, keys.QUANTIZE_IMATRIX_FILE, keys.QUANTIZE_IMATRIX_DATASET,
    ), _TEXT),
    **dict.fromkeys((keys.TAGS, keys.LANGUAGES, keys.DATASETS, keys.TOKENIZER_CHAT_TEMPLATES), _TEXTS),
    **dict.fromkeys((keys.BASE_MODEL_COUNT, keys.DATASET_COUNT), _COUNT),
}  # fmt: skip

_IS_NO_MODEL = ("imatrix", "adapter", "mmproj")


def check_kinds(metadata: Metadata) -> Iterator[Finding]:
    """Report values of another kind than the loader's, arrays of arrays, and a missing architecture."""
    architecture = architecture_of(metadata)
    kind_of_file = metadata.get(keys.TYPE)
    if keys.ARCHITECTURE not in metadata and (kind_of_file is None or kind_of_file.data not in _IS_NO_MODEL):
        text = "is missing: no program can tell what the file is"
        yield Finding("kind", text, Level.BAD, (keys.ARCHITECTURE,))
    for table, level in ((LOADED, Level.BAD), (SHOWN, Level.WARNING)):
        for template, expected in table.items():
            key = template.replace("{arch}", architecture)
            value = metadata.get(key)
            if value is not None and value.type_name not in expected:
                text = f"is {value.type_name}, llama.cpp expects {' or '.join(expected)}"
                yield Finding("kind", text, level, (key,))
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template.") and value.kind is not Kind.STRING:
            yield Finding("kind", f"is {value.type_name}, llama.cpp expects string", Level.BAD, (key,))
        if value.item is Kind.ARRAY:
            yield Finding("kind", "is an array of arrays, which llama.cpp refuses", Level.WARNING, (key,))


def architecture_of(metadata: Metadata) -> str:
    """Return the value of general.architecture, "" if it is missing or no text."""
    value = metadata.get(keys.ARCHITECTURE)
    return value.data if value is not None and value.kind is Kind.STRING else ""
