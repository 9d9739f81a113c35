"""Record what llama-quantize writes for the command lines of tests/end_to_end/quantize_cases.py.

    python scripts/record/quantizer_golden.py LLAMA_QUANTIZE "llama.cpp 0c1e57098"

Writes tests/golden/quantize/files.json: the sha256 of the inputs, and for every case the sha256 of each whole
output file. LLAMA_QUANTIZE is a plain GCC build (no fused multiply-add in ggml-quants.c); the second argument
says which.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.end_to_end.quantize_cases import CASES, MATRIX_NAME, arguments, file_hashes, make_inputs  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "quantize" / "files.json"


def record(llama_quantize: str, source: str) -> None:
    """Run every case in a folder of its own, and write the hashes of its outputs."""
    with tempfile.TemporaryDirectory() as name:
        inputs = Path(name) / "inputs"
        make_inputs(inputs)
        outputs = {case: _run(llama_quantize, case, inputs, Path(name) / case) for case in CASES}
        recording = {"recorded_from": source, "inputs": file_hashes(inputs), "outputs": outputs}
    GOLDEN.write_text(json.dumps(recording, indent=1) + "\n")


def _run(llama_quantize: str, case: str, inputs: Path, folder: Path) -> dict[str, str]:
    folder.mkdir()
    # llama-quantize stores the matrix's path as it is given. Ours gets a bare name too.
    shutil.copy(inputs / MATRIX_NAME, folder)
    words = [llama_quantize, *arguments(case, inputs, folder / "out.gguf", MATRIX_NAME)]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    (folder / MATRIX_NAME).unlink()
    return file_hashes(folder)


if __name__ == "__main__":
    record(*sys.argv[1:])
