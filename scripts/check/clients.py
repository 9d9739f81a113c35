"""Open what this project writes in programs that nobody here wrote, and print who reads what.

    npm install --prefix CLIENTS @huggingface/gguf hyllama
    pip install gguf gguf-parser xllamacpp
    python scripts/check/clients.py --npm CLIENTS

The files are made from examples/tiny-deepseek-v3: converted, quantized, split, and an importance matrix,
which is only read. A client that is not installed is skipped. Exits with 1 if a client fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import convert
import quantize
from gguf_tools import open_gguf
from gguf_tools.commands.command import make_parser

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny-deepseek-v3"
MATRIX = ROOT / "tests" / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"

GGUF_JS = """
import { gguf } from "@huggingface/gguf";
const { metadata, tensorInfos } = await gguf(process.argv[1], { allowLocalFile: true });
delete metadata.tensor_count; delete metadata.kv_count;  // big integers of its own
JSON.stringify(metadata);
console.log(tensorInfos.length);
"""
HYLLAMA_JS = """
import { ggufMetadata } from "hyllama";
import { readFileSync } from "node:fs";
const bytes = readFileSync(process.argv[1]);
const { byteOffset, length } = bytes;
const { metadata, tensorInfos } = ggufMetadata(bytes.buffer.slice(byteOffset, byteOffset + length));
if (!Object.keys(metadata).length) throw "no metadata";
console.log(tensorInfos.length);
"""
GGUF_PY = "import sys, gguf; print(len(gguf.GGUFReader(sys.argv[1]).tensors))"
GGUF_PARSER_PY = """
import sys
from gguf_parser import GGUFParser
parser = GGUFParser(sys.argv[1])
parser.parse()
assert parser.metadata
print(len(parser.tensors_info))
"""
XLLAMACPP_PY = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 256
server = xllamacpp.Server(params)
request = {"max_tokens": 8, "prompt": "def main(", "messages": [{"role": "user", "content": "def main("}]}
answer = getattr(server, sys.argv[2])(request)
assert "error" not in answer, answer
choice = answer["choices"][0]
print(len(choice.get("text") or choice["message"]["content"]))
"""

Check = Callable[[Path], list[str]]
"""Command line that opens a file; it prints a number above 0."""


def clients(npm: Path | None) -> dict[str, Check]:
    """Return the clients that are installed."""
    found: dict[str, Check] = {}
    if npm is not None:
        view = npm / "node_modules" / ".bin" / "gguf-view"
        found["@huggingface/gguf"] = lambda path: node(npm, GGUF_JS, path)
        found["gguf-view"] = lambda path: ["sh", "-c", f"'{view}' '{path}' | wc -l"]
        found["hyllama"] = lambda path: node(npm, HYLLAMA_JS, path)
    if find_spec("gguf"):
        found["gguf (PyPI)"] = lambda path: [sys.executable, "-c", GGUF_PY, str(path)]
    if find_spec("gguf_parser"):
        found["gguf-parser (PyPI)"] = lambda path: [sys.executable, "-c", GGUF_PARSER_PY, str(path)]
    if find_spec("xllamacpp"):
        found["xllamacpp, completion"] = lambda path: xllamacpp(path, "handle_completions")
        found["xllamacpp, chat"] = lambda path: xllamacpp(path, "handle_chat_completions")
    return found


def node(npm: Path, code: str, path: Path) -> list[str]:
    """Return a command that runs a module in the folder where the packages are."""
    return ["sh", "-c", 'cd "$0" && exec node --input-type=module -e "$1" "$2"', str(npm), code, str(path)]


def xllamacpp(path: Path, handler: str) -> list[str]:
    return [sys.executable, "-c", XLLAMACPP_PY, str(path), handler]


def make_files(folder: Path) -> dict[str, Path]:
    """Return the files by what they are."""
    converted, quantized = folder / "tiny-bf16.gguf", folder / "tiny-Q4_K_M.gguf"
    convert.convert(EXAMPLE, converted, outtype="bf16")
    quantize.quantize(converted, quantized, "Q4_K_M")
    parts = convert.convert(EXAMPLE, folder / "tiny.gguf", outtype="bf16", split_max_tensors=30)
    return {"converted": converted, "quantized": quantized, "split": parts.paths[0], "imatrix": MATRIX}


def verdict(command: list[str]) -> str:
    """Return "yes", or why not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no: {type(error).__name__}"
    last = (done.stdout.split() or ["0"])[-1]
    if done.returncode == 0 and last.isdecimal() and int(last) > 0:
        return "yes"
    return f"no: {(done.stderr.strip().splitlines() or ['printed ' + last])[-1][:60]}"


def main() -> int:
    parser = make_parser("clients.py", __doc__ or "")
    parser.add_argument("--npm", type=Path, metavar="DIR", help="folder with node_modules")
    args = parser.parse_args()
    known = clients(None if args.npm is None else args.npm.resolve())
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder))
        for path in files.values():
            with open_gguf(path) as file:
                assert file.tensors
        print(f"| client | {' | '.join(files)} |")
        print("|---" * (len(files) + 1) + "|")
        verdicts: list[str] = []
        for name, check in known.items():
            runs = name.startswith("xllamacpp")
            row = [
                "-" if runs and what == "imatrix" else verdict(check(path)) for what, path in files.items()
            ]
            print(f"| {name} | {' | '.join(row)} |", flush=True)
            verdicts += row
    return 1 if any(word.startswith("no") for word in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
