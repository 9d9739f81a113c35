"""The trained small model, and files that are made of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
import quantize
from gguf_tools.format.shards import open_gguf
from quantize.importances.entries import Importance
from tests.support.trained_model import calibration_text, trained_model

Damage = Callable[[str, Callable[[np.ndarray], object]], Path]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model's Hugging Face folder."""
    return trained_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of the text that importances were recorded with."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(calibration_text()[-20000:])
    return path


@pytest.fixture(scope="session")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the trained model in a file type, with whole attn_kv_b, made once."""
    folder = tmp_path_factory.mktemp("gguf")

    def make(file_type: str) -> Path:
        path = folder / f"{file_type}.gguf"
        if not path.exists() and file_type == "F32":
            convert.convert(tiny_folder, path, outtype="f32", mla="none")
        elif not path.exists():
            quantize.quantize(make("F32"), path, file_type, importances=importances_of(make("F32")))
        return path

    return make


def importances_of(path: Path) -> dict[str, Importance]:
    """Return importances for all matrices of a file: some are needed, and here any will do."""
    rng = np.random.default_rng(0)
    with open_gguf(path) as file:
        return {
            name: Importance(
                rng.exponential(1, (1, tensor.shape[-1])).astype(np.float32), np.ones(1, np.float32)
            )
            for name, tensor in file.tensors.items()
        }


def change_tensor(path: Path, name: str, change: Callable[[np.ndarray], object]) -> None:
    """Change the values of a tensor in place, float32 (n_elems,)."""
    file = open_gguf(path)
    offset, n_elems = file.data_offset(name), file.tensor(name).n_elems
    file.close()
    values = np.memmap(path, np.float32, "r+", offset, (n_elems,))
    change(values)
    values.flush()


@pytest.fixture
def damaged(made: Callable[[str], Path], tmp_path: Path) -> Damage:
    """Return a copy of the F32 file after a change to the values of a tensor, float32 (n_elems,)."""

    def damage(name: str, change: Callable[[np.ndarray], object]) -> Path:
        path = tmp_path / "damaged.gguf"
        shutil.copyfile(made("F32"), path)
        change_tensor(path, name, change)
        return path

    return damage
