"""The examples of the docstrings do what they say, in a folder that has the files they name."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

import convert
from tests.contract.import_graph import PACKAGES, ROOT, files_of, name_of
from tests.support.trained_model import calibration_text

GOLDEN = ROOT / "tests" / "golden"
MODULES = [
    name_of(path) for package in PACKAGES for path in files_of(package) if ">>> " in (ROOT / path).read_text()
]
RECIPE = "file_type: Q4_K_M\ntensor-type: [ffn_down_shexp=Q6_K]\n"


@pytest.fixture
def folder(
    tiny_folder: Path,
    tiny_gguf: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The trained model under the names that the examples have for models, made the current folder."""
    (tmp_path / "DeepSeek-V2-Lite").symlink_to(tiny_folder)
    (tmp_path / "model-bf16.gguf").symlink_to(tiny_gguf("bf16"))
    (tmp_path / "model.imatrix").symlink_to(GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_bytes(calibration_text()[:4000])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_example_is_skipped() -> None:
    sources = [ROOT / path for package in PACKAGES for path in files_of(package)]
    assert [path for path in sources if "doctest: +SKIP" in path.read_text()] == []


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, folder: Path) -> None:
    if name == "quantize.mla_layout":
        convert.convert(folder / "DeepSeek-V2-Lite", folder / "lite-ik.gguf", outtype="bf16", mla="both")
    module = importlib.import_module(name)
    done = doctest.testmod(module, optionflags=doctest.FAIL_FAST)
    assert done.attempted
    assert not done.failed
