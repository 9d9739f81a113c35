"""`gguf-tools rederive`: is a file what its source makes, byte for byte?"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.argument_types import COUNT, SEED
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.errors import BadArgument
from gguf_tools.findings import tell_all, teller
from gguf_tools.format.shards import open_gguf
from gguf_tools.text import say, say_json

if TYPE_CHECKING:
    from convert.rederive.options import RederiveOptions

DETAIL = """
Each tensor is made again from MODEL, some rows at a time, and these rows are compared with FILE's. No model
is written. FILE may come from gguf-tools or from llama-quantize. If MODEL is a folder, F32, F16 and BF16 are
tried as the type of the GGUF file in between. Differences are named: changed blocks, other importances, other
weights, or a file type that does not give the types of the tensors.

The exit code is 0 if all tensors have the same bytes and the file type gives their types, and 1 otherwise.
`same` says nothing about the rest of the header, which gguf-tools audit compares. A calibrated file takes as
long as its calibration. With another processor or another version of torch, such a file can at best be
consistent with its source, and the exit code is 1."""

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

    source       a path, or a name on the Hub; None: it is missing, which the error says
    attestation  what is said of the file and what it was made of
    options      how to make the file again
    """

    file: Path
    source: str | None
    attestation: Path | None
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
        "--calibrate", type=command.text_file, action=command.StoreOnce, metavar="TEXT",
        help="the text that FILE was calibrated on; method and number of chunks are those that FILE names"
        " (needs torch, and a temporary folder for the model)",
    )  # fmt: skip
    sub.add_argument(
        "-c", "--ctx-size", dest="chunk_size", type=command.number(COUNT), metavar="N",
        help="tokens per chunk of TEXT, for a FILE of an older version, which does not name them",
    )  # fmt: skip
    sub.add_argument(
        "--sample", type=command.number(COUNT), metavar="N",
        help="make N rows of each tensor, and say what chance a change has to slip through",
    )  # fmt: skip
    sub.add_argument(
        "--seed", type=command.number(SEED), metavar="N",
        help="chooses the rows of the sample (default: another one each time; it is printed)",
    )  # fmt: skip
    sub.add_argument(
        "--attestation", type=Path, metavar="A.json",
        help="compare the digests of all files with those that a statement of gguf-tools attest names, before"
        " anything is made; without --source, MODEL is the one on the Hub that it names",
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

    calibration = None
    if args.calibrate is not None:
        from imatrix.calibrate.calibration import Calibration

        with open_gguf(args.file) as file:
            calibration = Calibration.like(file, args.calibrate)
        if args.chunk_size is not None:
            cut = replace(calibration.cut, chunk_size=args.chunk_size)
            calibration = replace(calibration, cut=cut)
    elif args.chunk_size is not None:
        raise BadArgument("-c is for --calibrate, which is missing")
    return filled(_Request, args, options=filled(RederiveOptions, args, calibration=calibration))


def carry_out(request: _Request) -> int:
    """Make a file again and print what was found; return the exit code."""
    from convert.rederive.pipeline import rederive
    from convert.sources import model_path
    from gguf_tools.commands.attestation import Attestation

    said = None if request.attestation is None else Attestation.read(request.attestation)
    named = request.source if request.source is not None or said is None else said.model
    source, options = None if named is None else model_path(named, quiet=request.quiet), request.options
    given = (source, options.importances, getattr(options.calibration, "text", None))
    made_of = [Path(each) for each in given if isinstance(each, str | Path)]
    attested = () if said is None else tuple(said.findings(request.file, made_of))
    tell_all(attested, teller(quiet=request.quiet))
    if options.stop and any(each.is_bad for each in attested):
        return 1
    result = rederive(request.file, source, options, progress=not request.quiet)
    result = replace(result, findings=(*attested, *result.findings))
    if request.json:
        say_json(result.to_json())
    else:
        say(*result.lines())
    return 0 if result.is_as_claimed else 1
