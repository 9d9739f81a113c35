"""A small tokenizer in Gemma 4's form: pieces of a SentencePiece model, with merges, and single bytes.

The same pieces are a tokenizer.model of SentencePiece, too.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.piece_model import BYTE, CONTROL, NORMAL, TRAINED, UNKNOWN, piece

_SPECIAL = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool_call>", "<tool_call|>", "<|turn>", "<turn|>",
    '<|"|>',
)  # fmt: skip
_NAMED = {
    "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
    "mask_token": "<mask>",
}  # fmt: skip
_TEXT = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3" / "calibration.txt"
_N_MERGES = 150
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SINGLE = [*(chr(code) for code in range(33, 127)), "▁", "é", "ü"]


def write_gemma_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder."""
    merges = _merges(_TEXT.read_text(encoding="utf-8")[:20000])
    pieces = [*_SPECIAL, "\n", "\n\n", *_BYTES, *_SINGLE]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    content: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": vocab[text], "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for text in _SPECIAL
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
                          "invert": False},
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, first], "pair": [bos, first, bos, second],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocab["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    config = {**_NAMED, "tokenizer_class": "GemmaTokenizer", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_sentencepiece_model(folder: Path) -> None:
    """Write a tokenizer.model of 506 pieces and tokenizer_config.json to a folder."""
    joined = ["".join(pair) for pair in _merges(_TEXT.read_text(encoding="utf-8")[:20000])]
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((text, BYTE) for text in _BYTES)]
    pieces += [(text, NORMAL) for text in (*dict.fromkeys(joined), *_SINGLE)]
    data = [
        *TRAINED,
        *(part for at, (text, kind) in enumerate(pieces) for part in piece(text.encode(), -at, kind)),
    ]
    (folder / "tokenizer.model").write_bytes(b"".join(data))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_prefix_space": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _merges(text: str) -> list[tuple[str, str]]:
    """Merge the most frequent pair of neighbours in the words of a text, again and again."""
    words = Counter("▁" + word for word in text.split() if word.isascii())
    split = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < _N_MERGES:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for parts in split.values():
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
    return merges
