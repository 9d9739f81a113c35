"""Quantize GGUF files: the bytes of llama.cpp, the plan as data, importances with MLA done right.

>>> import quantize
>>> matrix = "model.imatrix"  # or what imatrix.load returns
>>> result = quantize.quantize("model-bf16.gguf", "model-Q4_K_M.gguf", "Q4_K_M", importances=matrix)
>>> result.paths[0].name
'model-Q4_K_M.gguf'

PlanOptions hold what the command's options say about types. A recipe file (see
`quantize.plan.recipe_files`) can take the place of the file type:

>>> options = quantize.PlanOptions(
...     overrides=quantize.parse_overrides(["ffn_down_exps=Q6_K"]),
...     fallbacks=quantize.parse_overrides(["attn_k_b=Q8_0"]),
... )
>>> report = quantize.lint("mine.yaml", "model-bf16.gguf", importances=matrix, options=options)
>>> report.stops
False
>>> result = quantize.quantize(
...     "model-bf16.gguf", "model-mine.gguf", "mine.yaml", importances=matrix, options=options
... )
"""

from gguf_tools.lazy import public_names

__all__, __getattr__, __dir__ = public_names(__name__)
