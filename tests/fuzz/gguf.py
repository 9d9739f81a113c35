"""GGUF files, through everything that `gguf-tools show`, `verify`, `hash` and `diff` do with them."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from gguf_tools.format.shards import open_gguf
from gguf_tools.look.compare import compare
from gguf_tools.look.listing import Description
from gguf_tools.look.verify import hash_source, verify
from gguf_tools.text import json_text
from tests.fuzz import mutate, scratch
from tests.hostile.fields import (
    ARRAY,
    F64,
    I32,
    STRING,
    U8,
    U32,
    U64,
    array,
    head,
    number,
    pair,
    strings,
    tensor,
    text,
    u32,
    u64,
    word,
)

MODEL = (
    *head(3, 11),
    *word("general.architecture", "deepseek2"),
    *number("deepseek2.block_count", 3),
    *number("deepseek2.attention.head_count", 4),
    *number("deepseek2.attention.kv_lora_rank", 64),
    *number("deepseek2.rope.dimension_count", 16),
    *number("deepseek2.attention.key_length", 80),
    *array("deepseek2.attention.head_count_kv", I32, 3, u32(1), u32(1), u32(1)),
    *number("general.alignment", 32),
    *pair("f", F64, struct.pack("<d", 0.5)),
    *strings("tokenizer.ggml.tokens", "a", b"\xff", "é"),
    *array("nested", ARRAY, 2, u32(U8), u64(2), b"\1", b"\2", u32(STRING), u64(1), *text("x")),
    *tensor("a", (32, 2), 8, 0),
    *tensor("b", (8,), 0, 96),
    *tensor("c", (32, 2, 2), 2, 128),
    bytes(400),
)

PLAIN = (
    *head(1, 4),
    *word("general.architecture", "x"),
    *pair("x.block_count", U64, u64(2)),
    *array("x.attention.head_count", U32, 2, u32(2), u32(2)),
    *number("x.embedding_length", 64),
    *tensor("t", (256, 8), 212, 0),
    bytes(1500),
)


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    seed, other = rng.choice(((MODEL, PLAIN), (PLAIN, MODEL)))
    return mutate.segments(rng, seed, other)


def warm_up() -> None:
    path = scratch.folder("gguf") / "model.gguf"
    path.write_bytes(b"".join(MODEL))
    read(path)


def read(path: Path) -> None:
    """Open a model and look at it in every way; raises ToolkitError if it is refused."""
    with open_gguf(path) as source:
        description = Description.of(source)
        json_text(description.to_json())
        description.lines()
        description.lines(full=True)
        verify(source)
        hash_source(source)
        compare(source, source)


def one_input(data: bytes) -> None:
    path = scratch.folder("gguf") / "model.gguf"
    path.write_bytes(data)
    read(path)
