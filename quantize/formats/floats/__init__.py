"""F32, F16 and BF16."""
