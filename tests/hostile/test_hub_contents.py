"""A Hub whose contents are not what it lists, or whose names would lead out of the cache."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.hub import fetch, stream
from gguf_tools.hub import downloads, ranges
from tests.hostile.small_hub import (
    CONFIG,
    LARGE,
    LISTING,
    NAME,
    flipped,
    is_whole,
    refusal,
    weights_of,
)
from tests.support.hub_server import HubServer, Trouble


@pytest.mark.parametrize(("where", "file"), [(LARGE, "model.safetensors"), (CONFIG, "config.json")])
def test_a_flipped_bit_is_refused_and_does_not_stay(
    where: str, file: str, hub: HubServer, small_model: Path, tmp_path: Path
) -> None:
    hub.troubles.append(Trouble(where, times=1, change=flipped))
    line = refusal(lambda: fetch(NAME, quiet=True))
    assert f"{file}: the content that came is not the Hub's" in line
    assert "removed from the cache" in line
    assert list((tmp_path / "cache").rglob(file)) == []
    cached = [path.read_bytes() for path in (tmp_path / "cache").rglob("blobs/*")]
    assert flipped((small_model / file).read_bytes()) not in cached
    assert is_whole(fetch(NAME, quiet=True), small_model)


def test_a_file_is_checked_by_the_next_run_if_the_first_was_killed(
    hub: HubServer, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.troubles.append(Trouble(LARGE, times=1, change=flipped))

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(downloads, "check", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(NAME, quiet=True)
    assert "content that came is not the Hub's" in refusal(lambda: fetch(NAME, quiet=True))
    assert is_whole(fetch(NAME, quiet=True), small_model)
    hub.requests.clear()
    fetch(NAME, quiet=True)
    assert hub.requests == [LISTING]


def test_a_cached_file_of_another_length_is_refused(hub: HubServer, small_model: Path) -> None:
    path = fetch(NAME, quiet=True)
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert "its length is 1000" in refusal(lambda: fetch(NAME, quiet=True))
    assert is_whole(fetch(NAME, quiet=True), small_model)


def test_the_blob_of_another_file_is_neither_taken_nor_lost(
    hub: HubServer, small_model: Path, tmp_path: Path
) -> None:
    """A server that gives a file the ETag of another one that is cached has the client link that."""
    path = fetch(NAME, quiet=True)
    (path / "model.safetensors").unlink()
    blob = os.path.basename(os.readlink(path / "config.json"))
    hub.troubles.append(Trouble("HEAD /owner/small/resolve", times=1, headers={"X-Linked-ETag": f'"{blob}"'}))
    assert "its length is" in refusal(lambda: fetch(NAME, quiet=True))
    assert (path / "config.json").exists()
    assert is_whole(fetch(NAME, quiet=True), small_model)


def test_a_streamed_shard_is_checked_when_all_of_it_has_passed(
    hub: HubServer, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = stream(NAME, quiet=True)
    before = streamed.recognised_by()
    size = (small_model / "model.safetensors").stat().st_size
    hub.troubles.append(Trouble(LARGE, change=lambda body: flipped(body) if len(body) > 500_000 else body))
    line = refusal(lambda: weights_of(NAME))
    assert "model.safetensors: the content that came is not the Hub's" in line
    assert "restart=True" in line
    hub.troubles.clear()
    # A run that would go on with what was made of other bytes sees another source.
    assert streamed.recognised_by() != before
    assert streamed.recognised_by()["model.safetensors"].startswith(f"{size} bytes")
    assert len(weights_of(NAME)) == 4


def test_which_streamed_shards_were_checked_is_told(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(names: list[str]) -> str:
        caplog.clear()
        with Checkpoint(stream(NAME)) as checkpoint:
            for name in names:
                checkpoint.raw(name).read()
        return caplog.text

    assert read(["w0", "w1", "w2", "w3"]) == read(["w2", "w0", "w3", "w1"]) == read(["w0"]) == ""
    assert "SHA-256 checked of 0 of 1 shards" in read(["w0", "w1", "w2"])
    monkeypatch.setattr(ranges.Budget.__init__, "__defaults__", (1000,))
    assert "SHA-256 checked of 0 of 1 shards" in read(["w3", "w1", "w2", "w0"])


def test_a_hash_of_pieces_in_any_order() -> None:
    data = np.random.default_rng(1).bytes(100_000)
    rng = np.random.default_rng(2)
    for _ in range(20):
        wrong: list[str] = []
        budget = ranges.Budget(200_000)
        digest = ranges.InOrder(len(data), hashlib.sha256(data).hexdigest(), budget, wrong.append)
        cuts = [0, *sorted(rng.choice(len(data), 30, replace=False).tolist()), len(data)]
        pieces = [(start, stop + 50) for start, stop in itertools.pairwise(cuts)]
        for index in rng.permutation(len(pieces)):
            start, stop = pieces[index]
            digest.take(start, memoryview(data)[start:stop])
        assert (digest.is_checked, wrong, budget.take(200_000)) == (True, [], True)


@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag"])
@pytest.mark.parametrize(
    "name", ["{place}/out", '"{place}/out"', '"../../../../out"', '".."', '""', "a" * 300]
)
def test_an_etag_that_is_a_path(
    name: str, header: str, hub: HubServer, small_model: Path, tmp_path: Path
) -> None:
    etag = name.replace("{place}", str(tmp_path / "elsewhere"))
    hub.troubles.append(Trouble("HEAD /", headers={"X-Linked-ETag": None, header: etag}))
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    for action in (lambda: fetch(NAME, quiet=True), lambda: stream(NAME, quiet=True)):
        assert f"the server's {header} is" in refusal(action)
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    hub.troubles.clear()
    assert is_whole(fetch(NAME, quiet=True), small_model)


@pytest.mark.parametrize("commit", ["../../../out", "main", "0" * 39, "G" * 40, "0" * 40])
def test_a_commit_of_a_foreign_form(commit: str, hub: HubServer, tmp_path: Path) -> None:
    """The last one is a commit, but not that of the list."""
    hub.troubles.append(Trouble("HEAD /", headers={"X-Repo-Commit": commit}))
    line = refusal(lambda: fetch(NAME, quiet=True))
    assert "commit" in line
    assert not list((tmp_path / "cache").rglob("*out*"))
    assert not list((tmp_path / "cache").rglob("snapshots/*/config.json"))


def test_a_file_that_is_told_and_sent_shorter(hub: HubServer) -> None:
    hub.troubles.append(Trouble(LARGE, change=lambda body: body[:-5]))
    line = refusal(lambda: fetch(NAME, quiet=True))
    assert "model.safetensors: Consistency check failed: file should be of size" in line
