"""Every tensor of a model is used by its network, or named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_tools.errors import FormatError, ShapeError, ToolkitError, UnexpectedTensors, UnsupportedCheckpoint
from gguf_tools.format.values import Value

pytest.importorskip("torch")

from imatrix.forward.open import open_model
from tests.convert.f32_files import write_f32
from tests.end_to_end.header_keys import Case, make_base, write_case
from tests.support.checkpoints import add_mtp_layer, micro_checkpoint

ROW = np.ones(96, np.float32)


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        (
            Case("one", tensors={"output.bias": ROW}), UnexpectedTensors,
            r"1 tensor that this model has no use for \(output.bias\), expected those of deepseek2",
        ),
        (
            Case("many", tensors={f"blk.0.x{number}": ROW for number in range(6)}), UnexpectedTensors,
            r"6 tensors .* \(blk.0.x0, blk.0.x1, blk.0.x2, blk.0.x3 ...\)",
        ),
        (Case("behind", tensors={"blk.3.attn_norm.weight": ROW}), UnexpectedTensors, "blk.3.attn_norm"),
        (Case("short", tensors={"blk.0.attn_norm.weight": ROW[:5]}), ShapeError, "shape 5, expected 96"),
        (
            Case("wide", {"deepseek2.embedding_length": Value.u32(95)}), ShapeError,
            "token_embd.weight: found shape 320 x 96, expected 320 x 95",
        ),
        (Case("all", {"deepseek2.attention.causal": Value.bool_(False)}), UnsupportedCheckpoint, "is false"),
        (Case("no eps", {"deepseek2.attention.layer_norm_rms_epsilon": None}), FormatError, "requires"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)  # fmt: skip
def test_a_file_is_refused_before_a_weight_is_read(
    case: Case, error: type[ToolkitError], text: str, tmp_path: Path
) -> None:
    path = write_case(make_base("v3", tmp_path), case, tmp_path / "case.gguf")
    with pytest.raises(error, match=text) as refusal:
        open_model(path)
    assert str(refusal.value).startswith(str(path))


@pytest.mark.parametrize("mla", ["both", "split", "none"])
def test_all_layouts_are_used(mla: str, tmp_path: Path) -> None:
    folder = micro_checkpoint(tmp_path / "m", "v3")
    with open_model(write_f32(folder, tmp_path / "m.gguf", mla=mla)) as source:
        assert source.network.n_layers == 3


def test_a_layer_for_multi_token_prediction_is_used(tmp_path: Path) -> None:
    folder = add_mtp_layer(micro_checkpoint(tmp_path / "m", "v3"))
    for path in (folder, write_f32(folder, tmp_path / "m.gguf", mtp=True)):
        with open_model(path) as source:
            assert source.network.n_mtp == 1
