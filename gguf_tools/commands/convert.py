"""The `convert-hf-to-gguf` command: the flags of llama.cpp's converter that fit, and `--mla`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from convert.architectures.options import DECLARED, declared, flag
from convert.options import ConvertOptions
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.arguments.card import (
    add_card_arguments,
    read_card,
    refuse_foreign_cards,
    write_card_of,
)
from gguf_tools.commands.arguments.types import (
    add_matrix_arguments,
    add_output_arguments,
    add_plan_arguments,
    add_restart_argument,
    add_stream_argument,
    add_type_arguments,
    check_plan_arguments,
    plan_options,
    read_importances,
)
from gguf_tools.commands.command import add_force
from gguf_tools.commands.parser import ForeignFlag, add_foreign_flags, completes
from gguf_tools.text import json_line, say
from quantize.plan.recipes import FILE_TYPES

if TYPE_CHECKING:
    from convert.card.write import CardRequest
    from quantize.run import Result
    from quantize.run_options import RunOptions


DESCRIPTION = """\
Turn a Hugging Face folder of a DeepSeek model (V2, V2-Lite, V2.5, V3, V3.1, R1) or of another family that
--print-supported-models lists into a GGUF file.
Weights may be F32, F16, BF16 or quantized: FP8, GPTQ, AWQ, compressed-tensors, bitsandbytes, MXFP4, NVFP4 and
others are decoded while they are read. No code of the model's folder is ever run."""

EPILOG = """\
examples:
  convert-hf-to-gguf DeepSeek-V2-Lite --outfile lite-bf16.gguf --outtype bf16
  convert-hf-to-gguf DeepSeek-V3 --outfile 'v3-{ftype}.gguf' --split-max-size 50G
  convert-hf-to-gguf DeepSeek-V3 --mla both            with attn_kv_b too, for ik_llama.cpp
  convert-hf-to-gguf Kimi-K2-Thinking --outtype q8_0 --keep-grid       experts as Q4_0 with their own codes
  convert-hf-to-gguf Qwen3-4B --lora my-adapter --outtype Q4_K_M       a fine-tune, merged on the way
  convert-hf-to-gguf gemma-3-4b-it --mmproj --outtype q8_0            the part that sees images
  convert-hf-to-gguf DeepSeek-V3 --dry-run             what would be written, and how large
  convert-hf-to-gguf deepseek-ai/DeepSeek-V3 --outtype Q4_K_M --stream   weights are not kept on the disk
  convert-hf-to-gguf DeepSeek-V3 --outtype Q4_K_M --imatrix v3.imatrix --outfile v3-Q4_K_M.gguf   in one pass

MLA layouts:
  split   attn_k_b and attn_v_b, one matrix per head: what llama.cpp wants
  both    attn_kv_b, attn_k_b and attn_v_b as 2-D matrices: what ik_llama.cpp wants, and the default
          for types that only ik_llama.cpp reads
  none    only attn_kv_b: plain attention, with its large cache
"""

FOREIGN_FLAGS = (
    ForeignFlag(("--no-lazy",), "weights are read piece by piece in any case", refused=False),
    ForeignFlag(("--use-temp-file",), "memory is bounded without a temporary file", refused=False),
    ForeignFlag(("--remote",), "give OWNER/NAME in place of a folder, as for hf download"),
    ForeignFlag(
        ("--fp8-as-q8",),
        "use --outtype Q8_0, or a recipe file in which --tensor-type says what becomes Q8_0",
    ),
    ForeignFlag(("--fuse-gate-up-exps",), "gate and up stay apart, as llama.cpp reads them too"),
    ForeignFlag(("--fuse-qkv",), "queries, keys and values stay apart, as llama.cpp reads them too"),
    ForeignFlag(("--dspark",), "drafts for speculative decoding are not converted"),
    ForeignFlag(("--target-model-dir",), "drafts for speculative decoding are not converted", 1),
    ForeignFlag(("--mistral-format",), "convert the folder's Hugging Face form instead"),
    ForeignFlag(("--disable-mistral-community-chat-template",), "Mistral's own format is not converted"),
)


def main(argv: Sequence[str] | None = None, prog: str = "convert-hf-to-gguf") -> int:
    """Run the command; return its exit code."""
    parser = make_parser(prog)
    return command.run(parser, lambda args: _carry_out(args, parser), argv)


def make_parser(prog: str = "convert-hf-to-gguf") -> argparse.ArgumentParser:
    parser = command.make_parser(prog, DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL_DIR",
        help="folder with config.json; or OWNER/NAME[@REVISION] on the Hub",
    )  # fmt: skip
    parser.add_argument(
        "--outfile", type=command.output_file_or_folder, metavar="FILE",
        help="where to write; {ftype} stands for the type; in a folder, the file is named after the model"
        " (default: in MODEL_DIR, or in the current folder for a model on the Hub)",
    )  # fmt: skip
    outtype = parser.add_argument(
        "--outtype", default="auto", metavar="TYPE",
        help="f32, f16, bf16 or q8_0 for the large matrices; auto: the 16-bit type of the checkpoint, bf16"
        " for a quantized one (default); or a file type of quantize (Q4_K_M ...) or a recipe file: quantized"
        " in the same pass, with the same bytes as converting to f32 and then quantizing. Several types,"
        " separated by commas, are made at once; --outfile then needs {ftype}",
    )  # fmt: skip
    completes(outtype, ("auto", "f32", "f16", "bf16", "q8_0", *FILE_TYPES))
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER",
        help="write the PEFT adapter in MODEL_DIR as a GGUF file of its own, in f32, f16 or bf16 (default:"
        " f32); FOLDER is the model that it was trained on, of which no weights are read. Both may be on the"
        " Hub. llama.cpp's programs load the file with --lora",
    )  # fmt: skip
    add_family_flags(parser, DECLARED)
    parser.add_argument(
        "--no-nextn", dest="mtp", action="store_false", default=None, help="another name of --no-mtp"
    )
    command.add_flags(parser, ConvertOptions, type="--outtype", or_with_size="")
    command.add_threads(parser)
    parser.add_argument(
        "--print-supported-models",
        action="store_true",
        help="list the architectures that can be converted; with --mmproj those whose towers can",
    )
    add_stream_argument(parser)
    add_restart_argument(parser)
    add_force(parser)
    command.add_scheduler(parser)
    add_matrix_arguments(parser)
    add_type_arguments(parser)
    add_output_arguments(parser)
    add_plan_arguments(parser)
    add_card_arguments(parser)
    add_foreign_flags(parser, "convert_hf_to_gguf.py", FOREIGN_FLAGS)
    return parser


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line.

    named     MODEL_DIR
    outfile   None: into MODEL_DIR, or here for a model of the Hub
    options   what to make of MODEL_DIR, for each type
    card      what the card says, None: there is to be none
    run       how to run
    stream    leave the weights of MODEL_DIR on the Hub
    """

    named: str
    outfile: Path | None
    options: tuple[ConvertOptions, ...]
    card: CardRequest | None
    run: RunOptions
    stream: bool


def _carry_out(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.print_supported_models:
        from convert.architectures import supported
        from convert.architectures.vision import TOWERS

        say(*TOWERS if args.mmproj else supported())
    elif args.base is not None:
        _convert_adapter(args, parser)
    else:
        _convert(_read(args, parser))


def _read(args: argparse.Namespace, parser: argparse.ArgumentParser) -> _Request:
    from quantize.run_options import RunOptions

    if args.model is None:
        parser.error("MODEL_DIR is missing")
    if args.mmproj and args.card:
        parser.error("--card describes the files of a text model; leave --card out with --mmproj")
    check_plan_arguments(args, parser)
    options = _options(args, parser)
    return filled(
        _Request,
        args,
        named=args.model,
        options=tuple(replace(options, outtype=outtype) for outtype in args.outtype.split(",")),
        card=read_card(args),
        run=filled(RunOptions, args),
    )


_OF_AN_ADAPTER = frozenset(
    {"model", "base", "outfile", "outtype", "allow_pickle", "force", "quiet", "verbose", "typed", "remarks"}
)
"""Arguments that have a meaning with --base, and those that change nothing."""


def _convert_adapter(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from convert.adapter_file import convert_adapter
    from convert.checkpoint.hub import adapter_folder
    from convert.sources import source_folder

    for name, value in vars(args).items():
        if name not in _OF_AN_ADAPTER and value != parser.get_default(name):
            parser.error(f"--base writes a file of an adapter alone; leave {flag(name)} out")
    if args.model is None:
        parser.error("MODEL_DIR is missing")
    outtype: Any = "f32" if args.outtype == "auto" else args.outtype
    base = source_folder(str(args.base), dry_run=True, allow_pickle=args.allow_pickle, quiet=args.quiet)
    path = convert_adapter(
        adapter_folder(args.model),
        base,
        args.outfile,
        outtype,
        allow_pickle=args.allow_pickle,
        force=args.force,
    )
    if not args.quiet:
        say(f"wrote {path}")


def _convert(request: _Request) -> None:
    from convert.pipeline import plan_run
    from convert.sources import source_folder
    from quantize.report import dry_run_lines
    from quantize.run import execute_together

    first = request.options[0]  # only types differ
    folder = source_folder(
        request.named,
        stream=request.stream,
        dry_run=request.dry_run,
        weights=not first.vocab_only,
        allow_pickle=first.allow_pickle,
        quiet=request.quiet,
    )
    with ExitStack() as stack:
        runs = [
            stack.enter_context(plan_run(folder, request.outfile, each, allow_problems=request.dry_run))
            for each in request.options
        ]
        if request.dry_run:
            for run in runs:
                say(*dry_run_lines(run, request.run, as_json=request.json, summary=request.summary))
                if not request.json:
                    say(f"would write {', '.join(map(str, run.output_paths))}")
            return
        refuse_foreign_cards(request.card, [path for run in runs for path in run.output_paths])
        how = replace(request.run, progress=not request.quiet, label="converting")
        results = execute_together(runs, how)
    for result in results:
        say(*_outcome(result, request))
    made = [result.paths[0] for result in results]
    write_card_of(made, request.card, Path(folder), request.typed, quiet=request.quiet or request.json)


def _outcome(result: Result, request: _Request) -> Iterator[str]:
    """Yield the result of a run, in as many lines as are asked for."""
    from quantize.report import note_lines, result_lines

    if request.json:
        yield json_line(result.to_json())
    elif request.quiet:
        return
    elif request.options[0].vocab_only and not result.is_found:
        yield from note_lines(result.preparation.plan)
        yield f"wrote {result.paths[0]}"
    else:
        yield from result_lines(result)


def _options(args: argparse.Namespace, parser: argparse.ArgumentParser) -> ConvertOptions:
    """Read what to make of the folder; the type may be several with commas between them."""
    from quantize.plan.converter_types import is_outtype
    from quantize.plan.decide import PlanOptions

    importances, types = read_importances(args), plan_options(args)
    if any(map(is_outtype, args.outtype.split(","))) and (importances or types != PlanOptions()):
        parser.error(
            f"importances and types by hand need a file type like Q4_K_M, found --outtype {args.outtype}"
        )
    family = read_flags(args, DECLARED)
    return filled(ConvertOptions, args, importances=importances, types=types, family=family)


def add_family_flags(parser: argparse.ArgumentParser, families: Iterable[type[Any]]) -> None:
    """Add a flag for each option of each family; options of the same name share one.

    A bool, or one that None leaves open, becomes two switches, --name and --no-name, a Literal a choice of
    words.
    """
    for name, (kind, text) in declared(families).items():
        if kind in (bool, bool | None):
            parser.add_argument(flag(name), action="store_true", default=None, help=text)
            parser.add_argument(
                flag(f"no_{name}"), dest=name, action="store_false", default=None,
                help=f"the opposite of {flag(name)}",
            )  # fmt: skip
        else:
            parser.add_argument(flag(name), choices=get_args(kind), help=text)


def read_flags(args: argparse.Namespace, families: Iterable[type[Any]]) -> dict[str, object]:
    """Read the options whose flags were given, by name."""
    values = {name: getattr(args, name) for name in declared(families)}
    return {name: value for name, value in values.items() if value is not None}
