"""Conversations: JSON lines, one conversation a line, as chat templates take them.

    {"messages": [{"role": "user", "content": "Is 91 prime?"},
                  {"role": "assistant", "content": "No: 91 = 7 * 13."}],
     "tools": [{"type": "function", "function": {"name": "factor", "parameters": {...}}}]}

Messages have the form of OpenAI's API and of transformers. `arguments` of a tool call may be an object, or
JSON in a text, as that API has it; templates are given the object.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.files.documents import parse_json
from gguf_tools.text import did_you_mean, quoted, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERING = "assistant"
"""The role whose words are the model's."""

_LINE_KEYS = ("messages", "tools", "id")
_MESSAGE_KEYS = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning",
)  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Messages of a conversation, and the tools that come with it.

    place     file and line, for messages
    messages  objects with a role, see ROLES, and a content
    tools     JSON schemas of functions; None: the conversation has none
    """

    place: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None = None

    @property
    def answers(self) -> tuple[int, ...]:
        """Numbers of the messages that are the model's."""
        return tuple(n for n, message in enumerate(self.messages) if message["role"] == ANSWERING)


def parse_conversations(name: str, text: str) -> tuple[Conversation, ...]:
    """Read the conversations of a file; `name` is the file's, for messages.

    raises  BadRequest naming the line for what is no JSON, an unknown key or role, and a conversation without
            an answer
    """
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return tuple(_conversation(f"{name}: line {number}", line) for number, line in lines)


def _conversation(place: str, line: str) -> Conversation:
    value = _object(place, line)
    refuse_unknown(place, value, _LINE_KEYS)
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"{place}: no messages, expected a list of them")
    tools = value.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRequest(f"{place}: tools are not a list of objects")
    found = Conversation(
        place,
        tuple(_message(f"{place}: message {number}", message) for number, message in enumerate(messages, 1)),
        tuple(tools) if tools else None,
    )
    if not found.answers:
        raise BadRequest(f"{place}: no message of the role {ANSWERING!r}, so there is nothing to measure")
    return found


def _object(place: str, text: str) -> dict[str, Any]:
    try:
        value = parse_json(text.encode(), strict=True)
    except ValueError as cause:
        raise BadRequest(f"{place}: {_reason(cause)}") from cause
    if not isinstance(value, dict):
        raise BadRequest(f"{place}: found {quoted(value, 40)}, expected an object")
    return value


def _reason(cause: ValueError) -> str:
    if isinstance(cause, json.JSONDecodeError):
        return f"no JSON at character {cause.colno}: {cause.msg}"
    return f"no JSON: {cause}"


def _message(place: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"{place}: found {quoted(message, 40)}, expected an object")
    refuse_unknown(place, message, _MESSAGE_KEYS)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        hint = did_you_mean(str(role), ROLES) or f", expected one of {', '.join(ROLES)}"
        raise BadRequest(f"{place}: no such role {quoted(role)}{hint}")
    if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
        raise BadRequest(f"{place}: content is not a text")
    if "tool_calls" in message:
        return {**message, "tool_calls": list(_calls(place, role, message["tool_calls"]))}
    return message


def _calls(place: str, role: str, calls: Any) -> Iterator[Mapping[str, Any]]:
    """Yield tool calls with their arguments as objects."""
    if role != ANSWERING or not isinstance(calls, list) or not calls:
        raise BadRequest(f"{place}: tool_calls, expected a list of calls in a message of the {ANSWERING}")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"{place}: a tool call without the name of a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _object(f"{place}: arguments of {shown(function['name'])}", arguments)
        if not isinstance(arguments, dict):
            raise BadRequest(f"{place}: arguments of {shown(function['name'])} are not an object")
        yield {**call, "function": {**function, "arguments": arguments}}


def refuse_unknown(place: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise BadRequest for a key that is not known, with the nearest one or, where none is near, all."""
    for key in given:
        if key not in known:
            hint = did_you_mean(str(key), known) or f", expected one of {', '.join(known)}"
            raise BadRequest(f"{place}: unknown key {quoted(key)}{hint}")
