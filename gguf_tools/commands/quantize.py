"""The `quantize` command: llama-quantize's arguments, our plan and bytes; and `quantize lint`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from convert.options import AdapterOptions
from gguf_tools.argument_types import THREADS
from gguf_tools.choices import filled
from gguf_tools.commands import command, lint
from gguf_tools.commands.arguments.calibration import (
    Divergence,
    add_calibration_arguments,
    read_calibration,
    read_divergence,
    refuse_early_of,
)
from gguf_tools.commands.arguments.card import (
    add_card_arguments,
    read_card,
    refuse_foreign_cards,
    write_card_of,
)
from gguf_tools.commands.arguments.forward import add_force_of_text
from gguf_tools.commands.arguments.size import SizeArguments, add_size_arguments, is_sized, read_size
from gguf_tools.commands.arguments.types import (
    add_matrix_arguments,
    add_output_arguments,
    add_plan_arguments,
    add_requantize_argument,
    add_restart_argument,
    add_stream_argument,
    add_type_arguments,
    check_plan_arguments,
    is_type,
    overrides_of_files,
    parsing_arguments,
    plan_options,
    read_importances,
    refuse_grids_for_sizes,
)
from gguf_tools.commands.parser import ForeignFlag, add_foreign_flags, completes
from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.files.named_files import output_path
from gguf_tools.findings import teller
from gguf_tools.format.ggml_types import by_name
from gguf_tools.text import json_line, say
from quantize.formats import encodable
from quantize.options import QuantizeOptions
from quantize.plan.ik_recipes import IK_RECIPES
from quantize.plan.overrides import parse_layers
from quantize.plan.recipe import Recipe
from quantize.plan.recipes import ALIASES, FILE_TYPES, RECIPES, unknown_file_type
from quantize.roles import LAYOUTS

if TYPE_CHECKING:
    from convert.card.write import CardRequest
    from convert.checkpoint.streamed import StreamedFolder
    from convert.sources import SourceOptions
    from gguf_tools.commands.gguf.change import RepackRequest
    from quantize.padding import PadChoice
    from quantize.plan.recipe_files import Mixture
    from quantize.run import Run
    from quantize.run_options import RunOptions


USAGE = """{prog} [options]{gap}INPUT [OUTPUT.gguf] TYPE [THREADS]
       {prog} lint [options] MODEL TYPE"""

DESCRIPTION = """\
Quantize a GGUF file, or a split set named by any of its files. The output has the same bytes as
llama-quantize's. INPUT may also be a Hugging Face folder, or OWNER/NAME on the Hub, which is then converted
and quantized in one pass. OUTPUT defaults to ggml-model-TYPE.gguf beside INPUT. THREADS means the same as -t.
TYPE is a file type of the list below, or a recipe file (.json, .yaml or .yml), or several of them separated
by commas; several types need {ftype} or {FTYPE} in the name of OUTPUT. `quantize lint` says what TYPE would
do to a model."""

EPILOG = """\
examples:
  quantize model-bf16.gguf model-Q8_0.gguf Q8_0
  quantize --imatrix model.imatrix model-bf16.gguf model-Q4_K_M.gguf Q4_K_M
  quantize model-bf16.gguf 'model-{FTYPE}.gguf' Q4_K_M,Q5_K_M    the source is read once for both
  quantize --dry-run --imatrix model.imatrix model-bf16.gguf Q2_K      every tensor's type, and why
  quantize --tensor-type ffn_down_exps=Q6_K --tensor-type 'blk\\.[0-3]\\.=Q8_0' in.gguf Q4_K_M
  quantize --fallback attn_k_b=Q8_0 in.gguf out.gguf Q4_K_M
  quantize --pad auto in.gguf out.gguf Q2_K             lengthens rows of 1408 with zeros
  quantize --keep-grid Kimi-K2-Thinking k2.gguf Q8_0    experts as Q4_0 with their own codes, the rest Q8_0
  quantize --custom-q 'ffn_down_exps=iq3_k,ffn_.*_exps=iq2_ks' in.gguf out.gguf IQ4_KS    for ik_llama.cpp
  quantize --reuse old.gguf --imatrix new.imatrix in.gguf new.gguf Q4_K_M     only tensors with new data
  quantize --size 3.4bpw --losses losses.json --imatrix model.imatrix model-bf16.gguf model.gguf
  quantize --size 12GiB --calibrate calibration.txt model-bf16.gguf model.gguf     types and bytes chosen
  quantize lint --imatrix model.imatrix model-bf16.gguf mine.yaml

An importance matrix (--imatrix) says which columns of a weight matrix matter most. It helps a lot at 1 to 3
bits, some at 4, hardly at 5, and not at 6 and more. attn_kv_b and attn_v_b use each other's importances;
attn_k_b has separate importances for every head.

The length of a row must be a multiple of the type's block length, which is 256 elements for most types.
attn_k_b has rows of 128 (qk_nope_head_dim). Unless --fallback names a type, it gets the type with blocks of
32 that llama-quantize chooses: Q4_0 for Q2_K and Q3_K, Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL
for the IQ types. A type that --fallback names must fit the rows.

A recipe file holds a file type and options, in the options' own notation:
  file_type: Q4_K_M
  tensor-type: [attn_output=Q8_0, ffn_down_exps=Q6_K]
  fallback: [attn_k_b=Q8_0]
and also name, custom-q, output-tensor-type, token-embedding-type, pure, leave-output-tensor. Options of
the command line take precedence.

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
    return command.run(parser, lambda args: _carry_out(args, parser), words)


def make_parser(prog: str = "quantize") -> argparse.ArgumentParser:
    epilog = EPILOG + "\n".join(recipe_lines())
    parser = command.make_parser(prog, DESCRIPTION, epilog=epilog)
    parser.usage = USAGE.format(prog=prog, gap=" " if prog == "quantize" else f"\n{' ' * 11}")
    words = parser.add_argument("words", nargs="+", metavar="INPUT [OUTPUT] TYPE [THREADS]")
    completes(words, FILE_TYPES)
    add_matrix_arguments(parser)
    add_type_arguments(parser)
    add_requantize_argument(parser)
    add_size_arguments(parser)
    file = parser.add_argument_group("what goes into the file")
    file.add_argument(
        "--prune-layers", type=command.argument(parse_layers), default=(), metavar="L0,L1,...",
        help="leave these layers out, and renumber the others",
    )  # fmt: skip
    file.add_argument(
        "--mla", choices=LAYOUTS,
        help="layout of the attention tensors, if INPUT is a folder (default: split, or both for types that"
        " only ik_llama.cpp reads)",
    )  # fmt: skip
    command.add_flags(file, AdapterOptions)
    command.add_flags(file, QuantizeOptions, type="TYPE", or_with_size="; auto with --size")
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
    command.add_threads(parser)
    add_stream_argument(parser)
    add_restart_argument(parser)
    add_force_of_text(parser)
    command.add_scheduler(
        parser, ". With --calibrate, the workers round weights, and this machine computes the model"
    )
    add_output_arguments(parser)
    add_card_arguments(parser)
    add_plan_arguments(parser)
    add_foreign_flags(parser, "llama-quantize", FOREIGN_FLAGS)
    return parser


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line.

    named     INPUT
    output    None: beside INPUT
    types     file types and recipe files; with a size one, or none
    options   what to make of INPUT, apart from the type
    size      None: the types are those that are named
    measured  what to measure of the outputs, None: nothing
    card      what the card says, None: there is to be none
    run       how to run
    is_llama_s  llama-quantize would understand the command line too, so that its habits are expected
    stream    leave the weights of INPUT on the Hub
    """

    named: str
    output: Path | None
    types: tuple[str, ...]
    options: SourceOptions
    size: SizeArguments | None
    measured: Divergence | None
    card: CardRequest | None
    run: RunOptions
    is_llama_s: bool
    stream: bool

    @property
    def computes(self) -> bool:
        """Whether the model is computed, which takes its weights."""
        return (
            self.options.calibration is not None
            or self.measured is not None
            or (self.size is not None and self.size.losses is None)
        )

    def plan(
        self, source: Path | StreamedFolder, file_type: str | Mixture, *, allow_problems: bool
    ) -> AbstractContextManager[Run]:
        from convert.sources import plan_source

        return plan_source(source, self.output, file_type, self.options, allow_problems=allow_problems)


def _carry_out(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.repack or args.repack_pattern is not None:
        from gguf_tools.commands.gguf import change

        change.repack(_read_repack(args, parser))
    else:
        _quantize(_read(args, parser))


def _read(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _Request:
    from convert.sources import SourceOptions
    from quantize.plan.overrides import parse_kv_override
    from quantize.run_options import RunOptions

    named, output, type_, n_threads = command_words(args, parser, needs_type=not is_sized(args))
    refuse_early_of(args, output)
    check_plan_arguments(args, parser)
    is_llama_s = _is_llama_s(args, parser) and not Path(named).is_dir()
    size, types = read_size(args, type_), plan_options(args)
    refuse_grids_for_sizes(args.keep_grid, size is not None)
    with parsing_arguments():
        kv_overrides = tuple(map(parse_kv_override, args.override_kv))
    types = replace(types, prune_layers=args.prune_layers)
    if size is not None:  # which has taken the others in
        types = replace(types, overrides=overrides_of_files(args))
    request = filled(
        _Request,
        args,
        named=named,
        output=output,
        types=tuple((type_ or "").split(",")),
        options=filled(
            SourceOptions,
            args,
            types=types,
            kv_overrides=kv_overrides,
            importances=read_importances(args),
            calibration=read_calibration(args),
            program=None if size is None else size.rules.target,
        ),
        size=size,
        measured=read_divergence(args),
        card=read_card(args),
        run=filled(
            RunOptions,
            args,
            n_threads=n_threads,
            replace=is_llama_s,
            tell=teller(quiet=args.quiet),
        ),
        is_llama_s=is_llama_s,
    )
    if request.stream and request.computes:
        raise BadRequest(
            "--stream can't be used here: --calibrate, --evaluate and --size without --losses compute the"
            " model, so all its weights must be downloaded; leave --stream out"
        )
    if request.dry_run and size is not None and size.losses is None:
        raise BadRequest(
            "--dry-run computes nothing, but --size without --losses must measure the divergence that each"
            " tensor adds; measure it with `sensitivity` first, and name its file with --losses"
        )
    return request


def _quantize(request: _Request) -> None:
    from convert.sources import source_folder
    from quantize.plan.recipe_files import find_mixture
    from quantize.report import dry_run_lines, result_lines
    from quantize.run import execute_together

    source = source_folder(request.named, stream=request.stream, dry_run=request.dry_run, quiet=request.quiet)
    if request.output is not None and request.output.exists() and not Path(source).exists():
        raise BadRequest(f"{source}: no such file, but OUTPUT exists; INPUT comes first")
    types: Sequence[tuple[str | Mixture, PadChoice | None]]
    if request.size is None:
        types = [(each, request.options.pad) for each in request.types]
    else:
        types = list(_choose_types(request, request.size, source))
    with ExitStack() as stack:
        runs = [
            stack.enter_context(_padded(request, pad).plan(source, each, allow_problems=request.dry_run))
            for each, pad in types
        ]
        if request.dry_run:
            for run in runs:
                say(*dry_run_lines(run, request.run, as_json=request.json, summary=request.summary))
            return
        if request.measured is not None:
            request.measured.refuse(runs[0])
        refuse_foreign_cards(request.card, [output for run in runs for output in run.output_paths])
        names = ", ".join((find_mixture(each) if isinstance(each, str) else each).name for each, _ in types)
        label = f"quantizing to {names}"
        results = execute_together(runs, replace(request.run, progress=not request.quiet, label=label))
    for result in () if request.quiet and not request.json else results:
        say(*[json_line(result.to_json())] if request.json else result_lines(result))
        if result.replaced and request.is_llama_s and not request.json:
            say(_LIKE_LLAMA)
    made = [result.paths[0] for result in results]
    write_card_of(made, request.card, Path(source), request.typed, quiet=request.quiet or request.json)
    if request.measured is not None:
        for output in made:
            request.measured.print_of(Path(source), output)


_LLAMA_S = frozenset(
    {
        "words", "imatrix", "include_weights", "exclude_weights", "pure", "leave_output_tensor",
        "output_tensor_type", "token_embedding_type", "tensor_type", "tensor_type_file", "custom_q",
        "prune_layers", "keep_split", "override_kv", "allow_requantize", "dry_run", "repack",
        "repack_pattern",
        "quiet", "verbose", "timeout",
        "typed", "remarks",
    }
)  # fmt: skip
"""Arguments that llama-quantize and ik_llama.cpp's have too, and those that change nothing."""

_LIKE_LLAMA = (
    "note: replaced the existing file without asking, as llama-quantize does; with any option that"
    " llama-quantize lacks, --force would be needed"
)


def _is_llama_s(args: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Whether only arguments were given that llama-quantize has, too."""
    ours = (name for name in vars(args) if name not in _LLAMA_S)
    several = any("," in word and is_type(word) for word in args.words)
    return not several and all(getattr(args, name) == parser.get_default(name) for name in ours)


def _padded(request: _Request, pad: PadChoice | None) -> _Request:
    return replace(request, options=replace(request.options, pad=pad))


def _choose_types(
    request: _Request, size: SizeArguments, source: Path | StreamedFolder
) -> Iterator[tuple[Mixture, PadChoice | None]]:
    """Choose the mixture for each size that is asked for, and the padding; say what was chosen and why."""
    from quantize.size.show import expected_lines, map_lines, sized_lines
    from quantize.size.solve import Planner, curve, size_padded

    def planner_of(pad: PadChoice | None) -> Planner:
        padded = _padded(request, pad)
        return lambda mixture: padded.plan(source, mixture, allow_problems=True)

    is_calibrated = request.options.calibration is not None
    for wanted in size.requests(Path(source), request.output, calibrated=is_calibrated):
        sized, pad = size_padded(planner_of, wanted, request.options.pad)
        if size.curve is not None:
            from imatrix.evaluate.report.standalone import plot_curve

            plot_curve(curve(sized, wanted, planner_of(pad)), sized, size.curve)
        if not request.json:
            chosen = sized.chosen
            expected = expected_lines(chosen, wanted.sensitivities)
            say(*sized_lines(sized), *expected, *map_lines(chosen.types))
        size.save(sized)
        yield sized.mixture, pad


def _read_repack(args: argparse.Namespace, parser: argparse.ArgumentParser) -> RepackRequest:
    from convert.sources import model_path
    from gguf_tools.commands.gguf.change import RepackRequest
    from quantize.plan.decide import PlanOptions
    from quantize.repack.rules import RepackOptions
    from quantize.run_options import RunOptions

    if not args.repack:
        parser.error("--repack-pattern needs --repack")
    if is_sized(args) or args.imatrix is not None or plan_options(args) != PlanOptions():
        parser.error(
            "--repack changes no weight: options about types, sizes and importances don't go with it"
        )
    named, output, _, n_threads = command_words(args, parser, needs_type=False)
    if output is None and not args.dry_run:
        parser.error("--repack needs OUTPUT")
    patterns = tuple(args.repack_pattern.split(",")) if args.repack_pattern else ()
    how = {"n_threads": n_threads, "replace": _is_llama_s(args, parser), "reuse": (), "scheduler": None}
    return filled(
        RepackRequest,
        args,
        source=model_path(named, quiet=args.quiet),
        output=output,
        options=filled(RepackOptions, args, only=patterns),
        run=filled(RunOptions, args, **how),
    )


def command_words(
    args: argparse.Namespace, parser: argparse.ArgumentParser, *, needs_type: bool = True
) -> tuple[str, Path | None, str | None, int | None]:
    """Read `INPUT [OUTPUT] TYPE [THREADS]` as (input, output or None, type or None, threads or None).

    As in llama-quantize, a second word that is a type is the type. With a size, there may be no type. The
    number of threads may also be that of -t.
    """
    words, n_threads = args.words, args.n_threads
    source, *rest = words
    output = None
    if rest and not is_type(rest[0]):
        output, *rest = rest
    type_ = None
    if needs_type or (rest and not rest[0].isdecimal()):
        if not rest or not is_type(rest[0]):
            parser.error(_no_type_text(words))
        type_, *rest = rest
    if len(rest) > 1:
        parser.error(f"unexpected argument {rest[1]!r}")
    if rest:
        if output is None and not rest[0].isdecimal():
            parser.error(_no_type_text(words))
        try:
            last = int(THREADS.parse(rest[0]))
        except BadArgument as error:
            parser.error(f"THREADS: {error}")
        if n_threads not in (None, last):
            parser.error(f"-t is {n_threads}, but THREADS is {last}: give only one of them")
        n_threads = last
    return source, None if output is None else output_path(output), type_, n_threads


def _no_type_text(words: Sequence[str]) -> str:
    """Describe the mistake in words that have no type in its place."""
    types = [word for word in words if not word.isdecimal() and is_type(word)]
    if types:
        others = [word for word in words if word not in types]
        return f"TYPE comes after the files: quantize {' '.join([*others, *types])}"
    last = words[-2] if len(words) > 3 and words[-1].isdecimal() else words[-1]
    looks_like_a_file = len(words) < 3 and (Path(last).suffix == ".gguf" or Path(last).exists())
    if looks_like_a_file:
        return "TYPE is missing, for instance Q4_K_M"
    return unknown_file_type(last)


def recipe_lines() -> Iterator[str]:
    """Yield the lines of a list of all file types, for --help."""
    yield from map(_recipe_line, RECIPES.values())
    yield "  " + ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    interleaved = [r for r in IK_RECIPES.values() if r.default and by_name(r.default).rows_interleaved > 1]
    yield "\ntypes of ik_llama.cpp, which only it can read:"
    yield from (_recipe_line(recipe) for recipe in IK_RECIPES.values() if recipe not in interleaved)
    yield "\nthe same with rows interleaved, for CPUs (see gguf-tools repack):"
    yield from (_recipe_line(recipe) for recipe in interleaved)


def _recipe_line(recipe: Recipe) -> str:
    number = "" if recipe.file_type is None else str(recipe.file_type)
    if recipe.default is None:
        what = "every tensor as it is"
    else:
        what = f"mostly {recipe.default}, {by_name(recipe.default).bits_per_weight:.2f} bits"
        what += ", needs --imatrix" * recipe.always_needs_importances
    types = {recipe.default, *(rule.type for rule in recipe.rules)} - {None}
    limit = "" if types <= {*encodable()} else " (plan only)"
    return f"  {recipe.name:10} {number:>3}  {what}{limit}"
