"""Count what makes the code hard to hold in the head: one table, today's figures.

    python scripts/check/house.py
    python scripts/check/house.py --list short-functions

The rows are those of `ROWS`. Most of them are read from the syntax trees. The files and kinds of values of a
conversion come from a run of it in a process of its own: a file counts if one of its functions ran, a kind of
value is a class of the library of which an instance was made. Kernels that numba compiled are not seen.

--list prints what a row has counted, a line each.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.contract.import_graph import (  # noqa: E402
    FLOORS,
    PACKAGES,
    ROOF,
    files_of,
    floor_of,
    imports_of,
    name_of,
    top,
    tree_of,
)

FILES = [path for package in PACKAGES for path in files_of(package)]
SAMPLE = ROOT / "examples/tiny-deepseek-v3"
LATE = Path("gguf_tools/lazy.py")
"""The one module that imports by a string: public names by a package's stub, and modules of tables."""

DOCUMENTED = frozenset({"__future__", "_typeshed", "os._exit"})
"""Names with an underscore that Python, or typeshed, documents for everybody's use."""

SHORT = 3
"""Lines of a function's body, without its docstring, up to which a function counts as short."""


def names() -> list[str]:
    return sorted(PACKAGES)


def lines() -> list[str]:
    return [f"{path}: {line}" for path in FILES for line in (ROOT / path).read_text().splitlines()]


def files() -> list[str]:
    return [str(path) for path in FILES]


def short_functions() -> list[str]:
    """Private functions and methods of up to SHORT lines that one place uses."""
    uses: Counter[str] = Counter()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return [
        f"{path}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
        and re.match(r"_(?!_)", node.name)
        and not node.decorator_list
        and uses[node.name] == 1
        and _n_lines(node) <= SHORT
    ]


def _n_lines(node: ast.FunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def what_docstrings() -> list[str]:
    """Docstrings, also of values, that begin "What " or "Return what"."""
    return [
        f"{path}:{node.lineno} {node.value.value.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.lstrip().startswith(("What ", "Return what"))
    ]


def imports_by_string() -> list[str]:
    """Calls that import a module by a string, but for the one place for that."""
    return [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path in FILES
        if path != LATE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__", "run_module")
    ]


def names_by_string() -> list[str]:
    """Names whose home a module tells as a string that is a module above the one that says it."""
    return [
        f"{path}:{node.lineno} {node.value}"
        for path in FILES
        if floor_of(name_of(path)) != ROOF
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+(:\w+)?", node.value)
        and _is_above(node.value.partition(":")[0], name_of(path))
        and _exists(node.value.partition(":")[0])
    ]


def _is_above(module: str, other: str) -> bool:
    floors = floor_of(module), floor_of(other)
    return None not in floors and FLOORS.index(floors[0]) > FLOORS.index(floors[1])  # type: ignore[arg-type]


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def circles_of_folders() -> list[str]:
    """Circles between what a folder holds, folders and modules, for every folder.

    A circle is found, its last edge is taken out, and the next one is looked for.
    """
    found = []
    for folder in sorted({name_of(path) for path in FILES if path.name == "__init__.py"}):
        graph: dict[str, set[str]] = {}
        for path in FILES:
            if (room := _room(name_of(path), folder)) is not None:
                inside = {_room(module, folder) for module in imports_of(path)} - {None, room}
                graph.setdefault(room, set()).update(inside)  # type: ignore[arg-type]
        while True:
            try:
                TopologicalSorter({room: sorted(others) for room, others in graph.items()}).prepare()
                break
            except CycleError as error:
                circle = error.args[1]
                found.append(" <- ".join(circle))
                graph[circle[1]].discard(circle[0])
    return found


def _room(module: str, folder: str) -> str | None:
    """Return what of a folder a module is in, or is; None for the folder itself and for what is elsewhere."""
    if not module.startswith(f"{folder}."):
        return None
    return ".".join(module.split(".")[: folder.count(".") + 2])


def private_names_of_others() -> list[str]:
    """Imports and attributes of other libraries whose names begin with an underscore, but for DOCUMENTED."""
    found = []
    for path in FILES:
        if path.parts[:2] == ("quantize", "simd"):  # numba's own way to be extended
            continue
        foreign = _foreign_names(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module and top(node.module) not in PACKAGES:
                parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                if node.module not in DOCUMENTED and any(re.match(r"_(?!_)", part) for part in parts):
                    found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
            elif (
                isinstance(node, ast.Attribute)
                and re.match(r"_(?!_)", node.attr)
                and _root(node) in foreign
                and (whole := ast.unparse(node)) not in DOCUMENTED
            ):
                found.append(f"{path}:{node.lineno} {whole}")
    return found


def _root(node: ast.expr) -> str | None:
    """Return the first of dotted names; None for an attribute of anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _foreign_names(path: Path) -> set[str]:
    """Return what a module calls the modules of other libraries that it imports."""
    return {
        alias.asname or top(alias.name)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.ImportFrom) and top(node.module or "") in {*PACKAGES, "typing"})
        for alias in node.names
        if top(alias.name) not in PACKAGES
    }


def family_lines() -> list[str]:
    """Lines of an ordinary dense family, Seed-OSS: its block, and those elsewhere that name it."""
    found = []
    for path in FILES:
        text = (ROOT / path).read_text()
        block = re.search(r"^# ---- Seed-OSS.*?^\)$", text, re.DOTALL | re.MULTILINE)
        first, last = (text.count("\n", 0, at) for at in (block.start(), block.end())) if block else (0, -1)
        for number, line in enumerate(text.splitlines()):
            if first <= number <= last or re.search("seed_?oss", line, re.IGNORECASE):
                found.append(f"{path}:{number + 1}: {line}")
    return found


def family_files() -> list[str]:
    return sorted({line.partition(":")[0] for line in family_lines()})


_TRACED = """
import json, sys, threading
from importlib import import_module
from inspect import CO_OPTIMIZED
from pathlib import Path
root, packages = Path(sys.argv[1]), set(json.loads(sys.argv[2]))
files, kinds = set(), set()
def seen(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    try:
        inside = Path(code.co_filename).relative_to(root)
    except ValueError:
        inside = None
    if inside and inside.parts[0] in packages and code.co_flags & CO_OPTIMIZED:  # no module, no class
        files.add(str(inside))
    if code.co_name in ("__init__", "__new__") and code.co_varnames:
        first = frame.f_locals.get(code.co_varnames[0])
        kind = first if isinstance(first, type) else type(first)
        if kind.__module__.partition(".")[0] in packages:
            kinds.add(f"{kind.__module__}.{kind.__qualname__}")
main = import_module(f"gguf_tools.commands.{sys.argv[3]}").main
threading.setprofile(seen)
sys.setprofile(seen)
status = main(sys.argv[4:])
sys.setprofile(None)
print("\\n" + json.dumps({"files": sorted(files), "kinds": sorted(kinds)}))
sys.exit(status)
"""


@cache
def traced(which: str) -> dict[str, list[str]]:
    """Run a plain conversion, or a calibrated run, and return the files and kinds of values in it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        convert = ["convert", str(SAMPLE), "--outfile", str(out / "base.gguf"), "--quiet"]
        if which == "calibrate":
            _run(["-m", "gguf_tools", *convert])
            text = str(SAMPLE / "calibration.txt")
            line = ["quantize", "--calibrate", text, "-c", "64", "--chunks", "2",
                    str(out / "base.gguf"), str(out / "q.gguf"), "Q4_K_M", "--quiet"]  # fmt: skip
        else:
            line = [
                "convert", str(SAMPLE), "--outfile", str(out / "q.gguf"), "--outtype",
                "Q4_K_M", "--quiet",
            ]  # fmt: skip
        # At first without a trace: what compiles kernels is no part of a run, and tracing it takes minutes.
        _run(["-m", "gguf_tools", *line])
        (out / "q.gguf").unlink()
        script = out / "traced.py"
        script.write_text(_TRACED)
        said = _run([str(script), str(ROOT), json.dumps(PACKAGES), *line])
        found: dict[str, list[str]] = json.loads(said.splitlines()[-1])
        return found


def _run(line: list[str]) -> str:
    """Run Python with some arguments, and return what it printed."""
    ended = subprocess.run([sys.executable, *line], capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"{' '.join(line)}: exit status {ended.returncode}: {ended.stderr.strip()[-2000:]}")
    return ended.stdout


ROWS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "names": ("import names in the wheel", names),
    "lines": ("library: lines", lines),
    "files": ("library: files", files),
    "conversion-files": ("files that a conversion to Q4_K_M touches", lambda: traced("convert")["files"]),
    "conversion-kinds": ("kinds of values that it makes", lambda: traced("convert")["kinds"]),
    "calibration-files": ("files that quantize --calibrate touches", lambda: traced("calibrate")["files"]),
    "calibration-kinds": ("kinds of values that it makes", lambda: traced("calibrate")["kinds"]),
    "imports-by-string": (f"imports by string outside {LATE}", imports_by_string),
    "names-by-string": ("names in strings that point up", names_by_string),
    "circles": ("circles between folders of a package", circles_of_folders),
    "short-functions": (f"private functions of up to {SHORT} lines with one caller", short_functions),
    "what-docstrings": ('docstrings that begin "What " or "Return what"', what_docstrings),
    "family-files": ("library files to touch for an ordinary dense family", family_files),
    "family-lines": ("lines of one (Seed-OSS)", family_lines),
    "private-names": ("private names of other libraries", private_names_of_others),
}
"""What is counted, by the name for --list: a title, and what to count."""


def table() -> Iterator[str]:
    yield "| | today |"
    yield "|---|--:|"
    for title, count in ROWS.values():
        yield f"| {title} | {len(count()):,} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", choices=ROWS, metavar="ROW", help=f"one of {', '.join(ROWS)}")
    args = parser.parse_args()
    print("\n".join(ROWS[args.list][1]() if args.list else table()))


if __name__ == "__main__":
    main()
