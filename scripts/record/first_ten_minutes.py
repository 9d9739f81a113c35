"""Write docs/first-ten-minutes.md: the way from a clone to a measured file, with what the commands print.

The commands run in a folder of their own, on examples/tiny-deepseek-v3. They need torch.
tests/end_to_end/test_first_ten_minutes.py runs them again and compares; numbers with a point may differ.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf_tools.commands.convert
import gguf_tools.commands.evaluate
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-ten-minutes.md"

MAINS: dict[str, Callable[[list[str]], int]] = {
    "convert-hf-to-gguf": gguf_tools.commands.convert.main,
    "evaluate": gguf_tools.commands.evaluate.main,
    "gguf-tools": gguf_tools.commands.main.main,
    "imatrix": gguf_tools.commands.imatrix.main,
    "quantize": gguf_tools.commands.quantize.main,
}

HEAD = """\
# The first ten minutes

From a clone to a quantized file and its measured quality, with the small trained model in the repository.
All output is real (`scripts/record/first_ten_minutes.py` writes this page). The times are those of a busy
machine with two cores; the first run of a recipe also compiles its kernels.

From `git clone` to the first Q4_K_M took 19 s on 2026-11-22, on a quiet machine with two cores (AMD EPYC,
virtual) and a nearby mirror of the packages: 15 s for cloning, an environment and `pip install .` without
torch, and 4 s for converting and quantizing in one pass, 3 of them for compiling kernels.

    pip install .

`imatrix` and `evaluate` below compute the model, so they need torch too. Its CPU build is enough here;
[installation](install.md#torch-on-a-cpu) has the other one.

    pip install torch --index-url https://download.pytorch.org/whl/cpu
"""

STEPS: tuple[tuple[str, str, int], ...] = (
    ("One pass from the checkpoint to a file for llama.cpp.",
     "convert-hf-to-gguf examples/tiny-deepseek-v3 --outtype Q4_K_M --outfile tiny-Q4_K_M.gguf", 0),
    ("What is in the file? `show` prints metadata, tensors and totals; these are its last lines.",
     "gguf-tools show tiny-Q4_K_M.gguf", 12),
    ("To make several types, keep a file in BF16.",
     "convert-hf-to-gguf examples/tiny-deepseek-v3 --outfile tiny-bf16.gguf", 0),
    ("An importance matrix tells which columns matter. Collecting it needs torch and a text."
     " (For a model of yours,\n`gguf-tools text -o texts` writes texts of nine kinds.)",
     "imatrix -m examples/tiny-deepseek-v3 -f examples/tiny-deepseek-v3/calibration.txt -o tiny.imatrix.gguf"
     " --chunks 8 --threads 2", 0),
    ("What would a type do? A dry run reads no weights and writes nothing.",
     "quantize --dry-run --summary --imatrix tiny.imatrix.gguf tiny-bf16.gguf IQ3_XXS", 0),
    ("Two types from one walk over the source.",
     "quantize --imatrix tiny.imatrix.gguf tiny-bf16.gguf tiny-{FTYPE}.gguf IQ3_XXS,Q5_K_M", 0),
    ("How good are they? (Measure real models on a text that the calibration has not seen.)",
     "evaluate tiny-bf16.gguf -f examples/tiny-deepseek-v3/calibration.txt --chunks 4 --threads 2 -c 128"
     " tiny-Q5_K_M.gguf tiny-Q4_K_M.gguf tiny-IQ3_XXS.gguf", 0),
    ("A typo gets its answer in one line.", "quantize tiny-bf16.gguf tiny.gguf Q4_KM", 0),
)  # fmt: skip
"""What is said, the command, and how many last lines of what it prints are shown; 0: all."""

TAIL = """
The files load in llama.cpp. [Commands](commands.md) shows what else there is, and each `--help` has examples.
"""


def record(folder: Path) -> str:
    """Return the page, from running the commands in `folder`."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return "".join([HEAD, *map(_step, *zip(*STEPS, strict=True), [folder] * len(STEPS)), TAIL])


def _step(text: str, command: str, n_lines: int, folder: Path) -> str:
    lines = run(command, folder)
    if n_lines and len(lines) > n_lines:
        lines = ["...", *lines[-n_lines:]]
    shown = "\n".join(f"    {line}".rstrip() for line in (f"$ {command}", *lines))
    return f"\n{text}\n\n{shown}\n"


def run(command: str, folder: Path) -> list[str]:
    """Return the lines that a command prints, in the order of both streams."""
    program, *arguments = shlex.split(command)
    printed = io.StringIO()
    with _inside(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        MAINS[program](arguments)
    return printed.getvalue().splitlines()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(record(Path(folder)), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
