"""Run the core of the tests on the installed packages in place of those beside the tests.

    python scripts/release/core_tests.py [PYTEST ARGUMENT ...]

Needs the extra `core`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    installed = subprocess.run(
        [sys.executable, "-c", "import gguf_tools; print(gguf_tools.__file__)"],
        cwd=tempfile.gettempdir(), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if Path(installed).is_relative_to(ROOT):
        raise SystemExit(f"{installed} is of this folder; install a wheel, and unset PYTHONPATH")
    print(f"testing {Path(installed).parent}", flush=True)
    site = shlex.quote(Path(sysconfig.get_path("purelib")).as_posix())
    command = [sys.executable, "-m", "pytest", "-m", "core", "-n", "auto", "-o", f"pythonpath={site} ."]
    environment = {
        **os.environ,
        "PYTHONUTF8": "1",
    }  # tests read sources; Windows takes them for another encoding
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
