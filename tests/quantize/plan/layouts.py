"""Models in other layouts than the recorded DeepSeek models, with only the tensors that matter.

scripts/record/plan_golden.py writes a file with the header of each and records llama-quantize's plans.
test_layouts.py compares ours with them. Sizes and the number of layers are V2-Lite's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.format.ggml_types import BF16
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.plan.model_facts import ModelFacts

N_LAYERS = 27
N_HEADS = 16
HIDDEN, LORA, HEAD = 2048, 512, 128

Shapes = dict[str, tuple[int, ...]]

_OUTPUT: Shapes = {"attn_output.weight": (HIDDEN, N_HEADS * HEAD)}
_EXPERTS: Shapes = {
    "ffn_down_exps.weight": (64, HIDDEN, 1408),
    "ffn_gate_exps.weight": (64, 1408, HIDDEN),
    "ffn_up_exps.weight": (64, 1408, HIDDEN),
    "ffn_down_shexp.weight": (HIDDEN, 2816),
}
_DENSE: Shapes = {
    "ffn_down.weight": (HIDDEN, 4096),
    "ffn_gate.weight": (4096, HIDDEN),
    "ffn_up.weight": (4096, HIDDEN),
}
_KV_B: Shapes = {"attn_kv_b.weight": (N_HEADS * 2 * HEAD, LORA)}
_HEADS_STACKED: Shapes = {
    "attn_k_b.weight": (N_HEADS, LORA, HEAD),
    "attn_v_b.weight": (N_HEADS, HEAD, LORA),
}
_HEADS_BELOW: Shapes = {
    "attn_k_b.weight": (N_HEADS * LORA, HEAD),
    "attn_v_b.weight": (N_HEADS * HEAD, LORA),
}
_PLAIN: Shapes = {
    "attn_q.weight": (HIDDEN, HIDDEN),
    "attn_k.weight": (HIDDEN // 4, HIDDEN),
    "attn_v.weight": (HIDDEN // 4, HIDDEN),
}


@dataclass(frozen=True)
class Layout:
    """A model: the contents of each layer, and the metadata."""

    layer: Shapes
    n_kv_heads: int
    n_experts: int = 64
    tied: bool = False

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Its tensors, in the order in which llama-quantize writes them."""
        outside = ("token_embd.weight",) if self.tied else ("output.weight", "token_embd.weight")
        names = sorted(self.layer)
        shapes: Shapes = dict.fromkeys(outside, (102400, HIDDEN))
        shapes |= {f"blk.{i}.{name}": self.layer[name] for i in range(N_LAYERS) for name in names}
        return tuple(TensorInfo(name, shape, BF16) for name, shape in shapes.items())

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts("deepseek2", N_LAYERS, self.n_experts, N_HEADS, self.n_kv_heads)

    @property
    def metadata(self) -> Metadata:
        """As much metadata as llama-quantize asks for."""
        numbers = {
            "block_count": N_LAYERS, "context_length": 4096, "embedding_length": HIDDEN,
            "feed_forward_length": 4096, "attention.head_count": N_HEADS,
            "attention.head_count_kv": self.n_kv_heads, "attention.kv_lora_rank": LORA,
            "attention.key_length": 192, "attention.value_length": HEAD, "rope.dimension_count": 64,
            "leading_dense_block_count": 1, "expert_count": self.n_experts,
            "expert_used_count": min(self.n_experts, 6), "expert_feed_forward_length": 1408,
            "expert_shared_count": 2, "vocab_size": 102400,
        }  # fmt: skip
        return {
            "general.architecture": Value.string("deepseek2"),
            **{f"deepseek2.{key}": Value.u32(number) for key, number in numbers.items()},
            "deepseek2.attention.layer_norm_rms_epsilon": Value.f32(1e-6),
        }


def write_header(layout: Layout, path: Path) -> Path:
    """Write a file in that layout with a hole where the data would be, which takes next to no space."""
    laid_out = FileLayout.of(layout.metadata, layout.tensors)
    with open(path, "wb") as file:
        file.write(laid_out.header)
        file.truncate(laid_out.total_bytes)
    return path


LAYOUTS: Mapping[str, Layout] = {
    "older": Layout(_OUTPUT | _EXPERTS | _KV_B, n_kv_heads=N_HEADS),
    "older with one KV head": Layout(_OUTPUT | _KV_B, n_kv_heads=1),
    "both": Layout(_OUTPUT | _EXPERTS | _KV_B | _HEADS_BELOW, n_kv_heads=N_HEADS),
    "tied": Layout(_OUTPUT | _EXPERTS | _HEADS_STACKED, n_kv_heads=1, tied=True),
    "older and tied": Layout(_OUTPUT | _KV_B, n_kv_heads=N_HEADS, tied=True),
    "dense": Layout(_OUTPUT | _DENSE | _PLAIN, n_kv_heads=N_HEADS, n_experts=0),
    "dense with shared keys": Layout(_OUTPUT | _DENSE | _PLAIN, n_kv_heads=4, n_experts=0),
    "eight experts": Layout(_OUTPUT | _EXPERTS | _PLAIN, n_kv_heads=N_HEADS, n_experts=8),
    "eight experts, older": Layout(_OUTPUT | _EXPERTS | _KV_B, n_kv_heads=N_HEADS, n_experts=8),
}
