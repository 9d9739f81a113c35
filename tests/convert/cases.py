"""The micro checkpoints whose conversion by llama.cpp's and ik_llama.cpp's converters is recorded.

scripts/record/converter_golden.py walks this table to record, and the family's test_family.py to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkpoints import (
    add_mtp_layer,
    edit_config,
    micro_checkpoint,
    shard,
    to_fp8,
    to_older_spelling,
)


@dataclass(frozen=True)
class Case:
    """make writes the checkpoint into a folder; outtype and mla are what it is converted with.

    mla "split" was recorded from llama.cpp, "both" from ik_llama.cpp.
    """

    make: Callable[[Path], Path]
    outtype: str
    mla: str = "split"


def _tied(folder: Path) -> Path:
    return edit_config(micro_checkpoint(folder, "v2", num_hidden_layers=2), tie_word_embeddings=True)


def _v2(folder: Path) -> Path:
    return to_older_spelling(micro_checkpoint(folder, "v2"))


def _v2_lite(folder: Path) -> Path:
    return micro_checkpoint(folder, "v2-lite", num_hidden_layers=3)


def _short_v3(folder: Path) -> Path:
    return micro_checkpoint(folder, "v3", num_hidden_layers=2)


CASES: dict[str, Case] = {
    "v3": Case(lambda folder: micro_checkpoint(folder, "v3"), "bf16"),
    # Tensors dealt to the shards like cards: the stacks are complete in another order.
    "v3-sharded": Case(lambda folder: shard(_short_v3(folder)), "f16"),
    # 128x128 divides none of the sizes, and kv_b_proj and q_b_proj have two rows of blocks.
    "v3-fp8": Case(lambda folder: to_fp8(_short_v3(folder)), "f32"),
    "v3-fp8-32x48": Case(lambda folder: to_fp8(_short_v3(folder), (32, 48)), "bf16"),
    # Both converters leave the layer out.
    "v3-mtp": Case(lambda folder: add_mtp_layer(_short_v3(folder)), "bf16"),
    "v2": Case(lambda folder: micro_checkpoint(folder, "v2"), "bf16"),
    "v2-older": Case(_v2, "f32"),
    "v2-lite": Case(_v2_lite, "f16"),
    "v2-tied": Case(_tied, "bf16"),
    # ik_llama.cpp's converter knows the older spelling only.
    "v2-both": Case(_v2, "bf16", "both"),
    "v2-lite-both": Case(lambda folder: to_older_spelling(_v2_lite(folder)), "f16", "both"),
    "v3-both": Case(lambda folder: to_older_spelling(micro_checkpoint(folder, "v3")), "bf16", "both"),
}
