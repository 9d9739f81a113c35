"""Metadata keys: their names, and the kinds of value that llama.cpp expects of them.

Names with `{arch}` are templates: `keys.BLOCK_COUNT.format(arch="deepseek2")` is
"deepseek2.block_count"; names with `{id}` take a number there.

llama.cpp accepts exactly one kind for a key that its loader reads: an int32 where it wants a uint32 makes it
refuse the whole model. Numbers that may differ by layer are a uint32, or an array of int32 or uint32. Keys
that only describe the model have the kind that its converter writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_U32 = ("uint32",)
_I32 = ("int32",)
_F32 = ("float32",)
_BOOL = ("bool",)
_STRING = ("string",)
_STRINGS = ("array of string",)
_BOOLS = ("array of bool",)
_I32S = ("array of int32", "array of uint32")
_U64S = ("array of uint64",)
_U32_PER_LAYER = ("uint32", "array of int32", "array of uint32")
_F32_PER_LAYER = ("array of float32", "float32")
_FLAG_PER_LAYER = (*_BOOLS, "uint32", *_I32S)

_kinds: dict[str, tuple[str, ...]] = {}
"""Kinds of value by key or template, the usual one first."""

_only_shown: set[str] = set()
"""Keys that no loader needs: programs show them, or fall back on something else."""


_per_layer: set[str] = set()
"""Keys whose array has a value for each layer, where it is an array."""


def _loaded(key: str, kinds: tuple[str, ...]) -> str:
    _kinds[key] = kinds
    return key


def _layered(key: str, kinds: tuple[str, ...]) -> str:
    _per_layer.add(key)
    return _loaded(key, kinds)


def _shown(key: str, kinds: tuple[str, ...]) -> str:
    _only_shown.add(key)
    return _loaded(key, kinds)


ALIGNMENT = _loaded("general.alignment", _U32)

# --- general: what the model is
ARCHITECTURE = _loaded("general.architecture", _STRING)
TYPE = _loaded("general.type", _STRING)
FILE_TYPE = _loaded("general.file_type", _U32)
QUANTIZATION_VERSION = _loaded("general.quantization_version", _U32)
NAME = _loaded("general.name", _STRING)
AUTHOR = _shown("general.author", _STRING)
VERSION = _shown("general.version", _STRING)
ORGANIZATION = _shown("general.organization", _STRING)
FINETUNE = _shown("general.finetune", _STRING)
BASENAME = _shown("general.basename", _STRING)
DESCRIPTION = _shown("general.description", _STRING)
QUANTIZED_BY = _shown("general.quantized_by", _STRING)
SIZE_LABEL = _shown("general.size_label", _STRING)
LICENSE = _shown("general.license", _STRING)
LICENSE_NAME = _shown("general.license.name", _STRING)
LICENSE_LINK = _shown("general.license.link", _STRING)
URL = _shown("general.url", _STRING)
DOI = _shown("general.doi", _STRING)
UUID = _shown("general.uuid", _STRING)
REPO_URL = _shown("general.repo_url", _STRING)
SOURCE_URL = _shown("general.source.url", _STRING)
SOURCE_DOI = _shown("general.source.doi", _STRING)
SOURCE_UUID = _shown("general.source.uuid", _STRING)
SOURCE_REPO_URL = _shown("general.source.repo_url", _STRING)
BASE_MODEL_COUNT = _shown("general.base_model.count", _U32)
DATASET_COUNT = _shown("general.dataset.count", _U32)
for _name in ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url"):
    _shown(f"general.base_model.{{id}}.{_name}", _STRING)
    _shown(f"general.dataset.{{id}}.{_name}", _STRING)
TAGS = _shown("general.tags", _STRINGS)
LANGUAGES = _shown("general.languages", _STRINGS)
DATASETS = _shown("general.datasets", _STRINGS)
SAMPLING_SEQUENCE = _shown("general.sampling.sequence", _STRING)
SAMPLING_TOP_K = _shown("general.sampling.top_k", _I32)
SAMPLING_TOP_P = _shown("general.sampling.top_p", _F32)
SAMPLING_MIN_P = _shown("general.sampling.min_p", _F32)
SAMPLING_XTC_PROBABILITY = _shown("general.sampling.xtc_probability", _F32)
SAMPLING_XTC_THRESHOLD = _shown("general.sampling.xtc_threshold", _F32)
SAMPLING_TEMP = _shown("general.sampling.temp", _F32)
SAMPLING_PENALTY_LAST_N = _shown("general.sampling.penalty_last_n", _I32)
SAMPLING_PENALTY_REPEAT = _shown("general.sampling.penalty_repeat", _F32)
SAMPLING_MIROSTAT = _shown("general.sampling.mirostat", _I32)
SAMPLING_MIROSTAT_TAU = _shown("general.sampling.mirostat_tau", _F32)
SAMPLING_MIROSTAT_ETA = _shown("general.sampling.mirostat_eta", _F32)

# --- hyper-parameters
VOCAB_SIZE = _loaded("{arch}.vocab_size", _U32)
HIDDEN_ACTIVATION = _loaded("{arch}.hidden_activation", _STRING)
ATTENTION_CAUSAL = _loaded("{arch}.attention.causal", _BOOL)
POOLING_TYPE = _loaded("{arch}.pooling_type", _U32)
CLASSIFIER_POOLING_TYPE = _loaded("{arch}.classifier.pooling_type", _U32)
CLASSIFIER_OUTPUT_LABELS = _loaded("{arch}.classifier.output_labels", _STRINGS)
DEEPSTACK_MAPPING = _layered("{arch}.deepstack_mapping", _I32S)
CONTEXT_LENGTH = _loaded("{arch}.context_length", _U32)
EMBEDDING_LENGTH = _loaded("{arch}.embedding_length", _U32)
BLOCK_COUNT = _loaded("{arch}.block_count", _U32)
LEADING_DENSE_BLOCK_COUNT = _loaded("{arch}.leading_dense_block_count", _U32)
FEED_FORWARD_LENGTH = _layered("{arch}.feed_forward_length", _U32_PER_LAYER)
EXPERT_FEED_FORWARD_LENGTH = _layered("{arch}.expert_feed_forward_length", _U32_PER_LAYER)
EXPERT_SHARED_FEED_FORWARD_LENGTH = _loaded("{arch}.expert_shared_feed_forward_length", _U32)
EXPERT_COUNT = _loaded("{arch}.expert_count", _U32)
EXPERT_USED_COUNT = _layered("{arch}.expert_used_count", _U32_PER_LAYER)
EXPERT_SHARED_COUNT = _loaded("{arch}.expert_shared_count", _U32)
EXPERT_GROUP_COUNT = _loaded("{arch}.expert_group_count", _U32)
EXPERT_GROUP_USED_COUNT = _loaded("{arch}.expert_group_used_count", _U32)
EXPERT_WEIGHTS_SCALE = _loaded("{arch}.expert_weights_scale", _F32)
EXPERT_WEIGHTS_NORM = _loaded("{arch}.expert_weights_norm", _BOOL)
MOE_LATENT_SIZE = _loaded("{arch}.moe_latent_size", _U32)
EXPERT_GATING_FUNC = _loaded("{arch}.expert_gating_func", _U32)
NEXTN_PREDICT_LAYERS = _loaded("{arch}.nextn_predict_layers", _U32)
HEAD_COUNT = _layered("{arch}.attention.head_count", _U32_PER_LAYER)
HEAD_COUNT_KV = _layered("{arch}.attention.head_count_kv", _U32_PER_LAYER)
KEY_LENGTH = _loaded("{arch}.attention.key_length", _U32)
VALUE_LENGTH = _loaded("{arch}.attention.value_length", _U32)
KEY_LENGTH_MLA = _loaded("{arch}.attention.key_length_mla", _U32)
VALUE_LENGTH_MLA = _loaded("{arch}.attention.value_length_mla", _U32)
TEMPERATURE_SCALE = _loaded("{arch}.attention.temperature_scale", _F32)
TEMPERATURE_LENGTH = _loaded("{arch}.attention.temperature_length", _U32)
INDEXER_HEAD_COUNT = _loaded("{arch}.attention.indexer.head_count", _U32)
INDEXER_KEY_LENGTH = _loaded("{arch}.attention.indexer.key_length", _U32)
INDEXER_TOP_K = _loaded("{arch}.attention.indexer.top_k", _U32)
INDEXER_BLOCK_SIZE = _loaded("{arch}.attention.indexer.block_size", _U32)
INDEXER_LOCAL_BLOCKS = _loaded("{arch}.attention.indexer.local_blocks", _U32)
INDEXER_KPOOL = _loaded("{arch}.attention.indexer.kpool", _U32)
INDEXER_KPOOL_SELECT_TAIL = _loaded("{arch}.attention.indexer.kpool_select_tail", _BOOL)
INDEXER_TYPES = _layered("{arch}.attention.indexer.types", _FLAG_PER_LAYER)
OUTPUT_GROUP_COUNT = _loaded("{arch}.attention.output_group_count", _U32)
OUTPUT_LORA_RANK = _loaded("{arch}.attention.output_lora_rank", _U32)
COMPRESS_RATIOS = _layered("{arch}.attention.compress_ratios", _I32S)
COMPRESS_ROPE_FREQ_BASE = _loaded("{arch}.attention.compress_rope_freq_base", _F32)
HYPER_CONNECTION_COUNT = _loaded("{arch}.hyper_connection.count", _U32)
HYPER_CONNECTION_ITERATIONS = _loaded("{arch}.hyper_connection.sinkhorn_iterations", _U32)
HYPER_CONNECTION_EPSILON = _loaded("{arch}.hyper_connection.epsilon", _F32)
HYPER_CONNECTION_LOW_RANK = _loaded("{arch}.hyper_connection.low_rank", _U32)
HASH_LAYER_COUNT = _loaded("{arch}.hash_layer_count", _U32)
EMBEDDING_LENGTH_OUT = _loaded("{arch}.embedding_length_out", _U32)
EMBEDDING_LENGTH_PER_LAYER_INPUT = _loaded("{arch}.embedding_length_per_layer_input", _U32)
ALTUP_ACTIVE_IDX = _loaded("{arch}.altup.active_idx", _U32)
ALTUP_NUM_INPUTS = _loaded("{arch}.altup.num_inputs", _U32)
ACTIVATION_SPARSITY_SCALE = _layered("{arch}.activation_sparsity_scale", _F32_PER_LAYER)
ATTN_LOGIT_SOFTCAPPING = _loaded("{arch}.attn_logit_softcapping", _F32)
FINAL_LOGIT_SOFTCAPPING = _loaded("{arch}.final_logit_softcapping", _F32)
LOGIT_SCALE = _loaded("{arch}.logit_scale", _F32)
RESIDUAL_SCALE = _loaded("{arch}.residual_scale", _F32)
EMBEDDING_SCALE = _loaded("{arch}.embedding_scale", _F32)
ATTENTION_SCALE = _loaded("{arch}.attention.scale", _F32)
VALUE_SCALE = _loaded("{arch}.attention.value_scale", _F32)
SWIGLU_CLAMP_EXP = _layered("{arch}.swiglu_clamp_exp", _F32_PER_LAYER)
SWIGLU_CLAMP_SHEXP = _layered("{arch}.swiglu_clamp_shexp", _F32_PER_LAYER)
Q_LORA_RANK = _loaded("{arch}.attention.q_lora_rank", _U32)
KV_LORA_RANK = _loaded("{arch}.attention.kv_lora_rank", _U32)
RECURRENT_LAYERS = _layered("{arch}.attention.recurrent_layers", _FLAG_PER_LAYER)
FULL_ATTENTION_INTERVAL = _loaded("{arch}.full_attention_interval", _U32)
SSM_CONV_KERNEL = _loaded("{arch}.ssm.conv_kernel", _U32)
SSM_STATE_SIZE = _loaded("{arch}.ssm.state_size", _U32)
SSM_GROUP_COUNT = _loaded("{arch}.ssm.group_count", _U32)
SSM_TIME_STEP_RANK = _loaded("{arch}.ssm.time_step_rank", _U32)
SSM_INNER_SIZE = _loaded("{arch}.ssm.inner_size", _U32)
KDA_HEAD_DIM = _loaded("{arch}.kda.head_dim", _U32)
KDA_SAFE_GATE = _loaded("{arch}.kda.safe_gate", _BOOL)
KDA_GATE_LOWER_BOUND = _loaded("{arch}.kda.gate_lower_bound", _F32)
SITU_BETA = _loaded("{arch}.activation.situ_beta", _F32)
SITU_LINEAR_BETA = _loaded("{arch}.activation.situ_linear_beta", _F32)
EXPERT_LATENT_LENGTH = _loaded("{arch}.expert_latent_length", _U32)
LAYERNORM_EPS = _loaded("{arch}.attention.layer_norm_epsilon", _F32)
LAYERNORM_RMS_EPS = _loaded("{arch}.attention.layer_norm_rms_epsilon", _F32)
KEY_LENGTH_SWA = _loaded("{arch}.attention.key_length_swa", _U32)
VALUE_LENGTH_SWA = _loaded("{arch}.attention.value_length_swa", _U32)
SHARED_KV_LAYERS = _loaded("{arch}.attention.shared_kv_layers", _U32)
SLIDING_WINDOW_PATTERN = _layered("{arch}.attention.sliding_window_pattern", _FLAG_PER_LAYER)
SLIDING_WINDOW = _loaded("{arch}.attention.sliding_window", _U32)
ROPE_DIMENSION_COUNT = _loaded("{arch}.rope.dimension_count", _U32)
ROPE_DIMENSION_COUNT_SWA = _loaded("{arch}.rope.dimension_count_swa", _U32)
ROPE_DIMENSION_SECTIONS = _loaded("{arch}.rope.dimension_sections", _I32S)
ROPE_FREQ_BASE = _loaded("{arch}.rope.freq_base", _F32)
ROPE_FREQ_BASE_SWA = _loaded("{arch}.rope.freq_base_swa", _F32)
ROPE_SCALE_LINEAR = _loaded("{arch}.rope.scale_linear", _F32)
ROPE_SCALING_ALPHA = _loaded("{arch}.rope.scaling.alpha", _F32)
ROPE_SCALING_TYPE = _loaded("{arch}.rope.scaling.type", _STRING)
ROPE_SCALING_FACTOR = _loaded("{arch}.rope.scaling.factor", _F32)
ROPE_SCALING_FINETUNED = _loaded("{arch}.rope.scaling.finetuned", _BOOL)
ROPE_SCALING_ATTN_FACTOR = _loaded("{arch}.rope.scaling.attn_factor", _F32)
ROPE_SCALING_ORIG_CTX_LEN = _loaded("{arch}.rope.scaling.original_context_length", _U32)
ROPE_SCALING_YARN_EXT_FACTOR = _loaded("{arch}.rope.scaling.yarn_ext_factor", _F32)
ROPE_SCALING_YARN_ATTN_FACTOR = _loaded("{arch}.rope.scaling.yarn_attn_factor", _F32)
ROPE_SCALING_YARN_LOG_MUL = _loaded("{arch}.rope.scaling.yarn_log_multiplier", _F32)
ROPE_SCALING_YARN_BETA_FAST = _loaded("{arch}.rope.scaling.yarn_beta_fast", _F32)
ROPE_SCALING_YARN_BETA_SLOW = _loaded("{arch}.rope.scaling.yarn_beta_slow", _F32)

INTERLEAVE_MOE_LAYER_STEP = _loaded("{arch}.interleave_moe_layer_step", _U32)
MOE_EVERY_N_LAYERS = _loaded("{arch}.moe_every_n_layers", _U32)
RESCALE_EVERY_N_LAYERS = _loaded("{arch}.rescale_every_n_layers", _U32)
N_DEEPSTACK_LAYERS = _loaded("{arch}.n_deepstack_layers", _U32)
ATTN_RES_BLOCK_SIZE = _loaded("{arch}.attn_res.block_size", _U32)
SHORTCONV_L_CACHE = _loaded("{arch}.shortconv.l_cache", _U32)
HRM_LAYERS_PER_STACK = _loaded("{arch}.hrm.layers_per_stack", _U32)
DENSE_2_FEAT_IN = _loaded("{arch}.dense_2_feat_in", _U32)
DENSE_2_FEAT_OUT = _loaded("{arch}.dense_2_feat_out", _U32)
DENSE_3_FEAT_IN = _loaded("{arch}.dense_3_feat_in", _U32)
DENSE_3_FEAT_OUT = _loaded("{arch}.dense_3_feat_out", _U32)
PLE_LAYERS = _loaded("{arch}.ple.layers", _I32S)
PLE_NGRAM_SIZE = _loaded("{arch}.ple.ngram_size", _U32)
PLE_HEADS_PER_NGRAM = _loaded("{arch}.ple.heads_per_ngram", _U32)
PLE_CONV_KERNEL = _loaded("{arch}.ple.conv_kernel", _U32)
PLE_EOS_TOKEN_ID = _loaded("{arch}.ple.eos_token_id", _U32)
PLE_IMAGE_TOKEN_ID = _loaded("{arch}.ple.image_token_id", _U32)
PLE_LAYER_MULTIPLIERS = _loaded("{arch}.ple.layer_multipliers", _U64S)
PLE_HEAD_OFFSETS = _loaded("{arch}.ple.head_offsets", _U64S)
PLE_HEAD_VOCAB_SIZES = _loaded("{arch}.ple.head_vocab_sizes", _U64S)

_OTHERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (_U32, """features_length expert_chunk_feed_forward_length experts_per_group
        decoder_start_token_id decoder_block_count time_mix_extra_dim
        time_decay_extra_dim token_shift_count adapters.count adapters.lora_rank num_loops hrm.h_cycles
        hrm.l_cycles attention.group_norm_groups attention.decay_lora_rank attention.iclr_lora_rank
        attention.value_residual_mix_lora_rank attention.gate_lora_rank attention.relative_buckets_count
        attention.key_length_mla_swa attention.value_length_mla_swa attention.kv_lora_rank_swa
        wkv.head_size posnet.embedding_length posnet.block_count
        convnext.embedding_length convnext.block_count target_hidden_size block_size conv_kernel_size
        conv_group_size selector_rank selector_top_k"""),
    (_F32, """expert_group_scale attn_logit_softcapping
        router_logit_softcapping adapters.router_gain attention.max_alibi_bias attention.clamp_kqv
        attention.group_norm_epsilon attention.output_scale
        hyper_connection.magnitude"""),
    (_BOOL, """use_parallel_residual swin_norm skip_loop_final_norm hrm.prefix_lm
        ssm.dt_b_c_rms norm_before_residual
        norm_before_fc"""),
    (_I32S, "adapters.token_ids_activate adapters.token_ids_substitute target_layers"),
)  # fmt: skip
"""Other hyper-parameters of llama.cpp's loader, by the kinds that it reads (src/models/*.cpp: get_key,
get_arr)."""

for _kind, _names in _OTHERS:
    for _name in _names.split():
        _loaded(f"{{arch}}.{_name}", _kind)
_layered("{arch}.attention.rope_pattern", _FLAG_PER_LAYER)
_XIELU = "xielu."
XIELU_ALPHA_N, XIELU_ALPHA_P, XIELU_BETA, XIELU_EPS = tuple(
    _layered(f"{_XIELU}{_name}", _F32_PER_LAYER) for _name in ("alpha_n", "alpha_p", "beta", "eps")
)
"""Numbers of the activation of apertus; llama.cpp's loader has no architecture in these keys."""

# --- tokenizer
TOKENIZER_MODEL = _loaded("tokenizer.ggml.model", _STRING)
TOKENIZER_PRE = _loaded("tokenizer.ggml.pre", _STRING)
TOKENIZER_TOKENS = _loaded("tokenizer.ggml.tokens", _STRINGS)
TOKENIZER_TOKEN_TYPE = _loaded("tokenizer.ggml.token_type", ("array of int32",))
TOKENIZER_SCORES = _loaded("tokenizer.ggml.scores", ("array of float32", "array of int32"))
TOKENIZER_MERGES = _loaded("tokenizer.ggml.merges", _STRINGS)
TOKENIZER_BOS_ID = _loaded("tokenizer.ggml.bos_token_id", _U32)
TOKENIZER_EOS_ID = _loaded("tokenizer.ggml.eos_token_id", _U32)
TOKENIZER_EOT_ID = _loaded("tokenizer.ggml.eot_token_id", _U32)
TOKENIZER_EOM_ID = _loaded("tokenizer.ggml.eom_token_id", _U32)
TOKENIZER_PREFIX_ID = _loaded("tokenizer.ggml.prefix_token_id", _U32)
TOKENIZER_SUFFIX_ID = _loaded("tokenizer.ggml.suffix_token_id", _U32)
TOKENIZER_MIDDLE_ID = _loaded("tokenizer.ggml.middle_token_id", _U32)
TOKENIZER_UNK_ID = _loaded("tokenizer.ggml.unknown_token_id", _U32)
TOKENIZER_SEP_ID = _loaded("tokenizer.ggml.seperator_token_id", _U32)  # spelled so in every file
TOKENIZER_PAD_ID = _loaded("tokenizer.ggml.padding_token_id", _U32)
TOKENIZER_MASK_ID = _loaded("tokenizer.ggml.mask_token_id", _U32)
for _name in ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "cls"):
    _loaded(f"tokenizer.ggml.{_name}_token_id", _U32)
TOKENIZER_TYPE_COUNT = _loaded("tokenizer.ggml.token_type_count", _U32)
TOKENIZER_LOWERCASE = _loaded("tokenizer.ggml.normalizer.lowercase", _BOOL)
TOKENIZER_STRIP_ACCENTS = _loaded("tokenizer.ggml.normalizer.strip_accents", _BOOL)
_shown("tokenizer.huggingface.json", _STRING)
_shown("tokenizer.rwkv.world", _STRING)
TOKENIZER_SUPPRESS = _loaded("tokenizer.ggml.suppress_tokens", _I32S)
TOKENIZER_ADD_BOS = _loaded("tokenizer.ggml.add_bos_token", _BOOL)
TOKENIZER_ADD_EOS = _loaded("tokenizer.ggml.add_eos_token", _BOOL)
TOKENIZER_ADD_SEP = _loaded("tokenizer.ggml.add_sep_token", _BOOL)
TOKENIZER_ADD_PREFIX = _loaded("tokenizer.ggml.add_space_prefix", _BOOL)
TOKENIZER_REMOVE_EXTRA_WS = _loaded("tokenizer.ggml.remove_extra_whitespaces", _BOOL)
TOKENIZER_PRECOMPILED_CHARSMAP = _loaded(
    "tokenizer.ggml.precompiled_charsmap", ("array of uint8", "array of int8")
)
TOKENIZER_CHAT_TEMPLATE = _loaded("tokenizer.chat_template", _STRING)
TOKENIZER_CHAT_TEMPLATE_NAMED = _loaded("tokenizer.chat_template.{name}", _STRING)
TOKENIZER_CHAT_TEMPLATES = _shown("tokenizer.chat_templates", _STRINGS)

# --- vision and audio towers (`general.type` is "mmproj")
_F32S = ("array of float32",)
CLIP_HAS_VISION_ENCODER = _loaded("clip.has_vision_encoder", _BOOL)
CLIP_HAS_AUDIO_ENCODER = _loaded("clip.has_audio_encoder", _BOOL)
CLIP_PROJECTOR_TYPE = _loaded("clip.projector_type", _STRING)
CLIP_USE_GELU = _loaded("clip.use_gelu", _BOOL)
CLIP_VISION_PROJECTOR_TYPE = _loaded("clip.vision.projector_type", _STRING)
CLIP_VISION_PROJECTION_DIM = _loaded("clip.vision.projection_dim", _U32)
CLIP_VISION_IMAGE_SIZE = _loaded("clip.vision.image_size", _U32)
CLIP_VISION_PATCH_SIZE = _loaded("clip.vision.patch_size", _U32)
CLIP_VISION_EMBEDDING_LENGTH = _loaded("clip.vision.embedding_length", _U32)
CLIP_VISION_FEED_FORWARD_LENGTH = _loaded("clip.vision.feed_forward_length", _U32)
CLIP_VISION_BLOCK_COUNT = _loaded("clip.vision.block_count", _U32)
CLIP_VISION_HEAD_COUNT = _loaded("clip.vision.attention.head_count", _U32)
CLIP_VISION_LAYERNORM_EPS = _loaded("clip.vision.attention.layer_norm_epsilon", _F32)
CLIP_VISION_IMAGE_MEAN = _loaded("clip.vision.image_mean", _F32S)
CLIP_VISION_IMAGE_STD = _loaded("clip.vision.image_std", _F32S)
CLIP_VISION_SPATIAL_MERGE_SIZE = _loaded("clip.vision.spatial_merge_size", _U32)
CLIP_VISION_IS_DEEPSTACK_LAYERS = _loaded("clip.vision.is_deepstack_layers", _BOOLS)
CLIP_VISION_PROJECTOR_SCALE_FACTOR = _loaded("clip.vision.projector.scale_factor", _U32)
CLIP_AUDIO_PROJECTOR_TYPE = _loaded("clip.audio.projector_type", _STRING)
CLIP_AUDIO_PROJECTION_DIM = _loaded("clip.audio.projection_dim", _U32)
CLIP_AUDIO_EMBEDDING_LENGTH = _loaded("clip.audio.embedding_length", _U32)
CLIP_AUDIO_FEED_FORWARD_LENGTH = _loaded("clip.audio.feed_forward_length", _U32)
CLIP_AUDIO_BLOCK_COUNT = _loaded("clip.audio.block_count", _U32)
CLIP_AUDIO_HEAD_COUNT = _loaded("clip.audio.attention.head_count", _U32)
CLIP_AUDIO_LAYERNORM_EPS = _loaded("clip.audio.attention.layer_norm_epsilon", _F32)
CLIP_AUDIO_NUM_MEL_BINS = _loaded("clip.audio.num_mel_bins", _U32)

# --- split sets
SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS_COUNT = "split.tensors.count"

# --- what llama-quantize writes about its importance matrix
QUANTIZE_IMATRIX_FILE = _shown("quantize.imatrix.file", _STRING)
QUANTIZE_IMATRIX_DATASET = _shown("quantize.imatrix.dataset", _STRING)
QUANTIZE_IMATRIX_ENTRIES_COUNT = "quantize.imatrix.entries_count"
QUANTIZE_IMATRIX_CHUNKS_COUNT = "quantize.imatrix.chunks_count"

# --- importance matrices in GGUF form (`general.type` is "imatrix")
IMATRIX_DATASETS = "imatrix.datasets"
IMATRIX_CHUNK_COUNT = "imatrix.chunk_count"
IMATRIX_CHUNK_SIZE = "imatrix.chunk_size"


def expected_kinds(key: str, architecture: str) -> Sequence[str]:
    """Return the kinds that llama.cpp accepts for a key, the usual one first.

    key           as in a file, or a template
    architecture  the file's `general.architecture`, the prefix of its hyper-parameters
    returns       names as in Value.type_name; empty for a key that is not well known
    """
    return _kinds.get(_template_of(key, architecture), ())


def kinds_instead(key: str, architecture: str, type_name: str) -> Sequence[str]:
    """Return the kinds that llama.cpp accepts for a key in place of `type_name`; none where it fits."""
    expected = expected_kinds(key, architecture)
    return () if type_name in expected else expected


def is_per_layer(key: str, architecture: str) -> bool:
    """Return whether a key that holds an array has a value for each layer there."""
    return _template_of(key, architecture) in _per_layer


def hparam_templates() -> Sequence[str]:
    """Return the templates of all hyper-parameters that are known."""
    return [template for template in _kinds if template.startswith(("{arch}.", _XIELU))]


def is_loaded(key: str, architecture: str) -> bool:
    """Return whether llama.cpp's loader reads a well-known key, and refuses the file over a wrong value."""
    template = _template_of(key, architecture)
    return template in _kinds and template not in _only_shown


def _template_of(key: str, architecture: str) -> str:
    """Return the template that `key` was made from; a key of no template as it is."""
    if key in _kinds:
        return key
    if key.startswith(TOKENIZER_CHAT_TEMPLATE + "."):
        return TOKENIZER_CHAT_TEMPLATE_NAMED
    if architecture and key.startswith(architecture + "."):
        return "{arch}" + key.removeprefix(architecture)
    return re.sub(r"\.\d+\.", ".{id}.", key)
