"""Compare whole files of `quantize` with llama.cpp's for a small model of each family, byte for byte.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python scripts/check/published_files.py package [NAME ...]

The models are those of tests/support/published_models.py, as BF16 files. A model that the library refuses is
named with its reason. Exits with 1 if files differ.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import gguf_tools  # noqa: E402
from gguf_tools.errors import ToolkitError  # noqa: E402
from scripts.release.same_bytes import digest, llama_quantize  # noqa: E402
from tests.support.published_models import PUBLISHED, write  # noqa: E402

TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_S", "Q4_0", "IQ4_XS")


def differing(library: Path, source: Path, folder: Path) -> Iterator[str]:
    """Yield the file types of which the two programs make different files."""
    for file_type in TYPES:
        ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
        gguf_tools.quantize(source, ours, file_type, provenance=False, force=True)
        llama_quantize(library, source, theirs, file_type)
        if digest(ours) != digest(theirs):
            yield file_type


def main() -> int:
    package, *names = sys.argv[1:]
    library = next(Path(package).glob("bins/*/libllama.*so*"))
    found = False
    for name in names or sorted(PUBLISHED):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "bf16.gguf")
            gguf_tools.convert(write(name, Path(folder, "model")), source, outtype="bf16")
            try:
                differ = list(differing(library, source, Path(folder)))
            except (ToolkitError, SystemExit) as error:
                print(f"{name}: refused: {str(error).strip().splitlines()[-1]}", flush=True)
                continue
        found |= bool(differ)
        print(f"{name}: {'DIFFERENT: ' + ', '.join(differ) if differ else 'equal'}", flush=True)
    return int(found)


if __name__ == "__main__":
    raise SystemExit(main())
