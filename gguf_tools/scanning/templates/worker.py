"""The process that parses and runs untrusted chat templates: little time, little memory, no files.

Reads one JSON object from standard input and answers with lines of JSON on standard output:

    {"stage": "parse"}                          before each stage: parse, run, done
    {"level": 2, "text": "..."}                 a remark
    {"tried": {"prompts": 7, "error": "", "emits": [...], "begins_with_bos": true}}
                                                the outcome, see rendering.RenderOutcome.summary
    {"broken": "..."}                           why it is no template

The reader must doubt every line: a template that breaks out writes what it likes. Before it sees the
template, the process gives up everything that could do harm. It can't open files or start processes, and an
audit hook ends it when Python is asked to do anything but compute.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from gguf_tools.findings import Level
from gguf_tools.lazy import late
from gguf_tools.scanning.templates import rendering, syntax_tree
from gguf_tools.scanning.templates.process import EXIT_BREAKOUT
from gguf_tools.scanning.templates.rendering import Conversation
from gguf_tools.system.locks import limit_process
from gguf_tools.text import quoted

# What jinja2, and methods of texts, import on their way. Once a template is there, an import is a way out.
_IMPORTED_LATE = (
    "html", "pprint", "textwrap", "jinja2.constants", "jinja2.debug", "encodings.ascii", "encodings.latin_1",
    "encodings.unicode_escape", "encodings.raw_unicode_escape", "encodings.punycode",
)  # fmt: skip
_REHEARSAL = """{% macro say(x) %}{{ x|trim|tojson }}{% endmacro %}{% set a = namespace(b='\\u00e9') %}
{% for m in messages %}{{ say(m.content) }}{% endfor %}{{ strftime_now('%d %b %Y') }}
{{ raise_exception('x') }}"""

_QUESTION = "Which river flows through Vienna?"
_SECOND_QUESTION = "And through Prague?"
_SYSTEM = {"role": "system", "content": "Answer in one sentence."}
_USER = {"role": "user", "content": _QUESTION}
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

_CONVERSATIONS = (
    Conversation("a question", _QUESTION, (_USER,)),
    Conversation("a question, no answer to come", _QUESTION, (_USER,), add_generation_prompt=False),
    Conversation("a system message and a question", _QUESTION, (_SYSTEM, _USER)),
    Conversation("several turns", _SECOND_QUESTION, (_SYSTEM, _USER, _ANSWER, _SECOND_USER)),
    Conversation(
        "several turns, the last one the model's", _QUESTION, (_SYSTEM, _USER, _ANSWER),
        add_generation_prompt=False,
    ),
    Conversation("tools", _QUESTION, (_SYSTEM, _USER), (_TOOL,)),
    Conversation("a tool's answer", _QUESTION, (_USER, _TOOL_CALL, _TOOL_ANSWER), (_TOOL,)),
)  # fmt: skip

# What compiling and running Python code cannot do without.
_ALLOWED_EVENTS = frozenset((
    "compile", "exec", "code.__new__", "object.__getattr__", "builtins.id", "sys._getframe",
    "sys.excepthook", "sys.unraisablehook",
))  # fmt: skip


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    rehearse()
    give_up(job["cpu_seconds"], job["memory_bytes"])
    try:
        _work(job)
    except RecursionError:
        answer({"level": Level.BAD, "text": "is nested too deeply for a parser"})
    except MemoryError:
        answer({"level": Level.BAD, "text": "needs more memory than it is given"})
    except TemplateSyntaxError as error:
        answer({"broken": f"line {error.lineno}: {quoted(error.message or '', 200)}"})
    except Exception as error:  # of jinja2's, which checks only some of what it is given
        answer({"broken": f"{type(error).__name__}: {quoted(str(error), 200)}"})
    answer({"stage": "done"})


def _work(job: dict[str, Any]) -> None:
    source = job["template"]
    answer({"stage": "parse"})
    sandbox = rendering.Sandbox()
    tree = sandbox.parse(source)
    for level, text in syntax_tree.remarks_on(tree, sandbox):
        answer({"level": level, "text": text})
    if job["run"]:
        answer({"stage": "run"})
        outcome = rendering.run(source, job["special"], job["max_chars"], _CONVERSATIONS)
        for level, text in outcome.remarks:
            answer({"level": level, "text": text})
        answer({"tried": outcome.summary(job["special"])})


def rehearse() -> None:
    """Load everything that trying a template needs."""
    for name in _IMPORTED_LATE:
        late(name)
    sandbox = rendering.Sandbox()
    list(syntax_tree.remarks_on(sandbox.parse(_REHEARSAL), sandbox))
    rendering.run(_REHEARSAL, {}, 1000, _CONVERSATIONS)


def give_up(cpu_seconds: int | None, memory_bytes: int) -> None:
    """Give up time, memory, files, processes and core dumps, for good; then watch Python itself.

    cpu_seconds  None: the caller has another bound
    """
    limit_process(cpu_seconds, memory_bytes)
    sys.addaudithook(_watch)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    # For the message of a SyntaxError, Python looks for the line in a file of the template's name.
    is_error = event == "open" and arguments[:1] == ("<template>",)
    if event not in _ALLOWED_EVENTS and not is_error:
        text = f"has Python do what no prompt needs, and was ended before it did: {quoted(event)}"
        answer({"level": Level.BAD, "text": text})
        os._exit(EXIT_BREAKOUT)


def answer(line: dict[str, Any]) -> None:
    """Write a line of the answer."""
    os.write(1, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
