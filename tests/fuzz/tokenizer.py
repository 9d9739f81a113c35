"""A small tokenizer folder with one strange file; the three harnesses for its files share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from convert.tokenizer.tokenizer import read_tokenizer
from gguf_tools.format.shards import FileLayout
from tests.fuzz import scratch

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

TOKENIZER_JSON: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [{"id": 6, "content": "<s>", **_FLAGS}, {"id": 7, "content": "</s>", **_FLAGS}],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            _split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"),
            _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
            {"type": "Digits", "individual_digits": True}, _BYTES,
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [6], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {"a": 0, "b": 1, "c": 2, "Ġ": 3, "ab": 4, "Ġab": 5}, "merges": [["a", "b"], ["Ġ", "ab"]],
    },
}  # fmt: skip
TOKENIZER_CONFIG: dict[str, Any] = {
    "add_bos_token": True, "add_eos_token": False,
    "bos_token": {"content": "<s>", **_FLAGS}, "eos_token": "</s>", "pad_token": None,
    "additional_special_tokens": ["<x>"], "tokenizer_class": "LlamaTokenizerFast",
    "added_tokens_decoder": {"6": {"content": "<s>", **_FLAGS}, "8": {"content": "<y>", **_FLAGS}},
    "chat_template": [{"name": "default", "template": "{{ x }}"}, {"name": "tool", "template": "y"}],
}  # fmt: skip
CONFIG = {"vocab_size": 12, "bos_token_id": 6, "eos_token_id": [7]}


def folder_with(name: str, **files: bytes) -> Path:
    """Return the folder of harness `name`, with valid files and `files`, whose names have __ for a dot."""
    folder = scratch.folder(name)
    if not any(folder.iterdir()):
        for file_name, content in (
            ("config.json", CONFIG),
            ("tokenizer.json", TOKENIZER_JSON),
            ("tokenizer_config.json", TOKENIZER_CONFIG),
        ):
            (folder / file_name).write_text(json.dumps(content))
    for file_name, data in files.items():
        (folder / file_name.replace("__", ".")).write_bytes(data)
    return folder


def read(folder: Path, pre_tokenizer: str | None = None) -> None:
    """Read the tokenizer in a folder, down to a file's header; raises CheckpointError if it is refused."""
    config = json.loads((folder / "config.json").read_text())
    FileLayout.of(read_tokenizer(folder, config, pre_tokenizer=pre_tokenizer).metadata(), ())
