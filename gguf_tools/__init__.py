"""GGUF files, and everything that makes them: one place to import from.

>>> import gguf_tools
>>> gguf_tools.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16").paths[0].name
'lite-bf16.gguf'
>>> result = gguf_tools.quantize("lite-bf16.gguf", "lite-Q4_K_M.gguf", "Q4_K_M")
>>> with gguf_tools.open_gguf("lite-Q4_K_M.gguf") as file:
...     file.get("general.architecture")
'deepseek2'

What a pipeline needs is here under one name, and loaded when it is first used: convert, quantize, calibrate,
evaluate, sensitivity, cook, card, upload, split, merge, and the options that they take. `imatrix` and `edit`
are modules. The package itself reads, lays out, writes and shows GGUF files; the others are its users.
"""

from gguf_tools.lazy import public_names

__version__ = "0.1.0"
"""The one place: pyproject.toml reads it from here, so no command looks for what is installed to tell it."""

__all__, __getattr__, __dir__ = public_names(__name__)
