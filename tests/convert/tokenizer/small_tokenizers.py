"""Tokenizer folders made for a test, and reading them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from convert.tokenizer.pretokenizers import KNOWN
from convert.tokenizer.tokenizer import Tokenizer, read_tokenizer
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.values import Value
from tests.support.tokenizer_files import tokenizer_json

# A text with code, Chinese, Japanese, emoji, numbers, and what else cuts words in odd places.
TEXT = """\
def mla(x: Tensor, *, n_head: int = 128) -> Tensor:
\t# 多头潜在注意力：把 KV 压缩到 512 维，再加 64 维的 RoPE。
    return F.softmax(q @ k.mT / 192**-0.5, dim=-1) @ v   # noqa: E501\r\n\r\n

DeepSeek-V3 有 671B 个参数，每个 token 激活 37B。１２３，二〇二五年1月10日!!
東京タワーは333メートルです。カタカナとひらがな、そして漢字〜！ 한국어도 됩니다.
🚀 (normal) 😶\u200d🌫️ ✅ 🦙🦙 👩🏽\u200d💻 é e\u0301 ½ Ⅷ ٣٤٥ ∑∫≈ €19.99 1,234,567.89 0xDEADBEEF
It's they'LL I'VE don't — "quoted" 'tis <div class="a-b_c">&nbsp;</div> \\n $HOME/.cache @user #1
Ελληνικά нещо на Български Ünïcödé Tiếng Việt עברית العربية हिन्दी ภาษาไทย កាន់តែ


   trailing white space   \t
"""


def read(folder: Path, vocab_size: int | None = None, **config: Any) -> Tokenizer:
    return read_tokenizer(folder, {**({} if vocab_size is None else {"vocab_size": vocab_size}), **config})


def write_vocab_file(path: Path, tokenizer: Tokenizer) -> Path:
    """Write a GGUF file that is all vocabulary, which llama.cpp loads with vocab_only."""
    metadata = {"general.architecture": Value.string("deepseek2"), **tokenizer.metadata()}
    path.write_bytes(FileLayout.of(metadata, ()).header)
    return path


def small(**changes: Any) -> dict[str, Any]:
    """A tokenizer.json: bytes a, b, c, Ġ, two merges, <s> and </s>."""
    content = {
        "version": "1.0",
        "added_tokens": [added(6, "<s>"), added(7, "</s>")],
        "normalizer": None,
        "pre_tokenizer": tokenizer_json("tiny")["pre_tokenizer"],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "Ġab": 5},
            "merges": ["a b", "Ġ ab"],
        },
    }
    return {**content, **changes}


def added(token_id: int, content: str, *, special: bool = True, normalized: bool = False) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": token_id, "content": content, "special": special, "normalized": normalized, **flags}


def put(folder: Path, **files: Any) -> Path:
    """Write files given as name=content, the last `_` standing for `.`: tokenizer_json=..."""
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def with_model(**changes: Any) -> dict[str, Any]:
    content = small()
    content["model"] = {**content["model"], **changes}
    return content


def tekken_json(n_tokens: int = 320) -> dict[str, Any]:
    """Return the content of a tekken.json with 16 special tokens, the bytes, and some short words."""
    known = next(known for known in KNOWN if known.name == "tekken")
    words = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b" t", b" the"]
    words += [b"%c%c" % (97 + i // 26, 97 + i % 26) for i in range(100)]
    words = list(dict.fromkeys(words))[: n_tokens - 16]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    return {
        "config": {"pattern": known.steps[0][1], "num_vocab_tokens": len(words),
                   "default_vocab_size": n_tokens, "default_num_special_tokens": 16, "version": "v13"},
        "special_tokens": [{"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)],
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(w).decode()} for i, w in enumerate(words)],
    }  # fmt: skip
