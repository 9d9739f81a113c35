"""tokenizer.model, a protocol buffer."""

from __future__ import annotations

import random

from tests.fuzz import mutate, scratch
from tests.fuzz.tokenizer import read
from tests.support.piece_model import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, nested, number, piece

MODEL = (
    *piece(b"<unk>", 0, UNKNOWN),
    *piece(b"<s>", 0, CONTROL),
    *piece(b"</s>", 0, CONTROL),
    *piece("▁a".encode(), -1.5, NORMAL),
    *piece(b"b", -2.5, NORMAL),
    *piece(b"<x>", 0, USER_DEFINED),
    *nested(2, (*number(3, 2), *number(40, 0), *number(41, 1), *number(42, 2))),
    *nested(3, (*nested(1, (b"identity",)), *number(3, 1), *number(4, 0))),
)


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    return mutate.segments(rng, MODEL)


def warm_up() -> None:
    one_input(b"".join(MODEL))


def one_input(data: bytes) -> None:
    folder = scratch.folder("tokenizer_model")
    if not any(folder.iterdir()):
        (folder / "config.json").write_text('{"vocab_size": 12}')
        (folder / "tokenizer_config.json").write_text(
            '{"added_tokens_decoder": {"7": {"content": "<y>", "special": true}}}'
        )
    (folder / "tokenizer.model").write_bytes(data)
    read(folder)
