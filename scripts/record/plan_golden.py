"""Record llama-quantize's plans for the layouts of tests/quantize/plan/layouts.py.

    python scripts/record/plan_golden.py LLAMA_QUANTIZE "llama.cpp 0c1e57098"

Writes tests/golden/plans/layouts.plans.json.gz: {"recorded_from": ..., "plans": {layout: {FILETYPE or
FILETYPE+imatrix: plan}}}. A plan is what the dry run prints: one type per tensor in file order, written as
runs [type, number of tensors]. The files that it plans for are headers with a hole where the data would be.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from quantize.plan.recipes import RECIPES  # noqa: E402
from tests.quantize.plan.layouts import LAYOUTS, write_header  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "plans" / "layouts.plans.json.gz"
MATRIX = ROOT / "tests" / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"

_TENSOR = re.compile(r"^\[ *\d+/ *\d+\] (\S+) .*, type = +(\w+), size =[^(\n]*(?:\((\w+)\))?", re.MULTILINE)


def record(llama_quantize: str, source: str) -> None:
    """Plan every layout for every file type, with and without importances, and write the plans."""
    plans: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, layout in LAYOUTS.items():
            model = write_header(layout, Path(folder) / "model.gguf")
            names = [tensor.name for tensor in layout.tensors]
            for recipe in RECIPES:
                for suffix, words in (("", []), ("+imatrix", ["--imatrix", str(MATRIX)])):
                    command = [llama_quantize, "--dry-run", *words, str(model), recipe]
                    plans.setdefault(name, {})[recipe + suffix] = _plan(command, names)
    text = json.dumps({"recorded_from": source, "plans": plans}, separators=(",", ":"))
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))


def _plan(command: list[str], names: list[str]) -> list[list[Any]]:
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = _TENSOR.findall(run.stdout + run.stderr)
    if [name for name, _, _ in lines] != names:
        raise SystemExit(f"{' '.join(command)}: the dry run lists other tensors than expected")
    types = ((new or old).upper() for _, old, new in lines)
    return [[type_, len(list(run_))] for type_, run_ in itertools.groupby(types)]


if __name__ == "__main__":
    record(*sys.argv[1:])
