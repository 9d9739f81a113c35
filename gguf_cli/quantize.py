"""The `quantize` command: llama-quantize's arguments, our plan and bytes; and `quantize lint`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_cli import command, lint
from gguf_cli.arguments.calibration import (
    add_calibration_arguments,
    evaluate_output,
    read_calibration,
    refuse_evaluation_text,
)
from gguf_cli.arguments.card import add_card_arguments, finish_card, prepare_card
from gguf_cli.arguments.command_words import command_words
from gguf_cli.arguments.list_of_types import recipe_lines
from gguf_cli.arguments.size import add_size_arguments, is_sized
from gguf_cli.arguments.types import (
    add_matrix_arguments,
    add_output_arguments,
    add_plan_arguments,
    add_requantize_argument,
    add_restart_argument,
    add_stream_argument,
    add_type_arguments,
    check_plan_arguments,
    parsing_arguments,
    plan_options,
    read_importances,
    refuse_to_compute,
)
from gguf_cli.completion import completes
from gguf_cli.parser import ForeignFlag, add_foreign_flags
from gguf_tools import __version__
from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.text import json_line
from quantize.mla_layout.names import LAYOUTS
from quantize.plan.recipe_files import is_recipe_file
from quantize.plan.recipes import FILE_TYPES

if TYPE_CHECKING:
    from quantize.plan.decide import PlanOptions
    from quantize.plan.recipe_files import Mixture
    from quantize.run import Run

USAGE = """{prog} [options]{gap}INPUT [OUTPUT.gguf] TYPE [THREADS]
       {prog} lint [options] TYPE MODEL"""

DESCRIPTION = """\
Quantize a GGUF file (or a split one, given any of its parts): the bytes that llama-quantize writes.
INPUT may also be a Hugging Face folder, or OWNER/NAME on the Hub, which is then converted and quantized
in one pass. OUTPUT
defaults to ggml-model-TYPE.gguf beside INPUT, THREADS to one per core. TYPE is a file type of the list
below, or a recipe file (.json, .yaml or .yml), or several with commas between them, in which case OUTPUT
needs {ftype} or {FTYPE} in its name. `quantize lint` says what TYPE would do to a model."""

EPILOG = """\
examples:
  quantize model-bf16.gguf model-Q8_0.gguf Q8_0
  quantize --imatrix model.imatrix model-bf16.gguf model-Q4_K_M.gguf Q4_K_M
  quantize model-bf16.gguf 'model-{FTYPE}.gguf' Q4_K_M,Q5_K_M    the source is read once for both
  quantize --dry-run --imatrix model.imatrix model-bf16.gguf Q2_K      every tensor's type, and why
  quantize --tensor-type ffn_down_exps=Q6_K --tensor-type 'blk\\.[0-3]\\.=Q8_0' in.gguf Q4_K_M
  quantize --fallback attn_k_b=Q8_0 in.gguf out.gguf Q4_K_M
  quantize --custom-q 'ffn_down_exps=iq3_k,ffn_.*_exps=iq2_ks' in.gguf out.gguf IQ4_KS    for ik_llama.cpp
  quantize --reuse old.gguf --imatrix new.imatrix in.gguf new.gguf Q4_K_M     only what is made of other data
  quantize --size 3.4bpw --losses losses.json --imatrix model.imatrix model-bf16.gguf model.gguf
  quantize --size 12GiB --calibrate calibration.txt model-bf16.gguf model.gguf     types and bytes chosen
  quantize lint --imatrix model.imatrix mine.yaml model-bf16.gguf

An importance matrix (--imatrix) says which columns of a weight matter. It helps a lot at 1 to 3 bits,
some at 4, hardly at 5, and not at 6 and more. Data for attn_kv_b serve attn_v_b and the other way round;
attn_k_b has values of its own for every head.

Rows must be whole blocks, of 256 elements for most types. attn_k_b has rows of 128 (qk_nope_head_dim), so
unless --fallback names a type it gets the one of 32-blocks that llama-quantize takes: Q4_0 for Q2_K and
Q3_K, Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL for the IQ types. A named type must fit.

A recipe file holds a file type and options, in the options' own notation:
  file_type: Q4_K_M
  tensor-type: [attn_output=Q8_0, ffn_down_exps=Q6_K]
  fallback: [attn_k_b=Q8_0]
and also name, custom-q, output-tensor-type, token-embedding-type, pure, leave-output-tensor. Options of
the command line go first.

types (plan only: some of its types can't be encoded yet):
"""

FOREIGN_FLAGS = (
    ForeignFlag(
        ("--max-buffer-size",), "memory is bounded by a few strips of rows for each thread", 1, refused=False
    ),
)


def main(argv: Sequence[str] | None = None, prog: str = "quantize") -> int:
    """Run the command; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if list(words[:1]) == ["lint"]:  # a model of that name is ./lint
        return lint.main(words[1:], f"{prog} lint")
    parser = make_parser(prog)
    return command.run(parser, lambda args: _quantize(args, parser), words)


def make_parser(prog: str = "quantize") -> argparse.ArgumentParser:
    epilog = EPILOG + "\n".join(recipe_lines())
    parser = command.make_parser(prog, DESCRIPTION, epilog=epilog, version=__version__)
    parser.usage = USAGE.format(prog=prog, gap=" " if prog == "quantize" else f"\n{' ' * 11}")
    words = parser.add_argument("words", nargs="+", metavar="INPUT [OUTPUT] TYPE [THREADS]")
    completes(words, FILE_TYPES)
    add_matrix_arguments(parser)
    add_type_arguments(parser)
    add_requantize_argument(parser)
    add_size_arguments(parser)
    file = parser.add_argument_group("what goes into the file")
    file.add_argument(
        "--prune-layers", metavar="L0,L1,...", help="leave these layers out and number the rest anew"
    )
    file.add_argument(
        "--mla", choices=LAYOUTS,
        help="layout of attention, where INPUT is a folder (default: split, or both for types that only"
        " ik_llama.cpp reads)",
    )  # fmt: skip
    file.add_argument("--keep-split", action="store_true", help="write as many parts as the input has")
    file.add_argument(
        "--repack", action="store_true",
        help="only interleave rows, as ik_llama.cpp does it; TYPE is not needed (see gguf-tools repack)",
    )  # fmt: skip
    file.add_argument(
        "--repack-pattern", metavar="REGEX,...", help="with --repack: only tensors whose name matches one"
    )
    file.add_argument(
        "--override-kv", action="append", default=[], metavar="KEY=TYPE:VALUE",
        help="set metadata, TYPE one of int, float, bool, str (repeatable)",
    )  # fmt: skip
    add_calibration_arguments(parser)
    add_stream_argument(parser)
    add_restart_argument(parser)
    command.add_scheduler(parser)
    add_output_arguments(parser)
    add_card_arguments(parser)
    add_plan_arguments(parser)
    add_foreign_flags(parser, "llama-quantize", FOREIGN_FLAGS)
    return parser


def _quantize(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from convert.sources import source_folder
    from quantize.plan.recipe_files import find_mixture
    from quantize.progress import ProgressBar
    from quantize.report import dry_run_lines, result_lines
    from quantize.run import execute_together
    from quantize.run_options import RunOptions

    if args.repack or args.repack_pattern is not None:
        _repack(args, parser)
        return
    named, output, type_, n_threads = command_words(args.words, parser, needs_type=not is_sized(args))
    check_plan_arguments(args, parser)
    computes = bool(args.calibrate or args.evaluate or (is_sized(args) and args.losses is None))
    refuse_to_compute(args, computes=computes)
    headers = args.dry_run and not computes
    args.folder = source_folder(named, stream=args.stream, dry_run=headers, quiet=args.quiet)
    source = Path(args.folder)
    if source.is_dir() and (args.keep_split or args.override_kv):
        parser.error("--keep-split and --override-kv need a GGUF file; INPUT is a folder")
    if args.mla is not None and not source.is_dir():
        parser.error("--mla needs a folder; gguf-tools mla-layout changes the layout of a file")
    plan = _plan_folder if source.is_dir() else _plan_file
    if output is not None and output.exists() and not source.exists():
        raise BadRequest(f"{source}: no such file, though OUTPUT is there; INPUT comes first")
    types: Sequence[str | Mixture] = (type_ or "").split(",")
    if is_sized(args):
        types = [_choose_types(args, source, output, type_)]
    names = ", ".join((find_mixture(each) if isinstance(each, str) else each).name for each in types)
    with ExitStack() as stack:
        runs = [stack.enter_context(plan(args, source, output, each)) for each in types]
        if args.dry_run:
            how = RunOptions(n_threads, reuse=args.reuse)
            for run in runs:
                for line in dry_run_lines(run, how, as_json=args.json, summary=args.summary):
                    print(line)
            return
        if args.evaluate is not None:
            refuse_evaluation_text(args, runs[0])
        card = prepare_card(args, source, [output for run in runs for output in run.output_paths])
        with ProgressBar(f"quantizing to {names}", quiet=args.quiet) as bar:
            options = RunOptions(n_threads, args.restart, args.reuse, args.verify, scheduler=args.scheduler)
            results = execute_together(runs, bar.shows(options))
    for result in () if args.quiet and not args.json else results:
        for line in [json_line(result.to_json())] if args.json else result_lines(result):
            print(line)
    finish_card(card, args, [result.paths[0] for result in results])
    for result in results if args.evaluate is not None else ():
        evaluate_output(args, source, result.paths[0])


def _repack(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from convert.sources import model_path
    from gguf_cli.gguf.repack import carry_out
    from quantize.plan.decide import PlanOptions
    from quantize.repack.rules import RepackOptions

    if not args.repack:
        parser.error("--repack-pattern needs --repack")
    if is_sized(args) or args.imatrix is not None or plan_options(args) != PlanOptions():
        parser.error(
            "--repack changes no weight: options about types, sizes and importances don't go with it"
        )
    named, output, _, n_threads = command_words(args.words, parser, needs_type=False)
    if output is None and not args.dry_run:
        parser.error("--repack needs OUTPUT")
    patterns = tuple(args.repack_pattern.split(",")) if args.repack_pattern else ()
    options = RepackOptions(only=patterns, keep_split=args.keep_split)
    carry_out(args, model_path(named, quiet=args.quiet), output, options, n_threads, force=True)


def _choose_types(args: argparse.Namespace, source: Path, output: Path | None, type_: str | None) -> Mixture:
    """Return the mixture for the size that is asked for, after saying what was chosen and why."""
    from calibrate.size.map import expected_lines, map_lines
    from calibrate.size.solve import curve, size_mixture, sized_lines
    from gguf_cli.arguments.size import check_size_arguments, save_choice, size_request

    if type_ is not None and is_recipe_file(type_):
        raise BadArgument(f"{type_}: a recipe file has its own types; with --size, name a file type or none")
    check_size_arguments(args)
    if args.losses is None:
        from gguf_cli.arguments.sensitivity_for_size import losses_for_size

        args.losses = losses_for_size(args, source, output)
    request = size_request(args, type_, args.losses)
    planned = argparse.Namespace(**{**vars(args), "dry_run": True, "tensor_type": [], "custom_q": []})

    def planner(mixture: Mixture) -> AbstractContextManager[Run]:
        return (_plan_folder if source.is_dir() else _plan_file)(planned, source, output, mixture)

    sized = size_mixture(planner, request)
    if args.curve is not None:
        from calibrate.size.plot import plot_curve

        plot_curve(curve(sized, request, planner), sized, args.curve)
    if not args.json:
        chosen = sized.chosen
        for line in (*sized_lines(sized), *expected_lines(chosen, request.losses), *map_lines(chosen.types)):
            print(line)
    save_choice(args, sized)
    args.tensor_type, args.custom_q = [], []  # the chosen types have taken them in
    return sized.mixture


def _plan_file(
    args: argparse.Namespace, source: Path, output: Path | None, types: str | Mixture
) -> AbstractContextManager[Run]:
    from quantize.options import QuantizeOptions
    from quantize.pipeline import plan_run
    from quantize.plan.overrides import parse_kv_override

    with parsing_arguments():
        kv_overrides = [parse_kv_override(text) for text in args.override_kv]
    options = QuantizeOptions(
        types=_options(args),
        kv_overrides=kv_overrides,
        importances=read_importances(args),
        keep_split=args.keep_split,
        provenance=not args.no_provenance,
        calibration=read_calibration(args),
    )
    return plan_run(source, output, types, options, allow_problems=args.dry_run)


def _plan_folder(
    args: argparse.Namespace, source: Path, output: Path | None, types: str | Mixture
) -> AbstractContextManager[Run]:
    from convert.options import ConvertOptions
    from convert.pipeline import plan_run

    options = ConvertOptions(
        outtype=types,
        importances=read_importances(args),
        types=_options(args),
        provenance=not args.no_provenance,
        calibration=read_calibration(args),
        mla=args.mla,
        program=args.target if is_sized(args) else None,
    )
    return plan_run(args.folder, output, options, allow_problems=args.dry_run)


def _options(args: argparse.Namespace) -> PlanOptions:
    from quantize.plan.overrides import parse_layers

    with parsing_arguments():
        layers = parse_layers(args.prune_layers) if args.prune_layers else ()
    return replace(plan_options(args), prune_layers=layers)


if __name__ == "__main__":
    raise SystemExit(main())
