"""Keys of quantization settings that are used, or say nothing about what the weights mean.

A key that is none of these gets a note, as it may say something new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from convert.weights.settings import Settings
from gguf_tools.text import shown

_USED = """
    quant_method method quant_algo bits w_bit nbits num_bits group_size q_group_size checkpoint_format format
    packing_format dynamic extra_config config_groups weight_block_size weight_scale_semantics
    quantization_status sparsity_config version quantization mode
"""
"""Read by convert.weights, or by what it says of rotations."""

_SHOWN_BY_TENSORS = """
    sym zero_point desc_act static_groups has_zero_point lm_head quant_lm_head head_bits data_type scale_dtype
    super_bits super_group_size quant_type quant_type_kwargs load_in_4bit load_in_8bit _load_in_4bit
    _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage weights
    quant_config weight_quant_params axis view_as_float skip_modules ignore ignored_layers exclude_modules
    modules_to_not_convert modules_to_convert llm_int8_skip_modules llm_int8_has_fp16_weight quantized_layers
    layer_config regex_config dynamic_config block_name_to_quantize modules_in_block_to_quantize
    module_name_preceding_first_block quant_block_list to_quant_block_names inside_layer_modules pack_dtype
    fmt scale_fmt expert_dtype include_input_output_embeddings untie_embedding_weights quantize_embeddings
    is_marlin_format global_compression_ratio transform_config pre_quant_scale awq_block_size quant_mode
"""
"""Keys that show in names, types and sizes of stored tensors; what can't be read is refused there."""

_OF_ACTIVATIONS = """
    activation_scheme activation_scale_ub activations act_bits act_data_type act_dynamic act_group_size
    act_sym kv_cache_scheme kv_cache_quant_algo kv_cache_quant_method kv_cache_dtype static_kv_dtype
    static_attention_dtype
"""

_OF_THE_RUN = """
    backend bnb_4bit_compute_dtype llm_int8_threshold llm_int8_enable_fp32_cpu_offload run_compressed
    dequantize use_optimized_inference do_fuse modules_to_fuse fuse_max_seq_len exllama_config use_exllama
    disable_exllama use_cuda_fp16 max_input_length offload_to_disk use_deep_gemm use_triton
"""

_OF_THE_MAKING = """
    producer quant_library autoround_version meta model_name_or_path model_file_base_name tokenizer dataset
    calibration damp_percent damp_auto_increment true_sequential act_group_aware model_seqlen batch_size
    pad_token_id cache_block_outputs iters nsamples seqlen lr minmax_lr low_gpu_mem_usage low_cpu_mem_usage
    enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning enable_alg_ext gradient_accumulate_steps
    amp mse hyb_act transformers_version tune_metadata
"""

KNOWN = frozenset(" ".join((_USED, _SHOWN_BY_TENSORS, _OF_ACTIVATIONS, _OF_THE_RUN, _OF_THE_MAKING)).split())
"""Those of transformers 5.24 (utils/quantization_config.py), and of checkpoints that GPTQModel, AutoAWQ,
auto-round, compressed-tensors, ModelOpt and exllamav2 have made."""


def unread_keys(settings: Settings) -> Iterator[str]:
    """Yield a note about the keys that nothing is known of; keys without a value say nothing."""
    prefix = f"{settings.section}." if settings.section else ""
    unread = [
        f"{prefix}{shown(key)}"
        for key, value in settings.values.items()
        if key not in KNOWN
        and value not in (None, False, "", [], {})
        # MLX names modules there, whose settings are read with them.
        and not (settings.method == "mlx" and isinstance(value, Mapping))
    ]
    if unread:
        yield f"{settings.path.name}: {', '.join(unread)}: not read"
