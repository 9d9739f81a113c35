"""Mistral Large 3 in Mistral's own format, as `deepseek2`: DeepSeek's latent attention under other names.

names     Mistral's names of weights -> DeepSeek's
config    what params.json says, as DeepSeek's configuration
metadata  DeepSeek's keys, those of YaRN further down, and those of the attention's temperature
family    all of them together
"""
