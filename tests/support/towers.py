"""Small models with vision towers: names and shapes as transformers has them, and a formula's weights.

`tests/golden/towers/NAME.json`, which scripts/record/tower_golden.py records, says what `write` writes:

    config     config.json
    beside     the other JSON files of the folder, by name
    weights    name -> shape, in BF16
    keys       the keys of the file that llama.cpp's converter makes of it, as [name, kind, value]
    tensors    its tensors, in F16, as [name, type, shape with rows first, start of the SHA-256 of its bytes]
    softplus   those tensors that torch has computed, with their numbers: it errs in the last bits, and not in
               the same way on all machines
    sha256     --outtype -> SHA-256 of the whole file
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes

from tests.support.checkpoints import formula, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "towers"
NAMES = tuple(sorted(path.stem for path in GOLDEN.glob("*.json")))


def recorded(name: str) -> dict[str, Any]:
    """Read what is recorded of a model."""
    content: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return content


def write(facts: dict[str, Any], folder: Path) -> Path:
    """Write the checkpoint that `facts`, as recorded, describe."""
    tensors = {
        name: formula(tuple(shape), seed).astype(ml_dtypes.bfloat16)
        for seed, (name, shape) in enumerate(facts["weights"].items())
    }
    write_checkpoint(folder, facts["config"], tensors)
    for name, content in facts["beside"].items():
        (folder / name).write_text(json.dumps(content))
    return folder
