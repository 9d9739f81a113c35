"""Chats rendered in a process of their own, because templates are programs of strangers.

There is one for all conversations of a run, started with the first. They are sent without waiting for the
answers, so that neither side stands still. What comes back is checked: a template that breaks out could
answer what it likes.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from threading import Thread, Timer
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.scanning.templates.process import EXIT_BREAKOUT, end_worker, start_worker
from gguf_tools.text import is_whole, printable, quoted
from imatrix.texts.chat import MAX_CHARS, Rendered
from imatrix.texts.conversations import Conversation
from imatrix.texts.templates import Template

SECONDS, EACH, MOST = 5.0, 0.1, 30.0
"""Processor time that there is at first, what each message adds, and the most that a conversation may use."""

WALL_SECONDS = 60.0
"""Time until the next answer; matters only on a machine so busy that the process hardly computes."""

_MAX_ANSWER = 8 * MAX_CHARS


class ChatRenderer:
    """Renders conversations; to be closed, which ends the process.

    special  what templates are told of a tokenizer
    control  spellings of control tokens, the longest first
    """

    def __init__(self, special: Mapping[str, str], control: Sequence[str]) -> None:
        self._special = special
        self._control = control
        self._process: subprocess.Popen[bytes] | None = None
        self._sender = Thread()
        self._numbers: dict[Template, int] = {}

    def __enter__(self) -> ChatRenderer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_worker(self._process)
            self._sender.join()
            self._process = None

    def render(
        self, conversations: Sequence[Conversation], templates: Sequence[Template]
    ) -> Iterator[Rendered | str]:
        """Yield each conversation as rendered through its template; a text says why a template refuses it.

        raises  BadRequest for what can't be compiled, and a template that takes too long, breaks out or ends
                the process
        """
        process = self._started()
        new = [each for each in dict.fromkeys(templates) if each not in self._numbers]
        self._numbers |= {each: number for number, each in enumerate(new, len(self._numbers))}
        jobs: list[Any] = [
            {"template": each.source, "name": each.name, "special": self._special, "control": self._control}
            for each in new
        ]
        jobs += (
            {"with": self._numbers[how], "place": each.place, "messages": each.messages, "tools": each.tools}
            for each, how in zip(conversations, templates, strict=True)
        )
        self._sender = Thread(target=_send, args=(process, jobs), daemon=True)
        self._sender.start()
        for template in new:
            said = self._answer(process, template, "compiling it")
            if "broken" in said:
                raise BadRequest(f"{template.place}: {printable(str(said['broken']))}")
        for each, template in zip(conversations, templates, strict=True):
            yield _checked(self._answer(process, template, each.place), each, template)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            if find_spec("jinja2") is None:
                raise BadRequest("rendering chats needs jinja2: pip install 'gguf-tools[torch]'")
            self._process = start_worker("imatrix.texts.worker")
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], template: Template, doing: str) -> Mapping[str, Any]:
        """Read one answer; raises BadRequest where none comes."""
        assert process.stdout is not None
        timer = Timer(WALL_SECONDS, process.kill)
        timer.start()
        try:
            line = process.stdout.readline(_MAX_ANSWER)
        finally:
            timer.cancel()
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(line)
            if isinstance(said, dict) and line.endswith(b"\n") and "level" not in said:
                return said
        raise BadRequest(f"{template.place}: this chat template {_ending(process, line)}: {doing}")


def _send(process: subprocess.Popen[bytes], jobs: Sequence[Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # the process has ended, and its answers will say why
        for job in jobs:
            process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()


def _ending(process: subprocess.Popen[bytes], line: bytes) -> str:
    """Say why a process has not answered; `line` is what it said instead."""
    assert process.stdout is not None
    if len(line) >= _MAX_ANSWER:
        return "makes its process talk without end"
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    process.kill()
    code = process.wait()
    last = (line + process.stdout.read(1 << 16)).decode("utf-8", "replace").strip().rpartition("\n")[2]
    if code == -getattr(signal, "SIGPROF", 0):
        return "takes too long, or runs without end"
    if code == -getattr(signal, "SIGKILL", 0):
        return f"was given up after {WALL_SECONDS:g} s"
    if code == EXIT_BREAKOUT:
        return f"tries to break out ({quoted(last, 200)})"
    return f"ends Python with exit code {code} ({quoted(last, 200)})"


def _checked(said: Mapping[str, Any], talk: Conversation, template: Template) -> Rendered | str:
    """Return the rendering, or why there is none; raises BadRequest for all else."""
    match said:
        case {"refused": str(why)}:
            return printable(why)
        case {"text": str(text), "spans": list(spans), "missed": list(missed)}:
            ends = [end for span in spans if isinstance(span, list) for end in span]
            are_spans = all(type(end) is int for end in ends) and 2 * len(spans) == len(ends)
            are_missed = all(number in talk.answers for number in missed)
            order = [0, *ends, len(text)] if are_spans else [1, 0]
            if order == sorted(order) and are_missed and is_whole(text):
                return Rendered(text, tuple(zip(ends[::2], ends[1::2], strict=True)), tuple(missed))
    raise BadRequest(f"{template.place}: {talk.place}: this chat template breaks out of its process")
