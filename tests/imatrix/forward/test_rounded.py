"""A model computed as another file of it would be, against that file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import quantize
from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import F32
from tests.imatrix.forward.float_files import files_of, scale
from tests.support.checkpoints import edit_tensors
from tests.support.trained_model import trained_model

torch = pytest.importorskip("torch")

from imatrix.forward.open import ModelSource, open_model  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402

Convert = Callable[[str], Path]
Kind = Literal["weights", "activations"]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Return the trained model, with weights that BF16 can't hold, as a file of float type, made once."""
    folder = tmp_path_factory.mktemp("rounded")
    return files_of(edit_tensors(trained_model(folder), scale), folder)


def rows_of(source: ModelSource, name: str, **options: Kind) -> torch.Tensor:
    load = source.loader_for(ForwardOptions(device="cpu", **options))
    tensor = load.tensor(name)
    rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
    return load.rows(tensor, 0, rows, torch.float32)


def test_weights_are_those_of_a_bf16_file(file_of: Convert) -> None:
    n_changed = 0
    with open_model(file_of("f16")) as base, open_model(file_of("bf16")) as expected:
        for name, tensor in base.tensors.items():
            found = rows_of(base, name, rounded="weights")
            n_changed += not torch.equal(found, rows_of(base, name))
            if tensor.type == F32:
                assert torch.equal(found, rows_of(expected, name)), name
            else:
                assert torch.equal(found, rows_of(base, name).bfloat16().float()), name
    assert n_changed > 10


def test_a_bf16_file_loses_nothing(file_of: Convert) -> None:
    with open_model(file_of("bf16")) as base:
        for name in base.tensors:
            assert torch.equal(rows_of(base, name, rounded="weights"), rows_of(base, name)), name


def test_activations_are_rounded_as_for_a_quantized_file(file_of: Convert, tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    quantize.quantize(file_of("f32"), path, "Q4_K_M")
    rounded = ForwardOptions(device="cpu", rounded="activations")
    with open_model(file_of("f32")) as base, open_model(path) as expected:
        here = base.loader_for(rounded)
        there = expected.loader_for(ForwardOptions(device="cpu", like="llama.cpp"))
        assert here.half_cache
        for name, tensor in base.tensors.items():
            assert here.rounding(tensor) is there.rounding(expected.tensors[name]), name
            assert torch.equal(rows_of(base, name, rounded="activations"), rows_of(base, name)), name


def test_activations_of_a_folder_are_rounded_as_for_the_file_of_it(tmp_path: Path, file_of: Convert) -> None:
    """A folder has attn_kv_b, whose files have attn_k_b with other rows."""
    rounded = ForwardOptions(device="cpu", rounded="activations")
    with open_model(trained_model(tmp_path)) as folder, open_model(file_of("f32")) as file:
        kinds = []
        for source in (folder, file):
            load = source.loader_for(rounded)
            attention = source.network.build(load, 0, source.network.rope.rotation(8, load.device)).attention
            kinds.append(attention.rounding)
        assert kinds[0] == kinds[1]
        assert kinds[0].query is not None


@pytest.mark.parametrize("rounded", ["weights", "activations"])
def test_a_noise_floor_is_computed_in_float32(rounded: Kind, file_of: Convert) -> None:
    with (
        open_model(file_of("f32")) as source,
        pytest.raises(BadRequest, match="a noise floor is computed in float32, not in bfloat16"),
    ):
        source.loader_for(ForwardOptions(device="cpu", dtype="bfloat16", rounded=rounded))
