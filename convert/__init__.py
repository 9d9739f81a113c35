"""Convert Hugging Face folders (DeepSeek, Kimi, GLM, Llama, Qwen ...) into GGUF files; read checkpoints.

>>> import convert
>>> result = convert.convert("DeepSeek-V2-Lite", "lite-bf16.gguf", outtype="bf16")
>>> result.paths[0].name
'lite-bf16.gguf'

Weights come out as float32, in whatever format a checkpoint keeps them:

>>> weights = convert.open_checkpoint("DeepSeek-V2-Lite")
>>> weights.read("lm_head.weight").dtype
dtype('float32')
"""

from gguf_tools.lazy import public_names

__all__, __getattr__, __dir__ = public_names(__name__)
