"""Conversations to try chat templates on: what a program would pass to them, with harmless texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

QUESTION = "Which river flows through Vienna?"
_SECOND_QUESTION = "And through Prague?"


@dataclass(frozen=True)
class Conversation:
    """What a template is given, apart from the special tokens.

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


_SYSTEM = {"role": "system", "content": "Answer in one sentence."}
_USER = {"role": "user", "content": QUESTION}
_ANSWER = {"role": "assistant", "content": "The Danube does."}
_SECOND_USER = {"role": "user", "content": _SECOND_QUESTION}

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_river",
        "description": "Find the river of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city."}},
            "required": ["city"],
        },
    },
}
_TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function",
         "function": {"name": "find_river", "arguments": {"city": "Vienna"}}},
    ],
}  # fmt: skip
_TOOL_ANSWER = {"role": "tool", "name": "find_river", "tool_call_id": "call00001", "content": "Danube"}

CONVERSATIONS = (
    Conversation("a question", QUESTION, (_USER,)),
    Conversation("a question, no answer to come", QUESTION, (_USER,), add_generation_prompt=False),
    Conversation("a system message and a question", QUESTION, (_SYSTEM, _USER)),
    Conversation("several turns", _SECOND_QUESTION, (_SYSTEM, _USER, _ANSWER, _SECOND_USER)),
    Conversation(
        "several turns, the last one the model's", QUESTION, (_SYSTEM, _USER, _ANSWER),
        add_generation_prompt=False,
    ),
    Conversation("tools", QUESTION, (_SYSTEM, _USER), (_TOOL,)),
    Conversation("a tool's answer", QUESTION, (_USER, _TOOL_CALL, _TOOL_ANSWER), (_TOOL,)),
)  # fmt: skip
