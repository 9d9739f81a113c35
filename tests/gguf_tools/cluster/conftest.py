"""A scheduler with two workers that are threads of this process: what they do can be patched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gguf_tools.cluster.connect import Cluster
from tests.support.dask_cluster import workers_in_threads

pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with workers_in_threads() as cluster:
        yield cluster
