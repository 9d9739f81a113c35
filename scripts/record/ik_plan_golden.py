"""Record the plans of ik_llama.cpp's llama-quantize for the models of tests/quantize/plan/ik_layouts.py.

    python scripts/record/ik_plan_golden.py LLAMA_QUANTIZE "wheel ik-llama-cpp-python 0.1.5"

Writes tests/golden/plans/ik.plans.json.gz: {"recorded_from": ..., "plans": {model: {FILETYPE or
FILETYPE+imatrix: plan}}}. A plan is one type per tensor in file order, as runs [type, number of tensors].
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from quantize.plan.ik_recipes import IK_RECIPES  # noqa: E402
from tests.quantize.plan.ik_layouts import MODELS, model, write_header  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "plans" / "ik.plans.json.gz"

_STEP = re.compile(r"^\[ *\d+/ *\d+\] +(\S+) - \[", re.MULTILINE)
_FROM = re.compile(r"type = +(\w+),")
_TO = re.compile(r"converting to (\w+) ")


def record(llama_quantize: str, source: str) -> None:
    """Plan every model for every file type, with and without importances, and write the plans."""
    plans: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        matrix = Path(folder) / "one.dat"
        matrix.write_bytes(struct.pack("<iiBii", 1, 1, ord("x"), 1, 1) + struct.pack("<f", 1.0))
        for name in MODELS:
            chosen = model(name)
            path = write_header(chosen, Path(folder) / "model.gguf")
            names = [tensor.name for tensor in chosen.tensors]
            for recipe in IK_RECIPES:
                for suffix, words in (("", []), ("+imatrix", ["--imatrix", str(matrix)])):
                    options = ["--dry-run", "--ignore-imatrix-rules", *words]
                    plan = _plan([llama_quantize, *options, str(path), recipe], names)
                    plans.setdefault(name, {})[recipe + suffix] = plan
    text = json.dumps({"recorded_from": source, "plans": plans}, separators=(",", ":"))
    GOLDEN.write_bytes(gzip.compress(text.encode(), mtime=0))


def _plan(command: list[str], names: list[str]) -> list[list[Any]]:
    run = subprocess.run(command, capture_output=True, check=False)
    # Notes go to another stream than the rest, and may stand in the middle of a line.
    text = run.stderr.decode(errors="replace")
    steps = _STEP.split(text)[1:]
    if run.returncode or steps[::2] != names:
        raise SystemExit(f"{' '.join(command)}: exit code {run.returncode}, {text[-800:]}")
    types = []
    for step in steps[1::2]:
        found = _TO.search(step) or _FROM.search(step)
        assert found is not None
        types.append(found[1].upper())
    return [[type_, len(list(run_))] for type_, run_ in itertools.groupby(types)]


if __name__ == "__main__":
    record(*sys.argv[1:])
