"""Runs of a chat template on harmless conversations, as in transformers: in jinja2's sandbox, watched.

Only the worker process calls `run`: the sandbox has had holes, and does not bound time or memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace

from gguf_tools.findings import Level
from gguf_tools.scanning.strings import deceiving_characters
from gguf_tools.text import quoted


@dataclass(frozen=True)
class Conversation:
    """Input of a template, apart from the special tokens.

    name                   in words, for messages
    said                   what the prompt has to repeat: the last thing that the user said
    messages, tools        as passed by transformers
    add_generation_prompt  whether the model answers next
    """

    name: str
    said: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    add_generation_prompt: bool = True


Remark = tuple[Level, str]

_TOKEN_LIKE = re.compile(r"<[|｜][^<>|｜\s]{1,60}[|｜]>")
_MAX_TOKENS = 100


class Generation(Extension):
    """The block `generation`, which marks the model's own words; here they are only passed on."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers; `attempts` lists attributes it refused: whose, and which.

    generation  what is done with the block of this name
    now         what templates are told that the time is
    """

    def __init__(
        self, generation: type[Extension] = Generation, now: Callable[[], datetime] = datetime.now
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols])
        self.attempts: list[tuple[str, str, bool]] = []
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda format_: now().strftime(format_),
            namespace=_PlainNamespace,
            dict=lambda *args, **kwargs: dict(*args, **kwargs),
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        self.attempts.append((type(obj).__name__, attribute, modifies_known_mutable(obj, attribute)))
        return super().unsafe_undefined(obj, attribute)


class Refused(TemplateError):
    """The error of a template that does not accept a conversation."""


class _PlainNamespace(Namespace):
    """A namespace without private attributes, so that none of Python's own can be replaced."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"sets the private attribute {name!r} of a namespace")


def _raise_exception(message: object) -> None:
    raise Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@dataclass
class RenderOutcome:
    """The outcome of trying a template.

    remarks   what is suspicious
    prompts   what the template made of each conversation, by its name
    errors    why it made nothing of a conversation, by its name
    """

    remarks: list[Remark] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def summary(self, special: Mapping[str, str]) -> dict[str, Any]:
        """Return the facts for a check of the vocabulary: number of prompts, first error, apparent tokens."""
        bos = special.get("bos_token", "")
        spelled = (token for prompt in self.prompts.values() for token in _TOKEN_LIKE.findall(prompt))
        return {
            "prompts": len(self.prompts),
            "error": next(iter(self.errors.values()), ""),
            "emits": list(islice(dict.fromkeys(spelled), _MAX_TOKENS)),
            "begins_with_bos": bool(bos) and any(text.startswith(bos) for text in self.prompts.values()),
        }


def run(
    source: str,
    special: Mapping[str, str],
    max_chars: int,
    conversations: Sequence[Conversation],
) -> RenderOutcome:
    """Compile a template and try it on conversations.

    special    variables such as bos_token, with their texts
    max_chars  where to stop a prompt that grows
    raises     whatever compiling raises
    """
    sandbox = Sandbox()
    template = sandbox.from_string(source)
    outcome = RenderOutcome()
    for conversation in conversations:
        context = {
            **special,
            # A copy for each, through JSON: what one run changes must not reach the next one.
            "messages": json.loads(json.dumps(conversation.messages)),
            "tools": json.loads(json.dumps(conversation.tools)),
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            prompt = _rendered(template.generate(context), max_chars)
        except Exception as error:  # a template can raise anything
            outcome.errors[conversation.name] = f"{type(error).__name__}: {error}"
            outcome.remarks += _remarks_on_error(error, sandbox)
            continue
        if prompt is None:
            text = f"makes more than {max_chars:,} characters of {conversation.name}"
            outcome.remarks.append((Level.BAD, text))
            break
        outcome.prompts[conversation.name] = prompt
        outcome.remarks += [
            (level, f"puts {phrase} into the prompt") for level, phrase in deceiving_characters(prompt)
        ]
    said = {conversation.name: conversation.said for conversation in conversations}
    if deaf := [name for name, prompt in outcome.prompts.items() if said[name] not in prompt]:
        given = "" if len(deaf) == len(outcome.prompts) else f", given: {'; '.join(deaf)}"
        outcome.remarks.append((Level.WARNING, f"leaves out what the user said{given}"))
    outcome.remarks += _remarks_on_attempts(sandbox)
    return outcome


def _rendered(pieces: Iterator[str], max_chars: int) -> str | None:
    """Return the pieces joined, None when they are too long."""
    kept: list[str] = []
    n_chars = 0
    for piece in pieces:
        n_chars += len(piece)
        if n_chars > max_chars:
            return None
        kept.append(piece)
    return "".join(kept)


def _remarks_on_error(error: Exception, sandbox: Sandbox) -> list[Remark]:
    """Return remarks on errors that no honest template causes; others mean that it refuses a conversation."""
    if isinstance(error, SecurityError):
        if sandbox.attempts:  # told by name, see _remarks_on_attempts
            return []
        return [(Level.BAD, f"is stopped by the sandbox: {quoted(str(error))}")]
    if isinstance(error, OverflowError):
        return [(Level.BAD, f"counts beyond all bounds: {quoted(str(error))}")]
    if isinstance(error, MemoryError):
        return [(Level.BAD, "needs more memory than it is given")]
    if isinstance(error, RecursionError):
        return [(Level.BAD, "calls itself without end")]
    return []


def _remarks_on_attempts(sandbox: Sandbox) -> list[Remark]:
    remarks: list[Remark] = []
    for owner, name, modifies in dict.fromkeys(sandbox.attempts):
        if modifies:
            text = f"changes what it is given, with {owner}.{name}; transformers refuses that"
            remarks.append((Level.NOTE, text))
        else:
            remarks.append((Level.BAD, f"reaches for {quoted(name)} of a {quoted(owner)} when it runs"))
    return remarks
