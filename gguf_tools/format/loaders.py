"""Loaders: which keys llama.cpp reads for an architecture, and which of these a file has to have.

A key that the loader of a file's architecture does not read has no effect, whatever its name says. What is
known here are the architectures that the forward pass computes. The kind of value that a key must have is in
`gguf_tools.format.keys`.

Facts of llama.cpp (2026-10): load_hparams of src/llama-model.cpp, and load_arch_hparams and the graphs of
src/models/*.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gguf_tools.format import keys
from gguf_tools.format.values import Metadata


@dataclass(frozen=True)
class Loader:
    """The keys that llama.cpp reads for an architecture, as templates.

    required  those without which it refuses a file
    optional  the others
    scaled    parts of the names of weights that are multiplied by a tensor beside them: "ffn_up" for
              "blk.0.ffn_up.weight" and "blk.0.ffn_up.scale"
    unbiased  parts of the names of weights whose bias it reads and does not add
    """

    required: frozenset[str]
    optional: frozenset[str]
    scaled: frozenset[str]
    unbiased: frozenset[str] = frozenset()

    def reads(self, template: str) -> bool:
        """Return whether the loader reads a key."""
        return template in self.required or template in self.optional


_REQUIRED = frozenset({keys.CONTEXT_LENGTH, keys.EMBEDDING_LENGTH, keys.BLOCK_COUNT})
_OPTIONAL = frozenset({
    keys.VOCAB_SIZE, keys.EMBEDDING_LENGTH_OUT, keys.ATTENTION_CAUSAL, keys.POOLING_TYPE,
    keys.CLASSIFIER_POOLING_TYPE, keys.CLASSIFIER_OUTPUT_LABELS, keys.NEXTN_PREDICT_LAYERS,
    keys.EXPERT_COUNT, keys.EXPERT_USED_COUNT, keys.EXPERT_GROUP_COUNT, keys.EXPERT_GROUP_USED_COUNT,
    keys.FEED_FORWARD_LENGTH, keys.HEAD_COUNT, keys.HEAD_COUNT_KV, keys.ROPE_SCALING_FINETUNED,
    keys.ROPE_SCALING_ORIG_CTX_LEN, keys.ROPE_FREQ_BASE, keys.ROPE_SCALING_TYPE, keys.ROPE_SCALING_FACTOR,
    keys.ROPE_SCALE_LINEAR, keys.ROPE_SCALING_ATTN_FACTOR, keys.ROPE_SCALING_ALPHA, keys.KEY_LENGTH,
    keys.VALUE_LENGTH, keys.ROPE_DIMENSION_COUNT, keys.KEY_LENGTH_SWA, keys.VALUE_LENGTH_SWA,
    keys.ROPE_DIMENSION_COUNT_SWA,
})  # fmt: skip
"""Keys that load_hparams reads for all architectures."""

_EPS = {keys.LAYERNORM_RMS_EPS}
_WINDOW = {keys.SLIDING_WINDOW_PATTERN, keys.ROPE_FREQ_BASE_SWA}
_WEIGHTS = {keys.EXPERT_WEIGHTS_SCALE, keys.EXPERT_WEIGHTS_NORM}
_FACTORS = {keys.RESIDUAL_SCALE, keys.EMBEDDING_SCALE, keys.ATTENTION_SCALE}
_SSM = {
    keys.SSM_CONV_KERNEL, keys.SSM_INNER_SIZE, keys.SSM_STATE_SIZE, keys.SSM_TIME_STEP_RANK,
    keys.SSM_GROUP_COUNT,
}  # fmt: skip
_RECURRENT = {keys.RECURRENT_LAYERS, keys.FULL_ATTENTION_INTERVAL}
_INDEXER = {keys.INDEXER_HEAD_COUNT, keys.INDEXER_KEY_LENGTH, keys.INDEXER_TOP_K}
_NGRAMS = {
    keys.PLE_LAYERS, keys.PLE_NGRAM_SIZE, keys.PLE_HEADS_PER_NGRAM, keys.PLE_CONV_KERNEL,
    keys.PLE_EOS_TOKEN_ID, keys.PLE_IMAGE_TOKEN_ID, keys.EMBEDDING_LENGTH_PER_LAYER_INPUT,
    keys.PLE_LAYER_MULTIPLIERS, keys.PLE_HEAD_OFFSETS, keys.PLE_HEAD_VOCAB_SIZES,
}  # fmt: skip
_MLA = {keys.KEY_LENGTH_MLA, keys.VALUE_LENGTH_MLA}
_SHARED_EXPERTS = {keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_SHARED_COUNT}
_TEMPERATURE = {keys.TEMPERATURE_SCALE, keys.TEMPERATURE_LENGTH}
_NEMOTRON = (
    _SSM | {keys.LAYERNORM_EPS},
    _EPS | _WEIGHTS | _SHARED_EXPERTS | {keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, keys.MOE_LATENT_SIZE},
)

_ORDINARY = ("llama", "qwen2", "qwen3", "seed_oss", "smollm3", "olmoe", "phimoe")
"""Architectures that read nothing besides but the epsilon of their norms."""

_OWN: Mapping[str, tuple[Iterable[str], Iterable[str]]] = {
    **dict.fromkeys(_ORDINARY, (_EPS, ())),
    "deepseek": (_EPS | _SHARED_EXPERTS, {keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_WEIGHTS_SCALE}),
    "qwen2moe": (_EPS, {keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH}),
    "qwen2vl": ({keys.ROPE_DIMENSION_SECTIONS}, ()),
    "qwen3vl": (_EPS | {keys.ROPE_DIMENSION_SECTIONS}, {keys.N_DEEPSTACK_LAYERS}),
    "qwen3vlmoe": (
        _EPS | {keys.ROPE_DIMENSION_SECTIONS},
        {keys.N_DEEPSTACK_LAYERS, keys.EXPERT_FEED_FORWARD_LENGTH},
    ),
    "qwen3moe": (_EPS, {keys.EXPERT_FEED_FORWARD_LENGTH}),
    "glm4moe": (
        _EPS | _SHARED_EXPERTS,
        _WEIGHTS
        | {keys.ROPE_DIMENSION_SECTIONS, keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_GATING_FUNC},
    ),
    "gpt-oss": (_EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.SLIDING_WINDOW}, _WINDOW),
    "minimax-m2": (_EPS | {keys.EXPERT_FEED_FORWARD_LENGTH}, {keys.EXPERT_GATING_FUNC}),
    "minimax-m3": (
        _EPS | _SHARED_EXPERTS | _INDEXER
        | {keys.EXPERT_GATING_FUNC, keys.INDEXER_BLOCK_SIZE, keys.INDEXER_LOCAL_BLOCKS},
        _WEIGHTS | {keys.LEADING_DENSE_BLOCK_COUNT},
    ),
    "gemma2": (
        _EPS,
        _WINDOW | {keys.SLIDING_WINDOW, keys.ATTN_LOGIT_SOFTCAPPING, keys.FINAL_LOGIT_SOFTCAPPING},
    ),
    "llama4": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.INTERLEAVE_MOE_LAYER_STEP},
        _WINDOW | {keys.SLIDING_WINDOW},
    ),
    "apertus": (_EPS | {keys.XIELU_ALPHA_N, keys.XIELU_ALPHA_P, keys.XIELU_BETA, keys.XIELU_EPS}, ()),
    "starcoder2": ({keys.LAYERNORM_EPS}, ()),
    "gemma3": (_EPS, _WINDOW | {keys.SLIDING_WINDOW, keys.FINAL_LOGIT_SOFTCAPPING}),
    "gemma3n": (_EPS | {keys.SLIDING_WINDOW}, _WINDOW),
    "gemma-embedding": (_EPS | {keys.SLIDING_WINDOW}, _WINDOW),
    **dict.fromkeys(("bert", "nomic-bert"), ({keys.LAYERNORM_EPS}, ())),
    "nomic-bert-moe": ({keys.LAYERNORM_EPS}, {keys.MOE_EVERY_N_LAYERS}),
    "modern-bert": ({keys.LAYERNORM_EPS}, _WINDOW | {keys.SLIDING_WINDOW, keys.HIDDEN_ACTIVATION}),
    # The loaders read rope.freq_base_swa, too, but the graphs rotate all layers with the one base.
    **dict.fromkeys(("olmo2", "exaone4"), (_EPS, {keys.SLIDING_WINDOW_PATTERN, keys.SLIDING_WINDOW})),
    "exaone-moe": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_GATING_FUNC, keys.SLIDING_WINDOW},
        _WEIGHTS
        | {keys.SLIDING_WINDOW_PATTERN, keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_SHARED_COUNT,
           keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "cohere2": (
        {keys.LAYERNORM_EPS, keys.LOGIT_SCALE, keys.SLIDING_WINDOW}, {keys.SLIDING_WINDOW_PATTERN},
    ),
    "cohere2moe": (
        {keys.LOGIT_SCALE, keys.SLIDING_WINDOW, keys.LEADING_DENSE_BLOCK_COUNT,
         keys.EXPERT_FEED_FORWARD_LENGTH},
        _EPS | _WEIGHTS
        | {keys.LAYERNORM_EPS, keys.SLIDING_WINDOW_PATTERN, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH,
           keys.EXPERT_SHARED_COUNT, keys.EXPERT_GATING_FUNC},
    ),
    "bailingmoe2": (
        _EPS | _SHARED_EXPERTS | {keys.EXPERT_GATING_FUNC},
        _WEIGHTS | {keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "falcon-h1": (_EPS | _SSM, ()),
    "kimi-linear": (
        _EPS | _MLA | _SHARED_EXPERTS
        | {keys.KV_LORA_RANK, keys.SSM_CONV_KERNEL, keys.KDA_HEAD_DIM, keys.EXPERT_GATING_FUNC},
        {keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_WEIGHTS_SCALE},
    ),
    "kimi-k3": (
        _EPS | _MLA | _SHARED_EXPERTS
        | {keys.KV_LORA_RANK, keys.SSM_CONV_KERNEL, keys.KDA_HEAD_DIM, keys.EXPERT_GATING_FUNC,
           keys.ATTN_RES_BLOCK_SIZE, keys.SITU_BETA, keys.SITU_LINEAR_BETA},
        _WEIGHTS
        | {keys.Q_LORA_RANK, keys.KDA_GATE_LOWER_BOUND, keys.LEADING_DENSE_BLOCK_COUNT,
           keys.EXPERT_LATENT_LENGTH},
    ),
    "bailingmoe3": (
        _EPS | _MLA | _SHARED_EXPERTS
        | {keys.KV_LORA_RANK, keys.SSM_CONV_KERNEL, keys.KDA_HEAD_DIM, keys.KDA_GATE_LOWER_BOUND,
           keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_GATING_FUNC},
        _WEIGHTS
        | {keys.Q_LORA_RANK, keys.KDA_SAFE_GATE, keys.ROPE_DIMENSION_SECTIONS,
           keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, keys.SWIGLU_CLAMP_EXP, keys.SWIGLU_CLAMP_SHEXP},
    ),
    "glm5-next": (
        _EPS | _MLA | _SHARED_EXPERTS | _INDEXER
        | {keys.Q_LORA_RANK, keys.KV_LORA_RANK, keys.SSM_CONV_KERNEL, keys.KDA_HEAD_DIM, keys.INDEXER_KPOOL,
           keys.HYPER_CONNECTION_COUNT, keys.HYPER_CONNECTION_ITERATIONS, keys.HYPER_CONNECTION_EPSILON},
        _WEIGHTS
        | {keys.LAYERNORM_EPS, keys.KDA_GATE_LOWER_BOUND, keys.LEADING_DENSE_BLOCK_COUNT,
           keys.EXPERT_GATING_FUNC, keys.SWIGLU_CLAMP_EXP, keys.SWIGLU_CLAMP_SHEXP, keys.INDEXER_TYPES,
           keys.INDEXER_KPOOL_SELECT_TAIL},
    ),
    "lfm2": (_EPS | {keys.SHORTCONV_L_CACHE}, {keys.SLIDING_WINDOW}),
    "lfm2moe": (
        _EPS | {keys.SHORTCONV_L_CACHE, keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_GATING_FUNC},
        {keys.LEADING_DENSE_BLOCK_COUNT},
    ),
    "mistral3": (
        _EPS,
        {keys.TEMPERATURE_SCALE, keys.ROPE_SCALING_YARN_BETA_FAST, keys.ROPE_SCALING_YARN_BETA_SLOW,
         keys.ROPE_SCALING_YARN_LOG_MUL},
    ),
    "phi3": (_EPS, {keys.SLIDING_WINDOW}),
    "granite": (
        _EPS | {keys.LOGIT_SCALE},
        _FACTORS | {keys.DEEPSTACK_MAPPING, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "granitemoe": (_EPS | {keys.LOGIT_SCALE}, _FACTORS | {keys.EXPERT_SHARED_FEED_FORWARD_LENGTH}),
    "granitehybrid": (
        _EPS | _SSM,
        _FACTORS | {keys.LOGIT_SCALE, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "qwen3next": (
        _EPS | _SSM,
        _RECURRENT | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "qwen35": (_EPS | _SSM | {keys.ROPE_DIMENSION_SECTIONS}, _RECURRENT),
    "qwen35moe": (
        _EPS | _SSM | {keys.ROPE_DIMENSION_SECTIONS},
        _RECURRENT | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "qwen4exp": (
        _EPS | _SSM | _INDEXER
        | {keys.ROPE_DIMENSION_SECTIONS, keys.HYPER_CONNECTION_COUNT, keys.HYPER_CONNECTION_LOW_RANK},
        _RECURRENT | _NGRAMS
        | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, keys.COMPRESS_RATIOS},
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "glm4": (_EPS, {keys.ROPE_DIMENSION_SECTIONS}),
    "hunyuan-dense": (_EPS, {keys.ROPE_DIMENSION_SECTIONS}),
    "hunyuan-moe": (_EPS | {keys.EXPERT_FEED_FORWARD_LENGTH}, {keys.EXPERT_SHARED_FEED_FORWARD_LENGTH}),
    "hy_v3": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH},
        _WEIGHTS | {keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, keys.EXPERT_GATING_FUNC},
    ),
    "laguna": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.LEADING_DENSE_BLOCK_COUNT},
        _WEIGHTS | _WINDOW
        | {keys.SLIDING_WINDOW, keys.EXPERT_GATING_FUNC, keys.EXPERT_SHARED_COUNT,
           keys.EXPERT_SHARED_FEED_FORWARD_LENGTH},
    ),
    "muse-glimmer": (
        _EPS | {keys.SLIDING_WINDOW, keys.LOGIT_SCALE}, _WINDOW | {keys.FINAL_LOGIT_SOFTCAPPING},
    ),
    "step35": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.SLIDING_WINDOW, keys.SLIDING_WINDOW_PATTERN},
        _WEIGHTS
        | {keys.EXPERT_SHARED_FEED_FORWARD_LENGTH, keys.EXPERT_GATING_FUNC, keys.ROPE_FREQ_BASE_SWA,
           keys.SWIGLU_CLAMP_EXP, keys.SWIGLU_CLAMP_SHEXP},
    ),
    "mimo2": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.SLIDING_WINDOW, keys.SLIDING_WINDOW_PATTERN},
        {keys.ROPE_FREQ_BASE_SWA, keys.VALUE_SCALE},
    ),
    "ernie4_5": (_EPS, {keys.ROPE_DIMENSION_SECTIONS}),
    "ernie4_5-moe": (
        _EPS | {keys.EXPERT_FEED_FORWARD_LENGTH, keys.INTERLEAVE_MOE_LAYER_STEP},
        {keys.ROPE_DIMENSION_SECTIONS, keys.EXPERT_SHARED_FEED_FORWARD_LENGTH,
         keys.LEADING_DENSE_BLOCK_COUNT},
    ),
    "gemma4": (
        _EPS
        | {keys.SLIDING_WINDOW_PATTERN, keys.SLIDING_WINDOW, keys.EMBEDDING_LENGTH_PER_LAYER_INPUT,
           keys.KEY_LENGTH_SWA, keys.VALUE_LENGTH_SWA},
        {keys.SHARED_KV_LAYERS, keys.ROPE_FREQ_BASE_SWA, keys.EXPERT_FEED_FORWARD_LENGTH,
         keys.FINAL_LOGIT_SOFTCAPPING},
    ),
    "deepseek2": (
        _EPS | _SHARED_EXPERTS | {keys.KV_LORA_RANK},
        # Without the rank of queries, a model of some depths is one whose queries are not compressed.
        _MLA | _WEIGHTS | _TEMPERATURE
        | {keys.Q_LORA_RANK, keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_GATING_FUNC,
           keys.ROPE_SCALING_YARN_LOG_MUL},
    ),
    "deepseek32": (
        _EPS | _SHARED_EXPERTS | _INDEXER | {keys.Q_LORA_RANK, keys.KV_LORA_RANK, keys.EXPERT_GATING_FUNC},
        _MLA | _WEIGHTS
        | {keys.ROPE_DIMENSION_SECTIONS, keys.LEADING_DENSE_BLOCK_COUNT, keys.ROPE_SCALING_YARN_LOG_MUL},
    ),
    "glm-dsa": (
        _EPS | _SHARED_EXPERTS | _INDEXER | {keys.Q_LORA_RANK, keys.KV_LORA_RANK},
        _MLA | _WEIGHTS
        | {keys.ROPE_DIMENSION_SECTIONS, keys.LEADING_DENSE_BLOCK_COUNT, keys.EXPERT_GATING_FUNC,
           keys.INDEXER_TYPES},
    ),
    "deepseek4": (
        _EPS | _SHARED_EXPERTS | _INDEXER | _WEIGHTS
        | {keys.Q_LORA_RANK, keys.SLIDING_WINDOW, keys.SWIGLU_CLAMP_EXP, keys.OUTPUT_GROUP_COUNT,
           keys.OUTPUT_LORA_RANK, keys.COMPRESS_ROPE_FREQ_BASE, keys.HYPER_CONNECTION_COUNT,
           keys.HYPER_CONNECTION_ITERATIONS, keys.HYPER_CONNECTION_EPSILON, keys.HASH_LAYER_COUNT,
           keys.COMPRESS_RATIOS, keys.EXPERT_GATING_FUNC},
        {keys.SWIGLU_CLAMP_SHEXP},
    ),
}  # fmt: skip
"""Keys that load_arch_hparams reads besides: those that are required, and those that are not."""


def _blocks(kind: str = "") -> set[str]:
    return {f"ffn_{part}{kind}" for part in ("gate", "up", "down")}


_MTP = {"eh_proj", "shared_head_head", "output"}
_ATTENTION = {"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output"}
_EXPERTS = _blocks("_exps") | _blocks("_shexp")
_DELTA_NET = {"attn_gate", "ssm_alpha", "ssm_beta", "ssm_out"}

_SCALED: Mapping[str, Iterable[str]] = {
    "llama": _blocks() | _blocks("_exps"),
    "mistral3": _blocks() | _blocks("_exps"),
    "qwen3": _blocks(),
    "qwen3moe": _blocks("_exps"),
    "qwen3next": _EXPERTS,
    "qwen35": _blocks() | _DELTA_NET,
    "qwen35moe": _EXPERTS | _DELTA_NET,
    "qwen4exp": _EXPERTS | _DELTA_NET,
    "nemotron_h": _blocks(),
    "nemotron_h_moe": _EXPERTS,
    "gemma4": _blocks() | _blocks("_exps"),
    "cohere2": _blocks(),
    "cohere2moe": _blocks() | _EXPERTS,
    "deepseek32": _blocks() | _EXPERTS,
    "glm-dsa": _blocks() | _EXPERTS,
    "hy_v3": _blocks() | _EXPERTS,
}
"""Weights besides those of attention that build_arch_graph multiplies by a scale."""

_OF_ATTENTION = {
    "deepseek2": {"attn_output"}, "deepseek32": {"attn_output"}, "glm-dsa": {"attn_output"}, "deepseek4": (),
    **dict.fromkeys(("bailingmoe3", "glm5-next", "kimi-k3"), ()),
    "mimo2": {"attn_output"},
    "kimi-linear": (),  # in layers of KDA; those of latent attention multiply attn_output by it
    "qwen3next": _ATTENTION - {"attn_qkv"},
}  # fmt: skip
"""The same of attention, where not all of them are."""

_OUTPUT = {"attn_output"}
_UNBIASED = {
    "mimo2": _ATTENTION - _OUTPUT, "ernie4_5": _OUTPUT, "ernie4_5-moe": _OUTPUT, "falcon-h1": _OUTPUT,
}  # fmt: skip
"""Weights whose bias create_tensor reads, and build_arch_graph does not add."""

LOADERS: Mapping[str, Loader] = MappingProxyType({
    name: Loader(
        _REQUIRED | set(required),
        (_OPTIONAL | set(optional)) - set(required),
        frozenset({*_MTP, *_OF_ATTENTION.get(name, _ATTENTION), *_SCALED.get(name, ())}),
        frozenset(_UNBIASED.get(name, ())),
    )
    for name, (required, optional) in _OWN.items()
})  # fmt: skip
"""Loaders by the architecture that general.architecture names."""


WINDOW_PERIODS: Mapping[str, int] = MappingProxyType({
    **dict.fromkeys(("afmoe", "cohere2", "cohere2moe", "exaone-moe", "exaone4", "laguna"), 4),
    **dict.fromkeys(("llama4", "mellum", "muse-glimmer", "olmo2", "smallthinker"), 4),
    "gemma2": 2, "gpt-oss": 2, "modern-bert": 3, "gemma3n": 5, "gemma3": 6, "gemma-embedding": 6, "plamo3": 8,
})  # fmt: skip
"""Architecture -> one layer in so many has no window, where no key says which (load_arch_hparams)."""


FULL_FIRST = frozenset({"cohere2moe", "laguna", "modern-bert", "smallthinker"})
"""Architectures in which the layer without a window is the first of so many, not the last."""


def without_effect(metadata: Metadata, architecture: str) -> tuple[str, ...]:
    """Return the well-known keys of a file that llama.cpp does not read for its architecture.

    Nothing is returned for an architecture whose loader is not known here.
    """
    loader = LOADERS.get(architecture)
    if loader is None:
        return ()
    known = {template.format(arch=architecture): template for template in keys.hparam_templates()}
    return tuple(key for key in metadata if key in known and not loader.reads(known[key]))
