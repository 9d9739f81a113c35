"""Suites: named classes of texts, and how each class is read.

A suite is a folder, or a YAML file that lies beside its texts:

    name: mine
    title: What our users write          # for people; by default the name
    context: 1024                        # of every class that names none; 512 without it
    classes:
      letters:
        title: Letters and mails
        texts: [letters/*.txt, notes.md] # seen from the YAML file; by default letters/ or letters.*
      support:
        texts: support.jsonl
        read: chat                       # plain or chat; by default chat for .jsonl, plain for all else
        context: 4096
        scored: assistant                # plain: second-half or all; chat: assistant or all
        template: chatml.jinja           # `model`: its own, the default; `plain`; or a file

Texts and templates lie in the folder of the suite: paths and links that lead out of it are refused.

A folder is read by its suite.yaml. Without one, or without classes there, every folder and every file in it
is a class: the files of a folder are its texts, in the order of their names, and .jsonl are chats. Names that
begin with a dot, README*, LICENSE*, and files .yaml, .yml and .jinja are no texts.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from gguf_tools.argument_types import checked
from gguf_tools.errors import BadRequest
from gguf_tools.files.documents import line_of, read_document
from gguf_tools.files.named_files import MAX_CORPUS, read_corpus, read_input_text
from gguf_tools.hub.names import cached_contents
from gguf_tools.text import did_you_mean, quoted, shown
from imatrix.texts.conversations import Conversation, parse_conversations, refuse_unknown
from imatrix.texts.templates import PLAIN as PLAIN_TEMPLATE
from imatrix.texts.templates import Template

DEFAULT = "default"
"""The suite that lies in the package."""

PLAIN, CHAT = "plain", "chat"
SECOND_HALF, ALL, ASSISTANT = "second-half", "all", "assistant"
SCORED: Mapping[str, tuple[str, ...]] = {PLAIN: (SECOND_HALF, ALL), CHAT: (ASSISTANT, ALL)}
"""Choices of scored tokens for a class, by how it is read; the first is the default."""

MODELS_OWN = "model"
"""The word that stands for a model's own template."""

SHORTEST = 2
"""Tokens of the shortest context: one is predicted from the other."""

_CONTEXT = 512
_FILE = "suite.yaml"
_SUITE_KEYS = ("name", "title", "context", "classes")
_CLASS_KEYS = ("title", "texts", "read", "context", "scored", "template")
_NO_TEXT = re.compile(r"\..*|README.*|LICEN[CS]E.*|.*\.(ya?ml|jinja)", re.IGNORECASE)
_NAME = re.compile(r"[\w.+-]{1,80}")
_CHAT_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class SuiteText:
    """A text, or a file of conversations; `name` is seen from the suite's folder."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class TextClass:
    """Texts that are measured together.

    title          for people
    texts          in order; each is cut into chunks on its own
    read           PLAIN or CHAT
    context        tokens of a chunk of plain text, and the most of a conversation
    scored         one of SCORED[read]: the second half of a chunk, the assistant's turns, or all tokens
    template       for chats, instead of the model's own; None: the model's
    conversations  of all texts, in order; none where they are read as plain
    """

    name: str
    title: str
    texts: tuple[SuiteText, ...]
    read: str
    context: int
    scored: str
    template: Template | None = None
    conversations: tuple[Conversation, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Suite:
    """Classes of texts.

    name     by which it is chosen
    title    what it is, for people
    classes  in the order in which they are measured
    quick    take a tenth of each class: every tenth chunk or conversation, and at least two
    """

    name: str
    title: str
    classes: tuple[TextClass, ...]
    quick: bool = False


@checked
def read_suite(name_or_path: str | PathLike[str], quick: bool = False) -> Suite:
    """Read a suite: `default`, a folder, or a YAML file.

        suite = read_suite("our-texts", quick=True)
        evaluate_suite("lite-bf16.gguf", suite, ["lite-Q4_K_M.gguf"])

    quick   take a tenth of each class
    raises  BadRequest, in one line with file and line, for whatever is wrong
    """
    if fspath(name_or_path) == DEFAULT:
        with resources.as_file(resources.files("imatrix.texts") / DEFAULT) as folder:
            return _read_folder(folder, quick)
    path = Path(name_or_path)
    if path.is_dir():
        return _read_folder(path, quick)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _read_yaml(path, quick)
    if path.exists():
        raise BadRequest(f"{path}: is neither a folder nor a YAML file; a single text is given with -f")
    hint = did_you_mean(str(path), [DEFAULT])
    raise BadRequest(f"{path}: no such suite, expected {DEFAULT!r}, a folder or a YAML file{hint}")


def _read_folder(folder: Path, quick: bool) -> Suite:
    if (folder / _FILE).exists():
        return _read_yaml(folder / _FILE, quick)
    given = _Given(folder, folder.resolve().name, {}, folder)
    return Suite(given.name, given.name, tuple(given.classes()), quick)


def _read_yaml(path: Path, quick: bool) -> Suite:
    entries = read_document(path)
    if not isinstance(entries, dict):
        raise BadRequest(f"{path}: found no keys, expected some of {', '.join(_SUITE_KEYS)}")
    folder = path.parent
    by_default = folder.resolve().name if path.name == _FILE else path.stem
    given = _Given(path, by_default, entries, folder)
    given.refuse_unknown((), _SUITE_KEYS)
    name = given.text_at(("name",), by_default)
    return Suite(name, given.text_at(("title",), name), tuple(given.classes()), quick)


@dataclass(frozen=True)
class _Given:
    """Description of a suite.

    path     the YAML file, or the folder without one, for messages
    name     of the suite, if it isn't said
    entries  the YAML file's
    folder   that its paths are seen from
    """

    path: Path
    name: str
    entries: Mapping[str, Any]
    folder: Path
    _read: dict[Path, SuiteText] = field(default_factory=dict)

    def classes(self) -> Iterator[TextClass]:
        """Yield the classes that are named or, where none is, that the folder has."""
        named = self.entries.get("classes")
        if named is None:
            found = [path for path in sorted(self.folder.iterdir()) if not _NO_TEXT.fullmatch(path.name)]
            if not found:
                raise BadRequest(f"{self.path}: no texts, expected files or folders of them")
            by_name: dict[str, Path] = {}
            for path in found:
                name = path.name if path.is_dir() else path.stem
                if name in by_name:
                    raise BadRequest(f"{path}: another class {name!r} is {by_name[name]}; name one otherwise")
                by_name[name] = path
            named = {name: {"texts": path.name} for name, path in by_name.items()}
        if not isinstance(named, dict) or not named:
            raise self.wrong(("classes",), "expected names of classes, each with what is said of it")
        n_chars = 0
        for name, said in named.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                why = f"a class {quoted(name)}, expected up to 80 letters, digits and any of . _ + -"
                raise self.wrong(("classes",), why)
            found_class = self._class(name, {} if said is None else said)
            n_chars += sum(len(text.text) for text in found_class.texts)
            if n_chars > MAX_CORPUS:  # a text may be that of many classes
                why = f"{n_chars:,} characters with the classes before"
                raise self.wrong(("classes", name), f"{why}, expected at most {MAX_CORPUS:,} in all")
            yield found_class

    def _class(self, name: str, said: Any) -> TextClass:
        where = ("classes", name)
        if not isinstance(said, dict):
            raise self.wrong(where, f"found {quoted(said)}, expected keys such as texts")
        if self.entries.get("classes") is not None:
            self.refuse_unknown(where, _CLASS_KEYS)
        paths = tuple(self._paths(name, said))
        is_chat = [path.suffix == _CHAT_SUFFIX for path in paths]
        if any(is_chat) and not all(is_chat) and "read" not in said:
            why = f"some texts are {_CHAT_SUFFIX} and some are not; say read: plain or chat"
            raise self.wrong(where, why)
        read = self._word((*where, "read"), said, (PLAIN, CHAT), CHAT if all(is_chat) else PLAIN)
        texts = tuple(self._text(name, path) for path in paths)
        # An error names the file as a user would.
        chats = ((str(self.folder / text.name), text.text) for text in texts if read == CHAT)
        return TextClass(
            name=name,
            title=self.text_at((*where, "title"), name, said),
            texts=texts,
            read=read,
            context=self._context(where, said),
            scored=self._word((*where, "scored"), said, SCORED[read], SCORED[read][0]),
            template=self._template((*where, "template"), said, read),
            conversations=tuple(each for chat in chats for each in parse_conversations(*chat)),
        )

    def _paths(self, name: str, said: Mapping[str, Any]) -> Iterator[Path]:
        """Yield the files of a class; the same one is taken once."""
        where = ("classes", name, "texts")
        patterns = said.get("texts", [name, f"{name}.*"])
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not all(isinstance(each, str) and each for each in patterns):
            raise self.wrong(where, "expected a file or a list of them")
        seen: set[Path] = set()
        for pattern in dict.fromkeys(patterns):
            found = list(self._matching(where, pattern))
            if not found and "texts" in said:
                why = "has no texts" if self._inside(where, pattern).is_dir() else "no such file"
                raise self.wrong(where, f"{self.folder / shown(pattern)}: {why}")
            for path in found:
                self._inside(where, path)
                if path not in seen:
                    seen.add(path)
                    yield path
        if not seen:
            why = f"class {quoted(name)} is empty: no {self.folder / name}, nor {name}.*"
            raise self.wrong(("classes", name), why)

    def _inside(self, where: tuple[str, ...], said: str | Path) -> Path:
        """Return a path of the folder; raises BadRequest where it leads out of it, or can't be one."""
        try:
            path = self.folder / said
            real = path.resolve()
            is_inside = real.is_relative_to(self.folder.resolve()) or (
                real.parent == cached_contents(self.folder)
                and Path(os.path.normpath(path)).is_relative_to(os.path.normpath(self.folder))
            )
            path.exists()  # names that are too long, and what is not to be looked at
        except (OSError, ValueError, RuntimeError) as error:
            raise self.wrong(where, f"{quoted(str(said))} is no path ({error.args[-1]})") from error
        if not is_inside:
            why = "leads out of the folder of the suite; copy the file into it"
            raise self.wrong(where, f"{quoted(str(said))} {why}")
        return path

    def _matching(self, where: tuple[str, ...], pattern: str) -> Iterator[Path]:
        """Yield the texts that a path, or a pattern with *, ? or [], names; of a folder those that it has."""
        if (named := self._inside(where, pattern)).exists():
            found = [named]
        else:
            try:
                found = [path for path in sorted(self.folder.glob(pattern)) if path.name[0] != "."]
            except (ValueError, NotImplementedError):
                found = []
        for path in found:
            if path.is_dir():
                inside = (each for each in sorted(path.rglob("*")) if each.is_file())
                yield from (each for each in inside if not _NO_TEXT.fullmatch(each.name))
            elif path.exists():
                yield path

    def _text(self, name: str, path: Path) -> SuiteText:
        """Read a text; one of many classes is kept once."""
        if path not in self._read:
            text = read_corpus(path)
            if not text.strip():
                raise BadRequest(f"{path}: is empty, expected a text of class {quoted(name)}")
            self._read[path] = SuiteText(path.relative_to(self.folder).as_posix(), text)
        return self._read[path]

    def _context(self, where: tuple[str, ...], said: Mapping[str, Any]) -> int:
        own = "context" in said
        context = said["context"] if own else self.entries.get("context", _CONTEXT)
        if not isinstance(context, int) or isinstance(context, bool) or context < SHORTEST:
            place = (*where, "context") if own else ("context",)
            why = f"found {quoted(context)}, expected a number of tokens, {SHORTEST} or more"
            raise self.wrong(place, why)
        return context

    def _template(self, where: tuple[str, ...], said: Mapping[str, Any], read: str) -> Template | None:
        word = self.text_at(where, MODELS_OWN, said)
        if "template" in said and read != CHAT:
            raise self.wrong(where, f"only a chat has a template, and the class is read as {read}")
        if word == MODELS_OWN:
            return None
        if word == PLAIN_TEMPLATE.name:
            return PLAIN_TEMPLATE
        if not (path := self._inside(where, word)).is_file():
            why = "no such file, and neither model nor plain"
            raise self.wrong(where, f"{self.folder / shown(word)}: {why}")
        return Template(shown(word), read_input_text(path), str(path))

    def _word(
        self, where: tuple[str, ...], said: Mapping[str, Any], words: tuple[str, ...], default: str
    ) -> str:
        word = said.get(where[-1], default)
        if word not in words:
            hint = did_you_mean(str(word), words) or f", expected {' or '.join(words)}"
            raise self.wrong(where, f"found {quoted(word)}{hint}")
        return str(word)

    def text_at(self, where: tuple[str, ...], default: str, said: Mapping[str, Any] | None = None) -> str:
        """Give the text of a key, or `default` where the key is missing."""
        value = (self.entries if said is None else said).get(where[-1], default)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(where, f"found {quoted(value)}, expected a text")
        return value

    def refuse_unknown(self, where: tuple[str, ...], known: tuple[str, ...]) -> None:
        given: Any = self.entries
        for key in where:
            given = given[key] or {}
        for key in given:
            if key not in known:
                refuse_unknown(self._place((*where, key)), {key: None}, known)

    def wrong(self, where: tuple[str, ...], why: str) -> BadRequest:
        """Make the error of a key: with the file, its line, and the key where there is one."""
        return BadRequest(f"{self._place(where)}: {'.'.join(where) + ': ' if self.entries else ''}{why}")

    def _place(self, where: tuple[Any, ...]) -> str:
        return f"{self.path}: line {line_of(self.entries, where)}" if self.entries else str(self.path)
