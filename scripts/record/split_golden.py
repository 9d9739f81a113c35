"""Record what llama-gguf-split writes for the cases of tests/gguf_tools/edit/split_cases.py.

    python scripts/record/split_golden.py LLAMA_GGUF_SPLIT "llama.cpp 0c1e57098"

Writes tests/golden/split/shards.json: for every case the sha256 of its input and of each shard.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gguf_tools.edit.split_cases import CASES, Case, hashes, make_input  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "split" / "shards.json"


def record(llama_gguf_split: str, source: str) -> None:
    """Run every case, and write the hashes of its input and shards."""
    cases = {name: _run(llama_gguf_split, case) for name, case in CASES.items()}
    GOLDEN.write_text(json.dumps({"recorded_from": source, "cases": cases}, indent=1) + "\n")


def _run(llama_gguf_split: str, case: Case) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as name:
        inputs, outputs = Path(name) / "in", Path(name) / "out"
        inputs.mkdir()
        outputs.mkdir()
        make_input(case, inputs / "model.gguf")
        command = [llama_gguf_split, "--split", *case.their_flags, inputs / "model.gguf", outputs / "model"]
        subprocess.run(command, check=True, capture_output=True)
        return {"input": hashes(inputs), "shards": hashes(outputs)}


if __name__ == "__main__":
    record(*sys.argv[1:])
