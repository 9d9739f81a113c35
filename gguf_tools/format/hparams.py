"""Hyper-parameters: the sizes of a model, as the keys under its architecture's name give them.

`read_hparams` refuses a value of the wrong kind. `known_hparams` treats it as missing, for listings that show
what can be known. What a missing value means is for the caller to say: llama.cpp has defaults for some, and
refuses a model without others.
"""

# ruff: noqa: RUF009 - what looks like a default is a dataclass field

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gguf_tools.errors import FormatError
from gguf_tools.format import keys
from gguf_tools.format.loaders import LOADERS, Loader
from gguf_tools.format.values import Metadata
from gguf_tools.text import quoted

Size = int | tuple[int, ...] | None
"""Whole number for all layers, or one for each; None where the key is missing."""

Flags = tuple[bool, ...] | int | None
"""Flag for each layer, or a whole number that the family makes them of; None where the key is missing."""


def _is_whole(data: object) -> bool:
    return isinstance(data, int) and not isinstance(data, bool)


def _is_number(data: object) -> bool:
    return isinstance(data, int | float) and not isinstance(data, bool)


def _all(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda data: all(map(fits, data)) if isinstance(data, tuple) else fits(data)


@dataclass(frozen=True)
class _Kind:
    """Kind of data that a key may hold, and what the caller gets of them."""

    expected: str
    fits: Callable[[object], bool]
    take: Callable[[Any], Any] = lambda data: data


_SIZE = _Kind("a whole number", _all(_is_whole))
_NUMBER = _Kind("a number", _is_number, float)
_NUMBERS = _Kind("a number, or one for each layer", _all(_is_number))
_FLAG = _Kind("true or false", lambda data: isinstance(data, bool))
_FLAGS = _Kind(
    "true or false for each layer, or a whole number",
    lambda data: all(isinstance(flag, int) for flag in data) if isinstance(data, tuple) else _is_whole(data),
    lambda data: tuple(map(bool, data)) if isinstance(data, tuple) else data,
)
_TEXT = _Kind("a string", lambda data: isinstance(data, str))


_KINDS: Mapping[str, _Kind] = {
    "uint32": _SIZE,
    "array of int32": _SIZE,
    "array of uint64": _SIZE,
    "float32": _NUMBER,
    "array of float32": _NUMBERS,
    "bool": _FLAG,
    "array of bool": _FLAGS,
    "string": _TEXT,
}
"""Usual kind of a key's value -> what is read of it: any width of a number does."""


def _key(template: str) -> Any:
    """Return a field that is read from the key `template`, as what that key usually holds."""
    kind = _KINDS[keys.expected_kinds(template, "")[0]]
    return field(default=None, metadata={"template": template, "kind": kind})


@dataclass(frozen=True)
class HParams:
    """The hyper-parameters of a model, named as their keys; None where a key is missing.

    architecture  general.architecture, the beginning of all the keys' names
    path          the model, for messages
    block_count   layers, with those for multi-token prediction (`nextn_predict_layers`)
    """

    architecture: str
    path: str | Path
    block_count: Size = _key(keys.BLOCK_COUNT)
    nextn_predict_layers: Size = _key(keys.NEXTN_PREDICT_LAYERS)
    leading_dense_block_count: Size = _key(keys.LEADING_DENSE_BLOCK_COUNT)
    vocab_size: Size = _key(keys.VOCAB_SIZE)
    context_length: Size = _key(keys.CONTEXT_LENGTH)
    attention_causal: bool | None = _key(keys.ATTENTION_CAUSAL)
    embedding_length: Size = _key(keys.EMBEDDING_LENGTH)
    embedding_length_out: Size = _key(keys.EMBEDDING_LENGTH_OUT)
    feed_forward_length: Size = _key(keys.FEED_FORWARD_LENGTH)

    expert_count: Size = _key(keys.EXPERT_COUNT)
    expert_used_count: Size = _key(keys.EXPERT_USED_COUNT)
    expert_shared_count: Size = _key(keys.EXPERT_SHARED_COUNT)
    expert_feed_forward_length: Size = _key(keys.EXPERT_FEED_FORWARD_LENGTH)
    expert_shared_feed_forward_length: Size = _key(keys.EXPERT_SHARED_FEED_FORWARD_LENGTH)
    expert_group_count: Size = _key(keys.EXPERT_GROUP_COUNT)
    expert_group_used_count: Size = _key(keys.EXPERT_GROUP_USED_COUNT)
    moe_latent_size: Size = _key(keys.MOE_LATENT_SIZE)
    expert_latent_length: Size = _key(keys.EXPERT_LATENT_LENGTH)
    situ_beta: float | None = _key(keys.SITU_BETA)
    situ_linear_beta: float | None = _key(keys.SITU_LINEAR_BETA)
    expert_gating_func: Size = _key(keys.EXPERT_GATING_FUNC)
    expert_weights_scale: float | None = _key(keys.EXPERT_WEIGHTS_SCALE)
    expert_weights_norm: bool | None = _key(keys.EXPERT_WEIGHTS_NORM)

    head_count: Size = _key(keys.HEAD_COUNT)
    head_count_kv: Size = _key(keys.HEAD_COUNT_KV)
    key_length: Size = _key(keys.KEY_LENGTH)
    value_length: Size = _key(keys.VALUE_LENGTH)
    key_length_mla: Size = _key(keys.KEY_LENGTH_MLA)
    value_length_mla: Size = _key(keys.VALUE_LENGTH_MLA)
    temperature_scale: float | None = _key(keys.TEMPERATURE_SCALE)
    temperature_length: Size = _key(keys.TEMPERATURE_LENGTH)
    indexer_head_count: Size = _key(keys.INDEXER_HEAD_COUNT)
    indexer_key_length: Size = _key(keys.INDEXER_KEY_LENGTH)
    indexer_top_k: Size = _key(keys.INDEXER_TOP_K)
    indexer_block_size: Size = _key(keys.INDEXER_BLOCK_SIZE)
    indexer_local_blocks: Size = _key(keys.INDEXER_LOCAL_BLOCKS)
    indexer_kpool: Size = _key(keys.INDEXER_KPOOL)
    indexer_kpool_select_tail: bool | None = _key(keys.INDEXER_KPOOL_SELECT_TAIL)
    indexer_types: Flags = _key(keys.INDEXER_TYPES)
    q_lora_rank: Size = _key(keys.Q_LORA_RANK)
    kv_lora_rank: Size = _key(keys.KV_LORA_RANK)
    layer_norm_epsilon: float | None = _key(keys.LAYERNORM_EPS)
    layer_norm_rms_epsilon: float | None = _key(keys.LAYERNORM_RMS_EPS)

    pooling_type: Size = _key(keys.POOLING_TYPE)
    classifier_pooling_type: Size = _key(keys.CLASSIFIER_POOLING_TYPE)
    interleave_moe_layer_step: Size = _key(keys.INTERLEAVE_MOE_LAYER_STEP)
    moe_every_n_layers: Size = _key(keys.MOE_EVERY_N_LAYERS)
    rescale_every_n_layers: Size = _key(keys.RESCALE_EVERY_N_LAYERS)
    n_deepstack_layers: Size = _key(keys.N_DEEPSTACK_LAYERS)
    attn_res_block_size: Size = _key(keys.ATTN_RES_BLOCK_SIZE)
    hrm_layers_per_stack: Size = _key(keys.HRM_LAYERS_PER_STACK)
    ple_layers: Size = _key(keys.PLE_LAYERS)
    ple_ngram_size: Size = _key(keys.PLE_NGRAM_SIZE)
    ple_heads_per_ngram: Size = _key(keys.PLE_HEADS_PER_NGRAM)
    ple_conv_kernel: Size = _key(keys.PLE_CONV_KERNEL)
    ple_eos_token_id: Size = _key(keys.PLE_EOS_TOKEN_ID)
    ple_layer_multipliers: Size = _key(keys.PLE_LAYER_MULTIPLIERS)
    ple_head_offsets: Size = _key(keys.PLE_HEAD_OFFSETS)
    ple_head_vocab_sizes: Size = _key(keys.PLE_HEAD_VOCAB_SIZES)

    recurrent_layers: Flags = _key(keys.RECURRENT_LAYERS)
    full_attention_interval: Size = _key(keys.FULL_ATTENTION_INTERVAL)
    ssm_conv_kernel: Size = _key(keys.SSM_CONV_KERNEL)
    ssm_state_size: Size = _key(keys.SSM_STATE_SIZE)
    ssm_group_count: Size = _key(keys.SSM_GROUP_COUNT)
    ssm_time_step_rank: Size = _key(keys.SSM_TIME_STEP_RANK)
    ssm_inner_size: Size = _key(keys.SSM_INNER_SIZE)
    kda_head_dim: Size = _key(keys.KDA_HEAD_DIM)
    kda_safe_gate: bool | None = _key(keys.KDA_SAFE_GATE)
    kda_gate_lower_bound: float | None = _key(keys.KDA_GATE_LOWER_BOUND)
    shortconv_l_cache: Size = _key(keys.SHORTCONV_L_CACHE)

    output_group_count: Size = _key(keys.OUTPUT_GROUP_COUNT)
    output_lora_rank: Size = _key(keys.OUTPUT_LORA_RANK)
    compress_ratios: Size = _key(keys.COMPRESS_RATIOS)
    compress_rope_freq_base: float | None = _key(keys.COMPRESS_ROPE_FREQ_BASE)
    hyper_connection_count: Size = _key(keys.HYPER_CONNECTION_COUNT)
    hyper_connection_iterations: Size = _key(keys.HYPER_CONNECTION_ITERATIONS)
    hyper_connection_epsilon: float | None = _key(keys.HYPER_CONNECTION_EPSILON)
    hyper_connection_low_rank: Size = _key(keys.HYPER_CONNECTION_LOW_RANK)
    hash_layer_count: Size = _key(keys.HASH_LAYER_COUNT)
    swiglu_clamp_exp: float | tuple[float, ...] | None = _key(keys.SWIGLU_CLAMP_EXP)
    swiglu_clamp_shexp: float | tuple[float, ...] | None = _key(keys.SWIGLU_CLAMP_SHEXP)

    xielu_alpha_n: float | tuple[float, ...] | None = _key(keys.XIELU_ALPHA_N)
    xielu_alpha_p: float | tuple[float, ...] | None = _key(keys.XIELU_ALPHA_P)
    xielu_beta: float | tuple[float, ...] | None = _key(keys.XIELU_BETA)
    xielu_eps: float | tuple[float, ...] | None = _key(keys.XIELU_EPS)

    sliding_window: Size = _key(keys.SLIDING_WINDOW)
    sliding_window_pattern: Flags = _key(keys.SLIDING_WINDOW_PATTERN)
    key_length_swa: Size = _key(keys.KEY_LENGTH_SWA)
    value_length_swa: Size = _key(keys.VALUE_LENGTH_SWA)
    shared_kv_layers: Size = _key(keys.SHARED_KV_LAYERS)
    embedding_length_per_layer_input: Size = _key(keys.EMBEDDING_LENGTH_PER_LAYER_INPUT)
    logit_scale: float | None = _key(keys.LOGIT_SCALE)
    residual_scale: float | None = _key(keys.RESIDUAL_SCALE)
    embedding_scale: float | None = _key(keys.EMBEDDING_SCALE)
    attention_scale: float | None = _key(keys.ATTENTION_SCALE)
    attention_value_scale: float | None = _key(keys.VALUE_SCALE)
    attn_logit_softcapping: float | None = _key(keys.ATTN_LOGIT_SOFTCAPPING)
    final_logit_softcapping: float | None = _key(keys.FINAL_LOGIT_SOFTCAPPING)
    rope_dimension_count: Size = _key(keys.ROPE_DIMENSION_COUNT)
    rope_dimension_count_swa: Size = _key(keys.ROPE_DIMENSION_COUNT_SWA)
    rope_dimension_sections: Size = _key(keys.ROPE_DIMENSION_SECTIONS)
    rope_freq_base: float | None = _key(keys.ROPE_FREQ_BASE)
    rope_freq_base_swa: float | None = _key(keys.ROPE_FREQ_BASE_SWA)
    rope_scale_linear: float | None = _key(keys.ROPE_SCALE_LINEAR)
    rope_scaling_type: str | None = _key(keys.ROPE_SCALING_TYPE)
    rope_scaling_factor: float | None = _key(keys.ROPE_SCALING_FACTOR)
    rope_scaling_finetuned: bool | None = _key(keys.ROPE_SCALING_FINETUNED)
    rope_scaling_attn_factor: float | None = _key(keys.ROPE_SCALING_ATTN_FACTOR)
    rope_scaling_original_context_length: Size = _key(keys.ROPE_SCALING_ORIG_CTX_LEN)
    rope_scaling_yarn_ext_factor: float | None = _key(keys.ROPE_SCALING_YARN_EXT_FACTOR)
    rope_scaling_yarn_attn_factor: float | None = _key(keys.ROPE_SCALING_YARN_ATTN_FACTOR)
    rope_scaling_yarn_log_multiplier: float | None = _key(keys.ROPE_SCALING_YARN_LOG_MUL)
    rope_scaling_yarn_beta_fast: float | None = _key(keys.ROPE_SCALING_YARN_BETA_FAST)
    rope_scaling_yarn_beta_slow: float | None = _key(keys.ROPE_SCALING_YARN_BETA_SLOW)

    def key(self, name: str) -> str:
        """Return the metadata key that a field is read from.

        >>> HParams("llama", "model.gguf").key("head_count")
        'llama.attention.head_count'
        """
        template: str = _FIELDS[name].metadata["template"]
        return template.format(arch=self.architecture)

    def size(self, name: str, default: int | None = None) -> int:
        """Return a size of the model; of one number per layer, the first that isn't 0.

        raises  FormatError naming the key for one that is negative, absurd, or missing without a default
        """
        size = getattr(self, name)
        if isinstance(size, tuple):
            size = next((number for number in size if number), None)
        if size is None:
            size = default
        if size is None or not 0 <= size < _SIZE_LIMIT:
            raise FormatError(f"{self.path}: {self.key(name)} is {quoted(size)}, expected {_SIZE.expected}")
        return int(size)

    def first(self, name: str) -> int | None:
        """Return a size, that of the first layer where layers differ; None where it is missing.

        llama.cpp reads sizes so where a decision is for the whole model.
        """
        size = getattr(self, name)
        if isinstance(size, tuple):
            return size[0] if size else None
        return None if size is None else int(size)

    def by_layer(self, name: str, n_layers: int) -> tuple[int, ...]:
        """Return a size for each layer; 0 where the key is missing.

        raises  FormatError naming the key where the file has another number of them
        """
        size = getattr(self, name)
        sizes = size if isinstance(size, tuple) else (size or 0,) * n_layers
        if len(sizes) != n_layers:
            raise FormatError(
                f"{self.path}: {self.key(name)} is {quoted(sizes)}, expected {n_layers} numbers, one for each"
                " layer"
            )
        return sizes

    def flags(self, name: str, n_layers: int) -> tuple[bool, ...] | None:
        """Return a flag for each layer; None where the key is missing."""
        flags = getattr(self, name)
        return (bool(flags),) * n_layers if isinstance(flags, int) else flags

    def number(self, name: str, default: float) -> float:
        """Return a number, or the default where it is missing."""
        number = getattr(self, name)
        return default if number is None else float(number)


_SIZE_LIMIT = 2**31
"""Number that no size of a model reaches."""

_FIELDS = {item.name: item for item in fields(HParams) if "template" in item.metadata}
"""Fields of HParams that are read from a key, by name."""


def read_hparams(metadata: Metadata, architecture: str, path: str | Path) -> HParams:
    """Return the hyper-parameters of the model at `path`, whose keys begin with `architecture`.

    A key that llama.cpp does not read for the architecture counts as missing.

    raises  FormatError naming the key for one that llama.cpp requires and the model lacks, or for a value of
            the wrong kind
    """

    def refuse(key: str, data: object, expected: str) -> None:
        raise FormatError(f"{path}: {key} is {quoted(data)}, expected {expected}")

    loader = LOADERS.get(architecture)
    for template in () if loader is None else sorted(loader.required):
        if template.format(arch=architecture) not in metadata:
            raise FormatError(
                f"{path}: no key {template.format(arch=architecture)}, which llama.cpp requires of a model of"
                f" this architecture"
            )
    return _read(metadata, architecture, path, refuse, loader)


def architecture_of(metadata: Metadata) -> str | None:
    """Return the name of the model's architecture; None where it is missing or no string."""
    value = metadata.get(keys.ARCHITECTURE)
    return value.data if value is not None and isinstance(value.data, str) else None


def known_hparams(metadata: Metadata, architecture: str) -> HParams:
    """Return the hyper-parameters of a model, without those of the wrong kind."""
    return _read(metadata, architecture, "", lambda key, data, expected: None)


def _read(
    metadata: Metadata,
    architecture: str,
    path: str | Path,
    refuse: Callable[[str, object, str], None],
    loader: Loader | None = None,
) -> HParams:
    """Return the hyper-parameters; `refuse` is called with key, value and what is expected instead.

    loader  that says which keys count; it refuses a list for a key that has none. None: it isn't known
    """
    values: dict[str, Any] = {}
    for name, item in _FIELDS.items():
        template, kind = item.metadata["template"], item.metadata["kind"]
        key = template.format(arch=architecture)
        if key not in metadata or (loader is not None and not loader.reads(template)):
            continue
        data = metadata[key].data
        may_be_list = any(each.startswith("array") for each in keys.expected_kinds(template, ""))
        is_fit = may_be_list or loader is None or not isinstance(data, tuple)
        if is_fit and kind.fits(data):
            values[name] = kind.take(data)
        else:
            refuse(key, data, kind.expected)
    return HParams(architecture, path, **values)
