"""Published models whose rows are no whole blocks, as headers."""

from __future__ import annotations

from collections.abc import Sequence

from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from tests.quantize.plan import any_architecture, recorded_plans

_V2_LITE = {
    "context_length": 163840, "embedding_length": 2048, "block_count": 27, "feed_forward_length": 10944,
    "leading_dense_block_count": 1, "vocab_size": 102400, "expert_count": 64, "expert_used_count": 6,
    "expert_shared_count": 2, "expert_feed_forward_length": 1408, "attention.head_count": 16,
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 512, "attention.key_length": 576,
    "attention.value_length": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
}  # fmt: skip
_QWEN_72B = {
    "block_count": 80, "embedding_length": 8192, "feed_forward_length": 29568, "attention.head_count": 64,
    "attention.head_count_kv": 8,
}  # fmt: skip


def odd_model(name: str) -> tuple[Metadata, Sequence[TensorInfo]]:
    """Return the metadata and the tensors of a model: v2-lite, qwen2.5-72b, or one of `any_architecture`."""
    if name == "v2-lite":
        metadata = {f"deepseek2.{key}": Value.u32(number) for key, number in _V2_LITE.items()}
        metadata["deepseek2.attention.layer_norm_rms_epsilon"] = Value.f32(1e-6)
        metadata[keys.ARCHITECTURE] = Value.string("deepseek2")
        return metadata, recorded_plans.tensors_of(name)
    if name == "qwen2.5-72b":
        return _qwen_72b()
    return any_architecture.metadata_of(name), any_architecture.tensors_of(name)


def _qwen_72b() -> tuple[Metadata, Sequence[TensorInfo]]:
    """Return the header of the 7B model with the sizes of the 72B one."""
    metadata, tensors = odd_model("qwen2.5-7b")
    sizes = {3584: 8192, 18944: 29568, 512: 1024}
    grown = [TensorInfo(each.name, tuple(sizes.get(n, n) for n in each.shape), F32) for each in tensors]
    layer = [each for each in grown if each.name.startswith("blk.0.")]
    outside = [each for each in grown if not each.name.startswith("blk.")]
    stack = [
        TensorInfo(each.name.replace("blk.0.", f"blk.{number}."), each.shape, F32)
        for number in range(_QWEN_72B["block_count"])
        for each in layer
    ]
    numbers = {f"qwen2.{key}": Value.u32(number) for key, number in _QWEN_72B.items()}
    return {**metadata, **numbers}, [*outside, *stack]
