"""Print the SHA-256 of files that the installed `quantize` and llama.cpp make of the sample model.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python scripts/release/same_bytes.py package [TYPE ...]

llama.cpp is the library in that npm package: llama-quantize calls its llama_model_quantize. Exits with 1 if
files differ.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf_tools
from quantize.plan.recipes import RECIPES

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "tiny-deepseek-v3"
CHILD = ROOT / "scripts" / "check" / "llama_quantize.py"
TYPES = ("Q4_0", "Q8_0", "Q2_K", "Q4_K_M", "Q6_K", "IQ4_XS")


def llama_quantize(library: Path, source: Path, output: Path, file_type: str) -> None:
    """Write a file as llama-quantize does; exits with its log if it refuses."""
    request = {
        "source": str(source), "output": str(output), "params": {"ftype": RECIPES[file_type].file_type},
        "kv_overrides": [], "rules": [], "prune_layers": [], "imatrix": None,
    }  # fmt: skip
    path = output.with_suffix(".json")
    path.write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, CHILD, library, path], capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp: {done.stderr}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    package, *types = sys.argv[1:]
    library = next(Path(package).glob("bins/*/libllama.*so*"))
    all_equal = True
    with tempfile.TemporaryDirectory() as name:
        source = Path(name, "bf16.gguf")
        gguf_tools.convert(SAMPLE, source, outtype="bf16")
        for file_type in types or TYPES:
            ours, theirs = Path(name, f"ours-{file_type}.gguf"), Path(name, f"theirs-{file_type}.gguf")
            gguf_tools.quantize(source, ours, file_type, provenance=False)
            llama_quantize(library, source, theirs, file_type)
            is_equal = digest(ours) == digest(theirs)
            all_equal &= is_equal
            print(f"{file_type:<8} ours   {digest(ours)}\n{'':<8} theirs {digest(theirs)}")
            print(f"{'':<8} {'equal' if is_equal else 'DIFFERENT'}", flush=True)
    return int(not all_equal)


if __name__ == "__main__":
    raise SystemExit(main())
