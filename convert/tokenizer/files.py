"""The JSON files about a tokenizer in a checkpoint's folder, each read once, and what its family adds.

Chat templates, which turn a conversation into a prompt, are files of their own or entries of others. A
template is written as it is; whether it is one at all is told where jinja2 is installed. Nothing of it
runs.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from convert.checkpoint.checkpoint import read_json_object_if_there
from convert.tokenizer.vocab import MAX_VOCAB
from gguf_tools.errors import BadConfig, BadTokenizer, ToolkitError
from gguf_tools.files.named_files import read_input
from gguf_tools.text import cut_short, quoted, shown


@dataclass(frozen=True)
class Tiktoken:
    """A file of tokens in the order of their ranks, and what the code beside it, which is not run, adds.

    file_name        of the ranks
    tokenizer_class  that of tokenizer_config.json
    pre_tokenizer    llama.cpp's name of its cutting
    n_special        special tokens behind those of the file
    names            the first of these
    other            how the others are called, by {id}, or by {number}, counted from 0
    bos              token that begins a text, whatever config.json says; "" for what that says
    normalizes       whether the code puts text into the form NFC
    """

    file_name: str
    tokenizer_class: str
    pre_tokenizer: str
    n_special: int
    names: tuple[str, ...] = ()
    other: str = ""
    bos: str = ""
    normalizes: bool = False


KIMI = Tiktoken("tiktoken.model", "TikTokenTokenizer", "kimi-k2", 256 + 2, other="<|reserved_token_{id}|>")
"""That of Kimi: num_reserved_special_tokens + 2 of tokenization_kimi.py. The embedding has no rows for the
last two."""

HUNYUAN = Tiktoken(
    "hy.tiktoken", "HYTokenizer", "hunyuan", 5 + 205,
    ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"), "<|extra_{number}|>",
    normalizes=True,
)  # fmt: skip
"""That of Hunyuan: SPECIAL_TOKENS of tokenization_hy.py. Which token begins a text is the family's to say."""


@dataclass(frozen=True)
class Quirks:
    """Quirks of a family's tokenizers.

    pre_tokenizers   name of a cutting in KNOWN -> the name by which llama.cpp's files of this family call it
    special_tokens   kind ("bos", "eot" ...) -> text of the added token that is of this kind, where no file
                     names one
    adds_bos         whether text begins with the bos token, whatever the files say
    tiktoken         the family's file of ranks; None for none; see vocab_tiktoken
    sentencepiece    whether a tokenizer.model counts before tokenizer.json
    states_prefix    where add_prefix_space of tokenizer_config.json stands among the keys; "": not written
    space_prefix     what add_space_prefix of a SentencePiece vocabulary is; None: not said
    of_size          number of tokens -> kind -> id: special tokens of vocabularies known by their size
    merged_pieces    control tokens that programs print, where a tokenizer.json with the tokens of a
                     SentencePiece model is Gemma 4's, whose merges count; None: it is not
    no_bos_sizes     numbers of tokens of vocabularies whose texts begin without the bos token
    control          added tokens that print as nothing, whatever tokenizer.json says
    listed_eot       whether the first of several ends in config.json that isn't the bos token ends a turn
    eod              whether eod_token_id of config.json ends a text, and the first of several ends in
                     generation_config.json a turn
    fairseq_mask     whether the token behind the pieces of a sentencepiece.bpe.model is <mask>
    late_eot         whether the key of the token that ends a turn stands last, as it does with the two before
    """

    pre_tokenizers: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    tiktoken: Tiktoken | None = None
    sentencepiece: bool = False
    states_prefix: Literal["", "first", "last"] = ""
    space_prefix: bool | None = None
    of_size: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    no_bos_sizes: tuple[int, ...] = ()
    control: tuple[str, ...] = ()
    listed_eot: bool = False
    eod: bool = False
    fairseq_mask: bool = False
    late_eot: bool = False
    merged_pieces: tuple[str, ...] | None = None


NO_QUIRKS = Quirks()

LLAMA = Quirks(
    sentencepiece=True,
    states_prefix="first",
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


MAX_BYTES = 8 << 20
MAX_PARSED = 1 << 17
"""Number of characters of a model's templates that are parsed, which takes jinja2 up to two seconds; those of
published models have up to 30,000."""

_IN_A_KEY = frozenset(string.ascii_letters + string.digits)


@dataclass(frozen=True)
class ChatTemplates:
    """default is what llama.cpp uses unless told a name; named are the others."""

    default: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_chat_templates(files: TokenizerFiles) -> ChatTemplates:
    """Return the templates of the first source that has any.

    1. chat_template.jinja and additional_chat_templates/*.jinja
    2. tokenizer_config.json: one text, or a list of {"name", "template"}
    3. chat_template.json, processor_config.json

    This is transformers' order; llama.cpp's converter asks 2 before 1. A note says when that matters.

    raises  BadTokenizer for a template that is not a string
    """
    in_files = _jinja_files(files.folder)
    in_config = _named_templates(files.config_path, files.tokenizer_config.get("chat_template"))
    others = [files.folder / name for name in ("chat_template.json", "processor_config.json")]
    found = [
        (path, _named_templates(path, read_json_object_if_there(path, BadTokenizer).get("chat_template")))
        for path in others
    ]
    path, in_json = next((pair for pair in found if pair[1]), found[0])

    chosen = in_files or in_config or in_json
    notes: list[str] = []
    if in_files and in_config and in_files != in_config:
        notes.append("chat template: chat_template.jinja is used; tokenizer_config.json has another one")
    if chosen and "default" not in chosen:
        notes.append(f"chat template: none is named default, only {', '.join(chosen)}")
    source = None if in_files else files.config_path.name if in_config else path.name
    notes += _broken_templates(chosen, source)
    named = {_key_part(name): template for name, template in chosen.items() if name not in ("default", "")}
    return ChatTemplates(chosen.get("default"), named, tuple(notes))


def _broken_templates(templates: Mapping[str, str], source: str | None) -> Iterator[str]:
    """Yield a note for each text that is no template.

    templates  text by name
    source     file that has them all; None: each is a file
    """
    try:
        from jinja2 import TemplateSyntaxError, nodes

        from gguf_tools.scanning.templates.rendering import Sandbox
    except ModuleNotFoundError as error:
        if error.name == "jinja2":
            return
        raise
    sandbox, n_chars = Sandbox(), 0
    for name, template in templates.items():
        n_chars += len(template)
        if n_chars > MAX_PARSED:
            return
        file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        which = f"{source}: chat template {quoted(name or 'default')}" if source else file
        try:
            # Only parsed: a compiler computes constants, and 5 ** 5 ** 12 is one.
            for node in sandbox.parse(template).find_all((nodes.Filter, nodes.Test)):
                known = sandbox.filters if isinstance(node, nodes.Filter) else sandbox.tests
                if node.name not in known:
                    kind = type(node).__name__.lower()
                    raise TemplateSyntaxError(f"No {kind} named {quoted(node.name)}", node.lineno)
        except TemplateSyntaxError as error:
            yield f"{which} is no valid template: line {error.lineno}: {cut_short(error.message or '')}"
        except Exception as error:  # jinja2 checks only some of what it is given
            yield f"{which} is no valid template: {cut_short(str(error))}"


def _jinja_files(folder: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        paths = {"default": main, **paths}
    try:
        return {
            name: read_input(path, MAX_BYTES, BadTokenizer).decode("utf-8") for name, path in paths.items()
        }
    except UnicodeDecodeError as cause:
        raise BadTokenizer(f"{folder}: a chat template can't be read: {cause}") from cause


def _named_templates(path: Path, entry: object) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list) and all(isinstance(choice, Mapping) for choice in entry):
        pairs = [(choice.get("name", ""), choice.get("template")) for choice in entry]
        if all(isinstance(part, str) for pair in pairs for part in pair):
            return dict(pairs)
    raise BadTokenizer(f'{path}: chat_template is neither a text nor a list of {{"name", "template"}}')


def _key_part(name: str) -> str:
    """Return a template's name as part of a metadata key, with _ for all but ASCII letters and digits."""
    return "".join(char if char in _IN_A_KEY else "_" for char in name)
