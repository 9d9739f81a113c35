"""Dense decoders that are a Llama or a Qwen but for a part or two."""
