"""DeepSeek V4 and V4-Flash as llama.cpp's `deepseek4`: names, types and keys of its own.

config    what config.json says, checked
rules     which weights become which tensors
metadata  the keys deepseek4.*
family    all of them together, and the types that tensors have whatever the output type is
"""
