"""The JSON files about a tokenizer in a checkpoint's folder, each read once, and what its family adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from convert.checkpoint.json_files import read_json_object_if_there
from convert.tokenizer.vocab import MAX_VOCAB
from gguf_tools.errors import BadConfig, BadTokenizer, ToolkitError
from gguf_tools.text import shown


@dataclass(frozen=True)
class Quirks:
    """Quirks of a family's tokenizers.

    pre_tokenizers   name of a cutting in KNOWN -> the name by which llama.cpp's files of this family call it
    special_tokens   kind ("bos", "eot" ...) -> text of the added token that is of this kind, where no file
                     names one
    adds_bos         whether text begins with the bos token, whatever the files say
    tiktoken         whether the family's tiktoken.model is read; see vocab_tiktoken
    sentencepiece    whether a tokenizer.model counts before tokenizer.json
    states_prefix    whether add_prefix_space of tokenizer_config.json is written
    space_prefix     what add_space_prefix of a SentencePiece vocabulary is; None: not said
    of_size          number of tokens -> kind -> id: special tokens of vocabularies known by their size
    merged_pieces    control tokens that programs print, where a tokenizer.json with the tokens of a
                     SentencePiece model is Gemma 4's, whose merges count; None: it is not
    no_bos_sizes     numbers of tokens of vocabularies whose texts begin without the bos token
    """

    pre_tokenizers: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    tiktoken: bool = False
    sentencepiece: bool = False
    states_prefix: bool = False
    space_prefix: bool | None = None
    of_size: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    no_bos_sizes: tuple[int, ...] = ()
    merged_pieces: tuple[str, ...] | None = None


NO_QUIRKS = Quirks()

LLAMA = Quirks(
    sentencepiece=True,
    states_prefix=True,
    of_size={32016: {"prefix": 32007, "suffix": 32008, "middle": 32009, "eot": 32010}},
    no_bos_sizes=(49152,),
)
"""Llama and its like. 32016 tokens are CodeLlama's, 49152 those of Granite's small models."""

GLM = Quirks(
    pre_tokenizers={"llama-bpe": "glm4"},
    special_tokens={
        "bos": "[gMASK]",
        "eot": "<|user|>",
        "unk": "<|endoftext|>",
        "eom": "<|observation|>",
    },
)
"""GLM-4 and its successors. Text ends by `<|user|>`; with `<|endoftext|>` there it would never end."""


MAX_MEMORY = 400 << 20
"""Bytes that tokenizer.json or tekken.json may take in memory. The largest, gpt-oss's with 446,189 pairs of
merges, is counted as 289 MiB, and takes half of that."""


@dataclass(frozen=True)
class TokenizerFiles:
    """JSON files of a folder that describe its tokenizer. A file is read when it is first asked for.

    config      config.json
    quirks      of the model's family
    model_name  what general.name calls the model

    The objects are empty where there is no such file; a broken one raises BadTokenizer.
    """

    folder: Path
    config: Mapping[str, Any]
    quirks: Quirks = NO_QUIRKS
    model_name: str = ""

    @cached_property
    def tokenizer_json(self) -> Mapping[str, Any]:
        return read_json_object_if_there(self.json_path, BadTokenizer, most_memory=MAX_MEMORY)

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        return read_json_object_if_there(self.config_path, BadTokenizer)

    @cached_property
    def special_tokens_map(self) -> Mapping[str, Any]:
        return read_json_object_if_there(self.folder / "special_tokens_map.json", BadTokenizer)

    @cached_property
    def added_tokens(self) -> Mapping[str, Any]:
        return read_json_object_if_there(self.added_path, BadTokenizer)

    @cached_property
    def vocab_size(self) -> int | None:
        """The rows of the embedding as config.json states them; raises BadConfig for an impossible number."""
        vocab_size = self.config.get("vocab_size")
        if vocab_size is None or (type(vocab_size) is int and 1 <= vocab_size <= MAX_VOCAB):
            return vocab_size
        found = shown(repr(vocab_size))
        path = self.folder / "config.json"
        raise BadConfig(f"{path}: vocab_size is {found}, expected a number from 1 to {MAX_VOCAB}")

    @property
    def json_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def added_path(self) -> Path:
        return self.folder / "added_tokens.json"

    @property
    def config_path(self) -> Path:
        return self.folder / "tokenizer_config.json"

    def load(self) -> Any:
        """Return the tokenizers library's own object for tokenizer.json, which also proves the file's form.

        raises  BadTokenizer when the library refuses it
        """
        from tokenizers import Tokenizer

        with library_errors(self.json_path, "the tokenizers library can't read it"):
            return Tokenizer.from_file(str(self.json_path))


@contextmanager
def library_errors(path: Path, what: str) -> Iterator[None]:
    """Raise BadTokenizer in place of what the tokenizers library raises for a file.

    It raises bare Exceptions for files that it refuses. Where its Rust code panics it raises PanicException,
    which isn't derived from Exception, after printing lines of its own.

    path  the file that the library was given, for the message
    what  what went wrong, in words: "its tokens can't be added"
    """
    try:
        yield
    except (ToolkitError, MemoryError):
        raise
    except BaseException as cause:
        if isinstance(cause, Exception) or type(cause).__name__ == "PanicException":
            raise BadTokenizer(f"{path}: {what}: {shown(str(cause))}") from cause
        raise
