"""The warden that all tests in this folder share, and the small model on a Hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.small_hub import hub, impatient, small_model, waits
from tests.hostile.warden import Warden

__all__ = ["hub", "impatient", "small_model", "waits", "warden"]


@pytest.fixture(scope="session")
def warden() -> Iterator[Warden]:
    with Warden() as warden:
        yield warden
