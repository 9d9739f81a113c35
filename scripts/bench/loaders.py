"""Time the decoding of every checkpoint format on one core: GB of BF16 output a second.

    python scripts/bench/loaders.py [--json] [--formats fp8 int4] [--rows 4096] [--cols 7168] [--seconds 1]

For each format, a checkpoint with one random matrix is written and then read as a conversion reads it: a few
MiB of rows at a time, into float32, from the page cache. The best pass counts. Every weight counts as 2 bytes
of BF16, whatever type a conversion would write. Compiling is not counted. --cols is a multiple of 128, and
--seconds are spent on each format.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import convert
from scripts.bench.common import machine, measured, parser_of
from tests.support.checkpoints import write_checkpoint

CHUNK_BYTES = 8 << 20
NAME = "model.layers.0.mlp.up_proj"
Tensors = dict[str, np.ndarray]


def random_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def random_words(*shape: int) -> np.ndarray:
    return random_bytes(*shape[:-1], 4 * shape[-1]).view(np.int32)


def scales(dtype: Any, *shape: int) -> np.ndarray:
    return (np.random.default_rng(1).random(shape, np.float32) + 0.5).astype(dtype)


def floats(n_rows: int, n_cols: int) -> np.ndarray:
    """Return random 8-bit floats without NaN, as arithmetic with NaN may be slower."""
    return (random_bytes(n_rows, n_cols) & np.uint8(0xF7)).view(ml_dtypes.float8_e4m3fn)


def shape_of(n_rows: int, n_cols: int) -> np.ndarray:
    return np.array([n_rows, n_cols], np.int64)


def compressed(num_bits: int, group_size: int | None) -> dict[str, Any]:
    group = {"weights": {"num_bits": num_bits, "group_size": group_size}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def gptq(bits: int, n_rows: int, n_cols: int, *, act_order: bool = False) -> Tensors:
    groups = np.arange(n_cols, dtype=np.int32) // 128
    return {
        ".qweight": random_words(n_cols * bits // 32, n_rows),
        ".qzeros": random_words(n_cols // 128, n_rows * bits // 32),
        ".scales": scales(np.float16, n_cols // 128, n_rows),
        ".g_idx": np.random.default_rng(2).permutation(groups) if act_order else groups,
    }


def exl2(widths: Sequence[int], n_rows: int, n_cols: int) -> Tensors:
    """Return a matrix whose groups of 128 columns share out the bit widths `widths`, widest first."""
    bits = np.sort(np.resize(widths, n_cols // 128))[::-1]
    starts = np.concatenate([[0], np.cumsum(4 * bits)])
    return {
        ".q_weight": random_words(int(starts[-1]), n_rows),
        ".q_scale": random_words(len(bits), n_rows // 8),
        ".q_scale_max": scales(np.float16, len(bits)),
        ".q_groups": np.stack([bits, starts[:-1]], axis=1).reshape(-1).astype(np.uint16).view(np.int16),
        ".q_invperm": np.random.default_rng(2).permutation(n_cols).astype(np.int32),
    }


def nf4(n_rows: int, n_cols: int, *, nested: bool = False) -> Tensors:
    n_blocks = n_rows * n_cols // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [n_rows, n_cols]}
    tensors = {
        ".weight": random_bytes(n_rows * n_cols // 2, 1),
        ".weight.quant_map": scales(np.float32, 16),
        ".weight.absmax": random_bytes(n_blocks) if nested else scales(np.float32, n_blocks),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_offset": 0.5}
        tensors |= {
            ".weight.nested_absmax": scales(np.float32, -(-n_blocks // 256)),
            ".weight.nested_quant_map": scales(np.float32, 256),
        }
    name = ".weight.quant_state.bitsandbytes__nf4"
    return tensors | {name: np.frombuffer(json.dumps(state).encode(), np.uint8)}


def hqq(bits: int, n_rows: int, n_cols: int) -> Tensors:
    n_groups = n_rows * n_cols // 64
    return {
        ".W_q": random_bytes(n_groups * bits // 8, 64),
        ".scale": scales(np.float16, n_groups, 1),
        ".zero": scales(np.float16, n_groups, 1),
        ".shape": shape_of(n_rows, n_cols),
        ".nbits": np.array(bits, np.int32),
        ".axis": np.array(1, np.int32),
    }


@dataclass(frozen=True)
class Case:
    """A format to time.

    config   the quantization_config
    tensors  (n_rows, n_cols) -> stored tensors: suffix to the module's name -> array
    """

    config: dict[str, Any]
    tensors: Callable[[int, int], Tensors]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
BNB = {"quant_method": "bitsandbytes"}

CASES: dict[str, Case] = {
    "bf16 (plain)": Case({}, lambda rows, cols: {".weight": scales(ml_dtypes.bfloat16, rows, cols)}),
    "fp8 128x128": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda rows, cols: {
            ".weight": floats(rows, cols),
            ".weight_scale_inv": scales(np.float32, -(-rows // 128), -(-cols // 128)),
        },
    ),
    "fp8 per row": Case(
        {"quant_method": "fbgemm_fp8"},
        lambda rows, cols: {".weight": floats(rows, cols), ".weight_scale": scales(np.float32, rows)},
    ),
    "fp8 inverse": Case(
        {"quant_method": "fp8", "weight_scale_semantics": "inverse"},
        lambda rows, cols: {".weight": floats(rows, cols), ".weight_scale_inv": scales(np.float32, rows)},
    ),
    "mxfp8": Case(
        compressed(8, 32),
        lambda rows, cols: {
            ".weight": floats(rows, cols), ".weight_scale": random_bytes(rows, cols // 32) // 8 + 112,
        },
    ),
    "int8 per row": Case(
        compressed(8, None),
        lambda rows, cols: {
            ".weight": random_bytes(rows, cols).view(np.int8),
            ".weight_scale": scales(ml_dtypes.bfloat16, rows, 1),
        },
    ),
    "int4 g32": Case(
        compressed(4, 32),
        lambda rows, cols: {
            ".weight_packed": random_words(rows, cols // 8), ".weight_shape": shape_of(rows, cols),
            ".weight_scale": scales(ml_dtypes.bfloat16, rows, cols // 32),
        },
    ),
    "int4 g128 asym": Case(
        compressed(4, 128),
        lambda rows, cols: {
            ".weight_packed": random_words(rows, cols // 8), ".weight_shape": shape_of(rows, cols),
            ".weight_scale": scales(ml_dtypes.bfloat16, rows, cols // 128),
            ".weight_zero_point": random_words(rows // 8, cols // 128),
        },
    ),
    "int4 g128 act-order": Case(
        compressed(4, 128),
        lambda rows, cols: {
            ".weight_packed": random_words(rows, cols // 8), ".weight_shape": shape_of(rows, cols),
            ".weight_scale": scales(ml_dtypes.bfloat16, rows, cols // 128),
            ".weight_g_idx": np.random.default_rng(2).permutation(
                np.arange(cols, dtype=np.int32) // 128
            ),
        },
    ),
    "int3 g128 (old packing)": Case(
        compressed(3, 128) | {"version": "0.17.0"},
        lambda rows, cols: {
            ".weight_packed": random_words(rows, -(-cols // 10)), ".weight_shape": shape_of(rows, cols),
            ".weight_scale": scales(ml_dtypes.bfloat16, rows, cols // 128),
        },
    ),
    "mxfp4": Case(
        compressed(4, 32),
        lambda rows, cols: {
            ".weight_packed": random_bytes(rows, cols // 2),
            ".weight_scale": random_bytes(rows, cols // 32) // 8 + 112,
        },
    ),
    "nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda rows, cols: {
            ".weight": random_bytes(rows, cols // 2), ".weight_scale": floats(rows, cols // 16),
            ".weight_scale_2": scales(np.float32),
        },
    ),
    "int4 row pairs": Case(
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        lambda rows, cols: {
            ".weight": random_bytes(rows // 2, cols),
            ".weight_scale": scales(ml_dtypes.bfloat16, rows, cols // 128),
        },
    ),
    "gptq 2": Case(GPTQ, partial(gptq, 2)),
    "gptq 3": Case(GPTQ, partial(gptq, 3)),
    "gptq 4": Case(GPTQ, partial(gptq, 4)),
    "gptq 4 act-order": Case(GPTQ, partial(gptq, 4, act_order=True)),
    "gptq 8": Case(GPTQ, partial(gptq, 8)),
    "marlin": Case(
        GPTQ,
        lambda rows, cols: {
            ".B": random_words(cols // 16, 2 * rows), ".s": scales(np.float16, cols // 128, rows),
        },
    ),
    "marlin 2:4": Case(
        GPTQ,
        lambda rows, cols: {
            ".B_24": random_words(cols // 32, 2 * rows), ".s": scales(np.float16, cols // 128, rows),
            ".B_meta": np.full((cols // 32, 2 * rows), 0x4444, np.int16),
        },
    ),
    "awq gemm": Case(
        AWQ,
        lambda rows, cols: {
            ".qweight": random_words(cols, rows // 8), ".qzeros": random_words(cols // 128, rows // 8),
            ".scales": scales(np.float16, cols // 128, rows),
        },
    ),
    "awq gemv": Case(
        AWQ,
        lambda rows, cols: {
            ".qweight": random_words(rows, cols // 8), ".qzeros": random_words(rows, -(-cols // 1024)),
            ".scales": scales(np.float16, rows, -(-cols // 1024) * 8),
        },
    ),
    "awq gemv fast": Case(
        AWQ,
        lambda rows, cols: {
            ".qweight": random_bytes(rows // 4, 2 * cols).view(np.int16),
            ".qzeros": scales(np.float16, -(-cols // 1024) * 8, rows),
            ".scales": scales(np.float16, -(-cols // 1024) * 8, rows),
        },
    ),
    "exl2 4.5": Case({"quant_method": "exl2"}, partial(exl2, (5, 4))),
    "exl2 2 to 8": Case({"quant_method": "exl2"}, partial(exl2, (8, 6, 5, 4, 3, 2))),
    "eetq": Case(
        {"quant_method": "eetq"},
        lambda rows, cols: {
            ".weight": random_bytes(cols, rows).view(np.int8), ".weight_scales": scales(np.float16, rows),
        },
    ),
    "bnb nf4": Case(BNB, nf4),
    "bnb nf4 nested": Case(BNB, partial(nf4, nested=True)),
    "bnb int8": Case(
        BNB,
        lambda rows, cols: {
            ".weight": random_bytes(rows, cols).view(np.int8), ".SCB": scales(np.float32, rows),
        },
    ),
    "hqq 2": Case({"quant_method": "hqq"}, partial(hqq, 2)),
    "hqq 4": Case({"quant_method": "hqq"}, partial(hqq, 4)),
}  # fmt: skip
"""Formats by name, each one line of the result. A row here adds a format."""


@dataclass(frozen=True)
class Timing:
    """The decoding speed of a format; gb_per_s counts 2 bytes for every weight."""

    format: str
    stored_as: str
    gb_per_s: float


def time_case(name: str, case: Case, n_rows: int, n_cols: int, budget: float) -> Timing:
    with tempfile.TemporaryDirectory() as folder:
        tensors = {NAME + suffix: array for suffix, array in case.tensors(n_rows, n_cols).items()}
        config = {"quantization_config": case.config} if case.config else {}
        write_checkpoint(Path(folder), config, tensors)
        with convert.open_checkpoint(folder) as weights:
            weight = weights.weight(NAME + ".weight")
            assert weight.shape == (n_rows, n_cols), f"{name}: {weight.shape}"
            step = max(1, CHUNK_BYTES // (4 * n_cols))
            weight.read_rows(0, step)  # compiles
            best = math.inf
            end = time.perf_counter() + budget
            while time.perf_counter() < end or best == math.inf:
                start = time.perf_counter()
                for row in range(0, n_rows, step):
                    weight.read_rows(row, min(n_rows, row + step))
                best = min(best, time.perf_counter() - start)
            return Timing(name, weight.stored_as, 2 * n_rows * n_cols / best / 1e9)


def line(timing: Timing) -> str:
    return f"{timing.format:24} {timing.gb_per_s:6.2f} GB/s  {timing.stored_as}"


def main() -> None:
    parser = parser_of(__doc__, {"--rows": 4096, "--cols": 7168, "--seconds": 1.0}, folder=False)
    parser.add_argument(
        "--formats", nargs="*", metavar="WORD", help="only formats with one of these in their names"
    )
    args = parser.parse_args()
    timings = (
        time_case(name, case, args.rows, args.cols, args.seconds)
        for name, case in CASES.items()
        if args.formats is None or any(word in name for word in args.formats)
    )
    found = measured(args, [f"{args.rows} x {args.cols}"], timings, line)
    if args.json:
        print(json.dumps({"machine": machine(), "timings": [asdict(timing) for timing in found]}, indent=1))


if __name__ == "__main__":
    main()
