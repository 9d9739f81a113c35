"""Conversations rendered through a chat template, and where the assistant's words are in the text.

The text is what transformers' `apply_chat_template` makes, but for the date: templates are told that it is
2024-07-26, so that numbers repeat.

The assistant's words are a turn's content, thoughts and tool calls as the template writes them, and the
token that ends the turn. Where a template marks them with `{% generation %}`, these marks count. Otherwise a
turn is found by putting another one in its place: the text around the words is the same in both renderings.

    rendered          <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n  Hello  <|im_end|>\\n
    another turn      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nQx0qzX-7kWv<|im_end|>\\n

So it does not matter whether a template trims, moves tools to the last question, or leaves thoughts out. If
what is around is not the same, the next way is tried: some templates, for one, refuse a tool's answer after a
turn that calls none. Whichever way finds a turn, the words must be those of the message, and must not change
with what a tool says after them. A turn that is not found is told and not measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from secrets import token_hex
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.text import is_whole, shown
from imatrix.texts.conversations import ANSWERING, Conversation
from imatrix.texts.templates import Template

DATE = datetime(2024, 7, 26)
"""Date that templates get as today's: the one that those of Llama 3 name where there is no clock."""

MAX_CHARS = 4 << 20
"""Characters at which a rendering that grows is given up."""

Span = tuple[int, int]

_STAND_IN = "Qx0qzX-7kWv"
"""Begins what takes a turn's place."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thoughts; templates are given them under the first two, as by transformers."""


class TemplateRefusal(BadRequest):
    """The error of a template that does not take a conversation."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as a model reads it.

    text    with the spelling of special tokens
    spans   characters of `text` that are the assistant's: beginnings and ends, in order
    missed  numbers of the messages that are the assistant's and were not found
    """

    text: str
    spans: tuple[Span, ...]
    missed: tuple[int, ...] = ()


class Renderer:
    """A template that is ready to render, with marks and a stand-in that nobody can put into a conversation.

    Only the process of worker.py has any: a template can take any time and all memory.

    special  what templates are told of a tokenizer, see `special_tokens`
    control  spellings of control tokens, the longest first: one that follows the assistant's words ends them
    raises   BadRequest for a template that can't be compiled
    """

    def __init__(self, template: Template, special: Mapping[str, str], control: Sequence[str]) -> None:
        from imatrix.texts.sandbox import compile_template

        self.name = template.name
        self._special = special
        self._control = control
        secret = token_hex(8)
        self._marks = f"\ufdd0{secret}", f"\ufdd1{secret}"  # Unicode keeps these for a program's own use
        self._answer = {"role": ANSWERING, "content": _STAND_IN + secret}
        self._compiled = compile_template(template, self._marks, DATE)

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation and find the assistant's words in it.

        raises  TemplateRefusal where the template has an error or does not want the conversation
        """
        tools = conversation.tools
        marked = self._text(conversation.messages, tools, conversation.place)
        text, spans = self._without_marks(marked)
        if spans:
            return Rendered(text, spans)
        found = {n: self._find(text, conversation, n) for n in conversation.answers}
        return Rendered(
            text,
            tuple(span for span in found.values() if span is not None),
            tuple(number for number, span in found.items() if span is None),
        )

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        place: str,
        prompted: bool = False,
    ) -> str:
        # A copy through JSON: what one rendering changes must not reach the next one.
        context = {
            **self._special,
            "messages": json.loads(json.dumps([_with_reasoning(message) for message in messages])),
            "tools": None if tools is None else json.loads(json.dumps(tools)),
            "documents": None,
            "add_generation_prompt": prompted,
        }
        pieces: list[str] = []
        n_chars = 0
        try:
            for piece in self._compiled.generate(context):
                pieces.append(piece)
                n_chars += len(piece)
                if n_chars > MAX_CHARS:
                    raise OverflowError(f"makes more than {MAX_CHARS} characters")
        except Exception as error:  # a template can raise anything
            needs = "needs more memory than it is given" if isinstance(error, MemoryError) else str(error)
            why = " ".join(needs.split()) or type(error).__name__
            raise TemplateRefusal(f"{place}: {self.name} template: {shown(why)}") from error
        if not is_whole(text := "".join(pieces)):
            raise TemplateRefusal(f"{place}: {self.name} template: makes half of a character")
        return text

    def _find(self, text: str, conversation: Conversation, number: int) -> Span | None:
        """Find the words of a message; None where it is not certain which they are."""
        message, later = conversation.messages[number], conversation.messages[number + 1 :]
        for way in (self._replaced, self._shortened, self._between, self._content):
            span = way(text, conversation, number)
            if span is None:
                continue
            words = text[slice(*span)]
            last = next((token for token in self._control if words.endswith(token)), "")
            if not _are_words_of(message, words.removesuffix(last)):
                continue
            if not (later and later[0]["role"] == "tool"):
                return span
            # What the tool says must not be among the words.
            others = [{**each, "content": "-"} if each["role"] == "tool" else each for each in later]
            changed = self._try([*conversation.messages[: number + 1], *others], conversation)
            if changed is not None and changed.startswith(text[: span[1]]):
                return span
        return None

    def _replaced(self, text: str, conversation: Conversation, number: int) -> Span | None:
        """Find a turn by another in its place."""
        return self._where(self._answer, text, conversation, number)

    def _content(self, text: str, conversation: Conversation, number: int) -> Span | None:
        """Find a turn's content by another one; its thoughts stay."""
        return self._where({**conversation.messages[number], **self._answer}, text, conversation, number)

    def _where(
        self, answer: Mapping[str, Any], text: str, conversation: Conversation, number: int
    ) -> Span | None:
        messages = conversation.messages
        before, after = self._around([*messages[:number], answer, *messages[number + 1 :]], conversation)
        end = len(text) - len(after)
        if not before or not text.startswith(before) or not text.endswith(after) or end < len(before):
            return None
        return len(before), end + len(self._end_mark(after))

    def _shortened(self, text: str, conversation: Conversation, number: int) -> Span | None:
        """Find a turn by another in its place, with nothing between it and the user's next words."""
        messages = conversation.messages
        rest = next((n for n in range(number, len(messages)) if messages[n]["role"] == "user"), len(messages))
        before, after = self._around([*messages[:number], self._answer, *messages[rest:]], conversation)
        mark = self._end_mark(after)
        end = text.find(mark, len(before))
        if not before or not mark or not text.startswith(before) or end < 0:
            return None
        return (len(before), end + len(mark)) if text[end:].endswith(after) else None

    def _between(self, text: str, conversation: Conversation, number: int) -> Span | None:
        """Find a turn between the prompt for it and what follows, where the text only ever gets longer."""
        prompt = self._try(conversation.messages[:number], conversation, prompted=True)
        answered = self._try(conversation.messages[: number + 1], conversation)
        if not prompt or not answered or not answered.startswith(prompt) or not text.startswith(answered):
            return None
        ended = answered.rstrip()
        return len(prompt), len(ended if ended.endswith(tuple(self._control)) else answered)

    def _around(self, messages: Sequence[Mapping[str, Any]], conversation: Conversation) -> tuple[str, str]:
        """Return the text before and after the stand-in as rendered; "" twice where it is not there once."""
        stand_in = self._answer["content"]
        before, _, after = (self._try(messages, conversation) or "").partition(stand_in)
        return ("", "") if stand_in in after or not before else (before, after)

    def _try(
        self, messages: Sequence[Mapping[str, Any]], conversation: Conversation, *, prompted: bool = False
    ) -> str | None:
        try:
            marked = self._text(messages, conversation.tools, conversation.place, prompted)
        except TemplateRefusal:
            return None
        return self._without_marks(marked)[0]

    def _end_mark(self, after: str) -> str:
        """Return the control token that `after` begins with, and the space before it; "" if there is none."""
        rest = after.lstrip()
        token = next((token for token in self._control if rest.startswith(token)), None)
        return "" if token is None else after[: len(after) - len(rest) + len(token)]

    def _without_marks(self, marked: str) -> tuple[str, tuple[Span, ...]]:
        """Return a text without marks, and the spans that were between them; what is empty is no span."""
        pieces: list[str] = []
        spans: list[Span] = []
        length = 0
        begin, end_mark = self._marks
        for number, part in enumerate(marked.split(begin)):
            words, end, rest = part.partition(end_mark)
            if number and end and words:
                spans.append((length, length + len(words)))
            pieces += (words, rest.replace(end_mark, ""))
            length += len(pieces[-2]) + len(pieces[-1])
        return "".join(pieces), tuple(spans)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _are_words_of(message: Mapping[str, Any], words: str) -> bool:
    """Whether a template wrote these words for a message: part of its content, or its thoughts and calls."""
    calls = message.get("tool_calls") or ()
    if calls or any(message.get(name) for name in _REASONING):
        return all(call["function"]["name"] in words for call in calls)
    return words.strip() in (message.get("content") or "")
