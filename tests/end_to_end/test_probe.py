"""Every family can be timed: estimates and bars of calibrated runs are made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from convert.options import ConvertOptions
from convert.pipeline import plan_run
from imatrix.calibrate.probe import Probe
from imatrix.calibrate.shapes import Shapes, network_of_model
from imatrix.forward.options import ForwardOptions
from tests.end_to_end import arch_models
from tests.imatrix.forward.deepseek4_models import v4_model
from tests.support.decoder_models import MODELS, decoder_model


def folder_of(case: str, path: Path) -> Path:
    if case in MODELS:
        decoder_model(case, path)
    return v4_model(path) if case == "deepseek4" else path if case in MODELS else arch_models.model(case)


@pytest.mark.parametrize(
    "case", [*arch_models.CASES, "deepseek4", "gemma4-small", "granite4-h", "nemotron-3", "qwen3next"]
)
def test_layers_of_every_kind_are_timed(case: str, tmp_path: Path) -> None:
    options = ConvertOptions(outtype="f32")
    with plan_run(folder_of(case, tmp_path), tmp_path / "out.gguf", options) as run:
        infos = run.preparation.plan.infos
        metadata = run.preparation.outputs[0].layout.metadata
    network = network_of_model(tmp_path, metadata, infos)
    probe = Probe(Shapes.of(network, infos, infos, metadata), 16, ForwardOptions(device="cpu"))
    found = [probe.layer(number) for number in range(network.n_layers)]
    assert all(each.attention > 0 for each in found)
    assert all(each.stages or each.block for each in found)  # a Nemotron has layers without attention
    # Gemma 4 has its dense block in the way past the attention.
    assert case.startswith("gemma4") or any(each.block + each.expert > 0 for each in found)
    assert probe.speeds.product > 0
