"""tokenizer_config.json; the same file also serves as special_tokens_map.json and generation_config.json."""

from __future__ import annotations

import json
import random

from tests.fuzz import mutate, tokenizer
from tests.fuzz.tokenizer import read

SEED = json.dumps(tokenizer.TOKENIZER_CONFIG | {"bos_token_id": 6, "eos_token_id": [7, 6]})


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    return mutate.json_bytes(rng, SEED)


def warm_up() -> None:
    one_input(SEED.encode())


def one_input(data: bytes) -> None:
    read(
        tokenizer.folder_with(
            "tokenizer_config",
            tokenizer_config__json=data,
            special_tokens_map__json=data,
            generation_config__json=data,
        )
    )
