"""The `evaluate` command: perplexity of any number of models, and how far each is from its base."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from convert.options import AdapterOptions
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.forward import (
    add_chunks_argument,
    add_context_argument,
    add_dry_run,
    add_run_arguments,
    cut_of,
    forward_options,
)
from gguf_tools.commands.command import StoreOnce, StoreOutput, TakesArguments, add_force
from gguf_tools.files.early_checks import refuse_early, refuse_to_replace
from gguf_tools.text import say

if TYPE_CHECKING:
    from gguf_tools.progress import Reporter
    from imatrix.evaluate.evaluation import Check
    from imatrix.evaluate.options import EvaluateOptions, LogitsFile
    from imatrix.evaluate.report.page import PageInputs
    from imatrix.texts.suite import Suite

DESCRIPTION = """\
Measure how much the predictions of quantized models differ from those of their base, under the names and
definitions of llama-perplexity. BASE is a Hugging Face folder or a GGUF file. All models go through the text
in step, layer by layer, so one layer at a time is in memory, and no file of logits is needed."""

EPILOG = """\
what the columns mean:
  PPL        perplexity: the model is as unsure as if it chose among so many tokens. Compare it only on the
             same text
  ln ratio   logarithm of the ratio of the model's PPL to the base's; 0 means equal
  KLD        Kullback-Leibler divergence from the base in nats: mean over tokens, then percentiles. It shows
             harm long before PPL does
  same top   how often the model's most likely token is the base's
  flips      share of tokens where the base gives its first choice a probability above 0.9, and the model
             prefers another token. A reader notices such changes
  RMS dp     root mean square of the change of the right token's probability
  drift      per layer: norm of the change of the hidden states over the norm of the base's. A jump shows the
             layer that adds most to it. For this layer, the errors of its tensors are shown: a tensor
             with a far larger error than others of its type was damaged
  accepted   for models with an MTP layer: share of the layer's drafts that are the model's own most likely
             token. Greedy speculative decoding accepts the first draft of each step under this condition.
             The base's share stands beside it

Where BASE is an encoder, or says how it pools vectors, these columns are in place of those above but drift:
  cosine     of the vectors of a passage by QUANT and by BASE: the mean over passages, and the lowest
  Recall@10  share of the ten passages nearest to each by BASE that are among the ten nearest by QUANT

Only the second half of every chunk is measured, so each prediction has half a chunk of context or more.

several texts:
  --suite  measures classes of text, such as code and conversations, in one run: each weight is read once for
           all of them. A suite is a folder, where each folder or file is a class, or a YAML file that says
           which texts each class has and how they are read. Conversations, as JSON lines, are rendered with
           the model's own chat template, and only what the assistant says is measured. A class has the same
           numbers as -f gives for its text. In the mean over all classes, each class has the same weight.
           Standard errors are computed over chunks, because tokens of one chunk are alike. They are larger
           than the errors of -f, which are llama-perplexity's

Weights are decoded exactly, and activations stay float, so the divergence is that of the file, without the
errors of any engine's kernels. llama.cpp also rounds activations to 8 bits, which adds about 0.0005 to KLD on
a small trained model. So compare only numbers from the same tool. --like llama.cpp rounds activations, the
base's too, as llama.cpp's CPU kernels and its cache do. The mean then differs from llama-perplexity's by 1 to
3 %. A difference in a last bit may send a token to other experts.

which file is better:
  --against STOCK.gguf  compares every QUANT with STOCK on the same chunks. It prints the ratio of their mean
                        KLD with a 95 % interval, and in words whether the file is better or worse, or
                        shows no significant difference. The interval is computed over chunks, because
                        tokens of one chunk are alike. With a suite, each class has its own ratio; its
                        interval and verdict are corrected for the number of classes.
  --noise-floor         measures how much BASE itself changes with weights rounded to BF16, and with the 8-bit
                        activations that llama.cpp uses for a quantized file. No file is written. People
                        who run the files can't see a smaller difference than these.

later runs without reading the base again:
  --keep DIR                 keeps in DIR what later runs with the same BASE, text and DIR need of BASE. They
                             don't read BASE again, so it may have been deleted. DIR takes 4 bytes x layers x
                             measured tokens x columns of hidden states, and the size of the output matrix.
  --kl-divergence-base FILE  writes the log probabilities of BASE: two bytes for each measured token and token
                             of the vocabulary. With --kl-divergence it reads them, as in llama-perplexity,
                             and BASE is left out: all models are compared with FILE. FILE contains the
                             tokens, so no text is needed. It has no hidden states, so no drift is shown, and
                             its 16 bits for a logit add about 1e-6 to KLD.

examples:
  evaluate DeepSeek-V2-Lite -f wiki.test.raw lite-Q4_K_M.gguf lite-IQ3_XXS.gguf
  evaluate DeepSeek-V2-Lite --suite default lite-Q4_K_M.gguf lite-IQ3_XXS.gguf
  evaluate lite-bf16.gguf --suite our-texts/ --quick --json lite.json lite-Q*.gguf
  evaluate lite-bf16.gguf -f wiki.test.raw --chunks 40 --json lite.json lite-Q*.gguf
  evaluate lite-bf16.gguf -f wiki.test.raw --html report.html --compare-with stock.json mine-*.gguf
  evaluate lite-bf16.gguf --suite default --against stock-Q4_K_M.gguf --noise-floor mine-Q4_K_M.gguf
  evaluate --kl-divergence-base lite.kld --kl-divergence lite-Q4_K_M.gguf

With --json, --html or --work, an interrupted run resumes after its last complete layer when the same command
is given again. What it needs for that is in FILE.work, or DIR, until the run has ended."""


def main(argv: Sequence[str] | None = None, prog: str = "evaluate") -> int:
    """Run the command; return its exit code."""
    parser = make_parser(prog)
    return command.run(parser, lambda args: _evaluate(parser, args), argv)


def make_parser(prog: str = "evaluate") -> argparse.ArgumentParser:
    parser = command.make_parser(prog, DESCRIPTION, epilog=EPILOG)
    parser.set_defaults(answers=True)
    parser.add_argument(
        "base", metavar="BASE",
        help="the model that others are compared with: a folder, a GGUF file, or OWNER/NAME on the Hub; with"
        " --kl-divergence, this word is one of the others",
    )  # fmt: skip
    quants = parser.add_argument(
        "quants", type=Path, nargs="+", default=[], metavar="QUANT", help="GGUF file that was made from BASE"
    )
    # Not "*", which is content with nothing between BASE and -f and then refuses what comes behind.
    quants.required = False
    what = parser.add_argument_group("what to measure")
    _add_texts(what)
    _add_comparisons(what)
    _add_reports(what)
    _add_stored_base(what)
    what.add_argument(
        "--like", choices=["llama.cpp"], help="round activations as this engine's CPU kernels do"
    )
    run = add_run_arguments(parser)
    command.add_flags(run, AdapterOptions)
    command.add_scheduler(run)
    add_force(run)
    add_dry_run(run)
    run.add_argument(
        "--work", type=command.output_folder, action=StoreOutput, metavar="DIR",
        help="where finished layers are kept (default: FILE.work beside --json or --html, else a temporary"
        " folder in $TMPDIR or /var/tmp)",
    )  # fmt: skip
    return parser


def _add_texts(what: TakesArguments) -> None:
    """Add what the models read."""
    texts = what.add_mutually_exclusive_group()
    texts.add_argument(
        "-f", "--file", dest="text", type=command.text_file, metavar="TEXT", action=StoreOnce,
        instead=", or give a folder of texts to --suite",
        help="UTF-8 text; needed without --suite and --kl-divergence",
    )  # fmt: skip
    texts.add_argument(
        "--suite", metavar="NAME|PATH",
        help="measure classes of text instead of one text, all in one run: default (a suite of the"
        " package), a folder, or a YAML file",
    )  # fmt: skip
    what.add_argument("--quick", action="store_true", help="use a tenth of each class of the suite")
    add_context_argument(what)
    add_chunks_argument(what)


def _add_comparisons(what: TakesArguments) -> None:
    """Add what files are judged by, besides the base."""
    what.add_argument(
        "--against", type=Path, metavar="STOCK.gguf",
        help="compare every QUANT with this file, and say whether it is better, worse or not significantly"
        " different",
    )  # fmt: skip
    what.add_argument(
        "--noise-floor",
        action="store_true",
        help="also measure how much BASE itself changes with BF16 weights and with activations of 8 bits",
    )


def _add_reports(what: TakesArguments) -> None:
    """Add what is written besides the table, and what goes into the page."""
    what.add_argument(
        "--json", type=command.output_file, action=StoreOutput, metavar="FILE",
        help="write all numbers as one JSON object",
    )  # fmt: skip
    what.add_argument(
        "--html", type=command.output_file, action=StoreOutput, metavar="REPORT.html",
        help="write one page with charts, a map of each file's tensors, and the texts where it is worst; the"
        " page loads nothing from elsewhere",
    )  # fmt: skip
    what.add_argument(
        "--compare-with", type=Path, action="append", default=[], metavar="OTHER.json",
        help="also show the files of an earlier --json result on the same text, in the page's chart of sizes"
        " (repeatable)",
    )  # fmt: skip
    what.add_argument(
        "--losses", type=Path, metavar="FILE.json",
        help="divergence that each tensor adds at each type, measured by `sensitivity`: the page gets a map"
        " of what more bytes for each tensor would save",
    )  # fmt: skip


def _add_stored_base(what: TakesArguments) -> None:
    """Add what makes a base, or replaces it."""
    what.add_argument(
        "--kl-divergence-base", type=Path, action=StoreOutput, metavar="FILE",
        help="write the log probabilities of BASE, as llama-perplexity does; read them with --kl-divergence",
    )  # fmt: skip
    what.add_argument(
        "--kl-divergence",
        action="store_true",
        help="compare with --kl-divergence-base FILE instead of a BASE",
    )
    what.add_argument(
        "--keep", type=command.output_folder, action=StoreOutput, metavar="DIR",
        help="keep the base's states in DIR, or use those that an earlier run has kept there",
    )  # fmt: skip


def _evaluate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from gguf_tools.files.leftovers import is_unfinished
    from gguf_tools.files.named_files import output_path, write_whole
    from gguf_tools.progress import reporting
    from gguf_tools.text import json_text
    from imatrix.evaluate.pipeline import LABEL, evaluating
    from imatrix.texts.suite import read_suite

    _refuse_contradictions(parser, args)
    is_written = args.kl_divergence_base is not None and not args.kl_divergence
    logits = output_path(args.kl_divergence_base) if is_written else None
    outputs = [path for path in (args.json, args.html, logits) if path is not None]
    refuse_early([*outputs, args.keep, args.work], [args.text])
    base, quants = _models(args)
    options = _options(args, logits)
    if options.work is None or not is_unfinished(options.work):
        refuse_to_replace(outputs, force=args.force)
    page = None if args.html is None else _page_inputs(args)
    check = (lambda text, files: None) if page is None else page.refuse_unfit
    with ExitStack() as opened:
        with reporting(not args.quiet, LABEL) as report:
            suite = None if args.suite is None else read_suite(args.suite, args.quick)
            if suite is not None and page is not None:
                page.refuse_other_suites(suite)
            texts = args.text if suite is None else suite
            if args.dry_run:
                _foresee(base, texts, quants, options, report, check)
                return
            evaluation = opened.enter_context(evaluating(base, texts, quants, options, report, check))
        say(*evaluation.lines())
        if args.json is not None:
            write_whole(args.json, (json_text(evaluation.to_json()) + "\n").encode())
        if page is not None:
            write_whole(args.html, page.page(evaluation).encode())
    for output in outputs:
        say(f"wrote {output}")
    if page is not None:
        page.refuse_other_bases(evaluation)


def _foresee(
    base: Path | LogitsFile,
    texts: Path | Suite | None,
    quants: Sequence[Path],
    options: EvaluateOptions,
    report: Reporter,
    check: Check,
) -> None:
    """Print what a run would take."""
    from imatrix.forward.options import require_torch

    require_torch("evaluating models")
    from imatrix.calibrate.passes import foresee_comparison
    from imatrix.evaluate.bases.cached_states import is_kept_folder
    from imatrix.evaluate.run import open_comparison

    if options.keep is not None and not is_kept_folder(options.keep):
        options = replace(options, keep=None)  # a run would begin the folder
    with open_comparison(base, texts, quants, options, report, check) as planned:
        say(*foresee_comparison(planned, options).lines())


def _models(args: argparse.Namespace) -> tuple[Path | LogitsFile, list[Path]]:
    """Return the base and what to compare with it."""
    from convert.sources import model_path
    from imatrix.evaluate.options import LogitsFile

    if args.kl_divergence:
        return LogitsFile(args.kl_divergence_base), [Path(args.base), *args.quants]
    return model_path(args.base, quiet=args.quiet), args.quants


def _refuse_contradictions(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with arguments that contradict each other, or lack another."""
    if args.compare_with and args.html is None:
        parser.error("--compare-with is for the page of --html, which is missing")
    if args.losses and args.html is None:
        parser.error("--losses is for the page of --html, which is missing")
    _refuse_with_suite(parser, args)
    if args.kl_divergence:
        if args.kl_divergence_base is None:
            parser.error("--kl-divergence compares with a file: --kl-divergence-base FILE is missing")
        return
    if args.text is None and args.suite is None:
        parser.error("-f TEXT or --suite is missing")
    if not args.quants:
        parser.error(f"{args.base}: is taken for BASE, and no QUANT to compare with it is given")


def _refuse_with_suite(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with arguments that are for a text where there is a suite, or the other way round."""
    if args.suite is None:
        if args.quick:
            parser.error("--quick is for --suite, which is missing")
        return
    for name, option in (("chunk_size", "-c"), ("n_chunks", "--chunks")):
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"{option} is for -f: each class of a suite has its own context and chunks")
    for name in ("kl_divergence_base", "kl_divergence"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} is for one text, given with -f")


def _page_inputs(args: argparse.Namespace) -> PageInputs:
    """Read the other inputs of the page now, so that a bad file is refused before hours of computing."""
    from imatrix.evaluate.report.page import PageInputs

    return PageInputs.read(args.compare_with, args.losses)


def _options(args: argparse.Namespace, logits: Path | None) -> EvaluateOptions:
    from imatrix.evaluate.options import EvaluateOptions

    work = args.work
    output = args.json or args.html
    if work is None and output is not None:
        work = output.with_name(output.name + ".work")
    how = {"cut": cut_of(args), "forward": forward_options(args)}
    return filled(EvaluateOptions, args, **how, work=work, logits=logits)
