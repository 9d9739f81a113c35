"""A checkpoint of 4-bit integers keeps them: the file's weights are the source's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
import quality
from convert.sources import SourceOptions, plan_source
from gguf_tools import open_gguf
from quantize.fill.sources import GGUFTensor
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides
from tests.support.published_models import write


def rows_of(path: Path, name: str) -> np.ndarray:
    with open_gguf(path) as file:
        return GGUFTensor(file, name).read_rows(0, file.tensors[name].n_rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("kimi-k2-thinking", tmp_path_factory.mktemp("int4"))


def test_experts_of_kimi_k2_thinking(folder: Path, tmp_path: Path) -> None:
    """In groups of 32 with bfloat16 scales; what is not packed becomes what is asked for."""
    exact = convert.convert(folder, tmp_path / "f32.gguf", outtype="f32").paths[0]
    with plan_source(folder, tmp_path / "kept.gguf", "Q8_0", SourceOptions(keep_grid=True)) as run:
        plan = run.preparation.plan
        kept = run.execute().paths[0]
    types = {tensor.name: tensor.target_type.name for tensor in plan.tensors}
    experts = [name for name in types if "_exps" in name]
    assert experts
    assert {types[name] for name in experts} == {"Q4_0"}
    reasons = [tensor.reason for tensor in plan.tensors if tensor.name in experts]
    assert all(reason.endswith("grid of Q4_0, exactly") for reason in reasons), reasons
    assert types["blk.1.ffn_down_shexp.weight"] == "Q8_0"
    for name in experts:
        np.testing.assert_array_equal(rows_of(kept, name), rows_of(exact, name))


def test_nothing_is_lost_of_the_source(folder: Path, tmp_path: Path) -> None:
    """With all else as it is, the divergence from the source's own weights is 0."""
    pytest.importorskip("torch")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"The {n} brown foxes jump over {n * n} lazy dogs." for n in range(120)))
    base = convert.convert(folder, tmp_path / "f32.gguf", outtype="f32").paths[0]
    files = []
    for keeps in (True, False):
        types = PlanOptions(overrides=parse_overrides([r"^(?!.*_exps).*=F32"]))
        options = SourceOptions(types=types, keep_grid=keeps)
        with plan_source(folder, tmp_path / f"{keeps}.gguf", "Q4_0", options) as run:
            files.append(run.execute().paths[0])
    kept, again = quality.evaluate(base, text, files, chunk_size=64, n_chunks=2).models
    assert kept.divergence.kld.mean.value < 1e-12 < again.divergence.kld.mean.value
