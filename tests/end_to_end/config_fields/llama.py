"""llama.cpp in a process of its own, which may end at an assertion."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 120


class LlamaError(Exception):
    """llama.cpp can't load a file, or not compute it."""


class Llama:
    """Computes logits of files in a child process, which is started anew after it has ended."""

    def __init__(self) -> None:
        self._child: Any = None
        self._pipe: Connection | None = None
        self._log = Path(tempfile.mkstemp(prefix="llama-", suffix=".log")[1])

    def logits(self, path: Path, tokens: list[int]) -> np.ndarray:
        """Return float32 (n_tokens, n_vocab); raises LlamaError with what llama.cpp says."""
        if self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._child = context.Process(target=serve, args=(theirs, self._log), daemon=True)
            self._child.start()
            theirs.close()
        try:
            self._pipe.send((path, tokens))
            answer = self._pipe.recv() if self._pipe.poll(SECONDS) else "no answer"
        except (EOFError, ConnectionError):
            answer = "ended: " + self._last_words()
        if isinstance(answer, str):
            if answer == "no answer" or answer.startswith("ended"):
                self._child.kill()
                self._child.join()
                self._pipe = None
            raise LlamaError(answer)
        return np.asarray(answer)

    def close(self) -> None:
        if self._pipe is not None:
            self._child.kill()
            self._child.join()
        self._log.unlink()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line.rpartition("/")[2] for line in lines[::-1] if "ASSERT" in line), "")


def serve(pipe: Connection, log: Path) -> None:
    """Answer requests for logits until nobody asks."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    from tests.support import oracle

    while True:
        try:
            path, tokens = pipe.recv()
        except EOFError:
            return
        try:
            with oracle.Model(path) as model:
                pipe.send(model.logits(tokens, n_threads=1))
        except RuntimeError as error:
            said = str(error).splitlines()
            told = [line for line in said if "error" in line or "not found" in line or "missing" in line]
            pipe.send((told or said)[0][-300:])
