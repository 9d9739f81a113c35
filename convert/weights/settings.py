"""Reads what a checkpoint says about its own quantization, wherever its producer wrote it.

The first of these that exists counts:

    config.json             quantization_config, or compression_config (older compressed-tensors); the same
                            inside text_config (multimodal wrappers)
                            quantization, MLX's
    quantize_config.json    the whole file (AutoGPTQ)
    quant_config.json       the whole file (AutoAWQ; EETQ)
    hf_quant_config.json    `quantization` in it (ModelOpt); also completes what config.json says

The method is `quant_method`, or `method`. A file that never has such a key stands for the method of the
program that writes it. Names of methods are in lower case, and one method has one name.

Keys that are not known to be used, or to say nothing about what the weights mean, get a note: they may say
something new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.checkpoint.checkpoint import Checkpoint
from gguf_tools.errors import BadConfig
from gguf_tools.text import quoted, shown

_SECTIONS = ("quantization_config", "compression_config")
_OF_MLX = "quantization"
"""Key of MLX, which writes the same under quantization_config, without a method."""

_SPELLINGS = {
    "intel/auto-round": "auto-round", "auto_round": "auto-round", "autoround": "auto-round",
    "compressed_tensors": "compressed-tensors", "bnb": "bitsandbytes", "fbgemm-fp8": "fbgemm_fp8",
}  # fmt: skip
_METHOD_KEYS = ("quant_method", "method")
# A key that only one program writes, for sections without a method.
_TELLING_KEYS = {
    "quant_algo": "modelopt", "config_groups": "compressed-tensors", "w_bit": "awq", "mode": "mlx",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """A checkpoint's quantization settings; empty where it has none.

    method   "gptq", "fp8" ...; None when nothing says so
    values   the keys as they stand there
    path     the file they stand in
    section  the key in that file that holds them, "" for the file itself
    model    config.json
    """

    method: str | None
    values: Mapping[str, Any]
    path: Path
    section: str
    model: Mapping[str, Any]

    def get(self, *keys: str) -> Any:
        """Return the value of the first of `keys` (spellings of one setting) that is there and not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def where(self, key: str) -> str:
        """Return where `key` stands, for an error: "DIR/config.json: quantization_config.bits"."""
        return f"{self.path}: {self.section}.{key}" if self.section else f"{self.path}: {key}"

    def bad(self, key: str, expected: str) -> BadConfig:
        """Return the error for a value of `key` that makes no sense."""
        return BadConfig(f"{self.where(key)} is {quoted(self.values.get(key))}, expected {expected}")

    def integer(self, *keys: str) -> int | None:
        """Return an integer setting under the first of its spellings; BadConfig when it is something else."""
        key = next((key for key in keys if self.values.get(key) is not None), None)
        if key is None:
            return None
        value = self.values[key]
        if type(value) is not int:
            raise self.bad(key, "an integer")
        return value

    def of_groups(self, key: str) -> tuple[Any, ...]:
        """Return the values of `key` for weights in all `config_groups` (compressed-tensors), each once."""
        groups = self.values.get("config_groups")
        values: list[Any] = []
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            value = weights.get(key) if isinstance(weights, dict) else None
            if value is not None and value not in values:
                values.append(value)
        return tuple(values)

    @property
    def described(self) -> str:
        """Name that the checkpoint gives to its format, for messages."""
        if self.method is None:
            return "no quantization_config"
        key = next((key for key in _METHOD_KEYS if key in self.values), None)
        place = self.where(key) if key else str(self.path)
        return f"{place} is {quoted(self.method)}"


def read_settings(checkpoint: Checkpoint) -> Settings:
    """Read the settings of a checkpoint's quantization.

    raises  BadConfig when a place for it holds something else
    """
    config, path = checkpoint.config, checkpoint.config_path
    modelopt = checkpoint.read_json("hf_quant_config.json")
    own = config.get(_OF_MLX)
    if isinstance(own, Mapping) and own.keys() >= {"bits", "group_size"}:
        return _settings(dict(own), path, _OF_MLX, config, "mlx")
    for holder, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        for key in _SECTIONS:
            if isinstance(holder, Mapping) and holder.get(key) is not None:
                values = _section(holder[key], path, prefix + key)
                if modelopt is not None:
                    values = _modelopt_values(modelopt, checkpoint) | values
                fallback = "compressed-tensors" if key == "compression_config" else None
                return _settings(values, path, prefix + key, config, fallback)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        content = checkpoint.read_json(name)
        if content is not None:
            return _settings(content, checkpoint.folder / name, "", config, method)
    if modelopt is not None:
        values = _modelopt_values(modelopt, checkpoint)
        path = checkpoint.folder / "hf_quant_config.json"
        return _settings(values, path, "quantization", config, "modelopt")
    return Settings(None, MappingProxyType({}), path, "quantization_config", config)


def _modelopt_values(content: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / "hf_quant_config.json"
    return _section(content.get("quantization", {}), path, "quantization")


def _section(value: Any, path: Path, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadConfig(f"{path}: {key} is {quoted(value)}, expected an object")
    return value


def _settings(
    values: dict[str, Any], path: Path, section: str, model: Mapping[str, Any], fallback: str | None
) -> Settings:
    settings = Settings(None, MappingProxyType(values), path, section, model)
    key = next((key for key in _METHOD_KEYS if key in values), None)
    if key is None:
        method = next((_TELLING_KEYS[key] for key in _TELLING_KEYS if key in values), fallback)
    elif isinstance(values[key], str):
        method = values[key].lower()
        method = _SPELLINGS.get(method, method)
    else:
        raise settings.bad(key, "the name of a method")
    return Settings(method, settings.values, path, section, model)


_USED = """
    quant_method method quant_algo bits w_bit nbits num_bits group_size q_group_size checkpoint_format format
    packing_format dynamic extra_config config_groups weight_block_size weight_scale_semantics
    quantization_status sparsity_config version quantization mode
"""
"""Keys that are read by convert.weights, or by what it says of rotations."""

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
