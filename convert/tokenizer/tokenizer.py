"""Turns a checkpoint's tokenizer into GGUF metadata, the keys tokenizer.*.

    tokenizer.json, a byte-level BPE     -> tokenizer.ggml.model "gpt2", merges, a named pre-tokenizer
    tiktoken.model, hy.tiktoken          -> the same, with merges made of its ranks
    tekken.json of Mistral               -> the same
    tokenizer.model, a SentencePiece BPE -> tokenizer.ggml.model "llama", scores
    tokenizer.json, a WordPiece          -> tokenizer.ggml.model "bert"
    sentencepiece.bpe.model, a unigram   -> tokenizer.ggml.model "t5", scores, a table of characters

Everything is read as data (JSON, protocol buffer); no code of the checkpoint's is ever run.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert.checkpoint.checkpoint import config_path, read_json_object
from convert.tokenizer import vocab_tekken, vocab_unigram
from convert.tokenizer.added_tokens import attribute_notes, name_note
from convert.tokenizer.cuttings import CUTTINGS
from convert.tokenizer.files import (
    MAX_MEMORY,
    NO_QUIRKS,
    ChatTemplates,
    Quirks,
    Tiktoken,
    TokenizerFiles,
    read_chat_templates,
)
from convert.tokenizer.pipeline_notes import PiecePipeline, byte_level_notes, normalizer_settings
from convert.tokenizer.pretokenizers import build_parts, find_pre_tokenizer
from convert.tokenizer.sentencepiece_notes import missing_byte_note
from convert.tokenizer.special_tokens import SpecialTokens, read_special_tokens
from convert.tokenizer.vocab import Vocab
from convert.tokenizer.vocab_bpe import add_tokens_of_config, is_byte_level_bpe, read_bpe_vocab
from convert.tokenizer.vocab_spm import (
    is_sentencepiece_bpe,
    read_merged_pieces,
    read_spm_json_vocab,
    read_spm_vocab,
)
from convert.tokenizer.vocab_tiktoken import read_tiktoken_vocab
from convert.tokenizer.vocab_wordpiece import cutting_name, is_wordpiece, read_wordpiece_vocab
from gguf_tools.errors import BadRequest, BadTokenizer
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from gguf_tools.text import shown

# Kinds without a key (cls) are known to tokenizers but not to GGUF.
_ID_KEYS = {
    "bos": keys.TOKENIZER_BOS_ID,
    "eos": keys.TOKENIZER_EOS_ID,
    "unk": keys.TOKENIZER_UNK_ID,
    "sep": keys.TOKENIZER_SEP_ID,
    "pad": keys.TOKENIZER_PAD_ID,
    "mask": keys.TOKENIZER_MASK_ID,
    "eot": keys.TOKENIZER_EOT_ID,
    "eom": keys.TOKENIZER_EOM_ID,
    "prefix": keys.TOKENIZER_PREFIX_ID,
    "suffix": keys.TOKENIZER_SUFFIX_ID,
    "middle": keys.TOKENIZER_MIDDLE_ID,
}
_ADD_KEYS = {
    "bos": keys.TOKENIZER_ADD_BOS,
    "eos": keys.TOKENIZER_ADD_EOS,
    "sep": keys.TOKENIZER_ADD_SEP,
}
_NORMALIZER_KEY = "tokenizer.ggml.normalizer.{name}"

# Two names of one cutting: llama.cpp tells DeepSeek's distills of Qwen by the token that they begin with.
_QWEN, _QWEN_WITH_BOS = "qwen2", "deepseek-r1-qwen"

_OTHER_TOKENIZER_FILES = (
    "tiktoken.model",
    "hy.tiktoken",
    "qwen.tiktoken",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)
_SAVE = "save the tokenizer as tokenizer.json first (AutoTokenizer.from_pretrained, then save_pretrained)"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, as the keys tokenizer.* of a GGUF file describe it.

    model             "gpt2" (byte-level BPE), "llama" (SentencePiece), "gemma4" (its pieces with merges) or
                      "bert" (WordPiece) or "t5" (unigram)
    pre               name of the pre-tokenizer; "default" for SentencePiece, "" where the model says it
    add_space_prefix  False when a SentencePiece text gets no leading space; None: llama.cpp's default
    prefix_first      whether add_space_prefix stands before all others, as tokenizer_config.json states it
    tokens_last       whether tokens stand behind merges and special ids, as in files made of tekken.json
    drops_spaces      whether all but one of several spaces are left out; None where the model says it
    charsmap          a table of characters and what takes their place; empty for none
    normalizer        the two settings that have keys: lowercase, strip_accents
    notes             one line for each thing that is not carried over as it stands, or had to be decided
    """

    model: str
    pre: str
    vocab: Vocab
    special: SpecialTokens
    chat_templates: ChatTemplates
    add_space_prefix: bool | None = None
    prefix_first: bool = False
    tokens_last: bool = False
    drops_spaces: bool | None = None
    charsmap: bytes = b""
    normalizer: Mapping[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def metadata(self) -> dict[str, Value]:
        """Return the keys and values in the order in which llama.cpp's converter writes them."""
        return dict(self._entries())

    def _entries(self) -> Iterator[tuple[str, Value]]:
        if self.add_space_prefix is not None and self.prefix_first:
            yield keys.TOKENIZER_ADD_PREFIX, Value.bool_(self.add_space_prefix)
        yield keys.TOKENIZER_MODEL, Value.string(self.model)
        if self.pre:
            yield keys.TOKENIZER_PRE, Value.string(self.pre)
        if not self.tokens_last:
            yield from self._tokens()
        if self.vocab.merges:
            yield keys.TOKENIZER_MERGES, Value.strings(self.vocab.merges)
        for kind, token_id in self.special.ids.items():
            if kind in _ID_KEYS and kind not in self.special.last:
                yield _ID_KEYS[kind], Value.u32(token_id)
        if self.tokens_last:
            yield from self._tokens()
        for kind, adds in self.special.adds.items():
            if kind in _ADD_KEYS:
                yield _ADD_KEYS[kind], Value.bool_(adds)
        templates = self.chat_templates
        for name, template in templates.named.items():
            yield keys.TOKENIZER_CHAT_TEMPLATE_NAMED.format(name=name), Value.string(template)
        if templates.named:
            yield keys.TOKENIZER_CHAT_TEMPLATES, Value.strings(templates.named)
        if templates.default:
            yield keys.TOKENIZER_CHAT_TEMPLATE, Value.string(templates.default)
        for name, value in self.normalizer.items():
            yield _NORMALIZER_KEY.format(name=name), Value.bool_(value)
        if self.add_space_prefix is not None:
            yield keys.TOKENIZER_ADD_PREFIX, Value.bool_(self.add_space_prefix)
        if self.drops_spaces is not None:
            yield keys.TOKENIZER_REMOVE_EXTRA_WS, Value.bool_(self.drops_spaces)
        if self.charsmap:
            yield keys.TOKENIZER_PRECOMPILED_CHARSMAP, Value.u8s(self.charsmap)
        for kind in self.special.last:
            if kind in self.special.ids:
                yield _ID_KEYS[kind], Value.u32(self.special.ids[kind])

    def _tokens(self) -> Iterator[tuple[str, Value]]:
        yield keys.TOKENIZER_TOKENS, Value.strings(self.vocab.tokens)
        scores = self.vocab.scores
        if scores is not None:
            # Those of tekken.json are zeros, which llama.cpp's converter writes as integers.
            of_pieces = self.model != "gpt2"
            yield keys.TOKENIZER_SCORES, Value.f32s(scores) if of_pieces else Value.i32s(map(int, scores))
        yield keys.TOKENIZER_TOKEN_TYPE, Value.i32s(self.vocab.types)


def read_tokenizer(
    folder: Path,
    config: Mapping[str, Any],
    *,
    pre_tokenizer: str | None = None,
    quirks: Quirks = NO_QUIRKS,
    model_name: str = "",
) -> Tokenizer:
    """Return the tokenizer in a checkpoint's folder.

    config         config.json, for vocab_size and special token ids
    pre_tokenizer  name of llama.cpp's pre-tokenizer, in place of recognising it
    quirks         of the model's family
    model_name     what general.name calls the model, which llama.cpp knows some by
    raises         BadTokenizer when the files are missing, damaged, or ask for what llama.cpp can't do;
                   BadRequest when pre_tokenizer is given and there is nothing it could apply to
    """
    files = TokenizerFiles(folder, config, quirks, model_name)
    return _with_quirks_of_size(_with_stated_prefix(_read(files, pre_tokenizer), files), quirks)


def _with_stated_prefix(tokenizer: Tokenizer, files: TokenizerFiles) -> Tokenizer:
    stated = files.tokenizer_config.get("add_prefix_space")
    if files.quirks.space_prefix is not None and tokenizer.model == "llama":
        return replace(tokenizer, add_space_prefix=files.quirks.space_prefix)
    if not files.quirks.states_prefix or not isinstance(stated, bool):
        return tokenizer
    return replace(tokenizer, add_space_prefix=stated, prefix_first=files.quirks.states_prefix == "first")


def _with_quirks_of_size(tokenizer: Tokenizer, quirks: Quirks) -> Tokenizer:
    """Return the tokenizer with what its family has for a vocabulary of this size."""
    special, size = tokenizer.special, len(tokenizer.vocab.tokens)
    ids = {**quirks.of_size.get(size, {}), **special.ids}
    adds = {**special.adds, "bos": False} if size in quirks.no_bos_sizes else special.adds
    return replace(tokenizer, special=replace(special, ids=ids, adds=adds))


def _read(files: TokenizerFiles, pre_tokenizer: str | None) -> Tokenizer:
    folder, quirks, tokenizer_json = files.folder, files.quirks, files.tokenizer_json
    model_path, tekken_path = folder / "tokenizer.model", folder / vocab_tekken.FILE_NAME
    has_model = model_path.is_file()
    if is_byte_level_bpe(tokenizer_json) and not (quirks.sentencepiece and has_model):
        return _read_byte_level(files, pre_tokenizer)
    if tekken_path.is_file() and not tokenizer_json:
        return _read_tekken(tekken_path, files, pre_tokenizer)
    if has_model:
        _refuse_pre_tokenizer(pre_tokenizer, model_path)
        return _read_sentencepiece(model_path, files)
    if quirks.merged_pieces is not None and is_sentencepiece_bpe(tokenizer_json):
        _refuse_pre_tokenizer(pre_tokenizer, files.json_path)
        return _read_merged_pieces(files, quirks.merged_pieces)
    if is_sentencepiece_bpe(tokenizer_json):
        _refuse_pre_tokenizer(pre_tokenizer, files.json_path)
        return _read_pieces(files)
    if is_wordpiece(tokenizer_json):
        _refuse_pre_tokenizer(pre_tokenizer, files.json_path, "WordPiece")
        return _read_wordpiece(files)
    unigram_path = folder / vocab_unigram.FILE_NAME
    if unigram_path.is_file() or vocab_unigram.is_unigram(tokenizer_json):
        _refuse_pre_tokenizer(pre_tokenizer, folder)
        return _read_unigram(unigram_path, files)
    if quirks.tiktoken and not tokenizer_json and (folder / quirks.tiktoken.file_name).is_file():
        return _read_tiktoken(quirks.tiktoken, files, pre_tokenizer)
    if tokenizer_json:
        model = tokenizer_json.get("model")
        kind = "none"
        if isinstance(model, Mapping):
            kind = f"{model.get('type')}{' with byte_fallback' if model.get('byte_fallback') else ''}"
        raise BadTokenizer(
            f"{files.json_path}: model is {shown(kind)}, expected a byte-level BPE, a WordPiece or a"
            " Unigram, or a tokenizer.model beside it"
        )
    others = [name for name in _OTHER_TOKENIZER_FILES if (folder / name).is_file()]
    raise BadTokenizer(
        f"{folder}: no tokenizer.json and no tokenizer.model"
        + (f"; found {', '.join(others)}: {_SAVE}" if others else "")
    )


def _refuse_pre_tokenizer(name: str | None, path: Path, kind: str = "SentencePiece") -> None:
    if name is not None:
        raise BadRequest(f"--pre-tokenizer {name}: {path} ({kind}) has none")


def _assembled(
    files: TokenizerFiles,
    model: str,
    pre: str,
    vocab: Vocab,
    special: SpecialTokens | None = None,
    notes: Sequence[str] = (),
    **settings: Any,
) -> Tokenizer:
    """Return the tokenizer with the folder's chat templates, and its special tokens where none are given.

    notes     what is not carried over, besides what vocabulary, special tokens and templates note
    settings  other fields of Tokenizer
    """
    special = special or read_special_tokens(files, vocab.tokens)
    templates = read_chat_templates(files)
    named = name_note(files, frozenset(vocab.tokens))
    notes = (*vocab.notes, *special.notes, *templates.notes, *notes, *named)
    normalizer = normalizer_settings(files.tokenizer_json)
    return Tokenizer(model, pre, vocab, special, templates, normalizer=normalizer, notes=notes, **settings)


def _read_byte_level(files: TokenizerFiles, pre_tokenizer: str | None) -> Tokenizer:
    tokenizer_json = files.tokenizer_json
    vocab = read_bpe_vocab(files).with_control(files.quirks.control)
    ignore_merges = bool(tokenizer_json["model"].get("ignore_merges"))
    pre = find_pre_tokenizer(
        files.json_path, tokenizer_json.get("pre_tokenizer"), ignore_merges=ignore_merges, name=pre_tokenizer
    )
    special = read_special_tokens(files, vocab.tokens)
    notes = list(byte_level_notes(tokenizer_json, vocab))
    if pre == _QWEN and pre_tokenizer is None and special.adds.get("bos") and "bos" in special.ids:
        pre = _QWEN_WITH_BOS
    if pre_tokenizer is None:
        pre = files.quirks.pre_tokenizers.get(pre, pre)
    if CUTTINGS[pre].ignore_merges != ignore_merges:
        notes.append(_merges_note(pre, ignore_merges))
    return _assembled(files, "gpt2", pre, vocab, special, notes)


def _merges_note(pre: str, ignore_merges: bool) -> str:
    return (
        f"ignore_merges is {str(ignore_merges).lower()} in tokenizer.json, llama.cpp's {pre} does the"
        " opposite: a word that is a token itself may be cut otherwise"
    )


def _read_wordpiece(files: TokenizerFiles) -> Tokenizer:
    vocab = read_wordpiece_vocab(files)
    return _assembled(files, "bert", cutting_name(vocab), vocab)


def _read_unigram(path: Path, files: TokenizerFiles) -> Tokenizer:
    if path.is_file():
        vocab, normalizer = vocab_unigram.read_fairseq_vocab(path, files)
    else:
        vocab, normalizer = vocab_unigram.read_unigram_vocab(files)
    return _assembled(
        files, "t5", "default", vocab, add_space_prefix=normalizer.add_space_prefix,
        drops_spaces=normalizer.drops_extra_spaces, charsmap=normalizer.charsmap,
    )  # fmt: skip


def _read_merged_pieces(files: TokenizerFiles, visible: Container[str]) -> Tokenizer:
    vocab = read_merged_pieces(files, visible)
    pipeline = PiecePipeline(files.json_path, files.tokenizer_json)
    notes = list(pipeline.notes(vocab, space_prefix=False))
    if files.tokenizer_json["model"].get("ignore_merges"):
        notes.append(_merges_note("gemma4", True))
    return _assembled(files, "gemma4", "", vocab, notes=notes, add_space_prefix=False)


def _read_pieces(files: TokenizerFiles) -> Tokenizer:
    vocab = read_spm_json_vocab(files)
    pipeline = PiecePipeline(files.json_path, files.tokenizer_json)
    prefix = None if pipeline.adds_space_prefix() else False
    tokenizer = _with_stated_prefix(
        _assembled(files, "llama", "default", vocab, add_space_prefix=prefix), files
    )
    lost = pipeline.notes(vocab, space_prefix=tokenizer.add_space_prefix is not False)
    missing = missing_byte_note(files.json_path, vocab.tokens)
    return replace(tokenizer, notes=(*tokenizer.notes, *lost, *missing))


def _read_tiktoken(kind: Tiktoken, files: TokenizerFiles, pre_tokenizer: str | None) -> Tokenizer:
    path = files.folder / kind.file_name
    if pre_tokenizer not in (None, kind.pre_tokenizer):
        raise BadRequest(f"--pre-tokenizer {pre_tokenizer}: that of {path} is {kind.pre_tokenizer}")
    vocab = read_tiktoken_vocab(kind, path, files)
    special = read_special_tokens(files, vocab.tokens, by_name=False)
    notes = _attribute_notes(files)
    if kind.bos in vocab.tokens:
        bos, stated = vocab.tokens.index(kind.bos), special.ids.get("bos")
        special = replace(special, ids={**special.ids, "bos": bos})
        if stated not in (None, bos):
            notes = (*notes, f"a text begins with {kind.bos} ({bos}); config.json says bos_token_id {stated}")
    return _assembled(files, "gpt2", kind.pre_tokenizer, vocab, special, notes)


def _read_tekken(path: Path, files: TokenizerFiles, pre_tokenizer: str | None) -> Tokenizer:
    content = read_json_object(path, BadTokenizer, most_memory=MAX_MEMORY)
    vocab, ids, pattern = vocab_tekken.read_tekken_vocab(
        path, content, files.vocab_size, config_path(files.folder)
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pipeline = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    pre = find_pre_tokenizer(path, pipeline, ignore_merges=True, name=pre_tokenizer)
    special = SpecialTokens(ids, {"bos": True, "eos": False})
    return _assembled(files, "gpt2", pre, vocab, special, tokens_last=True)


def _attribute_notes(files: TokenizerFiles) -> tuple[str, ...]:
    """Return notes on tokens that are added to a tokenizer.model or a file of tiktoken."""
    library = files.load() if files.tokenizer_json else build_parts(files.config_path)
    add_tokens_of_config(library, files)
    return tuple(attribute_notes(library, files))


def _read_sentencepiece(path: Path, files: TokenizerFiles) -> Tokenizer:
    notes = _attribute_notes(files)
    vocab, model = read_spm_vocab(path, files)
    special = read_special_tokens(files, vocab.tokens, model.special_ids)
    prefix = None if model.normalizer.add_space_prefix else False
    return _assembled(files, "llama", "default", vocab, special, notes, add_space_prefix=prefix)
