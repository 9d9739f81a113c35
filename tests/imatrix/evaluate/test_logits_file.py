"""The file of log probabilities, against llama-perplexity's own and against the logits themselves."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_tools
from gguf_tools.errors import OutputError
from tests.support.trained_model import GOLDEN, calibration_text

torch = pytest.importorskip("torch")

from gguf_tools.format.ggml_types import F32  # noqa: E402
from imatrix.evaluate.bases.logits_file import write_logits  # noqa: E402
from imatrix.forward import logits  # noqa: E402
from imatrix.forward.hidden_states import MemoryStates  # noqa: E402
from imatrix.forward.layers.load import Loader  # noqa: E402
from imatrix.forward.layers.residual import RMSNorm  # noqa: E402
from imatrix.forward.logits import Head  # noqa: E402
from imatrix.texts.tokens import Cut, Text  # noqa: E402

HEADER_BYTES = 20


def rows_of(content: bytes, n_tokens: int, n_vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and lowest log probabilities, float32 (n_rows, 2), and codes, int64 (n_rows, n_vocab)."""
    rows = np.frombuffer(content[HEADER_BYTES + 4 * n_tokens :], np.uint16)
    rows = rows.reshape(-1, 4 + n_vocab + n_vocab % 2)
    return rows[:, :4].copy().view(np.float32), rows[:, 4 : 4 + n_vocab].astype(np.int64)


def decoded(headers: np.ndarray, codes: np.ndarray) -> np.ndarray:
    values: np.ndarray = headers[:, :1] * codes + headers[:, 1:]
    return values


def test_the_file_is_llama_perplexitys(tiny_folder: Path, tmp_path: Path) -> None:
    """Down to the last byte of header and tokens; logits differ, because llama.cpp rounds keys and values."""
    (tmp_path / "t.txt").write_bytes(calibration_text()[-70000:])
    options = gguf_tools.EvaluateOptions(cut=Cut(512, n_chunks=2), logits=tmp_path / "base.kld")
    gguf_tools.evaluate(tiny_folder, tmp_path / "t.txt", [tiny_folder], options)
    expected = lzma.decompress((GOLDEN / "quality" / "first-4-rows.kld.xz").read_bytes())
    content = (tmp_path / "base.kld").read_bytes()
    start = HEADER_BYTES + 4 * 2 * 512
    assert content[:start] == expected[:start]
    assert len(content) == start + 2 * 255 * 2 * (4 + 4096)
    headers, codes = rows_of(content[: len(expected)], 2 * 512, 4096)
    expected_headers, expected_codes = rows_of(expected, 2 * 512, 4096)
    np.testing.assert_allclose(headers[:, 0], expected_headers[:, 0], rtol=1e-5)
    difference = decoded(headers, codes) - decoded(expected_headers, expected_codes)
    assert np.abs(difference).mean() < 1e-3
    assert np.abs(difference).max() < 1e-2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("base")] == ["base.kld"]


class Matrix:
    """A tensor in memory, as sources of weights are."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.shape, self.type = rows, rows.shape, F32

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.rows[start:stop]


def random_head(n_vocab: int, scale: float, seed: int) -> Head:
    """Return the end of a model with 24 columns, after 3 chunks of 16 tokens; everything is random."""
    rng = np.random.default_rng(seed)
    matrix: Any = Matrix((scale * rng.standard_normal((n_vocab, 24))).astype(np.float32))
    load = Loader(Path("base.gguf"), {"output.weight": matrix}, torch.device("cpu"), torch.float32)
    states = MemoryStates(3 * 16, 24)
    states.write(0, torch.from_numpy(rng.standard_normal((3 * 16, 24)).astype(np.float32)))
    return Head(load, states, RMSNorm(torch.ones(24), 1e-6), "output.weight")


@pytest.mark.parametrize("n_vocab", [100, 101])
@pytest.mark.parametrize("slice_rows", [7, 8192])
@pytest.mark.parametrize("scale", [0.0, 1.0, 9.0], ids=["flat", "narrow", "wide"])
def test_codes_give_back_log_probabilities(
    scale: float, slice_rows: int, n_vocab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "SLICE_ROWS", slice_rows)
    head = random_head(n_vocab, scale, seed=1)
    tokens = np.random.default_rng(2).integers(0, n_vocab, (3, 16))
    write_logits(head, torch.device("cpu"), Text(tokens, tokens).chunks, tmp_path / "b.kld", n_workers=2)
    content = (tmp_path / "b.kld").read_bytes()
    assert np.frombuffer(content[8:HEADER_BYTES], np.int32).tolist() == [16, n_vocab, 3]
    found = decoded(*rows_of(content, 3 * 16, n_vocab)).reshape(3, 7, n_vocab)
    whole = head.logits(torch.arange(3 * 16), head.read(0, n_vocab)).double()
    expected = torch.log_softmax(whole, -1).numpy().reshape(3, 16, n_vocab)[:, 8:15]
    floor = np.maximum(expected, expected.max(-1, keepdims=True) - 16)
    np.testing.assert_allclose(found, floor, atol=16 / 65535, rtol=1e-5)


def test_a_folder_that_is_not_there_is_named(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    options = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=1), logits=tmp_path / "none" / "b.kld")
    with pytest.raises(OutputError, match=r"none/b\.kld: there is no folder .*none; create it first"):
        gguf_tools.evaluate(tiny_folder, text, [tiny_folder], options)
