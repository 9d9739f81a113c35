"""The `gguf-tools` command: the roof of all commands, and the home of those for finished files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile

from gguf_tools.commands import command
from gguf_tools.commands.gguf import attest, audit, change, clean, edit, look, publish, rederive, refine, text
from gguf_tools.commands.parser import SHELLS, completion_script, subparsers_of
from gguf_tools.commands.roof import COMMANDS
from gguf_tools.text import json_text, say

_EXAMPLES = """\
examples:
  gguf-tools convert DeepSeek-V2-Lite --outfile lite.gguf      a Hugging Face folder as a GGUF file
  gguf-tools quantize lite.gguf lite-Q4_K_M.gguf Q4_K_M
  gguf-tools show model.gguf                 metadata, tensors, totals by type, KV cache per token
  gguf-tools show model.gguf --json | jq .types
  gguf-tools show model-00001-of-00004.gguf  a split set opens as one, by any of its files
  gguf-tools diff old.gguf new.gguf          what differs, down to the tensors' data
  gguf-tools diff --no-data old.gguf new.gguf
  gguf-tools diff --values model-bf16.gguf model-Q4_K_M.gguf     errors of the values, by tensor
  gguf-tools verify model.gguf               finds NaN scales, gaps, stray bytes
  gguf-tools verify model-Q4_K_M.gguf --against model-bf16.gguf     and values that are not the source's
  gguf-tools audit model-Q4_K_M.gguf DeepSeek-V2-Lite   is it what its base makes of it, and what is wrong
  gguf-tools rederive model-Q4_K_M.gguf --source model-bf16.gguf     is it that, byte for byte
  gguf-tools scan model.gguf                 a stranger's file: hidden bytes, hostile chat templates
  gguf-tools hash model.gguf                 SHA-256 of every tensor, the file and the content
  gguf-tools set model.gguf "general.name=DeepSeek V3"
  gguf-tools rename model.gguf OLD=NEW       a tensor, or with --key a metadata key
  gguf-tools split model.gguf model --max-size 50G
  gguf-tools merge model-00001-of-00008.gguf model.gguf
  gguf-tools mla-layout ik.gguf out.gguf --to split   a file of ik_llama.cpp, for llama.cpp
  gguf-tools card model-Q4_K_M.gguf --base-model OWNER/NAME   README.md for the Hub
  gguf-tools repack model.gguf model-r4.gguf          rows interleaved for ik_llama.cpp, and back with --undo
  gguf-tools text -o texts                   texts of nine kinds, to calibrate with
  gguf-tools cook DeepSeek-V2-Lite -f calibration.txt --types Q2_K,Q4_K_M,3.2bpw -o lite   all in one run
  gguf-tools upload lite me/lite-GGUF        files or a folder to the Hub
  gguf-tools clean models                    what interrupted runs have left
  gguf-tools checkpoint DeepSeek-V3          weights of a Hugging Face folder, and how they are stored

Each subcommand explains itself: gguf-tools show --help
"""


_COMPLETION = """\
examples:
  source <(gguf-tools completion bash)          for this shell; in ~/.bashrc or ~/.zshrc for all
  gguf-tools completion fish > ~/.config/fish/completions/gguf-tools.fish
"""


_CHECKPOINT = """\
examples:
  gguf-tools checkpoint DeepSeek-V3
  gguf-tools checkpoint deepseek-ai/DeepSeek-V3 | grep kv_b_proj      by headers, which are fetched
"""

_COOK = "make importances, quantized files, their divergence, card and checksums in one run"


def make_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Make the parser of `gguf-tools` and its subcommands.

    words  those of the command line, if that is all it has to understand: the arguments of `cook` come with
           other packages, which take time to load, and are left out where it is not among the words
    """
    parser = command.make_parser(
        "gguf-tools",
        "Make GGUF files, look at them, compare them, check them, change them.",
        epilog=_EXAMPLES,
    )
    commands = command.Subcommands(parser)
    for each in COMMANDS:
        commands.name(each.name, each.text)
    look.add_to(commands)
    look.add_scan(commands)
    audit.add_to(commands)
    rederive.add_to(commands)
    attest.add_to(commands)
    edit.add_to(commands)
    change.add_mla_layout(commands)
    change.add_repack(commands)
    text.add_to(commands)
    refine.add_to(commands)
    publish.add_card(commands)
    _add_cook(commands, words)
    publish.add_upload(commands)
    clean.add_to(commands)
    _add_checkpoint(commands)
    _add_completion(commands)
    return parser


def _add_cook(commands: command.Subcommands, words: Sequence[str] | None) -> None:
    if words is not None and "cook" not in words:
        commands.name("cook", _COOK)
        return
    from gguf_tools.commands.gguf import cook as cli

    cli.add_to(commands, _COOK)


def _add_checkpoint(commands: command.Subcommands) -> None:
    sub = commands.add(
        "checkpoint",
        lambda args: checkpoint(args.folder, allow_pickle=args.allow_pickle, as_json=args.json),
        "print the weights of a Hugging Face folder",
        "Of each: name, shape, bits per weight with scales and all, and how it is stored. Those of a "
        "quantized checkpoint are listed as the model has them, not as the files do. Only headers and a few "
        "small tensors are read.",
        epilog=_CHECKPOINT,
        answers=True,
    )
    sub.add_argument(
        "folder", metavar="FOLDER", help="folder with config.json, or OWNER/NAME[@REVISION] on the Hub"
    )
    sub.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read .bin and .pt checkpoints, as weights only",
    )
    command.add_timeout(sub)


def _add_completion(commands: command.Subcommands) -> None:
    sub = commands.add(
        "completion",
        lambda args: say(*completion_script(parsers(), args.shell).splitlines()),
        "print what a shell needs to complete options and commands",
        "",
        epilog=_COMPLETION, json=False, answers=True,
    )  # fmt: skip
    sub.add_argument("shell", choices=SHELLS)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands and subcommands, by the words that call them."""
    made = {parser.prog: parser for parser in _with_subcommands(make_parser())}
    for each in COMMANDS:
        for prog in (each.alone, each.prog):
            made |= {parser.prog: parser for parser in _with_subcommands(each.make_parser(prog))}
    return made


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    yield from subparsers_of(parser).values()


def checkpoint(named: str, *, allow_pickle: bool, as_json: bool) -> None:
    """Print the weights of a Hugging Face folder, here or on the Hub."""
    from convert import open_checkpoint
    from convert.sources import source_folder
    from convert.weights.model_weights import checkpoint_text, describe

    folder = source_folder(named, dry_run=True, allow_pickle=allow_pickle)
    with open_checkpoint(folder, allow_pickle=allow_pickle) as weights:
        say(*json_text(describe(weights)).split("\n") if as_json else checkpoint_text(weights))


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    flags = list(takewhile(lambda word: word == "--verbose", words))
    name, rest = words[len(flags) :][:1], words[len(flags) + 1 :]
    for each in COMMANDS:
        if [each.name] == name:
            return each.main([*flags, *rest])
    return command.run(make_parser(words), lambda args: args.body(args), argv)
