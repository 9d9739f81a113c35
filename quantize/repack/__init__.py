"""Regroup the rows of a finished file for ik_llama.cpp, and take them apart again; no weight changes.

>>> from quantize.repack import repack
>>> result = repack("model-bf16.gguf", "model-r16.gguf", to=("BF16_R16",))
>>> result = repack("model-r16.gguf", "model-again.gguf", undo=True)
>>> result.paths[0].name
'model-again.gguf'
"""

from gguf_tools.lazy import public_names

__all__, __getattr__, __dir__ = public_names(__name__)
