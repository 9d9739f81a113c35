"""Meaning of the names of tensors.

This is the only module that reads tensor names. Everything else asks for a `TensorRole`: which part of the
model the tensor is, which layer it belongs to, and, if it must not be quantized, why.

The names and the list of tensors that are never quantized are facts of llama.cpp's quantizer
(llama-quant.cpp: tensor_get_category, tensor_allows_quantization). It looks for substrings, so `ffn_down`
covers dense matrices, stacked experts and shared experts alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal, get_args

from gguf_tools.format.values import bytes_of
from gguf_tools.text import in_layer_ranges as in_layer_ranges

_LAYER = re.compile(r"blk\.(\d+)")

Program = Literal["llama.cpp", "ik_llama.cpp"]
"""A program that reads and makes GGUF files, and takes names of tensors in its own way."""

MLALayout = Literal["split", "both", "none"]
"""A layout of multi-head latent attention; quantize/mla_layout/layouts.py says what each is."""

LAYOUTS: tuple[MLALayout, ...] = get_args(MLALayout)

FeedForwardPart = Literal["dense", "routed", "shared"]
"""A kind of feed-forward block: one for all tokens, a routed expert, or experts that see every token."""


class Role(Enum):
    """The part that a tensor plays in the model, as far as it matters for choosing a type."""

    TOKEN_EMBD = "token embeddings"
    OUTPUT = "output"
    ATTN_QKV = "attn_qkv"
    ATTN_KV_B = "attn_kv_b"
    ATTN_K_B = "attn_k_b"
    ATTN_V_B = "attn_v_b"
    ATTN_V = "attn_v"
    ATTN_K = "attn_k"
    ATTN_Q = "attn_q"
    ATTN_OUTPUT = "attn_output"
    FFN_UP = "ffn_up"
    FFN_GATE = "ffn_gate"
    FFN_DOWN = "ffn_down"
    QUERY_LATENT = "low-rank query"
    NEXTN_PROJ = "nextn.eh_proj"
    OTHER = "other"


_WHOLE_NAMES: dict[str, Role] = {
    "output.weight": Role.OUTPUT,
    "token_embd.weight": Role.TOKEN_EMBD,
    "per_layer_token_embd.weight": Role.TOKEN_EMBD,
}

# Tried in this order, anywhere in the name; the first match decides.
_PARTS: tuple[tuple[str, Role], ...] = (
    ("attn_qkv.weight", Role.ATTN_QKV),
    ("attn_kv_b.weight", Role.ATTN_KV_B),
    ("attn_k_b.weight", Role.ATTN_K_B),
    ("attn_v_b.weight", Role.ATTN_V_B),
    ("attn_v.weight", Role.ATTN_V),
    ("attn_k.weight", Role.ATTN_K),
    ("attn_q.weight", Role.ATTN_Q),
    ("attn_output.weight", Role.ATTN_OUTPUT),
    ("ffn_up", Role.FFN_UP),
    ("ffn_gate", Role.FFN_GATE),
    ("ffn_down", Role.FFN_DOWN),
)

# The same in ik_llama.cpp (llama_tensor_get_type), which takes all that begins like attn_k or attn_q as one.
_IK_PARTS: tuple[tuple[str, Role], ...] = (
    ("attn_v.weight", Role.ATTN_V),
    ("attn_qkv.weight", Role.ATTN_QKV),
    ("attn_k", Role.ATTN_K),
    ("attn_q", Role.ATTN_Q),
    ("ffn_down", Role.FFN_DOWN),
    ("attn_output.weight", Role.ATTN_OUTPUT),
    ("ffn_gate", Role.FFN_GATE),
    ("ffn_up", Role.FFN_UP),
)

# Substrings of names that are never quantized, each with the reason that a plan prints.
_KEPT_PARTS: tuple[tuple[str, str], ...] = (
    ("_norm.weight", "norm"),
    ("ffn_gate_inp.weight", "expert router"),
    ("ffn_gate_tid2eid.weight", "expert routing table"),
    ("altup", "tiny matrix"),
    ("laurel", "tiny matrix"),
    ("per_layer_model_proj", "small projection"),
    ("ssm_conv1d", "convolution kernel"),
    ("shortconv.conv.weight", "convolution kernel"),
    ("indexer.k_proj.weight", "indexer projection"),
    ("indexer.q_proj.weight", "indexer projection"),
    *((f"time_mix_{part}.weight", "small time-mix matrix") for part in (
        "first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2",
        "decay_w1", "decay_w2", "lerp_fused",
    )),
    ("attn_rel_b.weight", "position bias"),
    (".position_embd", "position embeddings"),
    ("sam.pos_embd", "position embeddings"),
    ("sam.neck.", "vision part"),
    ("sam.net_", "vision part"),
    (".rel_pos", "position embeddings"),
    (".patch_embd", "vision part"),
    (".patch_merger", "vision part"),
    ("a.rvq.codebook", "audio codebook"),
    ("mm.a.code_embd", "audio codebook"),
)  # fmt: skip

# The matrices of Mamba that ik_llama.cpp keeps besides (llama_model_quantize_internal).
_IK_KEPT_PARTS = (("ssm_x.weight", "small matrix of Mamba"), ("ssm_dt.weight", "small matrix of Mamba"))

_KEPT_NAMES: dict[str, str] = {
    "position_embd.weight": "position embeddings",
    "token_types.weight": "token types",
}


@dataclass(frozen=True)
class _OwnNames:
    """Parts of names that have a meaning in one architecture only; they are tried before the general ones.

    kept   parts of names that are never quantized, each with the reason
    roles  parts of names of tensors that get a type of their own, each with the role
    """

    kept: tuple[tuple[str, str], ...] = ()
    roles: tuple[tuple[str, Role], ...] = ()


_NO_OWN_NAMES = _OwnNames()

# By architecture; facts of llama-quant.cpp (LLM_ARCH_GLM5_NEXT).
# Those of `clip` are not: llama-quantize makes F16 of an audio tower's convolutions, stops at those with four
# dimensions, and llama.cpp computes none by channels whose kernels are F16.
_OWN_NAMES: dict[str, _OwnNames] = {
    "clip": _OwnNames(
        kept=(("a.conv1d.", "convolution kernel"), (".conv_dw.weight", "convolution kernel")),
    ),
    "glm5-next": _OwnNames(
        kept=(
            ("hc_", "hyper-connection"),
            ("indexer.attn_q_b", "indexer projection"),
            ("indexer.attn_k", "indexer projection"),
            ("indexer.proj", "indexer projection"),
            ("indexer_compressor_gate", "indexer projection"),
            ("indexer_compressor_ape", "indexer projection"),
            *(
                (f"ssm_{part}.weight", "gate of linear attention")
                for part in ("f_a", "f_b", "g_a", "g_b", "beta")
            ),
            ("attn_kv_a_mqa.weight", "low-rank keys and values"),
            ("attn_k_b.weight", "low-rank keys and values"),
            ("attn_v_b.weight", "low-rank keys and values"),
        ),
        roles=(
            ("attn_q_a", Role.QUERY_LATENT),
            ("attn_q_b", Role.QUERY_LATENT),
            ("nextn.eh_proj", Role.NEXTN_PROJ),
        ),
    ),
}

_MERGED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attn_kv_b", ("attn_v_b",)),  # the second half of each head's rows
    ("attn_qkv", ("attn_q", "attn_k", "attn_v")),
    *((f"ffn_gate_up{part}", (f"ffn_gate{part}", f"ffn_up{part}")) for part in ("", "_exps", "_shexp")),
)
"""Matrices that hold the rows of others, which so multiply the same activations."""

_SIBLINGS: Mapping[str, tuple[str, ...]] = dict(_MERGED) | {
    part: (merged,) for merged, parts in _MERGED for part in parts
}


_IN_GROUPS = ("attn_output_a.weight",)
"""Ends of names of matrices whose rows are in groups, each of which multiplies its own (deepseek4)."""


@dataclass(frozen=True)
class TensorRole:
    """Role of a tensor, as its name, number of dimensions and architecture tell it.

    layer    the N of `blk.N.`, or None outside the layers
    kept_as  why it is never quantized, in a phrase; None when it may be quantized
    is_shared_expert  whether it belongs to experts that see every token
    """

    role: Role
    layer: int | None
    kept_as: str | None
    is_shared_expert: bool = False


@lru_cache(maxsize=1 << 16)
def tensor_role(
    name: str,
    shape: tuple[int, ...],
    architecture: str | None = None,
    program: Program = "llama.cpp",
) -> TensorRole:
    """Find the role of tensor `name` of `shape` (rows first) in a file of `architecture`.

    program  whose reading of the name counts
    Without an architecture, the name means what it means in most.
    """
    own = _NO_OWN_NAMES if architecture is None else _OWN_NAMES.get(architecture, _NO_OWN_NAMES)
    is_ik = program == "ik_llama.cpp"
    parts = _IK_PARTS if is_ik else (*own.roles, *_PARTS)
    kept = (*own.kept, *_KEPT_PARTS, *(_IK_KEPT_PARTS if is_ik else ()))
    shared = "_shexp.weight" in name
    role = _WHOLE_NAMES.get(name) or next((role for part, role in parts if part in name), Role.OTHER)
    return TensorRole(role, layer_of(name), _kept_as(name, shape, kept), shared)


def _kept_as(name: str, shape: tuple[int, ...], parts: Iterable[tuple[str, str]]) -> str | None:
    if n_dims(shape) < 2:
        return "1-D"
    if not name.endswith("weight"):
        return "not a weight"
    if name in _KEPT_NAMES:
        return _KEPT_NAMES[name]
    return next((reason for part, reason in parts if part in name), None)


_FEED_FORWARD = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)(|_exps|_shexp)\.(weight|bias)")

_PARTS_OF_FFN: dict[str, FeedForwardPart] = {"": "dense", "_exps": "routed", "_shexp": "shared"}

_NOT_OF_INNER_SIZE = re.compile(
    r"ffn_(post_)?norm|ffn_gate_(inp|tid2eid)|ffn_(latent|routed|res)_|ffn_\w+\.(input_)?scale$"
)


@dataclass(frozen=True)
class FeedForwardPlace:
    """The place of a tensor in a feed-forward block.

    matrix   gate, up, gate_up (both in one, gate first) or down
    is_bias  whether it is added to the product of that matrix
    """

    layer: int
    matrix: str
    part: FeedForwardPart
    is_bias: bool


def feed_forward_place(name: str) -> FeedForwardPlace | None:
    """Find the place of a tensor in a feed-forward block; None for any other tensor."""
    match = _FEED_FORWARD.fullmatch(name)
    if match is None:
        return None
    layer, matrix, part, kind = match.groups()
    return FeedForwardPlace(int(layer), matrix, _PARTS_OF_FFN[part], kind == "bias")


def is_unknown_feed_forward(name: str) -> bool:
    """Whether a tensor belongs to a feed-forward block in a way that is not known here."""
    is_inside = ".ffn_" in name and not _NOT_OF_INNER_SIZE.search(name)
    return is_inside and feed_forward_place(name) is None


def has_row_groups(name: str) -> bool:
    """Whether the rows of a tensor are in groups of equal size that multiply different things."""
    return name.endswith(_IN_GROUPS)


def float32_reason(name: str, shape: tuple[int, ...]) -> str | None:
    """Say why the converter stores a tensor as F32 whatever the output type; None if it does not.

    Facts of llama.cpp's converter (conversion/base.py: prepare_tensors). Unlike in `n_dims`, leading
    dimensions of 1 count here.
    """
    if len(shape) < 2:
        return "1-D"
    if name.endswith("_norm.weight"):
        return "norm"
    if not name.endswith(".weight"):
        return "not a weight"
    if name.endswith(("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")):
        return "expert router"
    if name.endswith(("altup_correct_coef.weight", "altup_predict_coef.weight")):
        return "coefficients"
    return None


def n_dims(shape: tuple[int, ...]) -> int:
    """Count dimensions as ggml does: without leading dimensions of 1.

    >>> n_dims((1, 64)), n_dims((16, 1, 64)), n_dims((1, 1))
    (1, 3, 1)
    """
    leading = next((i for i, length in enumerate(shape) if length != 1), len(shape))
    return max(1, len(shape) - leading)


def layer_of(name: str) -> int | None:
    """Read the N of a name that begins with `blk.N`; None for any other."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def file_order(names: Iterable[str]) -> list[str]:
    """Sort `names` into the order in which llama-quantize writes (and visits) tensors.

    Tensors outside the layers come first, then layer by layer. Within a layer, the order is by the bytes of
    the name.
    """

    def place(name: str) -> tuple[int, bytes]:
        layer = layer_of(name)
        return (-1 if layer is None else layer), bytes_of(name)

    return sorted(names, key=place)


def in_layer(name: str, layer: int) -> str:
    """Move a name to another layer: `blk.7.x` in layer 5 is `blk.5.x`."""
    return _LAYER.sub(f"blk.{layer}", name, count=1)


def siblings_with_same_activations(name: str) -> tuple[str, ...]:
    """Name the tensors that hold rows of `name`, or whose rows it holds: they multiply the same activations.

    >>> siblings_with_same_activations("blk.1.ffn_up_exps.weight")
    ('blk.1.ffn_gate_up_exps.weight',)
    """
    layer, dot, part = name.removesuffix(".weight").rpartition(".")
    if not name.endswith(".weight"):
        return ()
    return tuple(f"{layer}{dot}{other}.weight" for other in _SIBLINGS.get(part, ()))
