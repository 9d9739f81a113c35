"""Options of a measurement of sensitivities."""

from __future__ import annotations

from dataclasses import dataclass, field

from convert.options import AdapterChoices, AdapterOptions
from gguf_tools.argument_types import CheckedFields, Count, Seed
from imatrix.forward.options import CutChoices, ForwardChoices, ForwardOptions
from imatrix.texts.tokens import Cut
from quantize.type_names import TypeName


@dataclass(frozen=True)
class SensitivityOptions(AdapterOptions, CheckedFields):
    """Options of a measurement of sensitivities, with those of an adapter for a folder.

    cut         the part of the text that is used
    types       candidate types by name; None: those that llama.cpp's recipes use
    rows        how many rows of a tensor are encoded at every type; of a stack, of all matrices together
    least_rows  how many rows of each matrix are encoded at least
    tokens      tokens of the text whose rows of the embeddings and of the output are encoded
    seed        decides which labels are drawn
    pad_hidden  measure the types, too, that rows fit with the hidden size padded
    forward     how the model is computed
    restart     start over instead of resuming
    any_text    use the text even if it is nonsense; see imatrix/texts/quality.py
    force       replace an output that is there
    """

    cut: Cut = field(default_factory=Cut)
    types: tuple[TypeName, ...] | None = None
    rows: Count = 512
    least_rows: Count = 8
    tokens: Count = 8192
    seed: Seed = 0
    pad_hidden: bool = False
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    any_text: bool = False
    force: bool = False

    @property
    def hidden_facts(self) -> dict[str, bool]:
        """Recorded facts about `pad_hidden`: none without it."""
        return {"pad_hidden": True} if self.pad_hidden else {}


class SensitivityChoices(AdapterChoices, CutChoices, ForwardChoices, total=False):
    """The fields of SensitivityOptions, and of the Cut and ForwardOptions in it, as keyword arguments."""

    cut: Cut
    types: tuple[TypeName, ...] | None
    rows: Count
    least_rows: Count
    tokens: Count
    seed: Seed
    pad_hidden: bool
    forward: ForwardOptions
    restart: bool
    any_text: bool
    force: bool
