"""Public names of quantize.mla_layout and their homes, for type checkers and for `gguf_tools.lazy`."""

from quantize.mla_layout.pipeline import LayoutChange as LayoutChange
from quantize.mla_layout.pipeline import change_layout as change_layout
from quantize.roles import MLALayout as MLALayout
