"""Names of types for annotations: editors complete them, and type checkers find misspelt ones.

Here they come from the tables. Type checkers run nothing, so they read the stub beside this file, which
`python -m scripts.record.type_names` writes. A test holds one against the other.
"""

from __future__ import annotations

from typing import Literal

from quantize.formats import decodable
from quantize.plan.converter_types import OUTTYPES
from quantize.plan.recipes import FILE_TYPES

FileType = Literal[FILE_TYPES]
"""File types of the quantizer: Q4_K_M ..."""

TypeName = Literal[decodable()]
"""Types of tensors that can be decoded: Q4_K ...; most can be encoded, too."""

OutType = Literal[("auto", *OUTTYPES)]
"""Output types of the converter, as its command has them: bf16 ..."""
