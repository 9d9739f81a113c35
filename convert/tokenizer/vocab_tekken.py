"""Reads the vocabulary of Mistral's tekken.json.

    config          pattern: the regex that cuts text; default_vocab_size, default_num_special_tokens
    special_tokens  [{rank, token_str}]: the first ids; older files have none and mean OLD_NAMES. Those that
                    are not listed, up to the number that config says, are called <SPECIAL_ID>
    vocab           [{rank, token_bytes in base64}]: the ids after them, as many as make up the vocabulary

The merges of a token of several bytes are all pairs of tokens that it consists of, the pair with the lowest
ranks first. That is how llama.cpp's converter makes them.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.tokenizer.vocab import MAX_VOCAB, TokenType, Vocab, spelled
from gguf_tools.errors import BadTokenizer
from gguf_tools.text import shown

FILE_NAME = "tekken.json"
MAX_TOKEN = 1024
"""Maximum length of a token in bytes; the longest of Mistral's has 128."""

OLD_NAMES = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files up to version v7 (DEPRECATED_SPECIAL_TOKENS of mistral_common 1.6)."""

_SPECIAL_KINDS: Mapping[str, str] = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
"""Kind of a special token -> its name."""


def read_tekken_vocab(
    path: Path, content: Mapping[str, Any], vocab_size: int | None, config_path: Path
) -> tuple[Vocab, Mapping[str, int], str]:
    """Return the vocabulary in `content`, what `path` holds, ids of special tokens, the regex that cuts text.

    vocab_size   rows of the embedding, which must be as many as the vocabulary has
    config_path  the file that says so, for the message
    raises       BadTokenizer for a file of another form, a damaged one, or a vocabulary of another size
    """
    config = content.get("config")
    if not isinstance(config, Mapping) or not isinstance(config.get("pattern"), str):
        raise BadTokenizer(f"{path}: no config.pattern, expected the regex that cuts text")
    n_tokens, n_special = (
        _size(path, config, f"default_{key}") for key in ("vocab_size", "num_special_tokens")
    )
    if vocab_size not in (None, n_tokens):
        raise BadTokenizer(f"{path}: {n_tokens} tokens, but {config_path.name} says vocab_size {vocab_size}")
    names = _special_names(path, content.get("special_tokens"), n_special)
    ranks = tuple(_ranks(path, content.get("vocab"), n_tokens - n_special))
    ids = {kind: names.index(name) for kind, name in _SPECIAL_KINDS.items() if name in names}
    # Without a token of its own, the rest of a batch is filled with the end of a text.
    if "eos" in ids:
        ids.setdefault("pad", ids["eos"])
    types = (TokenType.CONTROL,) * n_special + (TokenType.NORMAL,) * len(ranks)
    vocab = Vocab(
        (*names, *map(spelled, ranks)), types, tuple(_merges(path, ranks)), scores=(0.0,) * n_tokens
    )
    return vocab, ids, config["pattern"]


def _size(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_VOCAB:
        raise BadTokenizer(f"{path}: config.{key} is {shown(repr(value))}, expected 1 to {MAX_VOCAB}")
    return value


def _special_names(path: Path, entries: Any, n_special: int) -> list[str]:
    if entries is None:
        entries = [{"rank": rank, "token_str": name} for rank, name in enumerate(OLD_NAMES)]
    try:
        listed = sorted((int(entry["rank"]), "" + entry["token_str"]) for entry in entries)
    except (TypeError, KeyError, ValueError) as cause:
        raise BadTokenizer(f"{path}: special_tokens is no list of rank and token_str") from cause
    if [rank for rank, _ in listed] != list(range(len(listed))) or len(listed) > n_special:
        raise BadTokenizer(
            f"{path}: {len(listed)} special tokens, expected ranks 0, 1, 2 ... and at most {n_special}"
        )
    return [*(name for _, name in listed), *(f"<SPECIAL_{i}>" for i in range(len(listed), n_special))]


def _ranks(path: Path, entries: Any, n_tokens: int) -> Iterator[bytes]:
    """Yield the bytes of the first `n_tokens` tokens, which must have the ranks 0, 1, 2 ..."""
    if not isinstance(entries, list) or len(entries) < n_tokens:
        count = len(entries) if isinstance(entries, list) else "no"
        raise BadTokenizer(f"{path}: {count} tokens in vocab, expected {n_tokens} or more")
    for number, entry in enumerate(entries[:n_tokens]):
        try:
            token, rank = binascii.a2b_base64(entry["token_bytes"], strict_mode=True), entry["rank"]
        except (TypeError, KeyError, ValueError) as cause:
            raise BadTokenizer(
                f"{path}: vocab[{number}] is {shown(repr(entry))}, expected rank and token_bytes"
            ) from cause
        if rank != number or not 1 <= len(token) <= MAX_TOKEN:
            raise BadTokenizer(
                f"{path}: vocab[{number}]: rank {shown(repr(rank))} and {len(token)} bytes, expected rank"
                f" {number} and 1 to {MAX_TOKEN} bytes"
            )
        yield token


def _merges(path: Path, ranks: Sequence[bytes]) -> Iterator[str]:
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    if len(rank_of) < len(ranks):
        raise BadTokenizer(f"{path}: {len(ranks) - len(rank_of)} tokens appear twice")
    for number, token in enumerate(ranks):
        if number < 256:  # the single bytes
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(rank_of[a], rank_of[b], a, b) for a, b in halves if a in rank_of and b in rank_of]
        if not pairs:
            raise BadTokenizer(f"{path}: no two tokens make up token {number}, {shown(repr(token))}")
        yield from (f"{spelled(a)} {spelled(b)}" for _, _, a, b in sorted(pairs))
