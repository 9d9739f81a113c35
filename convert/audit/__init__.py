"""Is a finished file what its base makes of it? Tensors and metadata compared, and what is wrong named."""
