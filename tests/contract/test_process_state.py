"""The first calls leave the process as they found it; tests/hostile/test_caller.py has all the others.

What an import sets up for good is not a call's doing, so everything is imported first.
"""

from __future__ import annotations

import gc
import importlib
import locale
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.contract.import_graph import PACKAGES

pytest.importorskip("torch")


def test_the_first_calls_leave_the_process_as_it_was(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    words = [sys.executable, "-m", "tests.contract.test_process_state", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=root, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def _state() -> dict[str, dict[Any, Any]]:
    """Return what may not change, by kind and name."""
    import numba
    import numpy as np
    import torch

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    with ThreadPoolExecutor(1) as pool:
        of_new_threads = pool.submit(torch.get_num_threads).result()
    return {
        "torch": {
            "threads": torch.get_num_threads(), "of new threads": of_new_threads,
            "dtype": torch.get_default_dtype(), "gradients": torch.is_grad_enabled(),
            "products": torch.get_float32_matmul_precision(),
        },
        "random": {
            "torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate(),
            "numpy": str(np.random.get_state()),  # noqa: NPY002
        },
        "numpy": {"errors": np.geterr(), "printing": str(np.get_printoptions())},
        "numba": {name: str(value) for name, value in vars(numba.config).items() if name.isupper()},
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "python": {
            "locale": locale.setlocale(locale.LC_ALL), "recursion": sys.getrecursionlimit(),
            "collector": (gc.isenabled(), gc.get_threshold()), "path": list(sys.path), "folder": os.getcwd(),
            "hooks": (sys.excepthook, sys.displayhook, threading.excepthook, list(sys.meta_path)),
            "streams": (sys.stdin, sys.stdout, sys.stderr), "warnings": list(warnings.filters),
        },
        "loggers": {
            each.name: (each.level, list(each.handlers), list(each.filters), each.propagate, each.disabled)
            for each in loggers
            if isinstance(each, logging.Logger)
        },
        "module dictionaries": {
            (module, name): id(value)
            for module, there in list(sys.modules.items())
            if module.partition(".")[0] in PACKAGES
            for name, value in vars(there).items()
            if not isinstance(value, types.ModuleType)
        },
    }  # fmt: skip


def _call(here: Path) -> None:
    """Convert, quantize, collect and evaluate."""
    import gguf_tools as gt

    how: dict[str, Any] = {"chunk_size": 32, "n_chunks": 1, "n_threads": 1}
    gt.convert(here / "m", here / "m.gguf", outtype="f32")
    gt.quantize(here / "m.gguf", here / "q.gguf", "Q8_0")
    gt.imatrix.collect(here / "m.gguf", here / "t", here / "i", any_text=True, **how)
    gt.evaluate(here / "m.gguf", here / "t", [here / "q.gguf"], **how)


def main(here: Path) -> None:
    """Print what the calls have changed."""
    import torch

    from tests.support.checkpoints import micro_checkpoint
    from tests.support.tokenizer_files import copy_tokenizer
    from tests.support.trained_model import calibration_text

    copy_tokenizer("tiny", micro_checkpoint(here / "m", "v3", vocab_size=4096, num_hidden_layers=2))
    (here / "t").write_bytes(calibration_text()[:3000])
    for package in PACKAGES:
        found = importlib.import_module(package)
        for name in getattr(found, "__all__", ()):
            getattr(found, name)
    torch.set_num_threads(3)
    before = _state()
    _call(here)
    after = _state()
    for kind, values in before.items():
        for name, value in values.items():
            if after[kind].get(name, value) != value or name not in after[kind]:
                print(f"{kind}: {name} was {value!r}, is {after[kind].get(name)!r}")
    for name in after["environment"].keys() - before["environment"].keys():
        print(f"environment: {name} is new")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
