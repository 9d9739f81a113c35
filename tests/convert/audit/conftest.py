"""Bases of four families, and files that are made of them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import convert
from gguf_tools.commands.main import main
from tests.convert.audit.families import family_folder
from tests.support.trained_model import calibration_text

Base = Callable[[str], Path]
Make = Callable[[str, str], Path]

CUT = ["-c", "256", "--chunks", "16", "-q"]
"""What of the text importances are collected on, and calibrations learn from."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Return the folder of a family."""
    parent = tmp_path_factory.mktemp("families")
    return lambda family: family_folder(family, parent)


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(calibration_text()[:60000])
    return path


@pytest.fixture(scope="session")
def made(base: Base, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a file of a family, made once: "Q4_K_M", "imatrix Q4_K_M" or "calibrated Q4_K_M"."""
    folder = tmp_path_factory.mktemp("files")

    def importances(family: str) -> Path:
        path = folder / f"{family}.imatrix"
        if not path.exists():
            words = ["-m", str(base(family)), "-f", str(calibration), "-o", str(path)]
            assert main(["imatrix", *words, *CUT]) == 0
        return path

    def make(family: str, how: str) -> Path:
        kind, _, file_type = how.rpartition(" ")
        path = folder / f"{family}-{kind}-{file_type}.gguf"
        if path.exists():
            return path
        if kind == "calibrated":
            words = [str(base(family)), str(path), file_type, "--calibrate", str(calibration)]
            assert main(["quantize", *words, *CUT]) == 0
        elif kind == "imatrix":
            convert.convert(base(family), path, outtype=file_type, importances=importances(family))
        else:
            convert.convert(base(family), path, outtype=file_type)
        return path

    return make
