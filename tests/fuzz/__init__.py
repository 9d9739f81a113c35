"""Fuzzing harnesses, a module for each reader of strangers' files. Tests, long runs and atheris use them."""
