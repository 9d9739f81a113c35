"""What the user may choose about the conversion of a DeepSeek V3.2 model: the same as for V3."""

from __future__ import annotations

from convert.architectures.deepseek2.options import Options

__all__ = ["Options"]
