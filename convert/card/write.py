"""Cards written beside files, and older ones taken up: their commands, their report, what people added."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes

from convert.card.facts import origin_of, read_all, read_report
from convert.card.page import COMMANDS_HEADING, MARK, Card, card_text
from convert.card.shell import read_command_line, read_comment
from convert.general_metadata import read_model_card
from gguf_tools.errors import BadRequest, GGUFError
from gguf_tools.files.named_files import read_input, write_whole
from gguf_tools.findings import Tell, log
from gguf_tools.hub.names import is_repo
from gguf_tools.text import quoted

CARD_NAME = "README.md"
_DOWNLOAD = re.compile(r"^hf download (\S+/\S+) ", re.MULTILINE)
_COMMANDS = re.compile(rf"^{COMMANDS_HEADING}\n\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"^\| \[(?:\\.|[^\]\\])*\]\(([^()|]*\.gguf)\)", re.MULTILINE)


@dataclass(frozen=True)
class CardRequest:
    """Facts for a card, besides the files.

    source        folder or file that the files were made of, None: not known
    repo          OWNER/NAME of the model, None: what the source or an older card says
    quantized_by  None: what an older card says
    home          OWNER/NAME of the files on the Hub; None: what an older card says
    report        of `evaluate --json`, None: no quality
    raises        BadRequest for names that the Hub doesn't know
    """

    source: Path | None = None
    repo: str | None = None
    quantized_by: str | None = None
    report: Path | None = None
    remarks: Sequence[str] = ()
    home: str | None = None

    def __post_init__(self) -> None:
        for name in (self.repo, self.home):
            if name is not None and not is_repo(name):
                raise BadRequest(f"{quoted(name)}: expected OWNER/NAME")


def write_card(
    files: Iterable[Path],
    request: CardRequest,
    commands: Mapping[str, Sequence[str]] | None = None,
    *,
    output: Path | None = None,
    force: bool = False,
    tell: Tell = log,
) -> Path:
    """Write the card of `files`, and of those that an older card at its place lists; return its path.

    commands  file name -> the command that made it; an older card knows those of other files
    output    None: README.md beside the files
    force     replace a card that is not ours
    tell      is told what of the files can't be in a card
    raises    BadRequest for a card that is not ours, a report on other files, or files of several folders
    """
    paths = list(files)
    path = paths[0].parent / CARD_NAME if output is None else output
    if not force:
        refuse_foreign(path)
    old = path.read_text(encoding="utf-8") if path.exists() and _is_ours(path) else ""
    entries = read_model_card(path)[0] if old else {}
    facts = read_all([*paths, *_still_there(old, paths)], tell)
    repo = request.repo or _repo(_text(entries.get("base_model")))
    download = _DOWNLOAD.search(old)
    known = {**_commands(old), **(commands or {})}
    card = Card(
        files=facts,
        origin=origin_of(facts, source=request.source, repo=repo),
        commands={each.name: known[each.name] for each in facts if each.name in known},
        report=None if request.report is None else read_report(request.report),
        quantized_by=request.quantized_by or _text(entries.get("quantized_by")),
        home=request.home or _repo(download[1] if download else None),
        remarks=request.remarks,
        own_text=old.split(f"\n{MARK}\n", 2)[2] if old else "",
    )
    write_whole(path, card_text(card).encode(errors="backslashreplace"))  # names of files can be any bytes
    return path


def refuse_foreign(path: Path) -> None:
    """Raise BadRequest for a card that was written by somebody else, which a new one would replace."""
    if path.exists() and not _is_ours(path):
        raise BadRequest(
            f"{path}: is not a card of gguf-tools, and the new card would replace it; write the files to"
            " another folder, or replace it with gguf-tools card --force"
        )


def _is_ours(path: Path) -> bool:
    try:
        return read_input(path).decode("utf-8").split("\n").count(MARK) == 2
    except UnicodeDecodeError:
        return False


def _commands(card: str) -> dict[str, Sequence[str]]:
    """Return the commands of an older card by file, without what a person made unreadable."""
    match = _COMMANDS.search(card)
    commands: dict[str, Sequence[str]] = {}
    files: list[str] = []
    for line in match[1].splitlines() if match else ():
        file = read_comment(line)
        if file is not None:
            files.append(file)
        else:
            with suppress(ValueError):
                commands.update(dict.fromkeys(files, read_command_line(line)))
            files = []
    return commands


def _still_there(card: str, files: Sequence[Path]) -> list[Path]:
    """Return the files of an older card that still lie beside it; one that has broken since is left out."""
    found = []
    for name in _LINK.findall(card):
        path = files[0].parent / os.path.basename(os.fsdecode(unquote_to_bytes(name)))
        if path in files or not path.is_file():
            continue
        try:
            read_all([path])
        except GGUFError:
            continue
        found.append(path)
    return found


def _repo(text: str | None) -> str | None:
    return text if text is not None and is_repo(text) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
