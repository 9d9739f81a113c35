"""The trained small model and its calibration text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trained_model import calibration_text, trained_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model's Hugging Face folder."""
    return trained_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text that the golden files were recorded with."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_bytes(calibration_text())
    return path
