"""A file of log probabilities as a base, as in llama-perplexity --kl-divergence; `logits_file` writes one.

The file has the tokens, too, so no text is needed. It knows nothing of layers, so no drift can be measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forward.device import to_torch
from forward.logits import Positions
from forward.perplexity import predicted_positions
from forward.text.tokens import Text
from gguf_tools.errors import BadRequest, TruncatedError
from gguf_tools.system import files
from gguf_tools.system.files import NO_WAIT, open_file
from quality.bases.logits_file import HEADER_BYTES, MAGIC, ROW_HEADER_BYTES

SMALLEST_LOG_PROB = -16.0
"""Log probability up to which llama-perplexity leaves a token out: the lowest codes stand for many values."""


@dataclass(frozen=True)
class FileLogits:
    """The log probabilities in a file, as a LogitSource.

    tokens      of all chunks, int64 (n_chunks, chunk_size), as they are in the text
    vocab_size  columns of a row
    offset      of the first row
    """

    path: Path
    tokens: npt.NDArray[np.int64]
    vocab_size: int
    offset: int

    @classmethod
    def open(cls, path: Path, n_chunks: int | None) -> FileLogits:
        """Return a file's log probabilities, of the first `n_chunks` chunks or all.

        raises  BadRequest for what is no such file, or can't be read; TruncatedError for one that ends early
        """
        try:
            # A pipe is not waited for: as it is empty, it is no such file.
            with open(open_file(path, os.O_RDONLY | NO_WAIT), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(HEADER_BYTES)
                if len(start) < HEADER_BYTES or not start.startswith(MAGIC):
                    raise BadRequest(f"{path}: not a file of logits as llama-perplexity writes them")
                chunk_size, vocab_size, stored = np.frombuffer(start, np.int32, offset=len(MAGIC)).tolist()
                if chunk_size < 4 or vocab_size < 1 or stored < 1:
                    raise BadRequest(
                        f"{path}: {stored} chunks of {chunk_size} tokens and a vocabulary of {vocab_size},"
                        " expected positive numbers"
                    )
                offset = HEADER_BYTES + 4 * chunk_size * stored
                n_rows = stored * (chunk_size - 1 - chunk_size // 2)
                expected = offset + n_rows * (ROW_HEADER_BYTES + 2 * (vocab_size + vocab_size % 2))
                if size < expected:
                    raise TruncatedError(f"{path}: {size} bytes, expected {expected}")
                tokens = np.frombuffer(file.read(4 * chunk_size * stored), np.int32)
        except OSError as error:
            raise BadRequest(f"{path}: can't be read ({error.strerror})") from error
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if outside.size:
            raise BadRequest(f"{path}: token {outside[0]} is outside of its vocabulary of {vocab_size}")
        by_chunk = tokens.reshape(stored, chunk_size).astype(np.int64)
        return cls(path, by_chunk[:n_chunks], vocab_size, offset)

    def text(self, bos: int | None) -> Text:
        """Return the file's text; `bos` takes the place of each chunk's first token."""
        inputs = self.tokens.copy()
        if bos is not None:
            inputs[:, 0] = bos
        return Text(self.tokens, inputs)

    @property
    def positions(self) -> Positions:
        return predicted_positions(self.text(None))

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the range itself: rows are read when it's their turn."""
        return torch.tensor([start, stop])

    def logits(self, start: int, stop: int, weight: torch.Tensor) -> torch.Tensor:
        """Return log probabilities; those that share the lowest code are too high."""
        first, last = weight.tolist()
        positions = self.positions
        chunk, position = divmod(start, positions.chunk_size)
        row = chunk * (positions.stop - positions.first) + position - positions.first
        row_bytes = ROW_HEADER_BYTES + 2 * (self.vocab_size + self.vocab_size % 2)
        n_rows = stop - start
        headers = np.empty((n_rows, 2), np.float32)
        codes = np.empty((n_rows, last - first), np.uint16)
        fd = files.open_file(self.path, os.O_RDONLY)
        try:
            for number in range(n_rows):
                place = self.offset + (row + number) * row_bytes
                _read_into(fd, headers[number], place, self.path)
                _read_into(fd, codes[number], place + ROW_HEADER_BYTES + 2 * first, self.path)
        finally:
            os.close(fd)
        return to_torch(headers[:, :1] * codes.astype(np.float32) + headers[:, 1:])


def _read_into(fd: int, out: npt.NDArray[Any], offset: int, path: Path) -> None:
    view = out.data.cast("B")
    while view:
        count = files.read_into(fd, view, offset)
        if count == 0:
            raise TruncatedError(f"{path}: shorter than when it was opened; was it changed meanwhile?")
        view, offset = view[count:], offset + count
