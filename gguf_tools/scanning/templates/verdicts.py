"""Chat templates: programs inside a file, read and tried in a process that can do no harm.

Each template goes to a worker of its own (see worker.py); what it answers, and how it ends, become
findings. Without jinja2 the templates are only searched as text.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gguf_tools.findings import Finding, Level, listed
from gguf_tools.format import keys
from gguf_tools.format.values import Kind, Metadata
from gguf_tools.scanning.header import items_of
from gguf_tools.scanning.templates.names import CHECK, search_text
from gguf_tools.scanning.templates.process import end_worker, start_worker
from gguf_tools.system.locks import can_limit
from gguf_tools.text import printable, quoted

MAX_TEMPLATES = 16
MAX_TEMPLATE_CHARS = 1 << 20
_SAFE_JINJA2 = (3, 1, 6)  # older sandboxes have holes that anyone can look up
_MAX_REMARK_CHARS = 400
_INSTALL = "pip install 'gguf-tools[scan]'"


@dataclass(frozen=True)
class Limits:
    """Limits of a worker for one template.

    cpu_seconds, memory_bytes  as the operating system counts them
    wall_seconds               in all, start included; matters only on a busy machine
    prompt_chars               length of one prompt
    answer_bytes               size of the whole answer
    """

    cpu_seconds: int = 2
    memory_bytes: int = 512 << 20
    wall_seconds: float = 60.0
    prompt_chars: int = 1_000_000
    answer_bytes: int = 1 << 20


def templates_of(metadata: Metadata) -> dict[str, str]:
    """Return the chat templates in metadata, by key."""
    prefix = f"{keys.TOKENIZER_CHAT_TEMPLATE}."
    return {
        key: value.data
        for key, value in metadata.items()
        if value.kind is Kind.STRING and (key == keys.TOKENIZER_CHAT_TEMPLATE or key.startswith(prefix))
    }


def check_templates(metadata: Metadata, limits: Limits | None = None) -> Iterator[Finding]:
    """Report what chat templates do, and would do, beyond making a prompt."""
    templates = templates_of(metadata)
    if not templates:
        return
    installed = _jinja2_version() if can_limit() else None
    if not can_limit():
        text = "chat templates were only searched as text: no process can be limited on this system"
        yield Finding(CHECK, text, Level.NOTE)
    elif installed is None:
        text = f"chat templates were only searched as text, for want of jinja2: {_INSTALL}"
        yield Finding(CHECK, text, Level.NOTE)
    elif installed < _SAFE_JINJA2:
        found, safe = (".".join(map(str, numbers)) for numbers in (installed, _SAFE_JINJA2))
        text = f"chat templates were read, not run: the sandbox of jinja2 {found} has holes, install {safe}"
        yield Finding(CHECK, text, Level.NOTE)
    for number, (key, template) in enumerate(templates.items()):
        if number == MAX_TEMPLATES:
            text = f"{len(templates):,} chat templates; only the first {MAX_TEMPLATES} were looked at"
            yield Finding(CHECK, text, Level.WARNING, (key,))
            return
        if len(template) > MAX_TEMPLATE_CHARS:
            text = f"a chat template of {len(template):,} characters; it was only searched as text"
            yield Finding(CHECK, text, Level.BAD, (key,))
        if installed is None or len(template) > MAX_TEMPLATE_CHARS:
            yield from search_text(key, template)
        else:
            yield from _try(key, template, metadata, limits or Limits(), installed >= _SAFE_JINJA2)


def _jinja2_version() -> tuple[int, ...] | None:
    try:
        numbers = version("jinja2").split(".")[:3]
    except PackageNotFoundError:
        return None
    return tuple(int(number) for number in numbers if number.isdecimal())


def _try(key: str, template: str, metadata: Metadata, limits: Limits, run: bool) -> Iterator[Finding]:
    special = special_tokens(metadata)
    answer = ask_worker({
        "template": template, "special": special, "run": run, "max_chars": limits.prompt_chars,
        "cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes,
    }, limits)  # fmt: skip
    for level, text in dict.fromkeys(answer.remarks):
        yield Finding(CHECK, text, level, (key,))
    if answer.ending:
        yield Finding(CHECK, answer.ending, answer.level, (key,))
    if answer.broken:
        text = f"is no template that jinja2 can read: {answer.broken}"
        yield Finding(CHECK, text, Level.WARNING, (key,))
    if answer.broken or answer.ending:
        yield from search_text(key, template)
    yield from _check_tokens(key, answer, metadata)


def _check_tokens(key: str, answer: Answer, metadata: Metadata) -> Iterator[Finding]:
    """Report where the prompts and the vocabulary disagree."""
    is_stopped = any(level is Level.BAD for level, _ in answer.remarks)
    if answer.n_prompts == 0 and answer.error and not is_stopped:
        text = f"takes none of the usual conversations; the first one ends with {answer.error}"
        yield Finding(CHECK, text, Level.NOTE, (key,))
    known = frozenset(items_of(metadata, keys.TOKENIZER_TOKENS, Kind.STRING))
    unknown = [text for text in answer.emits if text not in known]
    if known and unknown:
        text = f"puts out what looks like tokens, but is none: {listed(unknown)}"
        yield Finding(CHECK, text, Level.WARNING, (key,))
    add_bos = metadata.get(keys.TOKENIZER_ADD_BOS)
    if answer.begins_with_bos and add_bos is not None and add_bos.data is True:
        text = f"begins with BOS, and {keys.TOKENIZER_ADD_BOS} adds another: some programs send both"
        yield Finding(CHECK, text, Level.NOTE, (key,))


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the variables of templates beside the conversation: bos_token and the like, "" for none."""
    tokens = items_of(metadata, keys.TOKENIZER_TOKENS, Kind.STRING)
    variables = {}
    for name, key in (
        ("bos_token", keys.TOKENIZER_BOS_ID),
        ("eos_token", keys.TOKENIZER_EOS_ID),
        ("unk_token", keys.TOKENIZER_UNK_ID),
        ("pad_token", keys.TOKENIZER_PAD_ID),
    ):
        value = metadata.get(key)
        has_text = value is not None and isinstance(value.data, int) and 0 <= value.data < len(tokens)
        variables[name] = tokens[value.data] if value is not None and has_text else ""
    return variables


# --- the worker -----------------------------------------------------------------------------


@dataclass
class Answer:
    """Answer of a worker, and how the worker ended.

    remarks   (level, text)
    broken    why the template can't be parsed, or ""
    ending    why the worker didn't finish, or ""; `level` says how bad that is
    the rest  see rendering.Outcome.summary
    """

    remarks: list[tuple[Level, str]] = field(default_factory=list)
    broken: str = ""
    ending: str = ""
    level: Level = Level.BAD
    n_prompts: int = -1
    error: str = ""
    emits: list[str] = field(default_factory=list)
    begins_with_bos: bool = False
    stage: str = "start"

    def add(self, line: bytes) -> None:
        """Read one line of the answer; ignores what a worker does not write."""
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return
        match said:
            case {"stage": str(stage)}:
                self.stage = stage
            case {"level": int(level), "text": str(text)} if 0 <= level <= Level.BAD:
                self.remarks.append((Level(level), _safe(text)))
            case {"broken": str(text)}:
                self.broken = _safe(text)
            case {"tried": {"prompts": int(n), "error": str(error), "emits": list(emits), **rest}}:
                self.n_prompts, self.error = n, quoted(error, 200)
                self.emits = [text for text in emits if isinstance(text, str)]
                self.begins_with_bos = rest.get("begins_with_bos") is True


def _safe(text: str) -> str:
    return printable(text[:_MAX_REMARK_CHARS])


def ask_worker(job: dict[str, Any], limits: Limits) -> Answer:
    """Give a worker a job (see worker.py), and end it when it takes too long or answers too much."""
    process = start_worker("gguf_tools.scanning.templates.worker")
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
        output, ended = _read(process.stdout.fileno(), limits)
        if not ended:
            process.kill()
        code = process.wait()
    finally:
        end_worker(process)
    answer = Answer()
    for line in output.splitlines():
        answer.add(line)
    if not ended and len(output) >= limits.answer_bytes:
        answer.ending = "makes the worker that tries it talk without end"
    elif not ended:
        answer.ending = f"was given up after {limits.wall_seconds:g} s"
        answer.level = Level.WARNING
    elif answer.stage != "done" and not any(level is Level.BAD for level, _ in answer.remarks):
        _explain(answer, code, output, limits)
    return answer


def _explain(answer: Answer, code: int, output: bytes, limits: Limits) -> None:
    """Return why a worker ended early."""
    doing = {"parse": "parsing it", "run": "making a few prompts"}.get(answer.stage)
    if doing is not None and code == -signal.SIGXCPU:
        answer.ending = f"takes more than {limits.cpu_seconds} s of computing: {doing}"
    elif doing is not None:
        answer.ending = f"crashes Python, which was {doing} (exit code {code})"
    else:
        last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
        answer.ending = f"was not tried: the worker did not start ({quoted(last, 200)})"
        answer.level = Level.WARNING


def _read(descriptor: int, limits: Limits) -> tuple[bytes, bool]:
    """Read up to the end, or to a limit of size or time; returns whether it was the end."""
    deadline = time.monotonic() + limits.wall_seconds
    output = b""
    while len(output) < limits.answer_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return output, False
        part = os.read(descriptor, 1 << 16)
        if not part:
            return output, True
        output += part
    return output, False
