"""Subcommands of `gguf-tools`: a module for each group, with `add_to(commands)` and their bodies."""
