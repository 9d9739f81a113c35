"""Looking into files: what is in them, whether it is sound, and how two of them differ."""
