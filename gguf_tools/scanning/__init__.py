"""Search for suspicious things in an untrusted GGUF file, before anyone loads it.

    with open_gguf(path) as source:
        for finding in scan(source):
            print(as_text(finding))

A note is common in honest files; a warning is rare in them: look at it before you load the file. What is bad
was made to do harm, or is so broken that llama.cpp stops: don't load the file.

In reading order: hidden.py (bytes that nothing reads), strings.py (texts), header.py (what llama.cpp would
make of the header); templates/ (chat templates, which are programs, and the worker that tries them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gguf_tools.findings import Finding, Level, as_json, as_text, capped
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.shards import GGUFSet
from gguf_tools.progress import NO_REPORT, Reporter
from gguf_tools.scanning.header import check_kinds, check_numbers, check_tensors, check_vocabulary
from gguf_tools.scanning.hidden import check_hidden
from gguf_tools.scanning.strings import check_names, check_texts
from gguf_tools.scanning.templates.verdicts import Limits, check_templates

__all__ = ["Finding", "Level", "Limits", "as_json", "as_text", "scan"]


def scan(
    source: GGUFSet,
    *,
    data: bool = False,
    limits: Limits | None = None,
    progress: Reporter = NO_REPORT,
) -> list[Finding]:
    """Find what is suspicious about an open file or split set, the worst first.

    data      read the tensors' data too, as `gguf-tools verify` does
    limits    limits of the process that tries chat templates
    progress  counts the bytes of these data
    """
    findings = capped(_all_checks(source, data, limits, progress))
    return sorted(findings, key=lambda finding: -finding.level)


def _all_checks(source: GGUFSet, data: bool, limits: Limits | None, progress: Reporter) -> Iterator[Finding]:
    metadata, tensors = source.metadata, source.tensors
    if source.missing:
        yield Finding("parts", f"this is one part: {source.missing}", Level.NOTE, file=source.path.name)
    yield from check_hidden(source.shards)
    yield from check_names(metadata, "key")
    yield from check_names(tensors, "tensor")
    yield from check_texts(metadata)
    yield from check_kinds(metadata)
    yield from check_numbers(metadata, {} if source.missing else tensors)
    yield from check_tensors(architecture_of(metadata) or "", tensors)
    yield from check_vocabulary(metadata)
    yield from check_templates(metadata, limits)
    if data:
        yield from _check_data(source, progress)


def _check_data(source: GGUFSet, progress: Reporter) -> Iterator[Finding]:
    from gguf_tools.look.verify import verify  # needs numpy

    for finding in verify(source, progress):
        yield replace(finding, file=Path(finding.file).name)
