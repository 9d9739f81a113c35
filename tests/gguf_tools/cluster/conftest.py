"""A scheduler with two workers that are threads of this process: what they do can be patched."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from gguf_tools.cluster.connect import Cluster

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        distributed.LocalCluster(
            n_workers=2,
            processes=False,
            threads_per_worker=1,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        yield Cluster(client, "here")
