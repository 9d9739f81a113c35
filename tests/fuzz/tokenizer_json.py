"""tokenizer.json."""

from __future__ import annotations

import json
import random

from tests.fuzz import mutate, tokenizer
from tests.fuzz.tokenizer import read

SEED = json.dumps(tokenizer.TOKENIZER_JSON)


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    return mutate.json_bytes(rng, SEED)


def warm_up() -> None:
    one_input(SEED.encode())


def one_input(data: bytes) -> None:
    # Recognising a pre-tokenizer by trying it takes a second, so only some inputs get that far.
    name = "deepseek-llm" if len(data) % 64 else None
    read(tokenizer.folder_with("tokenizer_json", tokenizer__json=data), name)
