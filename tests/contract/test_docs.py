"""Pages name only paths, commands and options that exist; the picture shows recorded figures."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from gguf_tools.commands.parser import subparsers_of
from quantize.padding.inner_sizes import ARCHITECTURES
from scripts.record.pictures import FRONT, TINY, picture
from tests.contract.import_graph import ROOT
from tests.contract.test_help import PARSERS

PAGES = (
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "notes").glob("*.md")),
)
ALL = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

PROGRAMS = frozenset(prog.partition(" ")[0] for prog in PARSERS)
GROUP = "gguf-tools"
"""The program whose subcommands pages may also name alone: `verify --against`."""


@ALL
def test_links_lead_somewhere(page: Path) -> None:
    """Only those to files; the site's build checks those to headings."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (page.parent / link).exists()] == []


@ALL
def test_paths_exist(page: Path) -> None:
    assert [path for text in _code(page) for path in _missing_paths(text)] == []


@ALL
def test_commands_and_options_exist(page: Path) -> None:
    assert [f"{text}: {word}" for text in _code(page) for word in _wrong_words(text)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("gguf-tools shwo model.gguf", "gguf-tools shwo"),
        ("gguf-tools show, diff, hush", "gguf-tools hush"),
        ("imatrix chekc m.gguf", "imatrix chekc"),
        ("imatrix show --chunks 3 m.gguf", "--chunks"),
        ("quantize --calibrat text.txt in.gguf Q4_K_M", "--calibrat"),
        ("quantize lint --pure --dry-run Q4_K_M m.gguf", "--dry-run"),
        ("verify FILE --agianst SOURCE", "--agianst"),
        ("pip install --quiet . && evaluate --htlm r.html", "--htlm"),
        ("--nothing", "--nothing"),
        ("scripts/attack.py --tries 3", "--tries"),
        ("python scripts/attack.py --trials 3  # --all of them", ""),
        ("gguf-tools verify FILE --against=SOURCE", ""),
        ("llama-quantize --keep-split", ""),
        ("pip install torch --index-url https://example.org", ""),
    ],
)
def test_wrong_words_are_found(text: str, wrong: str) -> None:
    assert " ".join(_wrong_words(text)) == wrong


@pytest.mark.parametrize("path", ["quantize/nothing.py", "nothing.py", "quantize/nothing/", "docs/nothing"])
def test_missing_paths_are_found(path: str) -> None:
    assert list(_missing_paths(f"see {path}, and quantize/formats/, `tests/*/test_docs.py`")) == [path]


def test_the_page_on_padding_names_the_architectures() -> None:
    page = (ROOT / "docs" / "odd-sizes.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("The architectures are, by their names")
    listed = rest.partition(": ")[2].partition(". ")[0]
    assert tuple(re.split(r", | and ", listed.replace("\n", " "))) == ARCHITECTURES


def test_recorded_figures_are_those_of_the_tables() -> None:
    budget, gains = (
        (ROOT / "docs" / name).read_text() for name in ("budget.md", "notes/calibrated-gains.md")
    )
    for file in json.loads(TINY.read_text(encoding="utf-8"))["files"]:
        sizes = re.search(rf"\| {file['type']} \(([\d.]+) MiB\) \| ([\d.]+) .*\| ([\d.]+) \+/-", budget)
        default = re.search(rf"\| {file['type']} \| ([\d.]+) .*\| ([\d.]+) \(", gains)
        assert sizes is not None
        assert default is not None
        assert [float(found) for found in sizes.groups()] == [file["mib"], file["stock"], file["chosen"]]
        assert [float(found) for found in default.groups()] == [file["stock"], file["calibrated"]]
    files = json.loads(FRONT.read_text(encoding="utf-8"))["files"]
    cells = ([file["type"], file["stock"], file["calibrated"]] for file in files)
    rows = ("", "KLD, stock", "KLD, calibrated")
    columns = (
        " | ".join((row, *map(str, each))) for row, each in zip(rows, zip(*cells, strict=True), strict=True)
    )
    for column in columns:
        assert f"| {column} |".replace("|  |", "| |") in gains


@pytest.mark.parametrize("path", [FRONT, TINY], ids=lambda path: path.stem)
def test_pictures_show_the_recorded_figures(path: Path) -> None:
    figures = json.loads(path.read_text(encoding="utf-8"))
    pytest.importorskip("matplotlib")
    stored = path.with_suffix(".svg").read_text("utf-8")
    (texts, marks), (drawn_texts, drawn_marks) = map(_parts, (stored, picture(figures)))
    assert texts == drawn_texts
    assert marks == pytest.approx(drawn_marks, abs=2), "releases of matplotlib differ a little"


def _parts(svg: str) -> tuple[list[str], list[float]]:
    """Return the texts of a picture, and where its marks and ticks are."""
    places = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', svg)
    return re.findall(r"<text[^>]*>([^<]+)", svg), [float(number) for place in places for number in place]


# ---- Reading pages


def _code(page: Path) -> Iterator[str]:
    """Yield the lines of code blocks, joined where they end with a backslash, and the code within text."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fence = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"(?:(?<=\n\n)|\A)(?:    .*\n|\n(?=    ))+")
    for block in fence.findall(text):
        yield from block.splitlines()[1:-1]
    text = fence.sub("", text)
    for block in indented.findall(text):
        yield from (line.strip().removeprefix("$ ") for line in block.splitlines())
    for inline in re.findall(r"`([^`]+)`", indented.sub("", text)):
        yield " ".join(inline.split())


# ---- Paths


def _missing_paths(text: str) -> Iterator[str]:
    """Yield the words that look like paths of the repository, by their folder or as modules, and are none."""
    for word in re.split(r"[\s()\"'=]+", text):
        path = word.rstrip(".,:;")
        folder, slash, _ = path.partition("/")
        ours = path.endswith((".py", ".pyi")) or (slash and folder.strip(".") and (ROOT / folder).is_dir())
        if ours and re.fullmatch(r"[\w.*/-]+", path) and not _exists(path):
            yield path


def _exists(path: str) -> bool:
    """Say whether a path is there, seen from some folder; FAMILY and * stand for any name."""
    pattern = re.escape(path.rstrip("/")).replace(r"\*", "[^/]*")
    pattern = re.sub(r"(?<=/)[A-Z]+(?=/|$)", "[^/]+", pattern)
    return re.search(rf"/{pattern}$", _files(), re.MULTILINE) is not None


@cache
def _files() -> str:
    """Return all paths of the repository, one a line."""
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and re.match(r"[^.]|\.(ci|github)$", path.name)
    ]
    paths = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return "".join(f"/{path.relative_to(ROOT)}\n" for path in (*folders, *paths))


# ---- Commands


def _wrong_words(text: str) -> Iterator[str]:
    """Yield the subcommands and options of a line that its programs don't have; other programs have any."""
    for command in re.split(r"\s(?:&&|\|)\s", re.sub(r"(^|\s)#.*", "", text)):
        try:
            words = shlex.split(command)
        except ValueError:  # an apostrophe: text
            continue
        if not words:
            continue
        script = next((word for word in words[:2] if word.startswith("scripts/")), None)
        if words[0].startswith("-"):
            yield from _unknown(words, {option for parser in PARSERS.values() for option in _options(parser)})
        elif script is not None and _exists(script):
            yield from _unknown(words, _options_of_script(ROOT / script))
        elif words[0] in PROGRAMS or f"{GROUP} {words[0]}" in PARSERS:
            yield from _wrong_words_of_ours(words if words[0] in PROGRAMS else [GROUP, *words])


def _wrong_words_of_ours(words: list[str]) -> Iterator[str]:
    """Yield the wrong words of a command of ours; `gguf-tools show, diff` is two of them."""
    name, rest = words[0], words[1:]
    while rest and not rest[0].startswith("-"):
        subcommand = f"{name} {rest[0].rstrip(',')}"
        if subcommand not in PARSERS:
            yield from [subcommand] if subparsers_of(PARSERS[name]) else []
            break
        name = name if rest.pop(0).endswith(",") else subcommand
    yield from _unknown(words, _options(PARSERS[name]))


def _unknown(words: list[str], options: Collection[str]) -> Iterator[str]:
    for word in words:
        option = word.partition("=")[0].strip("[],.;:")
        if re.match(r"--?[a-zA-Z]", option) and option not in options:
            yield option


def _options(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(option for action in parser._actions for option in action.option_strings)


@cache
def _options_of_script(path: Path) -> frozenset[str]:
    """Return the options that a script of the repository adds to its parser."""
    return frozenset(re.findall(r"[\"'](--?[a-z][\w-]*)[\"']", path.read_text(encoding="utf-8")))
