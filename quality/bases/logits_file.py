"""The base's log probabilities as a file, which llama-perplexity compares other models with.

    "_logits_"                  magic
    n_ctx, n_vocab, n_chunk     int32
    tokens                      int32 (n_chunk, n_ctx), as they are in the text
    rows                        one for each measured token: scale and lowest log probability, float32; then
                                a code for each token of the vocabulary, uint16, to an even number of them

A log probability is scale * code + lowest. Logits more than 16 below the row's largest get code 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from forward.device import to_numpy
from forward.logits import LogitSource, Positions, sweep_vocabulary
from forward.perplexity import predicted_positions
from forward.text.tokens import Text
from gguf_tools.files.atomic_write import whole_file
from gguf_tools.system import files

MAGIC = b"_logits_"
HEADER_BYTES = len(MAGIC) + 12

_RANGE = 16.0
"""Logits that are farther below the largest one share the lowest code."""

_LARGEST_CODE = 65535
ROW_HEADER_BYTES = 8


def write_logits(head: LogitSource, device: torch.device, text: Text, path: Path, n_workers: int = 1) -> None:
    """Write the log probabilities of a model for all measured tokens of a text.

    The vocabulary is swept twice: for the range of each row, and for its codes.

    device  where logits are formed
    raises  OutputError when the file can't be written
    """
    positions = predicted_positions(text)
    ranges = _Ranges(positions, device)
    sweep_vocabulary([head], positions, [ranges], n_workers)
    with whole_file(path) as file:
        header = np.array([text.chunk_size, head.vocab_size, text.n_chunks], np.int32).tobytes()
        start = MAGIC + header + text.tokens.astype(np.int32).tobytes()
        _write_at(file.fileno(), start, 0)
        codes = _Codes(file.fileno(), len(start), ranges, head.vocab_size)
        sweep_vocabulary([head], positions, [codes], n_workers)


class _Ranges:
    """A LogitVisitor that keeps, for each token, the range of the logits and the sum of their exponentials.

    largest, smallest, sums  float64 (n_chunks, n_positions); sums of e^(logit - largest)
    """

    def __init__(self, positions: Positions, device: torch.device) -> None:
        shape = positions.n_chunks, positions.stop - positions.first
        self.largest = torch.full(shape, float("-inf"), dtype=torch.float64, device=device)
        self.smallest = torch.full(shape, float("inf"), dtype=torch.float64, device=device)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def visit(self, chunk: int, first: int, logits: Sequence[torch.Tensor]) -> None:
        values = logits[0].double()
        largest = torch.maximum(self.largest[chunk], values.amax(-1))
        shrink = torch.exp(self.largest[chunk] - largest)
        self.sums[chunk] = self.sums[chunk] * shrink + torch.exp(values - largest[:, None]).sum(-1)
        self.smallest[chunk] = torch.minimum(self.smallest[chunk], values.amin(-1))
        self.largest[chunk] = largest

    def finish_chunk(self, chunk: int) -> None:
        """Nothing is left to do."""


class _Codes:
    """A LogitVisitor that writes rows to their places in a file, a slice of the vocabulary at a time.

    offset  of the first row
    """

    def __init__(self, fd: int, offset: int, ranges: _Ranges, vocab_size: int) -> None:
        self._fd, self._offset = fd, offset
        self._lowest = torch.maximum(ranges.smallest, ranges.largest - _RANGE)
        self._scales = ((ranges.largest - self._lowest) / _LARGEST_CODE).float()
        log_probs = self._lowest - ranges.largest - ranges.sums.log()
        self._headers = to_numpy(torch.stack([self._scales, log_probs.float()], -1))
        self._row_bytes = ROW_HEADER_BYTES + 2 * (vocab_size + vocab_size % 2)
        self._vocab_size = vocab_size

    def visit(self, chunk: int, first: int, logits: Sequence[torch.Tensor]) -> None:
        above = (logits[0].double() - self._lowest[chunk][:, None]).clamp_(min=0)
        scales = self._scales[chunk].double()[:, None]
        codes = torch.where(scales > 0, above / scales, 0.0).round_().clamp_(max=_LARGEST_CODE)
        rows = to_numpy(codes.to(torch.int32)).astype(np.uint16)
        for number, row in enumerate(rows, chunk * len(rows)):
            _write_at(self._fd, row.tobytes(), self._place(number) + ROW_HEADER_BYTES + 2 * first)

    def finish_chunk(self, chunk: int) -> None:
        headers = self._headers[chunk]
        for number, header in enumerate(headers, chunk * len(headers)):
            _write_at(self._fd, header.tobytes(), self._place(number))
        if self._vocab_size % 2:
            end = self._place((chunk + 1) * len(headers))
            _write_at(self._fd, b"\0\0", end - 2)

    def _place(self, number: int) -> int:
        return self._offset + number * self._row_bytes


def _write_at(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = files.write_at(fd, data, offset)
        data, offset = data[written:], offset + written
