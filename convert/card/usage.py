"""Advice of a card to people who use files: which one fits their memory, and how to get and run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convert.card.facts import FileFacts, Report
from convert.card.markdown import as_markdown
from convert.card.shell import shell_word
from gguf_tools.text import size_text

_CONTEXT = 8192
"""Tokens of context that the advice counts with, for models that were trained with as many."""

_REST = 1 << 29
"""Bytes for activations and the program; half a gigabyte is what llama.cpp takes for models of 7 to 70 B."""

_MEMORIES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sizes of memory that people have, in gigabytes."""

_FENCE = "```"


def memory_of(file: FileFacts) -> int:
    """Count the bytes that a file needs to run: itself, its cache, and the rest."""
    return file.n_bytes + context_of(file) * (file.cache_bytes or 0) + _REST


def context_of(file: FileFacts) -> int:
    """Return the tokens of context that the advice counts with: no more than the model was trained with."""
    return min(_CONTEXT, file.context_length or _CONTEXT)


def memory_lines(files: Sequence[FileFacts], report: Report | None) -> Iterator[str]:
    """Yield a table in Markdown: which file is best for how much memory; a row where that changes.

    The best is the one that was measured nearest to the original, or else the largest.
    """
    yield "| with this much memory | take | which needs |"
    yield "| --: | --- | --: |"
    last: FileFacts | None = None
    for gigabytes in _MEMORIES:
        best = _best([file for file in files if memory_of(file) <= gigabytes << 30], report)
        if best is not None and best is not last:
            yield f"| {gigabytes} GB | {as_markdown(best.name)} | {size_text(memory_of(best))} |"
            last = best
    if last is None:
        least = min(files, key=memory_of)
        needed = memory_of(least)
        yield f"| {-(-needed >> 30)} GB | {as_markdown(least.name)} | {size_text(needed)} |"
    yield ""
    cache = "" if any(file.cache_bytes for file in files) else " (without the cache, whose size is not known)"
    tokens = max(map(context_of, files))
    yield f"That is the file, a 16-bit cache for {tokens:,} tokens{cache}, and half a gigabyte for the rest."


def _best(files: Sequence[FileFacts], report: Report | None) -> FileFacts | None:
    known = {} if report is None else report.by_name
    measured = [file for file in files if file.name in known]
    if measured:
        return min(measured, key=lambda file: known[file.name].kld)
    return max(files, key=lambda file: file.n_bytes, default=None)


def run_lines(file: FileFacts, home: str | None) -> Iterator[str]:
    """Yield how to get a file, and how to run it in llama.cpp, Ollama and LM Studio.

    home  OWNER/NAME of the files on the Hub; None: not known, so that the file is taken as it lies here
    """
    first = file.name
    here = shell_word(first)
    stem = first.removesuffix(".gguf")
    yield f"{_FENCE}sh"
    if home is not None:
        pattern = here if len(file.paths) == 1 else shell_word(f"{_common(file)}*")
        option = "" if len(file.paths) == 1 else "--include "
        yield "# download"
        yield f"hf download {home} {option}{pattern} --local-dir ."
    yield "# llama.cpp: a chat page at http://localhost:8080"
    yield f"llama-server -m {here} -c {context_of(file)}"
    yield "# Ollama"
    if home is not None and len(file.paths) == 1:
        yield f"ollama run hf.co/{home}:{here}"
    else:
        source = shell_word(f"FROM ./{first}")
        yield f"echo {source} > Modelfile && ollama create {shell_word(stem.lower())} -f Modelfile"
    yield "# LM Studio"
    yield f"lms get https://huggingface.co/{home}" if home is not None else f"lms import {here}"
    yield _FENCE


def recommended(files: Sequence[FileFacts]) -> FileFacts:
    """Choose the file that commands name: Q4_K_M, which most people take, or the middle one."""
    usual = (file for name in ("Q4_K_M", "Q4_K_S") for file in files if name in file.name)
    by_size = sorted(files, key=lambda file: file.n_bytes)
    return next(usual, by_size[len(by_size) // 2])


def _common(file: FileFacts) -> str:
    return file.name.rpartition("-00001-of-")[0]
