"""Evaluating on another device than the CPU: every tensor is where its operation needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gguf_tools
from imatrix.evaluate.evaluation import Evaluation

torch = pytest.importorskip("torch")

from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=2), forward=ForwardOptions(n_threads=1))
Made = Callable[[str], Path]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.imatrix.forward.pretended_device import keep_to_one_thread

    keep_to_one_thread(monkeypatch, "imatrix.evaluate.run", "imatrix.evaluate.bases.logits_file")


def on(device: str, options: gguf_tools.EvaluateOptions) -> gguf_tools.EvaluateOptions:
    return replace(options, forward=replace(options.forward, device=device))


def same(found: Evaluation, expected: Evaluation) -> None:
    """Check that two evaluations say the same, but for the order of sums."""
    near: dict[str, Any] = {"rel": 1e-4, "abs": 1e-7}
    assert found.alone.base_ppl.value == pytest.approx(expected.alone.base_ppl.value, **near)
    for one, other in zip(found.models, expected.models, strict=True):
        assert one.divergence.kld.mean.value == pytest.approx(other.divergence.kld.mean.value, **near)
        assert one.divergence.same_top == other.divergence.same_top
        assert [layer.drift for layer in one.layers] == pytest.approx(
            [layer.drift for layer in other.layers], **near
        )


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("memory", [4 << 30, 0], ids=["memory", "files"])
def test_another_device_gives_the_same(memory: int, made: Made, text: Path, tmp_path: Path) -> None:
    from tests.imatrix.forward.pretended_device import pretended

    forward = replace(OPTIONS.forward, memory_bytes=memory)
    options = replace(OPTIONS, forward=forward, keep=tmp_path / "kept")
    quants = [made("Q2_K"), made("F32")]
    expected = gguf_tools.evaluate(made("F32"), text, quants, OPTIONS)
    file = tmp_path / "b.kld"
    with pretended() as device:
        there = on(str(device), options)
        same(gguf_tools.evaluate(made("F32"), text, quants, there), expected)
        same(gguf_tools.evaluate(made("F32"), text, quants, there), expected)  # of what was kept
        gguf_tools.evaluate(made("F32"), text, quants, replace(there, keep=None, logits=file))
        read = gguf_tools.evaluate(gguf_tools.LogitsFile(file), None, quants, replace(there, keep=None))
    assert read.models[0].divergence.ppl.value == pytest.approx(expected.models[0].divergence.ppl.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_gives_the_same(dtype: Any, made: Made, text: Path) -> None:
    options = replace(OPTIONS, forward=ForwardOptions(dtype=dtype, n_threads=1))
    quants = [made("Q2_K"), made("F32")]
    expected = gguf_tools.evaluate(made("F32"), text, quants, on("cpu", options))
    found = gguf_tools.evaluate(made("F32"), text, quants, on("cuda", options))
    rel = 1e-3 if dtype == "float32" else 0.1
    assert found.models[0].divergence.kld.mean.value == pytest.approx(
        expected.models[0].divergence.kld.mean.value, rel=rel
    )
    assert not found.models[1].tokens.kld.any()
