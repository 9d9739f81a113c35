"""The first DeepSeek with experts (deepseek-moe-16b): plain attention, shared experts, no latents."""
