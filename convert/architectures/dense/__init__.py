"""Families without experts that are made of the parts of `convert.architectures.decoder`."""
