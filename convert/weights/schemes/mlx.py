"""MLX: codes in 32-bit words, lowest bits first, with a scale for each group of columns.

    X.weight U32 (..., rows, cols * bits / 32)

    mode    bits              group        X.scales (..., rows, groups)  X.biases, the same shape
    affine  2, 3, 4, 5, 6, 8  32, 64, 128  F16, BF16 or F32              as the scales
    mxfp4   4 (E2M1)          32           U8, exponents
    nvfp4   4 (E2M1)          16           U8, bytes of F8_E4M3
    mxfp8   8 (F8_E4M3)       32           U8, exponents

    affine: weight[i, j] = code[i, j] * scale[i, group] + bias[i, group]

Stacks of experts and embeddings are stored so as well. `quantization` in config.json has mode, bits and
group_size, and an object of its own for each module that differs, under the name of the module. Shapes show
the product of bits and group_size alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import Decoded, Module, Weight, WeightsLoader
from convert.weights.scales import SCALE_DTYPES, scale_grid
from convert.weights.schemes.fp4 import MX_GROUP, NV_GROUP, fp4_weight
from convert.weights.schemes.fp8 import Fp8Weight
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.text import quoted

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Mode -> bits and group_size where nothing is said (mlx 0.32, `quantize`)."""


@dataclass(frozen=True, slots=True)
class AffineWeight(Decoded):
    """A matrix, or a stack of them, as codes with a scale and a bias for each group of columns."""

    codes: RawTensor
    scales: RawTensor
    biases: RawTensor
    bits: int
    group_size: int

    @property
    def stored_as(self) -> str:
        return f"MLX {self.bits} bits in groups of {self.group_size}"

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        # numba is loaded by the first weight that is decoded, not by looking at a checkpoint.
        from convert.weights.kernels import scale_and_add_groups, unpack

        codes = unpack(self.codes.read_rows(start, stop), self.bits, self.shape[-1])
        scales, biases = (raw.read_rows(start, stop).astype(np.float32) for raw in (self.scales, self.biases))
        out = np.empty(codes.shape, np.float32)
        scale_and_add_groups(codes, biases, scales, self.group_size, out)
        return out


@dataclass(frozen=True, slots=True)
class _Setting:
    mode: str
    bits: int
    group_size: int


def _setting(module: Module) -> _Setting:
    """Return how a module is stored: as its own object in `quantization` says, else as all others.

    What its own object lacks is MLX's default, not what all others have.
    """
    own = module.settings.values.get(module.stem)
    values = own if isinstance(own, Mapping) else module.settings.values
    mode = str(values.get("mode", "affine"))
    default_bits, default_size = _DEFAULTS.get(mode, _DEFAULTS["affine"])
    bits, group_size = values.get("bits", default_bits), values.get("group_size", default_size)
    if type(bits) is not int or type(group_size) is not int or not 0 < bits <= 32 or not group_size > 0:
        raise module.settings.bad("bits", f"bits and group_size of MLX, which {module.stem} is stored with")
    return _Setting(mode, bits, group_size)


def _load(module: Module) -> Weight:
    setting, codes, scales = _setting(module), module[".weight"], module[".scales"]
    loader = _MODES.get(setting.mode)
    if loader is None or module.has(".global_scale"):
        what = "" if loader is None else " with a global_scale"
        raise UnsupportedCheckpoint(
            f"{codes.path}: {codes.name}: MLX's mode {quoted(setting.mode)}{what} is not read (read:"
            f" {', '.join(_MODES)})"
        )
    n_cols = codes.n_cols * 32 // setting.bits
    expected = (*codes.shape[:-1], n_cols // setting.group_size)
    if len(codes.shape) not in (2, 3) or scales.shape != expected or n_cols % setting.group_size:
        said = f"{setting.bits} bits in groups of {setting.group_size}, as quantization in config.json says"
        raise module.wrong(scales, f"shape {scales.shape}", f"{expected} for {codes.shape} with {said}")
    return loader(module, setting, (*codes.shape[:-1], n_cols))


def _load_affine(module: Module, setting: _Setting, shape: tuple[int, ...]) -> AffineWeight:
    scales, biases = module[".scales"], module[".biases"]
    if setting.bits not in AFFINE_BITS:
        bits = ", ".join(map(str, AFFINE_BITS))
        raise module.wrong(module[".weight"], f"{setting.bits} bits", f"{bits} of MLX's mode 'affine'")
    for raw in (scales, biases):
        if raw.dtype not in SCALE_DTYPES or raw.shape != scales.shape:
            raise module.wrong(raw, f"{raw.dtype} {raw.shape}", f"{', '.join(SCALE_DTYPES)} {scales.shape}")
    return AffineWeight(
        module.name, shape, module[".weight"], scales, biases, setting.bits, setting.group_size
    )


def _load_fp4(module: Module, setting: _Setting, shape: tuple[int, ...]) -> Weight:
    group_size = NV_GROUP if setting.mode == "nvfp4" else MX_GROUP
    scales = _exponents(module, setting, 4, group_size)
    if group_size == NV_GROUP:
        scales = replace(scales, dtype="F8_E4M3")
    return fp4_weight(module, shape, module[".weight"], scales, group_size)


def _load_fp8(module: Module, setting: _Setting, shape: tuple[int, ...]) -> Fp8Weight:
    scales = _exponents(module, setting, 8, MX_GROUP)
    codes = replace(module[".weight"], dtype="F8_E4M3", shape=shape)
    return Fp8Weight(module.name, shape, codes, "F8_E4M3", scale_grid(module, shape, scales))


def _exponents(module: Module, setting: _Setting, bits: int, group_size: int) -> RawTensor:
    """Return the scales of a mode that has but one number of bits and size of groups."""
    scales = module[".scales"]
    if (scales.dtype, setting.bits, setting.group_size) != ("U8", bits, group_size):
        found = f"{scales.dtype}, {setting.bits} bits in groups of {setting.group_size}"
        raise module.wrong(scales, found, f"U8, {bits} bits in groups of {group_size} of {setting.mode}")
    return scales


_MODES = {"affine": _load_affine, "mxfp4": _load_fp4, "nvfp4": _load_fp4, "mxfp8": _load_fp8}


LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("MLX", ("mlx",), ".weight", (".scales", ".biases", ".global_scale"), _load,
                  lambda module: module[".weight"].dtype == "U32" and module.has(".scales")),
)  # fmt: skip
