"""Public names of quantize.repack and their homes, for type checkers and for `gguf_tools.lazy`."""

from quantize.repack.pipeline import repack as repack
from quantize.repack.rules import RepackOptions as RepackOptions
