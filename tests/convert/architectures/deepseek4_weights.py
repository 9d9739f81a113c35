"""The weights that a checkpoint of DeepSeek V4 has, by the rules of its conversion."""

from __future__ import annotations

from collections.abc import Iterator

from convert.architectures.deepseek4 import RULES, V4Config


def weights_of(config: V4Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each weight as published, those of experts one by one."""
    for rule in (rule for rule in RULES if not rule.when):
        for layer in rule.where(config, None):
            for output in rule.outputs:
                assert isinstance(output.sizes, str)
                shape = tuple(getattr(config, size) for size in output.sizes.split())
                for expert in range(config.n_routed_experts if "{expert}" in output.source else 1):
                    yield output.source.format(layer=layer, expert=expert), shape
