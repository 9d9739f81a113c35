"""auto-round's own exports: GPTQ's or AWQ's packing, by `packing_format`.

    contains "awq"                                         AWQ GEMM
    auto_round:gptqmodel                                   GPTQ, zero points as they are
    auto, auto_round:gptq, auto_round:auto_gptq, or none   GPTQ, zero points stored one less
    auto_round, auto_round:KERNEL                          GPTQ, zero points as they are

There is usually no g_idx, so groups are runs of columns. Widths and group sizes can differ by module
(`extra_config`); both follow from the shapes.
"""

from __future__ import annotations

from convert.weights.base import Module, Weight, WeightsLoader
from convert.weights.schemes import awq, gptq

_ONE_LESS = (None, "auto", "auto_round:gptq", "auto_round:auto_gptq")


def _load(module: Module) -> Weight:
    packing = module.settings.get("packing_format")
    if packing is not None and not isinstance(packing, str):
        raise module.settings.bad("packing_format", "the name of a packing")
    if packing is not None and "awq" in packing:
        return awq.gemm_weight(module)
    return gptq.gptq_weight(module, 1 if packing in _ONE_LESS else 0)


LOADERS: tuple[WeightsLoader, ...] = (
    WeightsLoader("auto-round", ("auto-round",), ".qweight", gptq.SIDES, _load,
                  lambda module: module.settings.method == "auto-round"),
)  # fmt: skip
