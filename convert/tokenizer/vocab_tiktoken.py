"""Reads the vocabulary of Kimi or Hunyuan out of a file of tiktoken, and makes the merges that it lacks.

The file has lines `BASE64 RANK`: the bytes of the n tokens of the vocabulary, in the order of their ids. The
code beside it, which is not run, adds special tokens behind them: `Tiktoken` says which.
tokenizer_config.json may name some (`added_tokens_decoder`).

tiktoken merges the neighbours whose bytes together have the lowest rank; a GGUF file lists pairs of tokens.
The pair of a token is what remains of its bytes once all merges of lower rank are done. A token for which
other than two parts remain can't be made by merging.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from convert.tokenizer.files import Tiktoken, TokenizerFiles
from convert.tokenizer.vocab import MAX_VOCAB, TokenType, Vocab, added_tokens_of, pad_text, spelled
from gguf_tools.errors import BadTokenizer
from gguf_tools.files.named_files import read_input
from gguf_tools.text import quoted, shown

MAX_BYTES = 16 << 20
MAX_TOKEN = 1024
"""Maximum length of a token in bytes; Kimi's longest has 128. Time for its merges grows with the square."""


def read_tiktoken_vocab(kind: Tiktoken, path: Path, files: TokenizerFiles) -> Vocab:
    """Return the vocabulary of a file of tiktoken, padded to the embedding's rows with unused tokens.

    raises  BadTokenizer for another program's file, a damaged one, or one with more tokens than rows
    """
    vocab_size = files.vocab_size
    program = files.tokenizer_config.get("tokenizer_class", kind.tokenizer_class)
    if program != kind.tokenizer_class:
        raise BadTokenizer(
            f"{files.config_path}: tokenizer_class is {shown(repr(program))}, expected"
            f" {kind.tokenizer_class!r}: how another one uses {kind.file_name} is not known"
        )
    ranks = read_ranks(path)
    n_base = len(ranks)
    n_rows = n_base + kind.n_special if vocab_size is None else vocab_size
    if n_rows < n_base:
        raise BadTokenizer(f"{path}: {n_base} tokens, but config.json says vocab_size {n_rows}")
    names, notes = _special_names(kind, files, n_base, n_rows)
    if kind.normalizes:
        notes.append("normalizer NFC is not applied: llama.cpp's BPE takes text as it is")
    tokens = [*map(spelled, ranks), *names]
    types = [TokenType.NORMAL] * n_base + [TokenType.CONTROL] * len(names)
    n_empty = n_rows - len(tokens)
    if n_empty:
        notes.append(f"{n_empty} rows of the embedding have no token: written as [PADn]")
        tokens += map(pad_text, range(len(tokens), n_rows))
        types += [TokenType.UNUSED] * n_empty
    return Vocab(tuple(tokens), tuple(types), merges_of(ranks), notes=tuple(notes))


def _special_names(
    kind: Tiktoken, files: TokenizerFiles, n_base: int, n_rows: int
) -> tuple[list[str], list[str]]:
    """Return the names of the special tokens that have a row, and a note for each named one without."""
    path = files.config_path
    last = min(n_rows, n_base + kind.n_special)
    others = range(kind.n_special - len(kind.names))
    numbered = (kind.other.format(number=number, id=n_base + number) for number in others)
    names = [*kind.names, *numbered][: last - n_base]
    notes: list[str] = []
    for token_id, text, _ in added_tokens_of(path, files.tokenizer_config):
        if token_id < n_base:
            raise BadTokenizer(
                f"{path}: added token {quoted(text)} has id {token_id}, expected {n_base} or more:"
                f" {kind.file_name} has {n_base} tokens"
            )
        if token_id < last:
            names[token_id - n_base] = text
        else:
            notes.append(f"{path.name}: token {quoted(text)} has no row in the embedding: left out")
    return names, notes


def read_ranks(path: Path) -> tuple[bytes, ...]:
    """Return the tokens' bytes in the order of their ranks, which must be 0, 1, 2 ...

    raises  BadTokenizer naming the line
    """
    tokens: list[bytes] = []
    for number, line in enumerate(read_input(path, MAX_BYTES, BadTokenizer).splitlines(), 1):
        if not line.strip():
            continue
        fields = line.split()
        try:
            token, rank = binascii.a2b_base64(fields[0], strict_mode=True), int(fields[1])
        except (ValueError, IndexError) as cause:
            found = shown(repr(line))
            raise BadTokenizer(f"{path}: line {number} is {found}, expected BASE64 RANK") from cause
        if rank != len(tokens) or not 1 <= len(token) <= MAX_TOKEN or len(tokens) == MAX_VOCAB:
            raise BadTokenizer(
                f"{path}: line {number}: token of {len(token)} bytes and rank {rank}, expected rank"
                f" {len(tokens)} and 1 to {MAX_TOKEN} bytes"
            )
        tokens.append(token)
    known = set(tokens)
    for byte in range(256):
        if bytes([byte]) not in known:
            raise BadTokenizer(f"{path}: no token for the byte 0x{byte:02x}; the file is damaged")
    if len(known) < len(tokens):
        raise BadTokenizer(f"{path}: {len(tokens) - len(known)} tokens appear twice; the file is damaged")
    return tuple(tokens)


def merges_of(ranks: Sequence[bytes]) -> tuple[str, ...]:
    """Return the merges "left right" that the tokens stand for, in the order of their ranks."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    merges: list[str] = []
    for rank, token in enumerate(ranks):
        if len(token) > 1:
            parts = _merged(rank_of, token, rank)
            if len(parts) == 2:
                merges.append(" ".join(map(spelled, parts)))
    return tuple(merges)


def _merged(rank_of: Mapping[bytes, int], token: bytes, below: int) -> list[bytes]:
    """Merge the bytes of `token` while results have a rank under `below`; return the parts that are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        pairs = (rank_of.get(left + right, below) for left, right in pairwise(parts))
        best, place = min((rank, place) for place, rank in enumerate(pairs))
        if best >= below:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
