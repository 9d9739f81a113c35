"""Sizes and file names: how many weights a model has, and what its GGUF file is called."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gguf_tools.errors import BadRequest


@dataclass(frozen=True)
class ParameterCounts:
    """Weights of a model, as its size label needs them.

    total      all of them
    shared     those outside of routed experts
    expert     those of one routed expert, over all layers
    n_experts  routed experts of a layer; 0 for a dense model
    """

    total: int = 0
    shared: int = 0
    expert: int = 0
    n_experts: int = 0

    @property
    def size_label(self) -> str:
        """`16x5.7M`: so many experts, each with the shared weights this large; `1.5B` for a dense model."""
        if self.n_experts:
            return f"{self.n_experts}x{rounded(self.shared + self.expert)}"
        return rounded(self.total)


def count_parameters(tensors: Iterable[tuple[str, Sequence[int]]]) -> ParameterCounts:
    """Return the counts of GGUF tensors given as (name, shape), shapes rows first as numpy has them.

    Routed experts are the stacked tensors `..._exps.weight` (experts, rows, columns) and
    `..._exps.bias` (experts, columns).
    """
    total = shared = expert = 0
    experts_of_tensors: list[int] = []
    for name, shape in tensors:
        n_elems = math.prod(shape)
        total += n_elems
        if "_exps." in name and len(shape) >= 3:
            n_experts = shape[-2] if ".bias" in name else shape[-3]
            expert += n_elems // n_experts
            experts_of_tensors.append(n_experts)
        else:
            shared += n_elems
    n_experts = sum(experts_of_tensors) // len(experts_of_tensors) if experts_of_tensors else 0
    return ParameterCounts(total, shared, expert, n_experts)


def rounded(n_params: int) -> str:
    """Return a number of weights in at least two digits: 671026419200 -> 671B, 5700000 -> 5.7M."""
    units = ((1e12, 1e-12, "T"), (1e9, 1e-9, "B"), (1e6, 1e-6, "M"), (0, 1e-3, "K"))
    scale, suffix = next((scale, suffix) for limit, scale, suffix in units if n_params > limit or not limit)
    scaled = n_params * scale
    n_digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - n_digits, 0)}f}{suffix}"


def default_file_name(
    name: str | None,
    basename: str | None,
    finetune: str | None,
    version: str | None,
    size_label: str | None,
    file_type: str,
    *,
    vocab_only: bool = False,
) -> str:
    """Return BASENAME-SIZE-FINETUNE-VERSION-TYPE.gguf, the naming convention of GGUF files.

    file_type   "BF16", "Q8_0" ...
    vocab_only  a vocabulary has neither size nor type, and says -vocab
    """
    stem = (basename or name or "ggml-model").strip().replace(" ", "-").replace("/", "-")
    if vocab_only:
        parts = [stem, finetune, version, "vocab"]
    else:
        parts = [stem, size_label, finetune, version, file_type.upper()]
    return "-".join(part.strip().replace(" ", "-").replace("/", "-") for part in parts if part) + ".gguf"


def fill_outfile_template(file_name: str, file_type: str) -> str:
    """Return `file_name` with {ftype} or {outtype} replaced by the file type; {FTYPE} gives it in capitals.

    raises  BadRequest for another placeholder
    """
    values = {
        "": file_type.lower(),
        "ftype": file_type.lower(),
        "outtype": file_type.lower(),
        "FTYPE": file_type.upper(),
        "OUTTYPE": file_type.upper(),
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise BadRequest(f"--outfile {file_name}: unknown placeholder {match[0]}; known is {{ftype}}")
        return values[match[1]]

    return re.sub(r"\{([^{}]*)\}", value, file_name)
