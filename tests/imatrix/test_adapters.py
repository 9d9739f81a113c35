"""A folder with an adapter is computed as the model into which the adapter was merged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
from gguf_tools.errors import BadRequest
from tests.support.adapters import pair_of, write_adapter

torch = pytest.importorskip("torch")

MODULES = ("model.layers.0.self_attn.kv_b_proj", "model.layers.1.mlp.experts.2.down_proj", "lm_head")
SMALL = {"chunk_size": 64, "n_chunks": 2, "n_threads": 1}


@pytest.fixture(scope="module")
def adapter(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {name: tensor for module in MODULES for name, tensor in pair_of(tiny_folder, module).items()}
    return write_adapter(tmp_path_factory.mktemp("adapter") / "adapter", tensors, lora_alpha=0.2)


@pytest.fixture(scope="module")
def merged(tiny_folder: Path, adapter: Path) -> Path:
    """A file of the merged model."""
    path = adapter.with_name("merged.gguf")
    convert.convert(tiny_folder, path, "f32", lora=adapter)
    return path


def test_importances(
    tiny_folder: Path, adapter: Path, merged: Path, calibration: Path, tmp_path: Path
) -> None:
    collect = gguf_tools.imatrix.collect
    collected = collect(tiny_folder, calibration, tmp_path / "a.gguf", lora=adapter, **SMALL)
    expected = collect(merged, calibration, tmp_path / "b.gguf", **SMALL)
    without = collect(tiny_folder, calibration, tmp_path / "c.gguf", **SMALL)
    name = "blk.2.attn_output.weight"
    values = [each.importances.entries[name].read() for each in (collected, expected, without)]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)
    assert not np.allclose(values[0], values[2], rtol=1e-3)


def test_the_base_of_an_evaluation(tiny_folder: Path, adapter: Path, merged: Path, calibration: Path) -> None:
    found = gguf_tools.evaluate(tiny_folder, calibration, [merged], lora=adapter, **SMALL)
    without = gguf_tools.evaluate(tiny_folder, calibration, [merged], **SMALL)
    means = [each.models[0].divergence.kld.mean.value for each in (found, without)]
    assert abs(means[0]) < 1e-6 < 1e-3 < means[1]


@pytest.mark.slow
def test_sensitivities(
    tiny_folder: Path, adapter: Path, merged: Path, calibration: Path, tmp_path: Path
) -> None:
    how = {**SMALL, "types": ("Q4_K",), "rows": 16, "tokens": 64}
    found = gguf_tools.sensitivity(tiny_folder, calibration, tmp_path / "a.json", lora=adapter, **how)
    expected = gguf_tools.sensitivity(merged, calibration, tmp_path / "b.json", **how)
    costs = [each.tensors["blk.0.attn_output.weight"].by_type["Q4_K"] for each in (found, expected)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_a_file_takes_no_adapter(merged: Path, adapter: Path, calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="lora needs a folder with the adapter's base"):
        gguf_tools.imatrix.collect(merged, calibration, tmp_path / "a.gguf", lora=adapter, **SMALL)
    with pytest.raises(BadRequest, match="lora needs a folder with the adapter's base"):
        gguf_tools.quantize(merged, tmp_path / "a.gguf", "Q8_0", lora=adapter)
