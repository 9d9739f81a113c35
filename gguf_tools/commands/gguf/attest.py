"""`gguf-tools attest`: what files were made of, as an in-toto statement that others can sign and check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.command import StoreOutput, add_force
from gguf_tools.text import json_text, say

DETAIL = """
The statement is one of in-toto with SLSA provenance v1 as its predicate. It has the SHA-256 of the files and
of what --source and --imatrix name, and what the files' headers say. It is not signed: cosign attest-blob
signs it."""

EPILOG = """\
examples:
  gguf-tools attest lite-Q4_K_M.gguf --source lite-bf16.gguf -o attestation.json
  gguf-tools attest lite-*.gguf --source DeepSeek-V2-Lite --imatrix lite.imatrix.gguf -o attestation.json
"""


@dataclass(frozen=True)
class _Request(command.Asked):
    """Request of the command line."""

    files: tuple[Path, ...] = ()
    source: Path | None = None
    imatrix: Path | None = None
    output: Path = Path()


def add_to(commands: command.Subcommands) -> None:
    """Add the subcommand."""
    sub = commands.add(
        "attest", lambda args: carry_out(filled(_Request, args)), "write what files were made of, to be"
        " signed", DETAIL, epilog=EPILOG, json=False,
    )  # fmt: skip
    sub.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a GGUF file, any part of a split set"
    )
    sub.add_argument(
        "--source", type=Path, metavar="MODEL", help="the file or the folder that they were made of"
    )
    sub.add_argument("--imatrix", type=Path, metavar="FILE", help="the importances that they were made with")
    sub.add_argument(
        "-o", "--output", type=command.output_file, action=StoreOutput, required=True,
        metavar="OUT.json", help="where to write the statement",
    )  # fmt: skip
    add_force(sub)


def carry_out(request: _Request) -> None:
    """Write the statement."""
    from gguf_tools.commands.attestation import statement
    from gguf_tools.files.early_checks import refuse_to_replace
    from gguf_tools.files.named_files import write_whole

    refuse_to_replace([request.output], force=request.force)
    made_of = [path for path in (request.source, request.imatrix) if path is not None]
    write_whole(request.output, (json_text(statement(request.files, made_of)) + "\n").encode())
    say(f"wrote {request.output}")
