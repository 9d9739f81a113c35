"""Finds chat templates, which turn a conversation into a prompt.

They are files of their own or entries of others. A template is written as it is; whether it is one at all is
told where jinja2 is installed. Nothing of it runs.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from convert.checkpoint.json_files import read_json_object_if_there
from convert.tokenizer.files import TokenizerFiles
from gguf_tools.errors import BadTokenizer
from gguf_tools.files.named_files import read_input
from gguf_tools.text import cut_short, quoted

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

        from gguf_tools.scan.templates.rendering import Sandbox
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
