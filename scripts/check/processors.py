"""Run the tests whose numbers depend on the processor as on others; say how long each took and what failed.

    python scripts/check/processors.py [TEST ...] [--on NAME ...] [--workers N] [--slow]

Libraries choose code by the processor, and with it the order of their sums. Each has an environment variable
that makes it choose as on an older one:

    as-it-is       nothing is changed
    torch          ATEN_CPU_CAPABILITY: torch's own operations without AVX
    products       MKL_CBWR and ONEDNN_MAX_CPU_ISA: torch's matrix products with SSE alone
    skylakex       OPENBLAS_CORETYPE: numpy's products and factors as on an Intel Skylake, with AVX-512
    haswell        the same as on an Intel Haswell, without AVX-512
    nehalem        the same as on an Intel Nehalem, without AVX
    numba-sse4.2   NUMBA_CPU_NAME and NUMBA_CPU_FEATURES: kernels for any processor with SSE4.2
    numba-avx2     the same with AVX2

Kernels are compiled anew for numba's, which takes minutes the first time. A setting with which the libraries
choose as they do without it is not run: this processor is treated like that one. Without TEST, the tests of
calibration, importances, quality and block formats run. Exits with 1 if any fail.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llvmlite.binding import get_host_cpu_features

ROOT = Path(__file__).parents[2]
TESTS = ("tests/imatrix/calibrate", "tests/imatrix", "tests/imatrix/evaluate", "tests/quantize/formats")

SSE42 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16")
AVX2 = (*SSE42, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")

PROBE = """
import hashlib
import numpy as np
import torch
from numba.core.registry import cpu_target

a = np.random.RandomState(0).normal(size=(300, 700)).astype(np.float32)
x = torch.from_numpy(a)
small = x.bfloat16()
results = a @ a.T, np.linalg.cholesky(np.cov(a)), x.softmax(1), x @ x.T, (small @ small.T).float()
print(*cpu_target.target_context.codegen().magic_tuple())
print([hashlib.sha256(np.asarray(each).tobytes()).hexdigest() for each in results])
"""
"""Prints what numba compiles for, and digests of what the other libraries compute."""


@dataclass(frozen=True)
class Setting:
    """Environment variables, and the instructions that the processor must have for them."""

    environment: Mapping[str, str]
    needs: Sequence[str] = ()

    def whole(self) -> dict[str, str]:
        """Return this process' environment with the variables."""
        return {**os.environ, **self.environment}


def numba(features: Sequence[str]) -> Setting:
    """Return the setting under which numba compiles for any processor with these features."""
    text = ",".join(f"+{name}" for name in features)
    return Setting({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": text}, features)


SETTINGS = {
    "as-it-is": Setting({}),
    "torch": Setting({"ATEN_CPU_CAPABILITY": "default"}),
    "products": Setting({"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "skylakex": Setting({"OPENBLAS_CORETYPE": "SkylakeX"}, ("avx512f",)),
    "haswell": Setting({"OPENBLAS_CORETYPE": "Haswell"}, ("avx2", "fma")),
    "nehalem": Setting({"OPENBLAS_CORETYPE": "Nehalem"}, ("sse4.2",)),
    "numba-sse4.2": numba(SSE42),
    "numba-avx2": numba(AVX2),
}


def fingerprint(setting: Setting) -> str:
    """Return what the libraries choose under a setting, as `PROBE` prints it."""
    command = [sys.executable, "-c", PROBE]
    return subprocess.run(command, env=setting.whole(), check=True, capture_output=True, text=True).stdout


def run_tests(setting: Setting, words: Sequence[str]) -> list[str]:
    """Run pytest and print its last line; return the tests that failed.

    raises  SystemExit where no tests were run
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--no-header", *words]
    done = subprocess.run(command, env=setting.whole(), cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    print(lines[-1], flush=True)
    return [line for line in lines if line.startswith(("FAILED ", "ERROR "))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=TESTS, metavar="TEST", help="files, folders or node ids")
    parser.add_argument("--on", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--workers", default="0", metavar="N", help="processes, as pytest -n has them")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    options = parser.parse_args()
    if platform.machine() not in ("x86_64", "AMD64"):
        sys.exit(f"{platform.machine()}: the settings are those of x86-64, so there is nothing to run here")
    words = ["-n", options.workers, *(["-m", ""] if options.slow else []), *options.tests]
    features, plain, n_failed = get_host_cpu_features(), fingerprint(SETTINGS["as-it-is"]), 0
    for name in options.on:
        setting = SETTINGS[name]
        missing = [each for each in setting.needs if not features.get(each)]
        print(f"{name}: ", end="", flush=True)
        if missing:
            print(f"not run, because this processor lacks {', '.join(missing)}")
        elif setting.environment and fingerprint(setting) == plain:
            print("not run, because the libraries choose the same without it")
        else:
            started = time.monotonic()
            failed = run_tests(setting, words)
            print("".join(f"  {line}\n" for line in failed), end="")
            print(f"  took {time.monotonic() - started:.0f} s", flush=True)
            n_failed += len(failed)
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
