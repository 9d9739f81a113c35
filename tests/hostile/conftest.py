"""What tests in this folder share: the warden, the small model on a Hub, and files with odd names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.small_hub import hub, impatient, small_model, waits
from tests.hostile.warden import Warden

__all__ = ["hub", "impatient", "small_model", "waits", "warden"]


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files with odd names; see tests/hostile/odd_names.py."""
    from tests.hostile.odd_names import odd_files

    return odd_files(tmp_path_factory)


@pytest.fixture(scope="session")
def warden() -> Iterator[Warden]:
    with Warden() as warden:
        yield warden
