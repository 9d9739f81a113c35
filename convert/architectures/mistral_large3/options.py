"""What the user may choose about the conversion of Mistral Large 3: the same as for DeepSeek."""

from __future__ import annotations

from convert.architectures.deepseek2.options import Options

__all__ = ["Options"]
