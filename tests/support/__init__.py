"""Helpers that tests share: oracles, generated models, packers, a way to kill a run."""
