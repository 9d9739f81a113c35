"""The kinds of value that llama.cpp expects of well-known metadata keys.

It accepts exactly one kind for a key: an int32 where it wants a uint32 makes it refuse the whole model.
Numbers that may differ by layer are a uint32, or an array of int32 or uint32. Keys that only describe the
model have the kind that its converter writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gguf_tools.format import keys

_U32 = ("uint32",)
_I32 = ("int32",)
_F32 = ("float32",)
_BOOL = ("bool",)
_STRING = ("string",)
_STRINGS = ("array of string",)
_U32_PER_LAYER = ("uint32", "array of int32", "array of uint32")

_OF_TEMPLATE: Mapping[str, tuple[str, ...]] = {
    keys.ALIGNMENT: _U32,
    keys.ARCHITECTURE: _STRING,
    keys.TYPE: _STRING,
    keys.FILE_TYPE: _U32,
    keys.QUANTIZATION_VERSION: _U32,
    keys.NAME: _STRING,
    keys.AUTHOR: _STRING,
    keys.VERSION: _STRING,
    keys.ORGANIZATION: _STRING,
    keys.FINETUNE: _STRING,
    keys.BASENAME: _STRING,
    keys.DESCRIPTION: _STRING,
    keys.QUANTIZED_BY: _STRING,
    keys.SIZE_LABEL: _STRING,
    keys.LICENSE: _STRING,
    keys.LICENSE_NAME: _STRING,
    keys.LICENSE_LINK: _STRING,
    keys.URL: _STRING,
    keys.DOI: _STRING,
    keys.UUID: _STRING,
    keys.REPO_URL: _STRING,
    keys.SOURCE_URL: _STRING,
    keys.SOURCE_DOI: _STRING,
    keys.SOURCE_UUID: _STRING,
    keys.SOURCE_REPO_URL: _STRING,
    keys.BASE_MODEL_COUNT: _U32,
    keys.BASE_MODEL_NAME: _STRING,
    keys.BASE_MODEL_AUTHOR: _STRING,
    keys.BASE_MODEL_VERSION: _STRING,
    keys.BASE_MODEL_ORGANIZATION: _STRING,
    keys.BASE_MODEL_DESCRIPTION: _STRING,
    keys.BASE_MODEL_URL: _STRING,
    keys.BASE_MODEL_DOI: _STRING,
    keys.BASE_MODEL_UUID: _STRING,
    keys.BASE_MODEL_REPO_URL: _STRING,
    keys.DATASET_COUNT: _U32,
    keys.DATASET_NAME: _STRING,
    keys.DATASET_AUTHOR: _STRING,
    keys.DATASET_VERSION: _STRING,
    keys.DATASET_ORGANIZATION: _STRING,
    keys.DATASET_DESCRIPTION: _STRING,
    keys.DATASET_URL: _STRING,
    keys.DATASET_DOI: _STRING,
    keys.DATASET_UUID: _STRING,
    keys.DATASET_REPO_URL: _STRING,
    keys.TAGS: _STRINGS,
    keys.LANGUAGES: _STRINGS,
    keys.DATASETS: _STRINGS,
    keys.SAMPLING_SEQUENCE: _STRING,
    keys.SAMPLING_TOP_K: _I32,
    keys.SAMPLING_TOP_P: _F32,
    keys.SAMPLING_MIN_P: _F32,
    keys.SAMPLING_XTC_PROBABILITY: _F32,
    keys.SAMPLING_XTC_THRESHOLD: _F32,
    keys.SAMPLING_TEMP: _F32,
    keys.SAMPLING_PENALTY_LAST_N: _I32,
    keys.SAMPLING_PENALTY_REPEAT: _F32,
    keys.SAMPLING_MIROSTAT: _I32,
    keys.SAMPLING_MIROSTAT_TAU: _F32,
    keys.SAMPLING_MIROSTAT_ETA: _F32,
    keys.VOCAB_SIZE: _U32,
    keys.CONTEXT_LENGTH: _U32,
    keys.EMBEDDING_LENGTH: _U32,
    keys.BLOCK_COUNT: _U32,
    keys.LEADING_DENSE_BLOCK_COUNT: _U32,
    keys.FEED_FORWARD_LENGTH: _U32_PER_LAYER,
    keys.EXPERT_FEED_FORWARD_LENGTH: _U32_PER_LAYER,
    keys.EXPERT_COUNT: _U32,
    keys.EXPERT_USED_COUNT: _U32_PER_LAYER,
    keys.EXPERT_SHARED_COUNT: _U32,
    keys.EXPERT_GROUP_COUNT: _U32,
    keys.EXPERT_GROUP_USED_COUNT: _U32,
    keys.EXPERT_WEIGHTS_SCALE: _F32,
    keys.EXPERT_WEIGHTS_NORM: _BOOL,
    keys.EXPERT_GATING_FUNC: _U32,
    keys.NEXTN_PREDICT_LAYERS: _U32,
    keys.HEAD_COUNT: _U32_PER_LAYER,
    keys.HEAD_COUNT_KV: _U32_PER_LAYER,
    keys.KEY_LENGTH: _U32,
    keys.VALUE_LENGTH: _U32,
    keys.KEY_LENGTH_MLA: _U32,
    keys.VALUE_LENGTH_MLA: _U32,
    keys.TEMPERATURE_SCALE: _F32,
    keys.TEMPERATURE_LENGTH: _U32,
    keys.INDEXER_HEAD_COUNT: _U32,
    keys.INDEXER_KEY_LENGTH: _U32,
    keys.INDEXER_TOP_K: _U32,
    keys.INDEXER_TYPES: ("array of bool",),
    keys.OUTPUT_GROUP_COUNT: _U32,
    keys.OUTPUT_LORA_RANK: _U32,
    keys.COMPRESS_RATIOS: ("array of int32", "array of uint32"),
    keys.COMPRESS_ROPE_FREQ_BASE: _F32,
    keys.HYPER_CONNECTION_COUNT: _U32,
    keys.HYPER_CONNECTION_ITERATIONS: _U32,
    keys.HYPER_CONNECTION_EPSILON: _F32,
    keys.HASH_LAYER_COUNT: _U32,
    keys.EMBEDDING_LENGTH_OUT: _U32,
    keys.SWIGLU_CLAMP_EXP: ("array of float32", "float32"),
    keys.SWIGLU_CLAMP_SHEXP: ("array of float32", "float32"),
    keys.Q_LORA_RANK: _U32,
    keys.KV_LORA_RANK: _U32,
    keys.LAYERNORM_RMS_EPS: _F32,
    keys.SLIDING_WINDOW: _U32,
    keys.ROPE_DIMENSION_COUNT: _U32,
    keys.ROPE_FREQ_BASE: _F32,
    keys.ROPE_SCALING_TYPE: _STRING,
    keys.ROPE_SCALING_FACTOR: _F32,
    keys.ROPE_SCALING_ORIG_CTX_LEN: _U32,
    keys.ROPE_SCALING_YARN_EXT_FACTOR: _F32,
    keys.ROPE_SCALING_YARN_LOG_MUL: _F32,
    keys.ROPE_SCALING_YARN_ATTN_FACTOR: _F32,
    keys.ROPE_SCALING_YARN_BETA_FAST: _F32,
    keys.ROPE_SCALING_YARN_BETA_SLOW: _F32,
    keys.TOKENIZER_MODEL: _STRING,
    keys.TOKENIZER_PRE: _STRING,
    keys.TOKENIZER_TOKENS: _STRINGS,
    keys.TOKENIZER_TOKEN_TYPE: ("array of int32",),
    keys.TOKENIZER_SCORES: ("array of float32", "array of int32"),
    keys.TOKENIZER_MERGES: _STRINGS,
    keys.TOKENIZER_BOS_ID: _U32,
    keys.TOKENIZER_EOS_ID: _U32,
    keys.TOKENIZER_EOT_ID: _U32,
    keys.TOKENIZER_EOM_ID: _U32,
    keys.TOKENIZER_PREFIX_ID: _U32,
    keys.TOKENIZER_SUFFIX_ID: _U32,
    keys.TOKENIZER_MIDDLE_ID: _U32,
    keys.TOKENIZER_UNK_ID: _U32,
    keys.TOKENIZER_SEP_ID: _U32,
    keys.TOKENIZER_PAD_ID: _U32,
    keys.TOKENIZER_MASK_ID: _U32,
    keys.TOKENIZER_ADD_BOS: _BOOL,
    keys.TOKENIZER_ADD_EOS: _BOOL,
    keys.TOKENIZER_ADD_SEP: _BOOL,
    keys.TOKENIZER_ADD_PREFIX: _BOOL,
    keys.TOKENIZER_REMOVE_EXTRA_WS: _BOOL,
    keys.TOKENIZER_PRECOMPILED_CHARSMAP: ("array of uint8", "array of int8"),
    keys.TOKENIZER_CHAT_TEMPLATE: _STRING,
    keys.TOKENIZER_CHAT_TEMPLATE_NAMED: _STRING,
    keys.TOKENIZER_CHAT_TEMPLATES: _STRINGS,
}


def expected_kinds(key: str, architecture: str) -> Sequence[str]:
    """Return the kinds that llama.cpp accepts for a key, the usual one first.

    architecture  the file's `general.architecture`, the prefix of its hyper-parameters
    returns       names as in Value.type_name; empty for a key that is not well known
    """
    return _OF_TEMPLATE.get(_template_of(key, architecture), ())


def _template_of(key: str, architecture: str) -> str:
    """Return the template in `keys` that `key` was made from, None without one."""
    if key.startswith(keys.TOKENIZER_CHAT_TEMPLATE + "."):
        return keys.TOKENIZER_CHAT_TEMPLATE_NAMED
    if key.startswith(architecture + "."):
        return "{arch}" + key.removeprefix(architecture)
    return re.sub(r"\.\d+\.", ".{id}.", key)
