"""Rewrite a GGUF file between the layouts of multi-head latent attention, without the checkpoint.

>>> from quantize.mla_layout import change_layout
>>> result = change_layout("lite-ik.gguf", "lite.gguf", "split")
"""

from gguf_tools.lazy import public_names

__all__, __getattr__, __dir__ = public_names(__name__)
