"""README.md and generation_config.json, which describe a model apart from its weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

from convert.general_metadata import general_metadata
from gguf_tools.format.shards import FileLayout
from tests.fuzz import mutate, scratch

CARD = (
    b"---\n",
    b"license", b": ", b"mit", b"\n",
    b"tags", b":\n", b"- ", b"deepseek", b"\n", b"- ", b"mla", b"\n",
    b"base_model", b": ", b"deepseek-ai/DeepSeek-V2-Lite", b"\n",
    b"model_name", b": ", b'"', b"A Name 7B", b'"', b"\n",
    b"datasets", b": ", b"[", b"a/b", b", ", b"&x ", b"c", b", ", b"*x", b"]", b"\n",
    b"language", b": ", b"{", b"a", b": ", b"no", b"}", b"\n",
    b"---\n",
    b"# Text\n",
)  # fmt: skip
STRANGERS = (
    b"? ", b": ", b"- ", b"&x ", b"*x", b"*y", b"<<: ", b"!!python/object:os.system ", b"!x ", b"|\n ",
    b">-\n ", b"'", b'"', b'"\\U00110000"', b'"\\UFFFFFFFF"', b'"\\x0"', b'"\\0"', b'"\\uD800"',
    b"%YAML 1.1\n", b"%TAG ! x\n", b"---\n", b"...\n", b"\t", b"\0", b"\xff", "\u2028".encode(), b"{", b"}",
    b"[", b"]", b"#", b"@", b"`", b"2001-01-01", b"~", b"null", b"[" * 2000,
)  # fmt: skip
GENERATION = json.dumps(
    {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "mirostat": 2,
        "sequence": "top_k", "penalty_last_n": 64, "eos_token_id": [1, 2], "do_sample": True,
    }
)  # fmt: skip


def make(rng: random.Random) -> bytes:
    """Return a changed card, or a changed generation_config.json, which doesn't begin like a card."""
    if rng.random() < 0.3:
        return mutate.json_bytes(rng, GENERATION)
    card = mutate.segments(rng, CARD, STRANGERS)
    return card if card.startswith(b"---\n") else b"---\n" + card


def warm_up() -> None:
    one_input(b"".join(CARD))
    one_input(GENERATION.encode())


def read(folder: Path) -> None:
    """Collect a folder's metadata, down to the header of a file; raises CheckpointError if it is refused."""
    general = general_metadata(folder, {"_name_or_path": "deepseek-ai/DeepSeek-V2-Lite"})
    general.default_outfile("BF16")
    FileLayout.of(general.metadata(), ())


def one_input(data: bytes) -> None:
    folder = scratch.folder("model_card")
    is_card = data.startswith(b"---\n")
    (folder / "README.md").write_bytes(data if is_card else b"")
    (folder / "generation_config.json").write_bytes(b"" if is_card else data)
    read(folder)
