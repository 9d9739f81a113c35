"""Small random model files of many architectures, each from a seed.

A model is a recorded header (tests/golden/plans-any) with fewer layers and with other sizes, or one of the
few made up here. Names, metadata and dimensions stay as they were; the choice of types asks for these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import quantize
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import BF16, F16, F32, F64, I32, GGMLType, by_name
from gguf_tools.format.shards import layouts_of, shard_paths
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Metadata, Value
from quantize.roles import file_order, float32_reason
from tests.quantize.plan import any_architecture
from tests.support.samples import ROWS, TOO_LARGE

_LAYER = re.compile(r"((?:.*\.)?blk\.)(\d+)(\..*)", re.DOTALL)

_MADE_UP: dict[str, tuple[dict[str, Value], dict[str, tuple[int, ...]]]] = {
    "gpt2": (
        {"attention.layer_norm_epsilon": Value.f32(1e-5)},
        {
            "token_embd.weight": (500, 768), "position_embd.weight": (1024, 768),
            "output_norm.weight": (768,), "output_norm.bias": (768,), "output.weight": (500, 768),
            **{f"blk.{n}.{part}": shape for n in range(12) for part, shape in {
                "attn_norm.weight": (768,), "attn_qkv.weight": (2304, 768), "attn_qkv.bias": (2304,),
                "attn_output.weight": (768, 768), "ffn_norm.weight": (768,), "ffn_up.weight": (3072, 768),
                "ffn_up.bias": (3072,), "ffn_down.weight": (768, 3072),
            }.items()},
        },
    ),
    "bert": (
        {"attention.layer_norm_epsilon": Value.f32(1e-5), "attention.causal": Value.bool_(False)},
        {
            "token_embd.weight": (500, 384), "position_embd.weight": (512, 384),
            "token_types.weight": (2, 384), "token_embd_norm.weight": (384,),
            **{f"blk.{n}.{part}": shape for n in range(12) for part, shape in {
                "attn_q.weight": (384, 384), "attn_k.weight": (384, 384), "attn_v.weight": (384, 384),
                "attn_output.weight": (384, 384), "ffn_up.weight": (1536, 384),
                "ffn_down.weight": (384, 1536), "layer_output_norm.weight": (384,),
            }.items()},
        },
    ),
    "of-nobody": (
        {},
        {
            "output.weight": (500, 300),
            "token_embd.weight": (500, 300), "a.table": (40, 64), "b.weight": (3, 5, 64),
            **{f"blk.{n}.{part}": shape for n in range(4) for part, shape in {
                "mixer.weight": (300, 300), "ffn_down.weight": (300, 900), "odd.weight": (7, 77),
            }.items()},
        },
    ),
}  # fmt: skip

NAMES = (*any_architecture.MODELS, *_MADE_UP)
QUANTIZED = ("Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4", "Q6_K", "Q4_K", "Q2_K", "IQ4_XS", "TQ2_0", "NVFP4")
"""Types that a source may have before it is quantized."""

_UNUSUAL = tuple(kind for kind in ROWS if kind not in TOO_LARGE)
_COLUMNS = (256, 256, 256, 512, 512, 768, 288, 320, 96, 64, 48, 20)
_ROWS = (1, 2, 3, 4, 6, 8)
_DEPTHS = (2, 3, 4, 5, 9, 17)


@dataclass(frozen=True)
class SmallModel:
    """A model file before it is written.

    tensors   in the order of the file
    n_parts   files of the split set, 1 for a single file
    kinds     kinds of rows by tensor name, see tests/support/samples.py
    seed      of the weights
    """

    name: str
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    n_parts: int
    kinds: dict[str, str]
    seed: int

    def write(self, path: Path) -> Path:
        """Write the file, or the files of the set; return the first."""
        n = -(-len(self.tensors) // self.n_parts)
        groups = [self.tensors[start : start + n] for start in range(0, len(self.tensors), n)]
        layouts = layouts_of(self.metadata, groups)
        paths = shard_paths(path, len(layouts))
        random = np.random.default_rng(self.seed)
        for part, layout in zip(paths, layouts, strict=True):
            with GGUFWriter(part, layout) as writer:
                for info in layout.tensors:
                    writer.write(layout.offset_of(info.name), self._data(info, random))
                writer.publish()
        return paths[0]

    def _data(self, info: TensorInfo, random: np.random.Generator) -> npt.NDArray[np.uint8]:
        if info.type == I32:
            return random.integers(0, 8, info.shape, np.int32).view(np.uint8)
        if info.type == F64:
            return random.standard_normal(info.shape).view(np.uint8)
        rows = _rows(self.kinds[info.name], random, (info.n_rows, info.n_cols))
        return rows.view(np.uint8) if info.type == F32 else quantize.encode(rows, info.type)


def draw_model(random: np.random.Generator, name: str = "") -> SmallModel:
    """Draw a model: architecture where no name is given, depth, sizes, types, order and parts."""
    name = name or str(random.choice(NAMES))
    metadata, tensors = _header(name)
    metadata, tensors = _with_fewer_layers(metadata, tensors, int(random.choice(_DEPTHS)))
    metadata, tensors = _with_sizes(metadata, tensors, random)
    infos = _with_types(tensors, random)
    if random.random() < 0.3:
        infos = [infos[number] for number in random.permutation(len(infos))]
    return SmallModel(
        name=name,
        metadata=_with_more_keys(metadata, random),
        tensors=tuple(infos),
        n_parts=int(random.choice((1, 1, 1, 2, 3))),
        kinds={info.name: _draw_kind(info.type, random) for info in infos},
        seed=int(random.integers(1 << 31)),
    )


def _draw_kind(type_: GGMLType, random: np.random.Generator) -> str:
    if type_ == F32 and random.random() < 0.001:
        return str(random.choice((*TOO_LARGE, "not_finite")))
    return "normal" if random.random() < 0.8 else str(random.choice(_UNUSUAL))


def _rows(kind: str, random: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    if kind != "not_finite":
        return np.ascontiguousarray(ROWS[kind](random, shape), np.float32)
    rows = random.standard_normal(shape, np.float32)
    rows[-1, -1] = np.inf
    return rows


def _header(name: str) -> tuple[dict[str, Value], list[TensorInfo]]:
    if name not in _MADE_UP:
        return dict(any_architecture.metadata_of(name)), list(any_architecture.tensors_of(name))
    numbers, shapes = _MADE_UP[name]
    sizes = {"context_length": 512, "embedding_length": 768, "feed_forward_length": 3072,
             "attention.head_count": 12, "block_count": 1 + max(map(_layer_number, shapes))}  # fmt: skip
    own = {**{key: Value.u32(number) for key, number in sizes.items()}, **numbers}
    metadata = {keys.ARCHITECTURE: Value.string(name), **{f"{name}.{key}": own[key] for key in own}}
    return metadata, [TensorInfo(each, shapes[each], BF16) for each in file_order(shapes)]


def _layer_number(name: str) -> int:
    match = _LAYER.fullmatch(name)
    return int(match[2]) if match else -1


def _with_fewer_layers(
    metadata: dict[str, Value], tensors: Sequence[TensorInfo], depth: int
) -> tuple[dict[str, Value], list[TensorInfo]]:
    """Keep the first layers, and those for multi-token prediction, which are the last."""
    architecture = metadata[keys.ARCHITECTURE].data
    n_layers = 1 + max(_layer_number(info.name) for info in tensors)
    n_last = metadata.get(f"{architecture}.nextn_predict_layers", Value.u32(0)).data
    kept = [*range(min(depth, n_layers) - n_last), *range(n_layers - n_last, n_layers)]
    smaller = []
    for info in tensors:
        match = _LAYER.fullmatch(info.name)
        if match is None:
            smaller.append(info)
        elif int(match[2]) in kept:
            number = kept.index(int(match[2]))
            smaller.append(TensorInfo(f"{match[1]}{number}{match[3]}", info.shape, info.type))
    shorter = {}
    for key, value in metadata.items():
        if value.kind is Kind.ARRAY and len(value.data) == n_layers:
            value = Value.array(value.item, [value.data[number] for number in kept])
        elif key.endswith(".block_count"):
            value = Value.u32(len(kept))
        elif key.endswith(".leading_dense_block_count"):
            value = Value.u32(min(value.data, len(kept)))
        shorter[key] = value
    return shorter, smaller


def _with_sizes(
    metadata: dict[str, Value], tensors: Sequence[TensorInfo], random: np.random.Generator
) -> tuple[dict[str, Value], list[TensorInfo]]:
    """Draw the number of experts, and a length for each length of rows; matrices get few rows."""
    prefix = metadata[keys.ARCHITECTURE].data
    n_experts = metadata.get(f"{prefix}.expert_count", Value.u32(0)).data
    smaller = dict(metadata)
    if prefix == "deepseek2":  # llama.cpp does without it only where there are as many layers as in V2-Lite
        smaller.setdefault(f"{prefix}.attention.q_lora_rank", Value.u32(512))
    drawn = int(random.choice((4, 8, 12)))
    if n_experts:
        smaller[f"{prefix}.expert_count"] = Value.u32(drawn)
        smaller[f"{prefix}.expert_used_count"] = Value.u32(2)
        groups = (f"{prefix}.expert_group_count", f"{prefix}.expert_group_used_count")
        smaller |= {key: Value.u32(1) for key in groups if key in metadata}
    if n_experts == 0 and isinstance(metadata.get(f"{prefix}.attention.head_count", Value.u32(0)).data, int):
        shared = int(random.choice((0, 1, 4, 8)))
        if shared and f"{prefix}.attention.head_count_kv" in metadata:
            n_heads = metadata[f"{prefix}.attention.head_count"].data
            smaller[f"{prefix}.attention.head_count_kv"] = Value.u32(max(1, n_heads // shared))
    lengths: dict[int, int] = {}
    infos = []
    for info in tensors:
        n_cols = lengths.setdefault(info.n_cols, int(random.choice(_COLUMNS)))
        n_rows = (int(random.choice(_ROWS)),) if len(info.shape) > 1 else ()
        if info.name in ("token_embd.weight", "output.weight"):
            n_rows = (int(random.choice((33, 64, 200))),)
        mats = tuple(drawn if n == n_experts else min(n, 3) for n in info.shape[:-2])
        infos.append(TensorInfo(info.name, (*mats, *n_rows, n_cols), info.type))
    return smaller, infos


def _with_types(tensors: Sequence[TensorInfo], random: np.random.Generator) -> list[TensorInfo]:
    """Draw the types in which the tensors are stored."""
    style = str(random.choice(("BF16", "F16", "F32", "mixed", "quantized"), p=(0.3, 0.15, 0.25, 0.15, 0.15)))
    infos = []
    for info in tensors:
        type_ = info.type
        if type_ != I32:
            type_ = _type_of(info, style, random)
        if info.n_cols % type_.block_elems:
            type_ = BF16
        infos.append(TensorInfo(info.name, info.shape, type_))
    return infos


def _type_of(info: TensorInfo, style: str, random: np.random.Generator) -> GGMLType:
    if float32_reason(info.name, info.shape) is not None and style != "mixed":
        return F32
    if info.type.is_quantized and style != "F32":
        return info.type
    if style == "mixed":
        return F64 if random.random() < 0.002 else (F32, F16, BF16)[random.integers(3)]
    return by_name(str(random.choice(QUANTIZED))) if style == "quantized" else by_name(style)


def _with_more_keys(metadata: dict[str, Value], random: np.random.Generator) -> Metadata:
    """Add keys of every kind, some of which llama-quantize sets, at any place."""
    more = {
        keys.FILE_TYPE: Value.u32(int(random.choice((0, 1, 32)))),
        keys.QUANTIZATION_VERSION: Value.u32(int(random.choice((1, 2)))),
        "general.name": Value.string("Ein Mädchen"),
        "general.tags": Value.strings(["a", "", "déjà"]),
        "tokenizer.ggml.tokens": Value.strings([f"t{number}" for number in range(40)]),
        "tokenizer.ggml.scores": Value.f32s(np.linspace(-1, 1, 40)),
        "tokenizer.ggml.token_type": Value.i32s([1] * 40),
        "tokenizer.ggml.add_bos_token": Value.bool_(True),
        "x.u8": Value.u8(3), "x.i8": Value.i8(-3), "x.u16": Value.u16(300), "x.i16": Value.i16(-300),
        "x.u64": Value.u64(1 << 40), "x.i64": Value.i64(-(1 << 40)), "x.f64": Value.f64(0.1),
        "x.bools": Value.bools([True, False]), "x.none": Value.array(Kind.UINT32, []),
        "x.doubles": Value.array(Kind.FLOAT64, [0.5, -2.0]),
    }  # fmt: skip
    chosen = {key: value for key, value in more.items() if random.random() < 0.4}
    if random.random() < 0.02:
        chosen[keys.ALIGNMENT] = Value.u32(int(random.choice((16, 64))))
    everything = [*chosen.items(), *metadata.items()]
    return dict(everything[number] for number in random.permutation(len(everything)))
