"""The recorded small models of other architectures, and where our files differ on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "arch"
CASES: tuple[str, ...] = tuple(sorted(path.name for path in (GOLDEN / "models").iterdir()))

OWN_KEYS: Mapping[str, Mapping[str, Any]] = {
    # llama.cpp's converter leaves it out, and its loader takes the model for a softmax one.
    "glm-4.7-flash": {"deepseek2.expert_gating_func": 2},
}
"""Case -> keys that we write otherwise."""


def model(case: str) -> Path:
    """Return the folder of the checkpoint."""
    return GOLDEN / "models" / case


def recorded(kind: str, name: str) -> dict[str, Any]:
    """Return a recorded JSON file: of "convert" by "CASE.TYPE", of "tokens" by "CASE"."""
    content: dict[str, Any] = json.loads((GOLDEN / kind / f"{name}.json").read_text(encoding="utf-8"))
    return content
