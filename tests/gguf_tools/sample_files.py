"""Small GGUF files that the tests of gguf_tools share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gguf_tools import FileLayout, GGUFWriter, Kind, TensorInfo, Value
from gguf_tools.format import ggml_types as types
from gguf_tools.format.header import Endian, Header, read_header

METADATA: dict[str, Value] = {
    "general.architecture": Value.string("deepseek2"),
    "general.name": Value.string("Größe 深度 🐳"),
    "a.u8": Value.u8(255),
    "a.i8": Value.i8(-128),
    "a.u16": Value.u16(65535),
    "a.i16": Value.i16(-32768),
    "a.u32": Value.u32(2**32 - 1),
    "a.i32": Value.i32(-(2**31)),
    "a.f32": Value.f32(0.1),
    "a.bool": Value.bool_(True),
    "a.u64": Value.u64(2**64 - 1),
    "a.i64": Value.i64(-(2**63)),
    "a.f64": Value.f64(0.1),
    "a.strings": Value.strings(["", "a", "ü", b"\xff\xfe not UTF-8"]),
    "a.u8s": Value.u8s([1, 2, 255]),
    "a.i32s": Value.i32s([-1, 0, 1]),
    "a.f32s": Value.f32s([0.1, -0.0, 1e38]),
    "a.bools": Value.bools([True, False]),
    "a.empty": Value.array(Kind.UINT16, []),
}
"""Every kind but arrays of arrays, which llama.cpp refuses."""

TENSORS = (
    TensorInfo("token_embd.weight", (3, 64), types.F32),
    TensorInfo("output_norm.weight", (5,), types.F32),
    TensorInfo("blk.0.ffn_down_exps.weight", (2, 3, 64), types.Q8_0),
    TensorInfo("blk.0.attn_k_b.weight", (2, 4, 32), types.F16),
    TensorInfo("blk.0.ffn_gate.weight", (2, 256), types.Q4_K),
    TensorInfo("blk.1.four_d.weight", (2, 1, 3, 32), types.BF16),
)


def finite_bytes(info: TensorInfo, seed: int = 0) -> bytes:
    """Data for a tensor in which no 2 or 4 bytes are a NaN or an infinity, in either byte order."""
    rng = np.random.default_rng([seed, *info.name.encode()])
    return rng.integers(0, 0x70, info.n_bytes, np.uint8).tobytes()


def write_file(
    path: Path,
    metadata: dict[str, Value] = METADATA,
    tensors: tuple[TensorInfo, ...] = TENSORS,
    *,
    seed: int = 0,
    alignment: int | None = None,
    endian: Endian = "little",
    version: int = 3,
) -> dict[str, bytes]:
    """Write a file, and return the data of its tensors."""
    layout = FileLayout.of(metadata, tensors, alignment=alignment, endian=endian, version=version)
    data = {info.name: finite_bytes(info, seed) for info in tensors}
    with GGUFWriter(path, layout) as writer:
        for info in tensors:
            writer.write(layout.offset_of(info.name), data[info.name])
        writer.publish()
    return data


def decode_header(data: bytes, source: str) -> Header:
    """Parse the header at the start of `data`, a whole file in memory; see `read_header`."""
    return read_header(lambda offset, n_bytes: data[offset : offset + n_bytes], len(data), source)
