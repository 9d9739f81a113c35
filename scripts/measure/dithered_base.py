"""Make a base for measurements out of a quantized file of a really trained model.

    python scripts/measure/dithered_base.py model-Q4_K_M.gguf base.gguf [--type BF16] [--seed 5]

Trained models are often at hand as quantized files alone. Decoded, their weights lie on the grid of their
type, which the same type meets again exactly, so a measurement on them tells nothing. Here each quantized
weight gets uniform noise of up to half a step of its block: the smallest difference between two of its 16
neighbours. Where one huge weight makes the step wide, the noise is at most 0.6 of the matrix' median
magnitude. The dithered model is the base, and everything is compared with it.

Tensors of floats keep their bytes. Memory is that of one tensor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gguf_tools
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value

_BLOCK = 16
_TYPICAL = 0.6
_FILE_TYPES = {"F32": 0, "BF16": 32}
"""LLAMA_FTYPE_ALL_F32 and LLAMA_FTYPE_MOSTLY_BF16 of llama.h."""


def main() -> None:
    """Run the script."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("--type", choices=_FILE_TYPES, default="BF16", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    write_base(args.model, args.base, args.type, args.seed)


def write_base(model: Path, base: Path, type_name: str, seed: int) -> None:
    """Write a model decoded and dithered, quantized tensors as `type_name`."""
    rng, type_ = np.random.default_rng(seed), by_name(type_name)
    with gguf_tools.open_gguf(model) as source:
        metadata = dict(source.metadata)
        metadata.pop(keys.QUANTIZATION_VERSION, None)
        metadata[keys.FILE_TYPE] = Value.u32(_FILE_TYPES[type_name])
        infos = [
            TensorInfo(info.name, info.shape, type_ if info.type.is_quantized else info.type)
            for info in source.tensors.values()
        ]
        layout = gguf_tools.FileLayout.of(metadata, infos)
        with gguf_tools.GGUFWriter(base, layout, [model]) as writer:
            for info, offset in zip(infos, layout.offsets, strict=True):
                stored = source.tensor(info.name)
                if stored.type.is_quantized:
                    values = dithered(gguf_tools.read_values(source, info.name), rng)
                    data = gguf_tools.encode(values, type_name)
                else:
                    data = source.blocks(info.name)
                writer.write(offset, np.ascontiguousarray(data))
            writer.publish()


def dithered(values: npt.NDArray[np.float32], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Return weights off the grid of the type that they were stored in, in their shape."""
    blocks = values.reshape(-1, _BLOCK)
    most = _TYPICAL * float(np.median(np.abs(values)))
    result = np.empty_like(blocks)
    for start in range(0, len(blocks), 1 << 18):
        part = blocks[start : start + (1 << 18)]
        gaps = np.diff(np.sort(part, axis=1), axis=1)
        steps = np.where(gaps > 1e-12, gaps, np.inf).min(axis=1, keepdims=True)
        steps = np.minimum(np.where(np.isfinite(steps), steps, 0), most)
        noise = rng.random(part.shape, dtype=np.float32) - np.float32(0.5)
        result[start : start + len(part)] = part + steps * noise
    return result.reshape(values.shape)


if __name__ == "__main__":
    main()
