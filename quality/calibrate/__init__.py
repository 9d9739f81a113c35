"""Calibration: files of the same types and size whose errors the model notices less.

>>> import quality, quantize
>>> calibration = quality.Calibration("text.txt")
>>> result = quantize.quantize("model-bf16.gguf", "model-Q4_K_M.gguf", "Q4_K_M", calibration=calibration)
"""
