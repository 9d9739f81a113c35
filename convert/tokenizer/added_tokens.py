"""Tells which added tokens llama.cpp finds in a text otherwise than the tokenizers library does.

An added token may take the spaces beside it (lstrip, rstrip), count only where no letter stands beside it
(single_word), or be looked for in text that went through the normalizer (normalized). A GGUF file has no
place for any of that: llama.cpp looks for the text of a token and takes just that. Which tokens it matters
for is tried with the library, on two short texts each.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from convert.tokenizer.files import TokenizerFiles, library_errors
from gguf_tools.findings import listed
from gguf_tools.text import quoted

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Attributes of an added token."""

MAX_TRIED_CHARS, PATIENCE_SECONDS = 256, 20.0
"""Length of tokens that are tried, and the time for all of them. 6,000 take half a second; an expression of a
pre-tokenizer may take time that is exponential in the length."""

_EXAMPLES: Mapping[str, tuple[str, str]] = {
    "lstrip": ("keeps the space in", "a {}"),
    "rstrip": ("keeps the space in", "{} a"),
    "no rstrip": ("leaves out the space in", "{} a"),
    "single_word": ("finds it in", "a{}a"),
    "normalized": ("finds it in", "a{}a"),
}
"""Attribute -> what llama.cpp does, and a text for an example."""


def flags_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that an entry of a file states."""
    return {flag: entry[flag] for flag in FLAGS if flag in entry}


def attribute_notes(library: Any, files: TokenizerFiles) -> Iterator[str]:
    """Yield at most one note, on the attributes that llama.cpp doesn't know.

    library  the tokenizer with all its added tokens
    """
    lost: dict[str, list[str]] = {}
    with library_errors(files.json_path, "an added token can't be tried"):
        for attribute, text in _lost_attributes(library, files.model_name):
            lost.setdefault(attribute, []).append(text)
    if lost:
        yield f"added tokens: {'; '.join(_phrase(attribute, texts) for attribute, texts in lost.items())}"


_PHI3 = ("phi-3", "phi3")
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
"""Where a model's name says Phi 3, llama.cpp leaves out the spaces behind all special tokens but these
(llama_vocab::impl::load of src/llama-vocab.cpp)."""


def _is_phi3(model_name: str) -> bool:
    return any(name in model_name.lower() for name in _PHI3)


def name_note(files: TokenizerFiles, tokens: Collection[str]) -> Iterator[str]:
    """Yield a note where llama.cpp takes the model for Phi 3, and doesn't load a file without its tokens."""
    missing = [text for text in (*_PHI3_KEEPS, "</s>") if text not in tokens]
    if missing and _is_phi3(files.model_name):
        yield (
            f"the name {quoted(files.model_name)} says Phi 3, and llama.cpp doesn't load the file for want of"
            f" a token {missing[0]}: give another --model-name"
        )


def _lost_attributes(library: Any, model_name: str) -> Iterator[tuple[str, str]]:
    """Yield (attribute, text of the token) for what llama.cpp does otherwise."""
    library.no_truncation()
    library.no_padding()
    is_phi3, began = _is_phi3(model_name), time.thread_time()
    for token_id, token in library.get_added_tokens_decoder().items():
        text = token.content
        rstrip = is_phi3 and text not in _PHI3_KEEPS  # llama.cpp's
        is_plain = not (token.lstrip or token.rstrip or token.single_word or token.normalized or rstrip)
        if is_plain or not 0 < len(text) <= MAX_TRIED_CHARS:
            continue
        if time.thread_time() - began > PATIENCE_SECONDS:
            return
        for start, end in _places(library, f"a {text} a", token_id)[:1]:
            if start < 2:
                yield "lstrip", text
            if end > 2 + len(text) + rstrip:
                yield "rstrip", text
            if end < 2 + len(text) + rstrip:
                yield "no rstrip", text
        if token.single_word:  # between letters the model's own merges may make its id, but not always
            yield "single_word", text
        elif not _places(library, f"a{text}a", token_id):
            yield "normalized", text


def _places(library: Any, text: str, token_id: int) -> list[tuple[int, int]]:
    """Return where the token begins and ends in a text, what it takes of the spaces beside it included."""
    encoding = library.encode(text, add_special_tokens=False)
    pairs = zip(encoding.ids, encoding.offsets, strict=True)
    return [place for found, place in pairs if found == token_id]


def _phrase(attribute: str, texts: list[str]) -> str:
    does, example = _EXAMPLES[attribute]
    which = f"{attribute} of {listed(texts, 1)} is not carried over"
    return f"{which}: llama.cpp {does} {quoted(example.format(texts[0]))}"
