"""Sensitivities of an MTP layer: those of the draft's own loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gguf_tools
from imatrix.texts.tokens import Cut, Text
from quantize.formats import get_format
from tests.convert.f32_files import write_f32
from tests.imatrix.forward.mtp_models import v3_with_mtp
from tests.imatrix.forward.small_models import CHUNKS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import imatrix.forward.open  # noqa: E402
from imatrix.calibrate.statistics.gradients import GradientOptions, collect_gradients  # noqa: E402
from imatrix.forward.work_folder import EMBEDDING  # noqa: E402
from imatrix.sensitivities import run  # noqa: E402
from tests.naive.mtp import WholeDraft  # noqa: E402


@pytest.mark.slow
def test_damages_are_those_of_the_drafts_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(run, "read_text", lambda *_: Text(CHUNKS, CHUNKS))
    monkeypatch.setattr(
        "convert.tokenizer.tokenizer.read_tokenizer", lambda *_, **__: SimpleNamespace(metadata=dict)
    )
    (tmp_path / "text.txt").write_text("random tokens")
    folder = v3_with_mtp(tmp_path / "hf", num_hidden_layers=2)
    file = write_f32(folder, tmp_path / "model.gguf", mtp=True)
    options = gguf_tools.SensitivityOptions(
        types=("Q8_0",), rows=10**6, tokens=10**6, cut=Cut(CHUNKS.shape[1])
    )
    losses = gguf_tools.sensitivity(file, tmp_path / "text.txt", tmp_path / "losses.json", options)
    assert not list(tmp_path.glob("losses.json.*"))
    with (
        imatrix.forward.open.open_model(file) as source,
        collect_gradients(source, Text(CHUNKS, CHUNKS), tmp_path / "out", GradientOptions()) as found,
    ):
        labels = torch.from_numpy(np.array(found.draft.arrays(EMBEDDING)["labels"])).view(CHUNKS.shape)
    total = 0.0
    weights = WholeDraft(folder).eh_proj.weight.detach().numpy()
    codec = get_format("Q8_0")
    errors = weights - codec.decode(codec.encode(weights, None), weights.shape[1])
    for tokens, theirs in zip(CHUNKS, labels, strict=True):
        whole = WholeDraft(folder)
        logits = whole.logits(torch.from_numpy(tokens[None]))[0]
        torch.nn.functional.cross_entropy(logits, theirs, reduction="sum").backward()
        gradient = whole.eh_proj.weight.grad
        assert gradient is not None
        total += 0.5 * float(np.square((errors * gradient.numpy()).sum(-1, dtype=np.float64)).sum())
    damage = losses.tensors["blk.2.nextn.eh_proj.weight"].by_type["Q8_0"]
    assert damage == pytest.approx(total / CHUNKS.size, rel=1e-4)
    assert "blk.2.attn_output.weight" in losses.tensors
