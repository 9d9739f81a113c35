"""The warden that all tests in this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.warden import Warden


@pytest.fixture(scope="session")
def warden() -> Iterator[Warden]:
    with Warden() as warden:
        yield warden
