"""The best file of a size, with inner sizes padded or without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gguf_tools import open_gguf
from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.values import Value
from quantize import QuantizeOptions
from quantize.padding import PadChoice
from quantize.pipeline import plan_run
from quantize.plan.sensitivities import (
    Sensitivities,
    TensorSensitivity,
    read_sensitivities,
    write_sensitivities,
)
from quantize.size.parse import Size
from quantize.size.solve import Planner, SizeRequest, size_padded
from tests.quantize.padding.ffn_files import METADATA, SHAPES, write_ffn_file

TYPES = ("Q2_K", "Q3_K", "Q4_0", "Q4_K", "Q5_0", "Q6_K", "Q8_0")
DENSE = {name: shape for name, shape in SHAPES.items() if not name.startswith("blk.1.")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with dense blocks of 704 inner columns, 22 blocks of 32."""
    shapes = {name: tuple(704 if n == 160 else n for n in shape) for name, shape in DENSE.items()}
    metadata = {**METADATA, "deepseek2.feed_forward_length": Value.u32(704)}
    return write_ffn_file(tmp_path / "model.gguf", shapes, metadata)


def losses(model: Path, better: str) -> Sensitivities:
    """Losses that fall fourfold with each bit, and a hundredth of that for one type."""
    with open_gguf(model) as file:
        infos = [info for info in file.tensors.values() if len(info.shape) > 1 and "inp" not in info.name]
    by_type = {
        name: (0.01 if name == better else 1) * 4.0 ** -by_name(name).bits_per_weight for name in TYPES
    }
    return Sensitivities({info.name: TensorSensitivity.of(info.shape, by_type) for info in infos})


@pytest.mark.parametrize(
    ("better", "bits", "expected"),
    [("Q2_K", 3.5, ("deepseek2.feed_forward_length",)), ("Q4_0", 4.6, None)],
)
def test_both_are_tried_for_the_same_bytes(
    model: Path, better: str, bits: float, expected: PadChoice | None
) -> None:
    def planner_of(pad: PadChoice | None) -> Planner:
        return lambda mixture: plan_run(model, None, mixture, QuantizeOptions(pad=pad), allow_problems=True)

    wanted = SizeRequest(losses(model, better), Size("bpw", bits))
    sized, pad = size_padded(planner_of, wanted, None)
    assert pad == expected
    assert sized.total_bytes <= sized.budget
    plain, _ = size_padded(planner_of, wanted, "off")
    assert plain.budget == sized.budget
    assert sized.chosen.predicted <= plain.chosen.predicted
    down = sized.chosen.types["blk.0.ffn_down.weight"]
    assert (by_name(down).block_elems == 256) == (expected is not None)


def test_each_size_is_padded_only_where_it_pays(tmp_path: Path) -> None:
    """704 columns take a twelfth more and get their types; 352 take nearly half and are left."""
    shapes = {
        name: tuple({160: 704, 96: 352, 192: 704}.get(n, n) for n in shape) for name, shape in SHAPES.items()
    }
    sizes = {"feed_forward_length": 704, "expert_feed_forward_length": 352, "expert_shared_count": 2}
    metadata = {**METADATA, **{f"deepseek2.{key}": Value.u32(n) for key, n in sizes.items()}}
    model = write_ffn_file(tmp_path / "model.gguf", shapes, metadata)

    def planner_of(pad: PadChoice | None) -> Planner:
        return lambda mixture: plan_run(model, None, mixture, QuantizeOptions(pad=pad), allow_problems=True)

    wanted = SizeRequest(losses(model, "Q3_K"), Size("bpw", 4.3))
    sized, pad = size_padded(planner_of, wanted, "auto")
    assert pad == ("deepseek2.feed_forward_length",)
    predicted = {each: size_padded(planner_of, wanted, each)[0].chosen.predicted for each in ("256", "off")}
    assert sized.chosen.predicted < min(predicted.values())


def test_a_size_that_only_padded_rows_fit(tmp_path: Path) -> None:
    """Rows of 176 are F16 without zeros behind them."""
    shapes = {name: tuple(176 if n == 160 else n for n in shape) for name, shape in DENSE.items()}
    metadata = {**METADATA, "deepseek2.feed_forward_length": Value.u32(176)}
    model = write_ffn_file(tmp_path / "model.gguf", shapes, metadata)

    def planner_of(pad: PadChoice | None) -> Planner:
        return lambda mixture: plan_run(model, None, mixture, QuantizeOptions(pad=pad), allow_problems=True)

    sized, pad = size_padded(planner_of, SizeRequest(losses(model, "Q2_K"), Size("bpw", 5.5)), None)
    assert pad == ("deepseek2.feed_forward_length",)
    assert sized.total_bytes <= sized.budget
    with pytest.raises(BadRequest, match=r"a size of [\d,]+ bytes is too small: the smallest possible is"):
        size_padded(planner_of, SizeRequest(losses(model, "Q2_K"), Size("bpw", 1.5)), None)


def test_losses_of_padded_rows_are_kept(model: Path, tmp_path: Path) -> None:
    measured = losses(model, "Q2_K")
    write_sensitivities(measured, tmp_path / "losses.json")
    assert read_sensitivities(tmp_path / "losses.json") == measured
    data = json.loads((tmp_path / "losses.json").read_text())
    assert set(data["tensors"]["blk.0.ffn_down.weight"]["padded"]) == {"Q2_K", "Q3_K", "Q4_K", "Q6_K"}
