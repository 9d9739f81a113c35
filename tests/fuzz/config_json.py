"""config.json of a DeepSeek model, read down to the keys of the output."""

from __future__ import annotations

import json
import random
from pathlib import Path

from convert.architectures import find_architecture
from convert.architectures.base import metadata_of
from convert.architectures.options import LatentOptions
from convert.checkpoint.checkpoint import read_config
from gguf_tools.format.shards import FileLayout
from tests.fuzz import mutate, scratch
from tests.support.checkpoints import STYLES

_OLD_ROPE = {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.7}}
SEEDS = tuple(
    json.dumps(dict(config) | more) for config in (STYLES["v2"], STYLES["v3"]) for more in ({}, _OLD_ROPE)
)


def make(rng: random.Random) -> bytes:
    """Return a valid file with a few changes."""
    return mutate.json_bytes(rng, rng.choice(SEEDS))


def warm_up() -> None:
    one_input(SEEDS[0].encode())


def read(folder: Path) -> None:
    """Read the configuration in a folder; raises CheckpointError if it is refused."""
    raw = read_config(folder)
    path = folder / "config.json"
    architecture = find_architecture(raw, path)
    config = architecture.read_config(raw, path)
    for options in (LatentOptions("split", True), LatentOptions("none", False)):
        FileLayout.of(metadata_of(architecture, config, options), ())


def one_input(data: bytes) -> None:
    folder = scratch.folder("config_json")
    (folder / "config.json").write_bytes(data)
    read(folder)
