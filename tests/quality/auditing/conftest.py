"""Bases of four families, importances of them, and files that are made of them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import convert
from quantize.importances.entries import Importance
from tests.quality.auditing.families import family_folder
from tests.support.trained_model import calibration_text

Base = Callable[[str], Path]
Make = Callable[[str, str], Path]


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
def importances(base: Base, calibration: Path) -> Callable[[str], dict[str, Importance]]:
    """Return the importances of a family, collected once."""
    import imatrix

    known: dict[str, dict[str, Importance]] = {}

    def collected(family: str) -> dict[str, Importance]:
        if family not in known:
            done = imatrix.collect(base(family), calibration, chunk_size=256, n_chunks=16)
            known[family] = dict(done.importances.entries)
        return known[family]

    return collected


@pytest.fixture(scope="session")
def made(
    base: Base,
    calibration: Path,
    importances: Callable[[str], dict[str, Importance]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Make:
    """Return a file of a family, made once: "Q4_K_M", "imatrix Q4_K_M" or "calibrated Q4_K_M"."""
    folder = tmp_path_factory.mktemp("files")

    def make(family: str, how: str) -> Path:
        kind, _, file_type = how.rpartition(" ")
        path = folder / f"{family}-{kind}-{file_type}.gguf"
        if path.exists():
            return path
        if kind == "calibrated":
            from calibrate import Calibration
            from forward.text.tokens import Cut

            calibrating = Calibration(calibration, Cut(256, n_chunks=16))
            convert.convert(base(family), path, outtype=file_type, calibration=calibrating)
        elif kind == "imatrix":
            convert.convert(base(family), path, outtype=file_type, importances=importances(family))
        else:
            convert.convert(base(family), path, outtype=file_type)
        return path

    return make
