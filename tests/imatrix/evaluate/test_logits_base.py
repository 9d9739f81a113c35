"""A file of log probabilities as the base, as llama-perplexity --kl-divergence has it."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gguf_tools
from gguf_tools.commands.evaluate import main
from gguf_tools.errors import BadRequest, TruncatedError
from tests.support.trained_model import GOLDEN

torch = pytest.importorskip("torch")

from imatrix.evaluate.bases.logits_file import (  # noqa: E402
    SMALLEST_LOG_PROB,
    FileLogits,
    write_logits,
)
from imatrix.evaluate.visitor import DivergenceVisitor  # noqa: E402
from imatrix.forward import logits  # noqa: E402
from imatrix.forward.logits import sweep_vocabulary  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut, Text  # noqa: E402
from tests.imatrix.evaluate.test_logits_file import random_head  # noqa: E402

OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=3), forward=ForwardOptions(n_threads=1))
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(made: Made, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the base's log probabilities as a file."""
    path = tmp_path_factory.mktemp("logits") / "base.kld"
    gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], replace(OPTIONS, logits=path))
    return path


def test_a_file_gives_nearly_the_numbers_of_its_model(written: Path, made: Made, text: Path) -> None:
    expected = gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS)
    found = gguf_tools.evaluate(gguf_tools.LogitsFile(written), None, [made("Q2_K")], OPTIONS)
    assert found.alone.base_ppl.value == pytest.approx(expected.alone.base_ppl.value, rel=1e-4)
    measured, wanted = found.models[0].divergence, expected.models[0].divergence
    assert measured.ppl == wanted.ppl
    assert measured.kld.mean.value == pytest.approx(wanted.kld.mean.value, rel=1e-3)
    assert measured.same_top == wanted.same_top
    assert found.models[0].layers == ()
    assert found.models[0].worst_layer is None
    assert found.to_json()["text"]["path"] is None
    assert found.alone.text.n_tokens_measured == 93


@pytest.mark.parametrize("n_vocab", [300, 301])
@pytest.mark.parametrize("slice_rows", [77, 8192])
def test_the_divergence_of_each_token_is_llama_perplexitys(
    slice_rows: int, n_vocab: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves out log probabilities that are not above -16, and takes the others as they are."""
    monkeypatch.setattr(logits, "SLICE_ROWS", slice_rows)
    base, model = random_head(n_vocab, scale=4, seed=1), random_head(n_vocab, scale=3, seed=2)
    tokens = np.random.default_rng(3).integers(0, n_vocab, (3, 16))
    path = tmp_path / "b.kld"
    write_logits(base, torch.device("cpu"), Text(tokens, tokens).chunks, path)
    source = FileLogits.open(path, None)
    assert source.tokens.tolist() == tokens.tolist()
    text = source.text(bos=5)
    assert text.inputs[:, 0].tolist() == [5, 5, 5]
    paths, cpu = [path, path], torch.device("cpu")
    visitor = DivergenceVisitor(text.chunks, paths, cpu, lambda *_: None, SMALLEST_LOG_PROB)
    sweep_vocabulary([source, model], source.positions, [visitor])
    found = visitor.values(1)

    rows = np.frombuffer(path.read_bytes(), np.uint16, offset=20 + 4 * 48).reshape(21, -1)
    scale, lowest = rows[:, :4].copy().view(np.float32).T[..., None]
    whole = scale * rows[:, 4 : 4 + n_vocab].astype(np.float32) + lowest
    weight = model.read(0, n_vocab)
    own = torch.stack([torch.log_softmax(model.logits(source.positions.of_chunk(chunk), weight).double(), -1)
                       for chunk in range(3)]).flatten(0, 1).numpy()  # fmt: skip
    assert (whole <= -16).any()
    expected = np.where(whole > -16, np.exp(whole.astype(np.float64)) * (whole - own), 0).sum(-1)
    np.testing.assert_allclose(found.kld.ravel(), expected, rtol=1e-6)
    targets = tokens[:, 9:].ravel()
    np.testing.assert_array_equal(found.base_log_prob.ravel(), whole[np.arange(21), targets])
    np.testing.assert_array_equal(found.same_top.ravel(), whole.argmax(-1) == own.argmax(-1))


def test_the_command_reads_with_kl_divergence(
    written: Path, made: Made, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e.json"
    words = ["--kl-divergence-base", str(written), "--kl-divergence", "--threads", "1"]
    assert main([str(made("Q8_0")), *words, str(made("Q2_K")), "--json", str(out)]) == 0
    assert "drift" not in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [Path(model["path"]).name for model in found["models"]] == ["Q8_0.gguf", "Q2_K.gguf"]
    assert found["base"]["path"] == str(written)
    assert (
        main([*words, str(made("Q8_0")), "-f", str(text), "--chunks", "2", "--json", str(out), "--force"])
        == 0
    )
    found = json.loads(out.read_text())
    assert (found["text"]["path"], found["text"]["n_chunks"]) == (str(text), 2)


def test_what_does_not_go_together_is_refused(
    written: Path, made: Made, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quant, read = str(made("Q8_0")), ["--kl-divergence-base", str(written), "--kl-divergence"]
    for words, code, message in (
        ([quant, "--kl-divergence"], 2, "--kl-divergence-base FILE is missing"),
        ([quant, quant], 2, "-f TEXT or --suite is missing"),
        ([quant, "-f", str(text)], 2, "is taken for BASE, and no QUANT to compare with it is given"),
        ([quant, *read, "-c", "128"], 1, "base.kld: chunks of 64 tokens, and -c 128"),
        ([quant, *read, "--keep", str(tmp_path / "k")], 1, "nothing is written or kept"),
    ):
        assert main(words) == code, words
        assert message in capsys.readouterr().err
    (tmp_path / "t.txt").write_bytes(text.read_bytes()[100:])
    with pytest.raises(BadRequest, match=r"t\.txt: is not the text of .*base\.kld"):
        gguf_tools.evaluate(gguf_tools.LogitsFile(written), tmp_path / "t.txt", [quant], OPTIONS)


def test_a_file_that_is_something_else_is_refused(written: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "x.kld", written.read_bytes()
    for changed, message in (
        (b"GGUF" + content, "not a file of logits as llama-perplexity writes them"),
        (content[:10], "not a file of logits"),
        (content[:8] + bytes(12), "0 chunks of 0 tokens and a vocabulary of 0, expected positive numbers"),
        (content[:20] + b"\xff" * 4 + content[24:], "token -1 is outside of its vocabulary of 4096"),
    ):
        path.write_bytes(changed)
        with pytest.raises(BadRequest, match=message):
            FileLogits.open(path, None)
    path.write_bytes(lzma.decompress((GOLDEN / "quality" / "first-4-rows.kld.xz").read_bytes()))
    with pytest.raises(TruncatedError, match=r"x\.kld: \d+ bytes, expected 418\d{4}$"):
        FileLogits.open(path, None)
