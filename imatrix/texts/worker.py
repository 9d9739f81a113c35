"""The process that renders chats: templates of strangers, with little time, little memory and no files.

Reads lines of JSON from standard input, and answers each with one on standard output:

    {"template": "...", "name": ..., "special": {...}, "control": [...]}
                                                               {"ready": true}, or {"broken": why}
    {"with": 0, "place": ..., "messages": [...], "tools": [...]}
                                                               {"text": ..., "spans": [[0, 9]], "missed": []},
                                                               or {"refused": why}

Templates are numbered as they come. Before the first is read, the process gives up what could do harm, as
that of `scan` does. Past the time that a conversation may take, the system ends the process.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.scanning.templates.worker import answer, give_up, rehearse
from gguf_tools.system.locks import can_limit
from imatrix.texts.chat import Renderer, TemplateRefusal
from imatrix.texts.conversations import Conversation
from imatrix.texts.rendering import EACH, MOST, SECONDS
from imatrix.texts.templates import PLAIN, Template

MEMORY = 640 << 20
"""Bytes of memory, of which the process has 30 MB when it has loaded what it needs."""


def main() -> None:
    rehearse()
    Renderer(PLAIN, {}, ()).render(Conversation("", ({"role": "assistant", "content": "Hello."},)))
    if can_limit():
        give_up(None, MEMORY)
    renderers: list[Renderer] = []
    clock = _Clock()
    for line in sys.stdin.buffer:
        job = json.loads(line)
        with clock.running(len(job.get("messages", ()))):
            answer(_compiled(job, renderers) if "template" in job else _rendered(job, renderers))


def _compiled(job: dict[str, Any], renderers: list[Renderer]) -> dict[str, Any]:
    try:
        renderers.append(Renderer(Template(job["name"], job["template"]), job["special"], job["control"]))
    except BadRequest as error:
        return {"broken": str(error)}
    return {"ready": True}


def _rendered(job: dict[str, Any], renderers: list[Renderer]) -> dict[str, Any]:
    tools = job["tools"]
    talk = Conversation(job["place"], tuple(job["messages"]), None if tools is None else tuple(tools))
    try:
        rendered = renderers[job["with"]].render(talk)
    except TemplateRefusal as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": f"{talk.place}: rendering needs more memory than it is given"}
    return {"text": rendered.text, "spans": rendered.spans, "missed": rendered.missed}


class _Clock:
    """Has the system end this process when conversations have used up their time."""

    def __init__(self) -> None:
        self._left = SECONDS

    @contextmanager
    def running(self, n_messages: int) -> Iterator[None]:
        if not hasattr(signal, "setitimer"):
            yield
            return
        signal.setitimer(signal.ITIMER_PROF, min(MOST, self._left + EACH * n_messages))
        yield
        self._left = signal.setitimer(signal.ITIMER_PROF, 0)[0]


if __name__ == "__main__":
    main()
