"""`gguf-tools audit`: is a finished file what its base makes of it, and if not, what is wrong?"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.forward import add_chunks_argument, add_context_argument
from gguf_tools.commands.command import StoreOutput, add_force
from gguf_tools.errors import AnotherModel, BadArgument
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.text import json_text, say

if TYPE_CHECKING:
    from convert.audit.options import AuditOptions
    from convert.audit.report import AuditReport
    from imatrix.evaluate.evaluation import Evaluation
    from imatrix.texts.tokens import Cut

DETAIL = """
Audit what a stranger has uploaded, and your own file before an upload. Every tensor is
decoded and compared with BASE's. If the error is not what the type causes, audit looks for the reason: gate
and up swapped, heads permuted for the other kind of rope, key and value halves of kv_b mixed up, a norm with
1 added twice or not at all, an expert repeated or in another's place, a transposed matrix, scales left out,
rows shifted, another revision. Metadata are compared with what the converter would write: vocabulary, special
and added tokens, pre-tokenizer, chat template, rope, gating.

If the model has more than 10 billion weights, or BASE is on the Hub, only samples are read: runs of rows of
every matrix and every expert, from first to last. --all reads everything. Damage between the sampled rows is
found only with --all."""

EPILOG = """\
levels:
  bad      the model would compute something else, or is not the base's
  warning  differs from the base in a way that may be meant: layers left out, another context
  note     worth knowing: a key that the base lacks, a type that can't be decoded here

Files made with importances or calibration have larger errors than plain files, and these errors can hide
small differences from another revision. With importances, a single tensor with other weights is found if the
weights differ by at least 1 % of their size at Q8_0, 12 % at Q4_K and 44 % at two bits; in plain files, by at
least a third of that.

The exit code is 1 if anything is bad (with --strict: or a warning).

examples:
  gguf-tools audit lite-Q4_K_M.gguf DeepSeek-V2-Lite
  gguf-tools audit lite-Q4_K_M.gguf deepseek-ai/DeepSeek-V2-Lite     a base on the Hub
  gguf-tools audit lite-IQ2_XS.gguf lite-bf16.gguf --all --html audit.html
  gguf-tools audit lite-Q4_K_M.gguf DeepSeek-V2-Lite --suite default     its divergence, too
  gguf-tools audit lite-Q4_K_M.gguf DeepSeek-V2-Lite --ignore 'tokenizer.chat_template'     changed on purpose
"""


@dataclass(frozen=True)
class AuditRequest:
    """Request of the command line.

    base     a path, or a name on the Hub
    options  how to audit
    text     measures the divergence on this, in chunks as `cut` says; None: does not
    suite    measures it on the classes of this suite; None: does not
    quick    with a tenth of each class
    strict   warnings count as bad
    force    replace outputs that are there already
    """

    file: Path
    base: str
    options: AuditOptions
    text: Path | None
    cut: Cut | None
    suite: str | None
    quick: bool
    json: Path | None
    html: Path | None
    strict: bool
    force: bool
    quiet: bool


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "audit", lambda args: carry_out(_read(args)), "say whether a file is what its base makes of it, and"
        " what is wrong if not", DETAIL, epilog=EPILOG, json=False, answers=True,
    )  # fmt: skip
    sub.add_argument("file", type=Path, metavar="FILE", help="a GGUF file, or any file of a split set")
    sub.add_argument("base", metavar="BASE", help="folder, GGUF file, or OWNER/NAME[@REVISION] on the Hub")
    rows = sub.add_mutually_exclusive_group()
    rows.add_argument("--all", action="store_true", help="read every row of every tensor")
    rows.add_argument("--sample", action="store_true", help="read runs of rows of every matrix")
    sub.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN",
        help="report what is found of tensors or keys with this name only as notes, as in 'tokenizer.*'"
        " (repeatable)",
    )  # fmt: skip
    sub.add_argument("--strict", action="store_true", help="warnings count as bad")
    sub.add_argument(
        "--allow-pickle", action="store_true", help="read a BASE of .bin and .pt files, as weights only"
    )
    texts = sub.add_mutually_exclusive_group()
    texts.add_argument(
        "-f", "--file", dest="text", type=command.text_file, metavar="TEXT",
        help="also measure the divergence from BASE on this text, as `evaluate` does; a BASE on the Hub is"
        " fetched for that",
    )  # fmt: skip
    texts.add_argument(
        "--suite", metavar="NAME|PATH",
        help="also measure the divergence by class on a suite of texts: default, or your own folder or YAML"
        " file",
    )  # fmt: skip
    sub.add_argument("--quick", action="store_true", help="use a tenth of each class of the suite")
    add_context_argument(sub)
    add_chunks_argument(sub, what="use at most N chunks of TEXT; -1: all")
    sub.add_argument(
        "--json", type=command.output_file, action=StoreOutput, metavar="REPORT.json",
        help="write findings and the numbers of every tensor as one JSON object",
    )  # fmt: skip
    sub.add_argument(
        "--html", type=command.output_file, action=StoreOutput, metavar="REPORT.html",
        help="write the same as one HTML page that loads nothing",
    )  # fmt: skip
    command.add_threads(sub)
    command.add_timeout(sub)
    command.add_quiet(sub)
    add_force(sub)


def _read(args: argparse.Namespace) -> AuditRequest:
    from convert.audit.options import AuditOptions
    from gguf_tools.commands.arguments.forward import cut_of

    every_row = True if args.all else False if args.sample else None
    if args.quick and args.suite is None:
        raise BadArgument("--quick is for --suite, which is missing")
    options = filled(AuditOptions, args, every_row=every_row)
    return filled(AuditRequest, args, options=options, cut=None if args.text is None else cut_of(args))


def carry_out(request: AuditRequest) -> int:
    """Audit a file, print what was found and write the reports; return the exit code."""
    from gguf_tools.files.named_files import write_whole
    from gguf_tools.findings import Level

    outputs = [path for path in (request.json, request.html) if path is not None]
    for output in outputs:
        if not output.parent.is_dir():
            raise BadArgument(f"{output}: can't be written (no such folder)")
    refuse_to_replace(outputs, force=request.force)
    report = _audited(request)
    say(*report.lines())
    if request.json is not None:
        write_whole(request.json, (json_text(report.to_json()) + "\n").encode())
    if request.html is not None:
        write_whole(request.html, report.to_html().encode())
    for output in outputs:
        say(f"wrote {output}")
    return 1 if report.is_wrong or (request.strict and report.at(Level.WARNING)) else 0


def _audited(request: AuditRequest) -> AuditReport:
    from convert.audit.pipeline import audit
    from convert.checkpoint.hub import hub_name
    from convert.sources import source_folder
    from gguf_tools.findings import Finding, Level

    is_remote = hub_name(request.base) is not None
    base = source_folder(request.base, stream=is_remote, quiet=request.quiet)
    is_evaluated = request.text is not None or request.suite is not None
    if is_evaluated:
        from imatrix.forward.options import require_torch

        require_torch("measuring the divergence")
    report = audit(request.file, base, request.options, progress=not request.quiet)
    try:
        return replace(report, evaluation=_evaluated(request)) if is_evaluated else report
    except AnotherModel as error:
        return report.with_finding(Finding("divergence", f"not measured: {error}", Level.BAD))


def _evaluated(request: AuditRequest) -> Evaluation:
    """Measure the file's divergence from the base, which is fetched if it is on the Hub."""
    from convert.sources import model_path
    from imatrix.evaluate.options import EvaluateOptions
    from imatrix.evaluate.pipeline import evaluate, evaluate_suite
    from imatrix.texts.suite import read_suite

    base = model_path(request.base, quiet=request.quiet)
    progress = not request.quiet
    if request.suite is not None:
        suite = read_suite(request.suite, request.quick)
        return evaluate_suite(base, suite, [request.file], progress=progress)
    assert request.cut is not None
    options = EvaluateOptions(cut=request.cut)
    return evaluate(base, request.text, [request.file], options, progress=progress)
