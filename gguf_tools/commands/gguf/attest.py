"""`gguf-tools attest`: what files were made of, as an in-toto statement that others can sign and check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools import __version__
from gguf_tools.choices import filled
from gguf_tools.commands import command
from gguf_tools.commands.command import StoreOutput, add_force
from gguf_tools.commands.cook.record import sha256
from gguf_tools.errors import BadRequest, UnreadableInput
from gguf_tools.format import keys
from gguf_tools.format.shards import open_gguf
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

_STATED = (
    keys.FILE_TYPE, keys.QUANTIZE_IMATRIX_FILE, keys.QUANTIZE_IMATRIX_DATASET,
    keys.QUANTIZE_IMATRIX_ENTRIES_COUNT, keys.QUANTIZE_IMATRIX_CHUNKS_COUNT, "gguf_tools.calibration.method",
)  # fmt: skip


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
    from gguf_tools.files.early_checks import refuse_to_replace
    from gguf_tools.files.named_files import write_whole

    refuse_to_replace([request.output], force=request.force)
    made_of = [path for path in (request.source, request.imatrix) if path is not None]
    write_whole(request.output, (json_text(statement(request.files, made_of)) + "\n").encode())
    say(f"wrote {request.output}")


def statement(files: Iterable[Path], made_of: Iterable[Path]) -> dict[str, Any]:
    """Make the statement; raises GGUFError or UnreadableInput for a file that can't be read, and
    BadRequest for two files of one name, which a statement can't have."""
    subjects: dict[str, Path] = {}
    stated: dict[str, dict[str, Any]] = {}
    for path in files:
        with open_gguf(path) as file:
            for part in map(Path, file.paths):
                if subjects.setdefault(part.name, part) != part:
                    raise BadRequest(f"{part}: another file has this name; make a statement for each")
            stated[path.name] = {key: file.metadata[key].data for key in _STATED if key in file.metadata}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_digested(path) for path in subjects.values()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "pkg:pypi/gguf-tools#quantize",
                "externalParameters": {"files": stated},
                "resolvedDependencies": [_digested(path) for given in made_of for path in _files_of(given)],
            },
            "runDetails": {"builder": {"id": f"pkg:pypi/gguf-tools@{__version__}"}},
        },
    }


def _files_of(path: Path) -> list[Path]:
    """List the files of a folder, or all parts of a file."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
    if path.suffix != ".gguf":
        return [path]
    with open_gguf(path) as file:
        return list(map(Path, file.paths))


def _digested(path: Path) -> dict[str, Any]:
    with UnreadableInput.from_os(f"{path}: can't be read"):
        return {"name": path.name, "digest": {"sha256": sha256(path)}}
