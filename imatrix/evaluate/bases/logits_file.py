"""Log probabilities of a base in a file, as llama-perplexity writes it and compares other models with.

    "_logits_"                  magic
    n_ctx, n_vocab, n_chunk     int32
    tokens                      int32 (n_chunk, n_ctx), as they are in the text
    rows                        one for each measured token: scale and lowest log probability, float32; then
                                a code for each token of the vocabulary, uint16, to an even number of them

A log probability is scale * code + lowest. Logits more than 16 below the row's largest get code 0. The file
has the tokens, so it needs no text; it knows nothing of layers, so no drift can be measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gguf_tools.errors import BadRequest, TruncatedError
from gguf_tools.files.named_files import whole_file
from gguf_tools.system import files
from gguf_tools.system.files import NO_WAIT, open_file
from imatrix.forward.device import to_numpy, to_torch
from imatrix.forward.logits import LogitSource, Positions, predicted_positions, sweep_vocabulary
from imatrix.texts.chunks import Chunks
from imatrix.texts.tokens import Text

MAGIC = b"_logits_"
HEADER_BYTES = len(MAGIC) + 12

_RANGE = 16.0
"""Logits that are farther below the largest one share the lowest code."""

_LARGEST_CODE = 65535
ROW_HEADER_BYTES = 8

SMALLEST_LOG_PROB = -16.0
"""Log probability up to which llama-perplexity leaves a token out: the lowest codes stand for many values."""


def write_logits(
    head: LogitSource, device: torch.device, chunks: Chunks, path: Path, n_workers: int = 1
) -> None:
    """Write the log probabilities of a model for all measured tokens of a text in chunks of one length.

    The vocabulary is swept twice: for the range of each row, and for its codes.

    device  where logits are formed
    raises  OutputError when the file can't be written
    """
    positions = predicted_positions(chunks)
    ranges = _Ranges(positions, device)
    sweep_vocabulary([head], positions, [ranges], n_workers)
    with whole_file(path) as file:
        header = np.array([chunks.longest, head.vocab_size, chunks.n_chunks], np.int32).tobytes()
        start = MAGIC + header + chunks.tokens.astype(np.int32).tobytes()
        _write_at(file.fileno(), start, 0)
        codes = _Codes(file.fileno(), len(start), ranges, head.vocab_size)
        sweep_vocabulary([head], positions, [codes], n_workers)


class _Ranges:
    """A LogitVisitor that keeps, for each token, the range of the logits and the sum of their exponentials.

    largest, smallest, sums  float64 (n_measured,); sums of e^(logit - largest)
    """

    def __init__(self, positions: Positions, device: torch.device) -> None:
        self.positions, shape = positions, positions.tokens.shape
        self.largest = torch.full(shape, float("-inf"), dtype=torch.float64, device=device)
        self.smallest = torch.full(shape, float("inf"), dtype=torch.float64, device=device)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        values = logits[0].double()
        largest = torch.maximum(self.largest[at], values.amax(-1))
        shrink = torch.exp(self.largest[at] - largest)
        self.sums[at] = self.sums[at] * shrink + torch.exp(values - largest[:, None]).sum(-1)
        self.smallest[at] = torch.minimum(self.smallest[at], values.amin(-1))
        self.largest[at] = largest

    def finish_chunk(self, chunk: int) -> None:
        """Nothing is left to do."""


class _Codes:
    """A LogitVisitor that writes rows to their places in a file, a slice of the vocabulary at a time.

    offset  of the first row
    """

    def __init__(self, fd: int, offset: int, ranges: _Ranges, vocab_size: int) -> None:
        self._fd, self._offset, self._positions = fd, offset, ranges.positions
        self._lowest = torch.maximum(ranges.smallest, ranges.largest - _RANGE)
        self._scales = ((ranges.largest - self._lowest) / _LARGEST_CODE).float()
        log_probs = self._lowest - ranges.largest - ranges.sums.log()
        self._headers = to_numpy(torch.stack([self._scales, log_probs.float()], -1))
        self._row_bytes = ROW_HEADER_BYTES + 2 * (vocab_size + vocab_size % 2)
        self._vocab_size = vocab_size

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        above = (logits[0].double() - self._lowest[at, None]).clamp_(min=0)
        scales = self._scales[at].double()[:, None]
        codes = torch.where(scales > 0, above / scales, 0.0).round_().clamp_(max=_LARGEST_CODE)
        rows = to_numpy(codes.to(torch.int32)).astype(np.uint16)
        for number, row in enumerate(rows, at.start):
            _write_at(self._fd, row.tobytes(), self._place(number) + ROW_HEADER_BYTES + 2 * first)

    def finish_chunk(self, chunk: int) -> None:
        at = self._positions.place(chunk)
        for number, header in enumerate(self._headers[at], at.start):
            _write_at(self._fd, header.tobytes(), self._place(number))
        if self._vocab_size % 2:
            end = self._place(at.stop)
            _write_at(self._fd, b"\0\0", end - 2)

    def _place(self, number: int) -> int:
        return self._offset + number * self._row_bytes


def _write_at(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = files.write_at(fd, data, offset)
        data, offset = data[written:], offset + written


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
        with (
            BadRequest.from_os(f"{path}: can't be read"),
            # A pipe is not waited for: as it is empty, it is no such file.
            open(open_file(path, os.O_RDONLY | NO_WAIT), "rb") as file,
        ):
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

    @cached_property
    def positions(self) -> Positions:
        return predicted_positions(self.text(None).chunks)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the range itself: rows are read when it's their turn."""
        return torch.tensor([start, stop])

    def logits(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return log probabilities; those that share the lowest code are too high.

        tokens  measured ones that follow each other in the file
        """
        first, last = weight.tolist()
        row, n_rows = int(torch.searchsorted(self.positions.tokens, tokens[:1])), len(tokens)
        row_bytes = ROW_HEADER_BYTES + 2 * (self.vocab_size + self.vocab_size % 2)
        headers = np.empty((n_rows, 2), np.float32)
        codes = np.empty((n_rows, last - first), np.uint16)
        fd = open_file(self.path, os.O_RDONLY)
        try:
            for number in range(n_rows):
                place = self.offset + (row + number) * row_bytes
                _read_into(fd, headers[number], place, self.path)
                _read_into(fd, codes[number], place + ROW_HEADER_BYTES + 2 * first, self.path)
        finally:
            os.close(fd)
        return to_torch(headers[:, :1] * codes.astype(np.float32) + headers[:, 1:])


def _read_into(fd: int, out: npt.NDArray[Any], offset: int, path: Path) -> None:
    if files.fill(fd, out.data.cast("B"), offset) < out.nbytes:
        raise TruncatedError(f"{path}: shorter than when it was opened; was it changed meanwhile?")
