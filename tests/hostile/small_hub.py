"""A small model on a Hub that means harm, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.hub import stream
from gguf_tools.errors import HubError
from gguf_tools.hub import limits
from gguf_tools.hub.names import HubName
from tests.support.hub_server import HubServer

NAME = HubName("owner/small")
LISTING = "GET /api/models/owner/small"
CONFIG = "GET /owner/small/resolve"
LARGE = "GET /cdn/"
Speak = Callable[[Callable[[bytes], object]], object]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one file in the large storage, and a small one."""
    made = tmp_path_factory.mktemp("small")
    (made / "config.json").write_text('{"architectures": ["X"], "model_type": "x"}')
    rng = np.random.default_rng(0)
    tensors = {f"w{number}": rng.standard_normal((256, 768), np.float32) for number in range(4)}
    save_file(tensors, made / "model.safetensors")
    return made


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were to be slept, which take no time."""
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


@pytest.fixture
def hub(small_model: Path, tmp_path: Path, waits: list[float]) -> Iterator[HubServer]:
    with (
        HubServer({NAME.repo: small_model}) as server,
        server.client(tmp_path / "cache", HF_TOKEN="hf_secret"),
    ):
        yield server


@pytest.fixture
def impatient() -> Iterator[None]:
    """A user who lets nobody wait."""
    limits.allow(0.2)
    yield
    limits.allow(limits.DEFAULT_SECONDS)


def refusal(action: Callable[[], object]) -> str:
    """Return the one line that an action ends with."""
    with pytest.raises(HubError) as caught:
        action()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    return line


def is_whole(path: Path, folder: Path) -> bool:
    return all((path / file.name).read_bytes() == file.read_bytes() for file in folder.iterdir())


def flipped(body: bytes) -> bytes:
    return body[:-9] + bytes([body[-9] ^ 16]) + body[-8:]


def weights_of(name: HubName) -> dict[str, np.ndarray]:
    with Checkpoint(stream(name, quiet=True)) as checkpoint:
        return {tensor: checkpoint.raw(tensor).read() for tensor in checkpoint.names()}
