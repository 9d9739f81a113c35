"""Finds the tokens that begin a text, end it, pad it ..., and which of them a tokenizer adds by itself.

The facts lie in up to five files. They are read in the order of gguf-py's SpecialVocab, which uses
tokenizer_config.json, tokenizer.json's post-processor and config.json. The others only say where a text or a
turn begins and ends, and what pads it, if these leave it open.

One decision differs from SpecialVocab of late 2026. A post-processor of type ByteLevel adds nothing;
there it overrules `"add_bos_token": true` in tokenizer_config.json, which DeepSeek's V2 and V3 files
have. Here the explicit statement counts, as in earlier llama.cpp and in the GGUF files in use:
without it these models see raw text that lacks the first token they were trained with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.checkpoint.checkpoint import read_json_object_if_there
from convert.tokenizer.files import TokenizerFiles
from convert.tokenizer.vocab_bpe import SPECIAL_KINDS, added_tokens_in
from convert.tokenizer.vocab_wordpiece import is_wordpiece
from gguf_tools.errors import BadTokenizer
from gguf_tools.text import first_of, quoted

_ENDS = ("bos", "eos", "eot", "eom", "pad")
"""Kinds that are looked for in more files than llama.cpp's converter reads."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model, in the order in which they are written.

    ids   kind ("bos", "eos" ...) -> token id
    adds  kind -> whether encoding a text adds it
    last  kinds whose ids stand behind all other keys of the tokenizer
    """

    ids: Mapping[str, int]
    adds: Mapping[str, bool]
    notes: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Named:
    """Special tokens that the files name as texts, and which of these the post-processor adds."""

    texts: Mapping[str, str]
    adds: Mapping[str, bool]
    kinds: tuple[str, ...] = SPECIAL_KINDS
    notes: tuple[str, ...] = ()

    def text(self, kind: str) -> str | None:
        return self.texts.get(kind)

    def called(self, **texts: str | None) -> _Named:
        return replace(self, texts={**self.texts, **{kind: text for kind, text in texts.items() if text}})

    def adding(self, **adds: bool) -> _Named:
        return replace(self, adds={**self.adds, **adds})

    def noting(self, note: str) -> _Named:
        return replace(self, notes=(*self.notes, note))


def read_special_tokens(
    files: TokenizerFiles,
    tokens: Sequence[str],
    default_ids: Mapping[str, int] | None = None,
    *,
    by_name: bool = True,
) -> SpecialTokens:
    """Return the special tokens of a checkpoint's folder.

    tokens       texts by id
    default_ids  what a SentencePiece model says itself, used where nothing else says it
    by_name      look names of special tokens up among `tokens`, too
    raises       BadTokenizer when a side file is no JSON
    """
    tokenizer_config, quirks = files.tokenizer_config, files.quirks
    named = _Named({kind: text for kind in SPECIAL_KINDS if (text := _text(tokenizer_config, kind))}, {})
    named = named.called(
        bos=named.text("bos") or named.text("cls"), eos=named.text("eos") or named.text("sep")
    )
    byte_level = False
    for processor in _processors(files.tokenizer_json.get("post_processor")):
        kind = processor.get("type")
        byte_level |= kind == "ByteLevel"
        if kind == "RobertaProcessing":
            named = _after_roberta(named, processor)
        elif kind == "TemplateProcessing":
            named = _after_template(named, processor)
        elif kind == "BertProcessing":
            cls, sep = ((processor.get(name) or [None])[0] for name in ("cls", "sep"))
            if is_wordpiece(files.tokenizer_json):
                named = named.called(cls=cls, sep=sep)
                continue
            around = f"{quoted(cls)} before and {quoted(sep)} behind a text"
            named = named.noting(f"tokenizer.json puts {around}: left out")
    adds, add_notes = _adds(named, tokenizer_config, byte_level)
    if quirks.adds_bos and adds.get("bos") is not True:
        adds["bos"] = True
        add_notes.append("add_bos_token: true, as this family wants it; the tokenizer's files don't say so")
    named_tokens = {text: token_id for token_id, text in reversed(list(enumerate(tokens)))} if by_name else {}
    candidates = _candidates(files, named, named_tokens, default_ids or {})
    ids, id_notes = _ids(files.folder, candidates, len(tokens))
    ids |= {kind: found for kind, found in _by_quirks(files) if found in range(len(tokens))}
    ends = _unknown_ends(files, tokens, set(ids.values()))
    notes = (*named.notes, *add_notes, *id_notes, *ends)
    is_late = quirks.eod or quirks.listed_eot or quirks.late_eot
    return SpecialTokens(ids, adds, notes, last=("eot",) if is_late else ())


def _text(source: Mapping[str, Any], kind: str) -> str | None:
    entry = source.get(f"{kind}_token")
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


# --- what the post-processor of tokenizer.json adds ----------------------------------------------------


def _processors(post_processor: object) -> list[Mapping[str, Any]]:
    """Return the steps of a post-processor; like the library, accept a sequence without names."""
    if isinstance(post_processor, Mapping) and post_processor.get("type") == "Sequence":
        steps = post_processor.get("processors")
    else:
        steps = [post_processor]
    return [step for step in steps if isinstance(step, Mapping)] if isinstance(steps, list) else []


def _after_roberta(named: _Named, processor: Mapping[str, Any]) -> _Named:
    cls = named.text("cls") or (processor.get("cls") or [named.text("bos")])[0]
    sep = named.text("sep") or (processor.get("sep") or [named.text("eos")])[0]
    return named.called(cls=cls, sep=sep).adding(bos=True, eos=True, sep=True)


def _after_template(named: _Named, processor: Mapping[str, Any]) -> _Named:
    single = processor.get("single") or []
    pair = processor.get("pair") or []
    if others := [text for element in single[1:-1] if (text := _special(element))]:
        texts = ", ".join(map(quoted, others))
        named = named.noting(f"tokenizer.json puts {texts} beside a text, next to its ends: left out")
    first = _special(single[0]) if len(single) > 1 else None
    last = _special(single[-1]) if len(single) > 1 else None
    if first:
        if first not in (named.text("bos"), named.text("cls")):
            named = named.called(bos=named.text("bos") or first, cls=named.text("cls") or first)
        known = first in (named.text("bos"), named.text("cls"))
        named = named.adding(bos=known)
        if not known:
            before = f"{quoted(first)}, not the bos token, before a text"
            named = named.noting(f"tokenizer.json puts {before}: left out")
    if last:
        if last != named.text("eos"):
            named = _with_new_eos(named, last)
        named = named.adding(eos=True)
    return _after_pair(named, pair, first, last)


def _with_new_eos(named: _Named, last: str) -> _Named:
    """Take the token that the template puts at the end for eos, and the former eos for the end of a turn."""
    free = next((kind for kind in ("eot", "eom") if kind not in named.kinds), None)
    old = named.text("eos")
    if free is None:
        note = f"tokenizer.json puts {quoted(last)} after a text: it replaces {quoted(old)} as eos"
        return named.called(eos=last).noting(note)
    return replace(named, kinds=(*named.kinds, free)).called(**{free: old, "eos": last})


def _after_pair(named: _Named, pair: list[Any], first: str | None, last: str | None) -> _Named:
    """Note whether a separator stands between two texts, as in A [sep] [eos] B."""
    start = 1 if pair and first and _special(pair[0]) == first else 0
    stop = len(pair) - (1 if pair and last and _special(pair[-1]) == last else 0)
    between = pair[start:stop]
    if len(between) < 3 or _sequence(between[0]) != "A" or _sequence(between[-1]) != "B":
        return named
    between = between[1:-1]
    ends = [text for text in (named.text("sep"), named.text("eos")) if text]
    add_sep = _special(between[0]) in ends and not last
    if len(between) == 2:
        add_sep |= _special(between[1]) in ends
    named = named.adding(sep=add_sep)
    if add_sep and not named.text("sep"):
        named = named.called(sep=named.text("eos"))
    return named


def _special(element: object) -> str | None:
    return _id_in(element, "SpecialToken")


def _sequence(element: object) -> str | None:
    return _id_in(element, "Sequence")


def _id_in(element: object, kind: str) -> str | None:
    """Return the id in an element `{kind: {"id": ...}}` of a template."""
    inner = element.get(kind) if isinstance(element, Mapping) else None
    return inner.get("id") if isinstance(inner, Mapping) else None


def _adds(
    named: _Named, tokenizer_config: Mapping[str, Any], byte_level: bool
) -> tuple[dict[str, bool], list[str]]:
    adds: dict[str, bool] = {}
    notes: list[str] = []
    if byte_level:  # adds nothing, so the two are false unless tokenizer_config.json says otherwise
        for kind in ("bos", "eos"):
            stated = tokenizer_config.get(f"add_{kind}_token")
            adds[kind] = stated is True
            if stated is True and kind not in named.adds:
                notes.append(
                    f"add_{kind}_token: true, as tokenizer_config.json says; "
                    "tokenizer.json's post-processor adds none"
                )
    adds |= named.adds
    for kind in named.kinds:
        stated = tokenizer_config.get(f"add_{kind}_token")
        if not isinstance(stated, bool):
            continue
        if adds.setdefault(kind, stated) != stated:
            notes.append(
                f"add_{kind}_token: {str(adds[kind]).lower()}, as tokenizer.json's post-processor does; "
                f"tokenizer_config.json says {str(stated).lower()}"
            )
    return adds, notes


# --- ids -----------------------------------------------------------------------------------------------


def _candidates(
    files: TokenizerFiles, named: _Named, id_of: Mapping[str, int], default_ids: Mapping[str, int]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (file, kind -> id) for each source of ids; the first that has a kind counts."""
    generation_config = _generation_config(files)
    added = added_tokens_in(files.json_path, files.tokenizer_json)
    id_of_added: dict[str | None, int] = dict(reversed(added))

    def by_kind(id_of_kind: Callable[[str], Any], kinds: Sequence[str] = named.kinds) -> dict[str, Any]:
        return {kind: id_of_kind(kind) for kind in named.kinds if kind in kinds}

    yield "tokenizer_config.json", by_kind(lambda kind: id_of_added.get(named.text(kind)))
    yield "config.json", by_kind(lambda kind: files.config.get(f"{kind}_token_id"))
    yield "tokenizer_config.json", by_kind(lambda kind: id_of.get(named.text(kind) or ""), _ENDS)
    special_tokens = files.quirks.special_tokens
    yield "tokenizer.json", {kind: id_of_added.get(text) for kind, text in special_tokens.items()}
    listed = files.special_tokens_map
    yield "special_tokens_map.json", by_kind(lambda kind: id_of.get(_text(listed, kind) or ""), _ENDS)
    yield "generation_config.json", by_kind(lambda kind: generation_config.get(f"{kind}_token_id"), _ENDS)
    yield "tokenizer.model", default_ids


def _generation_config(files: TokenizerFiles) -> Mapping[str, Any]:
    with suppress(BadTokenizer):  # a broken one is reported with the sampling settings, which it is for
        return read_json_object_if_there(files.folder / "generation_config.json", BadTokenizer)
    return {}


def _ids(
    folder: Path, sources: Iterable[tuple[str, Mapping[str, Any]]], n_tokens: int
) -> tuple[dict[str, int], list[str]]:
    """Return the id of each kind, the first of several, and notes on what is left out."""
    ids: dict[str, int] = {}
    notes: list[str] = []
    for file_name, candidates in sources:
        for kind, stated in candidates.items():
            token_id, *others = stated if isinstance(stated, list) and stated else [stated]
            if kind in ids or type(token_id) is not int:
                continue
            if 0 <= token_id < n_tokens:
                ids[kind] = token_id
                if others and kind != "eos":
                    notes.append(f"{file_name}: {kind}_token_id has {len(others) + 1} ids: the first is used")
            else:
                notes.append(f"{file_name}: {kind} token id {token_id} is none of {n_tokens}: left out")
    notes += [f"no {kind} token found in {folder}" for kind in ("bos", "eos") if kind not in ids]
    return ids, notes


def _by_quirks(files: TokenizerFiles) -> Iterator[tuple[str, Any]]:
    """Yield the kinds that `Quirks.eod` and `listed_eot` are about, with what the files say of them."""
    if files.quirks.eod:
        yield "eos", files.config.get("eod_token_id")
        ends = _generation_config(files).get("eos_token_id")
        if isinstance(ends, list) and len(ends) > 1:
            yield "eot", ends[0]
    ends = files.config.get("eos_token_id")
    if files.quirks.listed_eot and isinstance(ends, list):
        yield "eot", next((end for end in ends if end != files.config.get("bos_token_id")), None)


_KNOWN_ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>",
    "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))  # fmt: skip
"""Tokens that end a text in llama.cpp whatever the file says (special_eog_ids in src/llama-vocab.cpp)."""


def _unknown_ends(files: TokenizerFiles, tokens: Sequence[str], known: set[int]) -> Iterator[str]:
    """Yield a note for each file with ends of a text that llama.cpp doesn't know: a GGUF file has one eos."""
    known = set(known)
    sources = {"config.json": files.config, "generation_config.json": _generation_config(files)}
    for file_name, source in sources.items():
        stated = source.get("eos_token_id")
        ids = stated if isinstance(stated, list) else []
        found = [i for i in ids if type(i) is int and 0 <= i < len(tokens) and i not in known]
        lost = [i for i in dict.fromkeys(found) if tokens[i] not in _KNOWN_ENDS]
        known.update(lost)
        if lost:
            texts = first_of([f"{quoted(tokens[token_id])} ({token_id})" for token_id in lost], 3)
            yield (
                f"{file_name}: eos_token_id lists {texts}, too: a GGUF file has one eos token, and"
                " llama.cpp goes on after these"
            )
