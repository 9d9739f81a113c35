"""Harnesses: a module for each reader of strangers' files, shared by tests, long runs and atheris."""
