"""Tells which parts of a tokenizer.json llama.cpp leaves out.

    truncation, padding   noted where they change a text
    normalizer            SentencePiece's tokens: ▁ for a space and before a text; byte-level BPE: nothing
    pre_tokenizer         SentencePiece's tokens: Metaspace; byte-level BPE: see pretokenizers
    post_processor        see special_tokens
    decoder               what turns bytes and ▁ back
    model                 see vocab_bpe and vocab_spm; dropout

What is none of these is noted, and where possible an example is found by trying it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.tokenizer.files import library_errors
from convert.tokenizer.pretokenizers import build_parts
from convert.tokenizer.vocab import ALPHABET, TokenType, Vocab
from convert.tokenizer.vocab_bpe import added_tokens_in
from gguf_tools.text import quoted, shown

PROBES = ("ﬁ", "Ａ", "½", "A", "é", "e\u0301", " a  b ", "\t", "…", "İ")
"""Texts that normalizers change: ligatures, full width, fractions, case, accents, white space."""

MAX_TRIED, MAX_TRIED_CHARS, PATIENCE_SECONDS = 1 << 15, 64, 20.0
"""Number of tokens that a pre-tokenizer is tried on, their length, and the time for all of them. Llama has
fewer, and takes a fifth of a second; an expression may take time that is exponential in the length."""

_SPACE = "▁"
_SETTINGS = ("lowercase", "strip_accents")
_NOT_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


def changed_by(normalize: Callable[[str], str], *more: str) -> str:
    """Return words on the first text that `normalize` changes, of PROBES and `more`; empty for none."""
    for text in (*more, *PROBES):
        if (to := normalize(text)) != text:
            return f"{quoted(text)} as it is, not as {quoted(to)}"
    return ""


def steps_of(part: object, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part, whose sequences list theirs under `key`."""
    if not isinstance(part, Mapping):  # the library takes an object's values without names, too
        return
    if part.get("type") == "Sequence":
        for step in part.get(key) or ():
            yield from steps_of(step, key)
    else:
        yield part


def normalizer_settings(tokenizer_json: Mapping[str, Any]) -> dict[str, bool]:
    """Return the settings of the normalizer that have keys: lowercase, strip_accents."""
    settings: dict[str, bool] = {}
    for step in steps_of(tokenizer_json.get("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Lowercase":
            settings["lowercase"] = True
        elif kind == "StripAccents":
            settings["strip_accents"] = True
        elif kind == "BertNormalizer":
            settings |= {name: step[name] for name in _SETTINGS if step.get(name) is not None}
    return {name: settings[name] for name in _SETTINGS if name in settings}


# --- both kinds of tokens ------------------------------------------------------------------------------


def common_notes(tokenizer_json: Mapping[str, Any], *, byte_level: bool) -> Iterator[str]:
    """Yield notes on what no tokenizer of llama.cpp does."""
    truncation, padding = (tokenizer_json.get(name) for name in ("truncation", "padding"))
    if isinstance(truncation, Mapping):
        length = shown(str(truncation.get("max_length")))
        yield f"truncation to {length} tokens is not applied: llama.cpp takes the whole text"
    if isinstance(padding, Mapping) and padding.get("strategy") != "BatchLongest":
        yield "padding is not applied: llama.cpp adds nothing behind a text"
    if dropout := tokenizer_json["model"].get("dropout"):
        yield f"dropout {shown(str(dropout))} is not applied: llama.cpp does all merges"
    decoders = steps_of(tokenizer_json.get("decoder"), "decoders")
    for name in _names(step for step in decoders if not _is_usual_decoder(step, byte_level=byte_level)):
        yield f"decoder {name} is not applied: llama.cpp prints tokens as they are"


def _is_usual_decoder(step: Mapping[str, Any], *, byte_level: bool) -> bool:
    kind = step.get("type")
    if kind in ("Fuse", "ByteFallback") or byte_level:
        return kind in ("Fuse", "ByteFallback", "ByteLevel")
    if kind == "Replace":
        return step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
    if kind == "Strip":  # the space that was put before the text
        return step.get("content") == " " and not step.get("stop")
    return kind == "Metaspace" and step.get("replacement") == _SPACE


def _names(steps: Iterator[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(shown(str(step.get("type"))) for step in steps))


# --- byte-level BPE ------------------------------------------------------------------------------------


def byte_level_notes(tokenizer_json: Mapping[str, Any], vocab: Vocab) -> Iterator[str]:
    """Yield notes on the normalizer and on bytes without a token of a byte-level BPE."""
    for step in steps_of(tokenizer_json.get("normalizer"), "normalizers"):
        yield f"normalizer {step.get('type')} is not applied: llama.cpp's BPE takes text as it is"
    if tokenizer_json["model"].get("unk_token"):
        known = set(vocab.tokens)
        n_missing = sum(char not in known for byte, char in enumerate(ALPHABET) if byte not in _NOT_IN_UTF8)
        if n_missing:
            yield f"{n_missing} bytes have no token: llama.cpp leaves them out, where unk_token is expected"
    yield from common_notes(tokenizer_json, byte_level=True)


# --- SentencePiece's tokens ----------------------------------------------------------------------------


class PiecePipeline:
    """Normalizer and pre-tokenizer of a tokenizer.json with a SentencePiece model's tokens.

    raises  BadTokenizer where the tokenizers library can't use one of its steps
    """

    def __init__(self, path: Path, tokenizer_json: Mapping[str, Any]) -> None:
        self._path = path
        self._json = tokenizer_json
        self._pre_tokenizer = tokenizer_json.get("pre_tokenizer")
        normalizers = list(steps_of(tokenizer_json.get("normalizer"), "normalizers"))
        pre_tokenizers = list(steps_of(self._pre_tokenizer, "pretokenizers"))
        self._lost = [step for step in normalizers if not _is_usual_normalizer(step)]
        self._metaspaces = [step for step in pre_tokenizers if step.get("type") == "Metaspace"]
        self._names = _names(iter(pre_tokenizers))
        usual = [step for step in normalizers if _is_usual_normalizer(step)]
        self._usual = build_parts(
            path,
            normalizer={"type": "Sequence", "normalizers": usual},
            pre_tokenizer={"type": "Sequence", "pretokenizers": self._metaspaces},
        )

    def adds_space_prefix(self) -> bool:
        """Return whether a text begins with ▁."""
        return self._spaced("a") == f"{_SPACE}a"

    def notes(self, vocab: Vocab, *, space_prefix: bool) -> Iterator[str]:
        """Yield notes on what llama.cpp leaves out.

        space_prefix  whether the file has llama.cpp put ▁ before a text
        """
        for step in self._lost:
            yield f"normalizer {step.get('type')} is not applied: llama.cpp takes {self._change(step)}"
        yield from self._space_notes(space_prefix=space_prefix)
        yield from self._cut_notes(vocab)
        yield from common_notes(self._json, byte_level=False)

    def _change(self, step: Mapping[str, Any]) -> str:
        normalizer = build_parts(self._path, normalizer=step).normalizer
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, Mapping) else None
        with library_errors(self._path, "its normalizer can't be tried"):
            example = changed_by(normalizer.normalize_str, *([literal] if literal else []))
        return example or "text as it is"

    def _spaced(self, text: str) -> str:
        """Return a text with ▁ for its spaces, as the usual steps make it."""
        with library_errors(self._path, "its pre_tokenizer can't be tried"):
            normalized = self._usual.normalizer.normalize_str(text)
            return "".join(word for word, _ in self._usual.pre_tokenizer.pre_tokenize_str(normalized))

    def _space_notes(self, *, space_prefix: bool) -> Iterator[str]:
        for text in ("a b", "a", " a"):
            theirs = _SPACE * space_prefix + text.replace(" ", _SPACE)
            if (ours := self._spaced(text)) != theirs:
                made = f"tokenizer.json makes {quoted(ours)} of {quoted(text)}"
                yield f"spaces: {made}, llama.cpp {quoted(theirs)}"
                break
        if space_prefix and any(step.get("prepend_scheme") == "first" for step in self._metaspaces):
            yield "spaces: tokenizer.json puts one before a text, llama.cpp behind special tokens, too"

    def _cut_notes(self, vocab: Vocab) -> Iterator[str]:
        """Yield a note where the pre-tokenizer cuts a token, which the library never makes then."""
        if not self._names:
            return
        cut = build_parts(self._path, pre_tokenizer=self._pre_tokenizer).pre_tokenizer.pre_tokenize_str
        names = ", ".join(self._names)
        added = {text for text, _ in added_tokens_in(self._path, self._json)}
        start = time.thread_time()
        with library_errors(self._path, "its pre_tokenizer can't be tried"):
            for token, type_ in zip(vocab.tokens[:MAX_TRIED], vocab.types, strict=False):
                fits = 1 < len(token) <= MAX_TRIED_CHARS and token not in added
                if type_ is not TokenType.NORMAL or not fits:
                    continue
                if [word for word, _ in cut(token)] not in ([token], [_SPACE + token]):
                    yield f"pre_tokenizer {names} cuts the token {quoted(token)}; llama.cpp doesn't"
                    return
                if time.thread_time() - start > PATIENCE_SECONDS:
                    yield f"pre_tokenizer {names} is too slow to be tried, and not applied"
                    return


def _is_usual_normalizer(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Prepend":
        return step.get("prepend") == _SPACE
    return step.get("type") == "Replace" and step.get("content") == _SPACE and step.get("pattern") in (
        {"String": " "}, {"Regex": " "},
    )  # fmt: skip
