"""What becomes of one tensor: its type and importances, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass

from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.codecs import ignores_importances
from quantize.plan.decide import Decider
from quantize.roles import Role


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one tensor.

    name, shape   in the output, rows first
    source_name   in the input; another layer's number when layers are pruned
    as_if         the type that the source counts as where types are decided, if not its own: a conversion in
                  one pass decides what quantizing the F32 file would
    decider       who chose the type
    reason        why this type, in a phrase
    fell_from     the type that was chosen, when rows do not fit it and another took its place
    entry         name of the importances that weigh its columns, or None
    weighting     how those importances came to this tensor, in a phrase; empty in the plain case
    n_neutral     how many of its matrices have seen nothing and get neutral weights
    lacks_data    its type needs importances, and there are none
    unfit_data    what is wrong with the importances that have its name; empty when nothing is
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    source_name: str
    source_type: GGMLType
    target_type: GGMLType
    decider: Decider
    reason: str
    fell_from: GGMLType | None = None
    as_if: GGMLType | None = None
    entry: str | None = None
    weighting: str = ""
    n_neutral: int = 0
    lacks_data: bool = False
    unfit_data: str = ""

    @property
    def info(self) -> TensorInfo:
        """The tensor as it stands in the output file."""
        return TensorInfo(self.name, self.shape, self.target_type)

    @property
    def source_info(self) -> TensorInfo:
        """The tensor as it stands in the input."""
        return TensorInfo(self.source_name, self.shape, self.source_type)

    @property
    def is_copied(self) -> bool:
        """Whether its bytes go into the output as they are stored."""
        return self.source_type == self.target_type

    @property
    def counts_as(self) -> GGMLType:
        """The type that the source counts as where types are decided."""
        return self.as_if or self.source_type

    @property
    def stays(self) -> bool:
        """Whether the decision leaves its type alone."""
        return self.counts_as == self.target_type

    @property
    def is_weighed(self) -> bool:
        """Whether importances would make a difference to its bytes."""
        return not self.stays and not ignores_importances(self.target_type.name)
