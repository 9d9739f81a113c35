"""The plan of the converter: which type each tensor gets under --outtype.

llama.cpp's converter (conversion/base.py: prepare_tensors) is simpler than its quantizer. Small and delicate
tensors become F32, and everything else the one type that was asked for. Where Q8_0 can't hold a row, the
tensor becomes F16.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from gguf_tools.errors import BadArgument
from gguf_tools.format.ggml_types import BF16, F16, F32, MXFP4, Q8_0, GGMLType
from gguf_tools.format.tensors import TensorInfo
from quantize.fill.sources import Described
from quantize.plan.decide import Decider, KeptGrid
from quantize.plan.findings import fallbacks
from quantize.plan.plan import Plan, TensorPlan
from quantize.roles import float32_reason, tensor_role

OUTTYPES: dict[str, GGMLType] = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}
"""Types that --outtype may name, besides `auto`."""

_KEPT_PARTS: tuple[tuple[str, str], ...] = (("indexer.proj.weight", "weights of the indexer's heads"),)
"""Parts of names of tensors that the converter keeps in F32 and the quantizer does not -> why."""


def is_outtype(name: str) -> bool:
    """Return whether `name` is one of the converter's output types, not a file type of the quantizer."""
    return name == "auto" or name in OUTTYPES


def resolve_outtype(outtype: str, tensors: Iterable[Described], *, decoded: bool = False) -> GGMLType:
    """Return the type that --outtype means for a checkpoint.

    tensors  the tensors as they are stored
    decoded  whether weights are decoded from a quantized format

    `auto` is the type of the first matrix stored in 16 bits, and F16 when there is none. With `decoded` it is
    BF16, which has the range of decoded weights.
    raises  BadRequest for an unknown name
    """
    if outtype == "auto" and decoded:
        return BF16
    if outtype == "auto":
        halves = (t.type for t in tensors if len(t.shape) > 1 and t.type in (F16, BF16))
        return next(halves, F16)
    if outtype not in OUTTYPES:
        raise BadArgument(f"{outtype!r}: unknown output type, expected one of {', '.join(OUTTYPES)}, auto")
    return OUTTYPES[outtype]


def outtype_plan(
    tensors: Sequence[TensorInfo],
    wanted: GGMLType,
    kept: Container[GGMLType] = (),
    settled: Mapping[str, GGMLType] = MappingProxyType({}),
    grids: Mapping[str, KeptGrid] = MappingProxyType({}),
) -> Plan:
    """Return the plan for a checkpoint's tensors, in their order, under the output type `wanted`.

    kept     types whose tensors stay as they are stored, whatever is wanted
    settled  name of a tensor -> its type, whatever is wanted
    grids    tensors by name that lie on a grid, which they keep

    The plan's file type is named like the recipe with the same number in `general.file_type`. A file of
    floats with MXFP4 experts counts as MXFP4_MOE, as in llama.cpp's converter.
    """
    plans = tuple(
        _on_grid(plan, grids.get(plan.name))
        for plan in (_tensor_plan(t, settled.get(t.name, wanted), kept, t.name in settled) for t in tensors)
    )
    has_mxfp4 = any(tensor.target_type == MXFP4 for tensor in plans)
    keeps_mxfp4 = has_mxfp4 and (wanted != Q8_0 or bool(settled))
    return Plan("MXFP4_MOE" if keeps_mxfp4 else wanted.name, plans, findings=tuple(fallbacks(plans)))


def _on_grid(plan: TensorPlan, grid: KeptGrid | None) -> TensorPlan:
    """Return the plan with the type of the tensor's grid, unless the tensor stays as it is in any case."""
    if grid is None or plan.decider is Decider.KEPT:
        return plan
    return replace(plan, target_type=grid.type, decider=Decider.GRID, reason=grid.text, fell_from=None)


def _tensor_plan(
    tensor: TensorInfo, wanted: GGMLType, kept: Container[GGMLType], is_settled: bool
) -> TensorPlan:
    target, decider, reason = wanted, Decider.OPTION, f"--outtype {wanted.name.lower()}"
    fell_from = None
    kept_reason = next((reason for part, reason in _KEPT_PARTS if part in tensor.name), None)
    delicate = float32_reason(tensor.name, tensor.shape) or kept_reason
    if tensor.type in kept:
        target, decider, reason = tensor.type, Decider.KEPT, f"{tensor.type.name} in the checkpoint"
    elif is_settled and not tensor.n_cols % wanted.block_elems:
        decider, reason = Decider.KEPT, f"{wanted.name}, as llama.cpp's converter has it"
    elif delicate is not None:
        target, decider, reason = F32, Decider.KEPT, delicate
    elif tensor.n_cols % wanted.block_elems:
        target, fell_from = F16, wanted
        reason = f"row length {tensor.n_cols} is no multiple of {wanted.block_elems}: {wanted.name} -> F16"
    return TensorPlan(
        name=tensor.name,
        shape=tensor.shape,
        role=tensor_role(tensor.name, tensor.shape).role,
        source_name=tensor.name,
        source_type=tensor.type,
        target_type=target,
        decider=decider,
        reason=reason,
        fell_from=fell_from,
    )
