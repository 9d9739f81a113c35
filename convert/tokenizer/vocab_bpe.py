"""Reads a byte-level BPE vocabulary out of tokenizer.json.

The ids are those that the `tokenizers` library gives, with what transformers adds to them: the tokens
of tokenizer_config.json that tokenizer.json lacks, and the `special` flags it overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.tokenizer.added_tokens import attribute_notes, flags_of
from convert.tokenizer.files import TokenizerFiles, library_errors
from convert.tokenizer.vocab import TokenType, Vocab, added_tokens_of, check_fits, looks_special, pad_text
from gguf_tools.errors import BadTokenizer
from gguf_tools.findings import listed
from gguf_tools.text import quoted, shown

SPECIAL_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

_REPLACEMENT_CHARACTER = "\ufffd"


def is_byte_level_bpe(tokenizer_json: Mapping[str, Any]) -> bool:
    """True for tokens of bytes written as characters; SentencePiece's have byte_fallback instead."""
    model = tokenizer_json.get("model")
    if not isinstance(model, Mapping):
        return False
    return model.get("type", "BPE") == "BPE" and "merges" in model and not model.get("byte_fallback")


def read_bpe_vocab(files: TokenizerFiles) -> Vocab:
    """Return the vocabulary of tokenizer.json, padded to the rows of the embedding with unused tokens.

    raises  BadTokenizer for what llama.cpp's BPE can't do, contradicting ids, or ids past the embedding
    """
    path, model = files.json_path, files.tokenizer_json["model"]
    check_affixes(path, model)  # first: the library panics, and prints, at some
    library = files.load()
    # Without a type, what looks like a BPE may be another model to the library.
    if not isinstance(model.get("vocab"), Mapping) or not isinstance(model["merges"], list):
        raise BadTokenizer(f"{path}: model.vocab and model.merges are no object and list, as a BPE has them")
    return replace(read_library_vocab(files, library), merges=read_merges(path, model["merges"]))


def read_library_vocab(files: TokenizerFiles, library: Any) -> Vocab:
    """Return the tokens of a library that has read tokenizer.json, padded to the rows of the embedding.

    raises  BadTokenizer for contradicting ids, or ids past the embedding
    """
    path, tokenizer_json, vocab_size = files.json_path, files.tokenizer_json, files.vocab_size
    _check_ids(path, tokenizer_json["model"]["vocab"])
    _check_added_ids(path, tokenizer_json, library)
    notes = list(add_tokens_of_config(library, files))

    text_of = {token_id: text for text, token_id in library.get_vocab(with_added_tokens=True).items()}
    _check_base_holes(path, tokenizer_json["model"]["vocab"], text_of)
    last = max(text_of, default=-1)
    n_rows = last + 1 if vocab_size is None else vocab_size
    if last >= 0:
        check_fits(path, text_of[last], last, n_rows)

    added = library.get_added_tokens_decoder()
    tokens: list[str] = []
    types: list[TokenType] = []
    for token_id in range(n_rows):
        if token_id not in text_of:
            text, kind = pad_text(token_id), TokenType.UNUSED
        elif token_id not in added:
            text, kind = text_of[token_id], TokenType.NORMAL
        else:
            text, kind = _added_token(path, library, text_of[token_id], added[token_id])
        tokens.append(text)
        types.append(kind)
    if n_rows > len(text_of):
        notes.append(f"{n_rows - len(text_of)} rows of the embedding have no token: written as [PADn]")
    notes += [*attribute_notes(library, files), *unused_added_tokens(files, text_of)]
    return Vocab(tuple(tokens), tuple(types), notes=tuple(notes))


def check_affixes(path: Path, model: Mapping[str, Any]) -> None:
    """Raise BadTokenizer for a BPE that marks where words begin or end."""
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            found = shown(repr(model[key]))
            raise BadTokenizer(f"{path}: model.{key} is {found}; llama.cpp's BPE has none")


def _check_ids(path: Path, vocab: Mapping[str, int]) -> None:
    seen: dict[int, str] = {}
    for text, token_id in vocab.items():
        if token_id in seen:
            both = f"{quoted(seen[token_id])} and {quoted(text)}"
            raise BadTokenizer(f"{path}: tokens {both} have the same id {token_id}")
        seen[token_id] = text


def added_tokens_in(path: Path, tokenizer_json: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return text and id of the added tokens of a tokenizer.json that the library has read."""
    tokens = tokenizer_json.get("added_tokens") or []
    try:
        return [(token["content"], token["id"]) for token in tokens]
    except (TypeError, KeyError) as cause:  # the library takes an object's values without names, too
        raise BadTokenizer(f"{path}: added_tokens are not a list of objects with content and id") from cause


def _check_added_ids(path: Path, tokenizer_json: Mapping[str, Any], library: Any) -> None:
    """Refuse added tokens that the library has renumbered, because an id was taken or left a gap."""
    for text, token_id in added_tokens_in(path, tokenizer_json):
        actual = library.token_to_id(text)
        if actual != token_id:
            raise BadTokenizer(
                f"{path}: added token {quoted(text)} is given id {token_id}, but the tokenizers library makes"
                f" it {actual}: {token_id} is taken by another token, or ids before it are missing"
            )


def _check_base_holes(path: Path, base: Mapping[str, int], text_of: Mapping[int, str]) -> None:
    last = max(base.values(), default=-1)
    ids = sorted(token_id for token_id in text_of if token_id <= last)
    missing = next((i for i, token_id in enumerate(ids) if token_id != i), None)
    if missing is not None:
        raise BadTokenizer(
            f"{path}: no token has id {missing}, though ids go up to {last}: the vocabulary is damaged"
        )


def add_tokens_of_config(library: Any, files: TokenizerFiles) -> list[str]:
    """Add to `library` what transformers would; return a note for each token that has no row."""
    with library_errors(files.config_path, "its tokens can't be added"):
        return list(_add_tokens_of_config(library, files))


def _add_tokens_of_config(library: Any, files: TokenizerFiles) -> Iterator[str]:
    from tokenizers import AddedToken

    config_path, vocab_size = files.config_path, files.vocab_size
    batch = _Batch(library)
    for token_id, text, entry in added_tokens_of(config_path, files.tokenizer_config):
        actual = batch.id_of(text)
        if vocab_size is not None and actual >= vocab_size:
            yield f"{config_path.name}: token {quoted(text)} has no row in the embedding: left out"
            continue
        batch.add(AddedToken(text, **flags_of(entry)))
        if actual != token_id:
            yield f"{config_path.name}: token {quoted(text)} is given id {token_id}: it is {actual}"
    library.add_tokens(batch.tokens)

    added = {token.content for token in library.get_added_tokens_decoder().values()}
    batch = _Batch(library)
    for text, entry in named_special_tokens(files):
        if text in added:
            continue
        added.add(text)
        if vocab_size is not None and batch.id_of(text) >= vocab_size and library.token_to_id(text) is None:
            where = "is in no vocabulary and has no row in the embedding"
            yield f"special token {quoted(text)} {where}: left out"
            continue
        batch.add(AddedToken(text, **{**flags_of(entry), "special": True, "normalized": False}))
    library.add_special_tokens(batch.tokens)


def unused_added_tokens(files: TokenizerFiles, text_of: Mapping[int, str]) -> Iterator[str]:
    """Yield a note where added_tokens.json, which counts beside a tokenizer.model alone, has other tokens."""
    id_of = {text: token_id for token_id, text in text_of.items()}
    lost = [text for text, token_id in files.added_tokens.items() if id_of.get(text) != token_id]
    if lost:
        where = f"is not in {files.json_path.name} under its id"
        yield f"{files.added_path.name}: token {listed(lost, 1)} {where}: left out"


class _Batch:
    """Tokens to be added to the library all at once, and the ids that it will give them.

    Adding thousands one at a time takes minutes, because the library walks through all its tokens for each.
    """

    def __init__(self, library: Any) -> None:
        self.tokens: list[Any] = []
        self._library = library
        self._new_ids: dict[str, int] = {}
        self._n_tokens = library.get_vocab_size(with_added_tokens=True)

    def id_of(self, text: str) -> int:
        """Return the id that a token has, or would get if it were added next."""
        known = self._library.token_to_id(text)
        return self._new_ids.get(text, self._n_tokens + len(self._new_ids)) if known is None else known

    def add(self, token: Any) -> None:
        self.tokens.append(token)
        if token.content and self._library.token_to_id(token.content) is None:
            self._new_ids.setdefault(token.content, self.id_of(token.content))


def named_special_tokens(files: TokenizerFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield text and properties of special tokens in tokenizer_config.json and special_tokens_map.json."""
    for source in (files.tokenizer_config, files.special_tokens_map):
        named = [source.get(f"{kind}_token") for kind in SPECIAL_KINDS]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = source.get(key)
            if isinstance(listed, Mapping):
                named += listed.values()
            elif isinstance(listed, list):
                named += listed
        for token in named:
            entry = token if isinstance(token, Mapping) else {"content": token}
            text = entry.get("content")
            if isinstance(text, str) and text:
                yield text, entry


def _added_token(path: Path, library: Any, text: str, added: Any) -> tuple[str, TokenType]:
    if not added.normalized:
        # llama.cpp prints an added token as it is spelled, the library by its byte decoder. Bytes that are
        # no text by themselves keep their spelling: nothing could match them otherwise.
        with library_errors(path, f"token {quoted(text)} can't be decoded"):
            ids = library.encode(text, add_special_tokens=False).ids
            decoded = library.decode(ids, skip_special_tokens=False)
        if _REPLACEMENT_CHARACTER not in decoded:
            text = decoded
    if added.special or looks_special(text):
        return text, TokenType.CONTROL
    return text.replace("▁", " "), TokenType.USER_DEFINED


def read_merges(path: Path, merges: list[Any]) -> tuple[str, ...]:
    """Return merges as "left right"; a space inside a part is written as the byte alphabet's Ġ."""
    joined: list[str] = []
    for merge in merges:
        if isinstance(merge, str):
            joined.append(merge)
        elif isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge):
            joined.append(" ".join(part.replace(" ", "Ġ") for part in merge))
        else:
            found = shown(repr(merge))
            raise BadTokenizer(f'{path}: merge {found} is neither "left right" nor a pair of texts')
    return tuple(joined)
