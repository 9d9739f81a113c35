"""`gguf-tools rederive`: is a file what its source makes, byte for byte?"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.argument_types import COUNT, SEED
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.text import say, say_json

if TYPE_CHECKING:
    from convert.rederive.options import RederiveOptions

DETAIL = """
Every tensor is made of SOURCE anew, some rows at a time, and compared with FILE's while it is made. No model
is written. FILE may be of gguf-tools or of llama-quantize. Of a folder, F32, F16 and BF16 are tried as the
type of the file that lay between. What differs is named: changed blocks, other importances, other weights, a
file type that does not give these types.

The exit code is 0 if all tensors have the same bytes and the file type gives their types, and 1 otherwise.
`same` says nothing of the rest of the header; gguf-tools audit compares it. Calibrated files are refused."""

EPILOG = """\
examples:
  gguf-tools rederive lite-Q4_K_M.gguf --source lite-bf16.gguf
  gguf-tools rederive lite-IQ3_XS.gguf --source DeepSeek-V2-Lite --imatrix lite.imatrix.gguf
  gguf-tools rederive v3-Q4_K_M-00001-of-00009.gguf --source v3-bf16.gguf --sample 64     in a minute
  gguf-tools rederive lite-Q4_K_M.gguf --source lite-bf16.gguf --stop --json | jq .same
"""


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line.

    source   a path, or a name on the Hub; None: it is missing, which the error says
    options  how to make the file again
    """

    file: Path
    source: str | None
    options: RederiveOptions


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "rederive", lambda args: carry_out(_read(args)), "make a file again and say whether its bytes are the"
        " same", DETAIL, epilog=EPILOG, answers=True,
    )  # fmt: skip
    sub.add_argument("file", type=Path, metavar="FILE", help="a GGUF file, or any file of a split set")
    sub.add_argument(
        "--source", metavar="MODEL",
        help="what FILE was made of: the GGUF file that was quantized, a folder, or OWNER/NAME[@REVISION] on"
        " the Hub",
    )  # fmt: skip
    sub.add_argument(
        "--imatrix", dest="importances", metavar="FILE", help="the importances that FILE was made with"
    )
    sub.add_argument(
        "--sample", type=command.number(COUNT), metavar="N",
        help="make N rows of each tensor, and say what chance a change has to slip through",
    )  # fmt: skip
    sub.add_argument(
        "--seed", type=command.number(SEED), metavar="N",
        help="chooses the rows of the sample (default: another one each time; it is printed)",
    )  # fmt: skip
    sub.add_argument("--stop", action="store_true", help="stop at the first tensor that differs")
    sub.add_argument(
        "--allow-pickle", action="store_true", help="read a MODEL of .bin and .pt files, as weights only"
    )
    command.add_threads(sub)
    command.add_timeout(sub)
    command.add_quiet(sub)


def _read(args: argparse.Namespace) -> _Request:
    from convert.rederive.options import RederiveOptions

    return filled(_Request, args, options=filled(RederiveOptions, args))


def carry_out(request: _Request) -> int:
    """Make a file again and print what was found; return the exit code."""
    from convert.rederive.pipeline import rederive
    from convert.sources import model_path

    source = None if request.source is None else model_path(request.source, quiet=request.quiet)
    result = rederive(request.file, source, request.options, progress=not request.quiet)
    if request.json:
        say_json(result.to_json())
    else:
        say(*result.lines())
    return 0 if result.is_as_claimed else 1
