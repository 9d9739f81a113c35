"""A Dask worker that dies when it is asked what it sees: `dask worker --preload .../dies_when_asked.py`."""

from __future__ import annotations

import os
import signal

from gguf_tools.cluster import worker
from gguf_tools.cluster.job import PostedJob


def _die(_job: PostedJob) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


worker.examine = _die
