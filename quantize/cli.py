"""The `quantize` command: llama-quantize's arguments, our plan and bytes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools import __version__, command
from gguf_tools.errors import BadRequest
from gguf_tools.ggml_types import by_name
from quantize.formats import available
from quantize.recipes import ALIASES, RECIPES, find_recipe

if TYPE_CHECKING:
    from quantize.decide import PlanOptions
    from quantize.importance import ImportanceFile
    from quantize.pipeline import Preparation
    from quantize.recipes import Recipe

USAGE = "quantize [options] INPUT.gguf [OUTPUT.gguf] TYPE [THREADS]"

DESCRIPTION = """\
Quantize a GGUF file (or a split one, given any of its parts): the bytes that llama-quantize writes.
OUTPUT defaults to ggml-model-TYPE.gguf beside INPUT, THREADS to one per core."""

EPILOG = """\
examples:
  quantize model-bf16.gguf model-Q8_0.gguf Q8_0
  quantize --imatrix model.imatrix model-bf16.gguf model-Q4_K_M.gguf Q4_K_M
  quantize --dry-run --imatrix model.imatrix model-bf16.gguf Q2_K      every tensor's type, and why
  quantize --tensor-type ffn_down_exps=Q6_K --tensor-type 'blk\\.[0-3]\\.=Q8_0' in.gguf out.gguf Q4_K_M

An importance matrix (--imatrix) says which columns of a weight matter. It helps a lot at 1 to 3 bits,
some at 4, hardly at 5, and not at 6 and more. Data for attn_kv_b serve attn_v_b and the other way round;
attn_k_b has values of its own for every head.

types:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = _parser()
    return command.run(parser, lambda args: _quantize(args, parser), argv)


def _recipe_lines() -> Iterator[str]:
    known = set(available())
    for recipe in RECIPES.values():
        number = "" if recipe.file_type is None else str(recipe.file_type)
        if recipe.default is None:
            what = "every tensor as it is"
        else:
            what = f"mostly {recipe.default}, {by_name(recipe.default).bits_per_weight:.2f} bits"
        types = {recipe.default, *(rule.type for rule in recipe.rules)} - {None}
        limit = "" if types <= known else " (plan only: some of its types can't be encoded yet)"
        yield f"  {number:>2}  {recipe.name:9}  {what}{limit}"
    yield "  " + ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())


def _parser() -> argparse.ArgumentParser:
    epilog = EPILOG + "\n".join(_recipe_lines())
    parser = command.make_parser("quantize", DESCRIPTION, epilog=epilog, version=__version__)
    parser.usage = USAGE
    parser.add_argument("words", nargs="+", metavar="INPUT [OUTPUT] TYPE [THREADS]")
    matrix = parser.add_argument_group("importance matrix")
    matrix.add_argument("--imatrix", type=Path, metavar="FILE", help="importance matrix, GGUF or .dat")
    matrix.add_argument(
        "--include-weights", action="append", default=[], metavar="NAME",
        help="use importances only for tensors whose name contains NAME (repeatable)",
    )  # fmt: skip
    matrix.add_argument(
        "--exclude-weights", action="append", default=[], metavar="NAME",
        help="use no importances for tensors whose name contains NAME (repeatable)",
    )  # fmt: skip
    types_ = parser.add_argument_group("which type for which tensor")
    types_.add_argument("--pure", action="store_true", help="one type for all tensors, no mixture")
    types_.add_argument("--leave-output-tensor", action="store_true", help="leave output.weight as it is")
    types_.add_argument("--output-tensor-type", metavar="TYPE", help="ggml type of output.weight")
    types_.add_argument("--token-embedding-type", metavar="TYPE", help="ggml type of token_embd.weight")
    types_.add_argument(
        "--tensor-type", action="append", default=[], metavar="REGEX=TYPE",
        help="ggml type of tensors whose name matches; the first match wins (repeatable)",
    )  # fmt: skip
    types_.add_argument(
        "--tensor-type-file", action="append", default=[], type=Path, metavar="FILE",
        help="REGEX=TYPE words, separated by spaces or newlines (repeatable)",
    )  # fmt: skip
    types_.add_argument(
        "--allow-requantize", action="store_true",
        help="quantize tensors that are quantized already; quality suffers",
    )  # fmt: skip
    file = parser.add_argument_group("what goes into the file")
    file.add_argument(
        "--prune-layers", metavar="L0,L1,...", help="leave these layers out and number the rest anew"
    )
    file.add_argument("--keep-split", action="store_true", help="write as many parts as the input has")
    file.add_argument(
        "--override-kv", action="append", default=[], metavar="KEY=TYPE:VALUE",
        help="set metadata, TYPE one of int, float, bool, str (repeatable)",
    )  # fmt: skip
    plan = parser.add_argument_group("looking before writing")
    plan.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the exact size; read no weight, write nothing",
    )
    plan.add_argument("--json", action="store_true", help="with --dry-run: the plan as one JSON object")
    return parser


def _quantize(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from quantize.pipeline import prepare, quantize
    from quantize.progress import ProgressBar
    from quantize.report import result_lines

    source, output, recipe, n_threads = _words(args.words, parser)
    if args.json and not args.dry_run:
        parser.error("--json prints a plan: it needs --dry-run")
    options = _plan_options(args)
    kv_overrides = _kv_overrides(args)
    importances = _importances(args)
    if args.dry_run:
        from gguf_tools.shards import open_gguf
        from quantize.pipeline import default_output

        with open_gguf(source) as opened:
            preparation = prepare(
                opened,
                output or default_output(source, recipe),
                recipe,
                importances=importances,
                options=options,
                keep_split=args.keep_split,
                kv_overrides=kv_overrides,
                allow_missing_data=True,
            )
        _print_plan(preparation, as_json=args.json)
        return
    with ProgressBar(f"quantizing to {recipe.name}") as bar:
        result = quantize(
            source,
            output,
            recipe.name,
            importances=importances,
            options=options,
            keep_split=args.keep_split,
            kv_overrides=kv_overrides,
            n_threads=n_threads,
            progress=bar.start,
        )
    for line in result_lines(result):
        print(line)


def _words(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[Path, Path | None, Recipe, int | None]:
    """Return (input, output or None, recipe, threads or None) of `INPUT [OUTPUT] TYPE [THREADS]`.

    As in llama-quantize, a second word that is a type is the type.
    """
    source, *rest = words
    output = None
    if rest and not _is_type(rest[0]):
        output, *rest = rest
    if not rest:
        parser.error("no TYPE is given")
    try:
        recipe = find_recipe(rest[0])
    except BadRequest as error:
        parser.error(str(error))
    if len(rest) > 2:
        parser.error(f"unexpected argument {rest[2]!r}")
    n_threads = None
    if len(rest) == 2:
        if not rest[1].isdecimal() or int(rest[1]) < 1:
            parser.error(f"THREADS is {rest[1]!r}, expected a whole number from 1")
        n_threads = int(rest[1])
    return Path(source), None if output is None else Path(output), recipe, n_threads


def _is_type(word: str) -> bool:
    try:
        find_recipe(word)
    except BadRequest:
        return False
    return True


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    from quantize.decide import PlanOptions
    from quantize.overrides import parse_layers, parse_override_file, parse_overrides, parse_type

    overrides = parse_overrides(args.tensor_type)
    for path in args.tensor_type_file:
        overrides += parse_override_file(_read_text(path))
    return PlanOptions(
        overrides=overrides,
        pure=args.pure,
        leave_output=args.leave_output_tensor,
        output_type=parse_type(args.output_tensor_type) if args.output_tensor_type else None,
        embedding_type=parse_type(args.token_embedding_type) if args.token_embedding_type else None,
        prune_layers=parse_layers(args.prune_layers) if args.prune_layers else (),
        allow_requantize=args.allow_requantize,
    )


def _kv_overrides(args: argparse.Namespace) -> list:
    from quantize.overrides import parse_kv_override

    return [parse_kv_override(text) for text in args.override_kv]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{path}: not a text file ({error.reason} at byte {error.start})") from error


def _importances(args: argparse.Namespace) -> ImportanceFile | None:
    if args.imatrix is None:
        if args.include_weights or args.exclude_weights:
            raise BadRequest("--include-weights and --exclude-weights need --imatrix")
        return None
    from dataclasses import replace

    from imatrix.store import load
    from quantize.importance import select

    found = load(args.imatrix)
    entries = select(found.entries, args.include_weights, args.exclude_weights)
    if not entries:
        raise BadRequest(
            f"{args.imatrix}: none of its {len(found.entries)} entries is left by --include-weights"
            " or --exclude-weights"
        )
    return replace(found, entries=entries)


def _print_plan(preparation: Preparation, *, as_json: bool) -> None:
    from quantize.report import plan_lines, total_lines

    if as_json:
        print(json.dumps(preparation.plan.to_json(preparation.total_bytes), ensure_ascii=False))
        return
    for line in (*plan_lines(preparation.plan), *total_lines(preparation)):
        print(line)


if __name__ == "__main__":
    raise SystemExit(main())
