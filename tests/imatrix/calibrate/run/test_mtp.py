"""Gradients and calibration of an MTP layer: those of its own drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import gguf_tools
from imatrix.forward.open import open_model
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut, Text
from quantize import quantize
from tests.imatrix.forward.mtp_models import v3_with_mtp
from tests.imatrix.forward.small_models import CHUNKS
from tests.support.checkpoints import add_mtp_layer
from tests.support.trained_model import trained_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.calibrate.statistics.gradients import GradientOptions, collect_gradients  # noqa: E402
from imatrix.forward.work_folder import EMBEDDING  # noqa: E402
from tests.imatrix.calibrate.run.whole_model import whole_covariance  # noqa: E402
from tests.naive.mtp import WholeDraft  # noqa: E402


def test_gradients_are_those_of_the_drafts_loss(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder, text = v3_with_mtp(tmp_path / "hf"), Text(CHUNKS, CHUNKS)
    options = GradientOptions(ForwardOptions(device="cpu"))
    with open_model(folder) as source, collect_gradients(source, text, tmp_path / "out", options) as found:
        layer = found.layer(source.network.n_layers)
        labels = found.draft.arrays(EMBEDDING)["labels"].reshape(CHUNKS.shape)
    whole = WholeDraft(folder)
    matrices = {
        "nextn.eh_proj": whole.eh_proj,
        "attn_output": whole.layer.self_attn.o_proj,
        "ffn_up_shexp": whole.layer.mlp.shared_experts.up_proj,
    }
    gradients: dict[str, Any] = {}

    def keep(name: str, linear: Any) -> None:
        def hook(_module: Any, _inputs: Any, product: Any) -> None:
            product.register_hook(lambda gradient: gradients.update({name: gradient}))

        linear.register_forward_hook(hook)

    for name, linear in matrices.items():
        keep(name, linear)
    logits = whole.logits(torch.from_numpy(CHUNKS))
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).flatten(), reduction="sum"
    )
    loss.backward()
    for name, gradient in gradients.items():
        rows = gradient.reshape(CHUNKS.size, -1).double().numpy()
        sizes = np.linalg.norm(rows, axis=1, keepdims=True)
        expected = rows.T @ (rows / np.maximum(sizes, 1e-30)) * sizes.mean()
        mine = whole_covariance(layer, f"blk.3.{name}.weight")
        assert mine is not None
        assert np.linalg.norm(mine - expected) < 1e-4 * np.linalg.norm(expected), name
    assert gradients.keys() == matrices.keys()


@pytest.mark.slow
def test_calibrated_drafts_are_nearer_to_the_base(text: Path, tmp_path: Path) -> None:
    base, cut = tmp_path / "base.gguf", Cut(64, n_chunks=12)
    convert.convert(add_mtp_layer(trained_model(tmp_path)), base, outtype="f32", mtp=True)
    quantize(base, tmp_path / "stock.gguf", "Q2_K")
    calibration = gguf_tools.Calibration(text, cut)
    quantize(base, tmp_path / "calibrated.gguf", "Q2_K", calibration=calibration)
    files = tmp_path / "stock.gguf", tmp_path / "calibrated.gguf"
    stock, calibrated = (each.drafts for each in gguf_tools.evaluate(base, text, files, cut=cut).models)
    assert stock is not None
    assert calibrated is not None
    assert calibrated.kld.mean.value < 0.7 * stock.kld.mean.value
