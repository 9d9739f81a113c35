"""Convert, quantize and evaluate the sample model with the installed commands, away from the sources.

    python scripts/release/try_commands.py

Prints what they print, and exits with the code of the first that fails. Needs the extra `torch`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SAMPLE = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"
LINES = (
    ["convert-hf-to-gguf", str(SAMPLE), "--outfile", "bf16.gguf", "--outtype", "bf16"],
    ["quantize", "bf16.gguf", "q4.gguf", "Q4_K_M"],
    ["evaluate", "bf16.gguf", "-f", str(SAMPLE / "calibration.txt"), "-c", "64", "--chunks", "2", "q4.gguf"],
    ["gguf-tools", "verify", "q4.gguf"],
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, *arguments in LINES:
            print(f"$ {name} {' '.join(arguments)}", flush=True)
            command = shutil.which(name, path=sysconfig.get_path("scripts"))
            if command is None:
                raise SystemExit(f"{name} is not installed")
            code = subprocess.run([command, *arguments], cwd=folder).returncode
            if code:
                sys.exit(code)


if __name__ == "__main__":
    main()
