"""Options as values of dataclasses: what a field tells the command line, and how values are made of others.

keep_grid: bool = flag(False, "tensors whose weights are ...")    # --keep-grid, and what --help says

options = with_choices({"n_chunks": 4, "device": "cpu"}, EvaluateOptions())    # its `cut` and `forward`
conversion = filled(ConvertOptions, options, outtype="Q4_K_M")    # the fields that both have

Options have names of two kinds in messages: a flag in a command, an argument in Python. Messages of the
library are written with flags. A command prints them as they are. Everywhere else an error or a finding
says `force=True` for --force, and n_chunks for --chunks. A whole command line, such as `gguf-tools card
--force`, is one in Python, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gguf_tools.text import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    A = TypeVar("A", bound=DataclassInstance)
    B = TypeVar("B", bound=DataclassInstance)
T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """The flag of a field, as the command line has it.

    text     for --help; words in braces are the command's own: {type}
    names    spellings; none: --keep-grid for keep_grid, --no-provenance for a field that is True
    parse    reads the word behind it; None: it is a text, or of a bool there is no word
    metavar  what that word is called
    words    some that it may be, for completion
    """

    text: str
    names: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    words: tuple[str, ...] = ()


def flag(default: Any, text: str, *names: str, **how: Any) -> Any:
    """Declare a field that the command line has a flag for; see Flag."""
    return field(default=default, metadata={Flag: Flag(text, names, **how)})


def flags_of(options: Any) -> list[tuple[Field[Any], Flag]]:
    """Return the fields of options that have a flag, each with it, in their order."""
    return [(each, each.metadata[Flag]) for each in fields(options) if Flag in each.metadata]


def filled(options: type[T], source: object, /, **given: Any) -> T:
    """Make a value of what `source` has under the names of its fields; what is `given` comes first.

    options  the dataclass
    source   other options that have some fields of these, or the arguments of a command line
    """
    names = [each.name for each in fields(options) if each.init]  # type: ignore[arg-type]
    return options(**{name: getattr(source, name) for name in names if hasattr(source, name)} | given)


@overload
def with_choices(choices: Mapping[str, Any], options: A, /) -> A: ...
@overload
def with_choices(choices: Mapping[str, Any], options: A, run: B, /) -> tuple[A, B]: ...
def with_choices(choices: Mapping[str, Any], *options: Any) -> Any:
    """Return options, one value or two, with the fields that `choices` name in their place.

    A choice may also be a field of options within one of these, such as its `cut`; it goes there, also if
    that value is a choice itself.
    raises  TypeError for a choice that is a field of none, listing all
    """
    own = [each for value in options for each in fields(value)]
    made_by: dict[str, Any] = {each.name: each.default_factory for each in own}
    parts = {name: fields(options) for name, options in made_by.items() if is_dataclass(options)}
    refuse_unknown(choices, [each.name for each in (*own, *chain(*parts.values()))])

    def changed(value: Any) -> Any:
        chosen = _changed(value, choices)
        inner = {each.name: getattr(chosen, each.name) for each in fields(value) if each.name in parts}
        return replace(chosen, **{name: _changed(part, choices) for name, part in inner.items()})

    made = tuple(map(changed, options))
    return made if len(made) > 1 else made[0]


def _changed(value: Any, choices: Mapping[str, Any]) -> Any:
    return replace(value, **{each.name: choices[each.name] for each in fields(value) if each.name in choices})


def refuse_unknown(choices: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for choices that are not known, with what is."""
    known = sorted(known)
    unknown = [name for name in choices if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}{near}; expected {', '.join(known)}")


_SWITCHES = {
    flag: f"{flag.strip('-').replace('-', '_')}=True"
    for flag in (
        "--allow-pickle", "--allow-requantize", "--dry-run", "--force", "--keep-grid", "--keep-split",
        "--mmproj", "--mtp", "--noise-floor", "--pad-hidden", "--process-output", "--pure", "--restart",
        "--stream", "--undo",
    )
} | {
    "--leave-output-tensor": "leave_output=True", "--no-mtp": "mtp=False",
    "--sentence-transformers-dense-modules": 'family={"sentence_transformers_dense_modules": True}',
}  # fmt: skip

_NAMES = {
    "--against": "against", "-c": "chunk_size", "--calibrate": "calibration", "--chunks": "n_chunks",
    "--curve": "a curve", "--device": "device", "--dtype": "dtype", "--exclude-weights": "exclude",
    "--fallback": "fallbacks", "--from-chunk": "from_chunk", "--html": "a page", "--imatrix": "importances",
    "--include-weights": "include", "--json": "a report", "--keep": "keep",
    "--kl-divergence-base": "logits", "--like": "like", "--lora": "lora",
    "--lora-scale": "lora_scale", "--memory": "memory_bytes", "--metadata": "metadata_file", "--mla": "mla",
    "--model-name": "model_name", "--only": "only", "--outfile": "outfile",
    "--output-tensor-type": "output_type", "--outtype": "outtype", "--override-kv": "kv_overrides",
    "--pad": "pad", "--plot": "a plot", "--pre-tokenizer": "pre_tokenizer",
    "--prune-layers": "prune_layers", "--ram": "ram", "--sample": "sample", "--scheduler": "scheduler",
    "--seed": "seed", "--source": "source", "--tensor-type": "overrides", "--timeout": "the longest wait",
    "--to": "to", "--token-embedding-type": "embedding_type", "--vram": "vram", "--work": "work",
}  # fmt: skip

FLAGS = frozenset({*_SWITCHES, *_NAMES})
"""Flags that messages of the library name."""

_COMMAND = r"(?:gguf-tools|quantize|evaluate|imatrix|convert-hf-to-gguf|sensitivity|hf|llama-\w+)"
_SPOKEN = re.compile(
    rf"\b{_COMMAND}(?: [\w-]+)? --?[a-z][\w-]*"
    r"|(?<![\w./-])(?P<flag>--?[a-z][a-z-]*)(?P<number> [0-9]+\b)?(?![\w-])"
)

_in_command = False


@contextmanager
def speaking_flags() -> Iterator[None]:
    """Have messages name flags: what runs in this block is a command."""
    global _in_command
    before, _in_command = _in_command, True
    try:
        yield
    finally:
        _in_command = before


def in_command() -> bool:
    """Whether what runs is a command, whose user reads standard error."""
    return _in_command


def spoken(text: str) -> str:
    """Return a message of the library as it is said here.

    >>> spoken("x.gguf: exists already; --force replaces it")
    'x.gguf: exists already; force=True replaces it'
    """
    return text if _in_command else _SPOKEN.sub(_in_python, text)


def _in_python(match: re.Match[str]) -> str:
    flag, number = match["flag"], match["number"] or ""
    if flag in _SWITCHES:
        return _SWITCHES[flag] + number
    if flag in _NAMES:
        return _NAMES[flag] + number.replace(" ", "=")
    return match[0]
