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

This page leads from a clone of the repository to a quantized file and its measured quality. It uses the
small trained model that the repository contains. All output is real: `scripts/record/first_ten_minutes.py`
writes this page. The times are from a busy machine with two cores. The first run with a new set of types
also compiles kernels, the parts of the program that process weights; later runs find them compiled.

On 2026-11-22, everything from `git clone` to the first Q4_K_M file took 19 s, on a quiet machine with two
cores (AMD EPYC, virtual) and a nearby mirror of the packages. Cloning, making an environment and
`pip install .` without torch took 15 s. Converting and quantizing in one pass took 4 s, of which compiling
kernels took 3 s.

    pip install .

`imatrix` and `evaluate` below compute the model, so they also need torch. The build for CPUs is enough here.
[Installation](install.md#torch-on-a-cpu) says what to install for a GPU.

    pip install torch --index-url https://download.pytorch.org/whl/cpu
"""

STEPS: tuple[tuple[str, str, int], ...] = (
    ("This command makes a quantized file for llama.cpp from the checkpoint, in one pass.",
     "convert-hf-to-gguf examples/tiny-deepseek-v3 --outtype Q4_K_M --outfile tiny-Q4_K_M.gguf", 0),
    ("What is in the file? `show` prints metadata, tensors and totals. These are the last lines:",
     "gguf-tools show tiny-Q4_K_M.gguf", 12),
    ("To make several types, first make a file in BF16. The other files are then made from it.",
     "convert-hf-to-gguf examples/tiny-deepseek-v3 --outfile tiny-bf16.gguf", 0),
    ("An importance matrix says which columns of the weights matter most."
     " Collecting it needs torch and a text.\n"
     "(For a model of yours, `gguf-tools text -o texts` writes texts of nine kinds.)",
     "imatrix -m examples/tiny-deepseek-v3 -f examples/tiny-deepseek-v3/calibration.txt -o tiny.imatrix.gguf"
     " --chunks 8 --threads 2", 0),
    ("What would another type give? `--dry-run` prints the plan. It reads no weights and writes nothing."
     " The last\nnote is normal: importance matrices have no data for the embeddings and the output.",
     "quantize --dry-run --summary --imatrix tiny.imatrix.gguf tiny-bf16.gguf IQ3_XXS", 0),
    ("Two types can be made in one run, which reads the source only once.",
     "quantize --imatrix tiny.imatrix.gguf tiny-bf16.gguf tiny-{FTYPE}.gguf IQ3_XXS,Q5_K_M", 0),
    ("How good are the files? `evaluate` compares their predictions with those of the BF16 file."
     " (Measure real\nmodels on a text that the calibration has not seen.) The most useful column is KLD,"
     " the mean Kullback-Leibler\ndivergence: 0 means equal predictions. `evaluate --help` explains all"
     " columns. The text is so short here that\nperplexities (PPL) say little, and that the figures of the"
     " two files with importances may be different on\nyour machine, where the importance matrix differs in"
     " its last digits.",
     "evaluate tiny-bf16.gguf -f examples/tiny-deepseek-v3/calibration.txt --chunks 4 --threads 2 -c 128"
     " tiny-Q5_K_M.gguf tiny-Q4_K_M.gguf tiny-IQ3_XXS.gguf", 0),
    ("A typo gets an error of one line.", "quantize tiny-bf16.gguf tiny.gguf Q4_KM", 0),
)  # fmt: skip
"""What is said, the command, and how many last lines of what it prints are shown; 0: all."""

TAIL = """
All these model files load in llama.cpp. [Your first real model](first-real-model.md) is the next step.
[Commands](commands.md) lists all commands, and each has a `--help` with examples.
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
