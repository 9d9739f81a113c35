"""One tree of exceptions: what is not there is a ToolkitError and a FileNotFoundError."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gguf_tools as gt

ROOT = Path(__file__).parents[3]
MODEL, TEXT = ROOT / "examples/tiny-deepseek-v3", ROOT / "examples/tiny-deepseek-v3/calibration.txt"

CALLS: dict[str, Callable[[Any], object]] = {
    "open_gguf": gt.open_gguf,
    "open_checkpoint": gt.open_checkpoint,
    "quantize": lambda no: gt.quantize(no, None, "Q4_0"),
    "quantize with a matrix": lambda no: gt.quantize(MODEL, "o.gguf", "Q4_0", importances=no),
    "quantize with a recipe": lambda no: gt.quantize(MODEL, "o.gguf", f"{no}.yaml"),
    "quantize with losses": lambda no: gt.quantize(MODEL, "o.gguf", "3bpw", losses=no),
    "calibrate": lambda no: gt.calibrate(MODEL, "o.gguf", "Q4_0", no),
    "convert": lambda no: gt.convert(no, "o.gguf"),
    "lint": lambda no: gt.lint("Q4_0", no),
    "evaluate a base": lambda no: gt.evaluate(no, TEXT, [no]),
    "evaluate a file": lambda no: gt.evaluate(MODEL, TEXT, [no]),
    "evaluate on a text": lambda no: gt.evaluate(MODEL, no, [MODEL]),
    "sensitivity": lambda no: gt.sensitivity(no, TEXT, "l.json"),
    "imatrix.load": gt.imatrix.load,
    "imatrix.collect": lambda no: gt.imatrix.collect(no, TEXT),
    "edit_model": lambda no: gt.edit.edit_model(no, lambda keys, names: gt.edit.remove_keys(keys, [])),
    "split": lambda no: gt.split(no, "part"),
    "merge": lambda no: gt.merge(no, "whole.gguf"),
    "card": gt.card,
    "upload": lambda no: gt.upload(no, "me/repo"),
    "cook": lambda no: gt.cook(MODEL, no, "Q4_0", "out"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(gt.MissingInput) as raised:
        CALLS[name](tmp_path / "none")
    assert isinstance(raised.value, gt.ToolkitError)
    assert isinstance(raised.value, FileNotFoundError)
    assert str(tmp_path / "none") in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_of_the_kind_of_what_was_looked_for() -> None:
    assert issubclass(gt.MissingModel, gt.GGUFError | gt.CheckpointError)
    assert issubclass(gt.MissingFile, gt.BadRequest)
    assert issubclass(gt.MissingMatrix, gt.BadImportance)


def test_an_error_goes_through_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(gt.MissingModel("a.gguf: no such file")))
    assert (type(error), str(error)) == (gt.MissingModel, "a.gguf: no such file")


def test_types_have_their_names() -> None:
    assert gt.GGMLType.Q4_K is gt.GGMLType["q4_k"]
    assert gt.GGMLType.IQ2_KS.id == 145
    assert {"Q4_K", "IQ4_NL", "MXFP4"} <= set(dir(gt.GGMLType))
    with pytest.raises(AttributeError, match="GGMLType has no 'Q4_KM'"):
        gt.GGMLType.Q4_KM  # noqa: B018
