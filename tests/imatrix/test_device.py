"""Collecting on another device than the CPU: every tensor is where its operation needs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_tools.commands.imatrix import main
from imatrix.store import load
from tests.imatrix.forward.deepseek4_models import v4_model

torch = pytest.importorskip("torch")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.imatrix.forward.pretended_device import keep_to_one_thread

    keep_to_one_thread(monkeypatch)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [(), ("--all-experts", "--process-output"), ("--dtype", "bfloat16"), ("--memory", "0")],
    ids=" ".join,
)
def test_another_device_gives_the_same(
    options: tuple[str, ...], tiny_folder: Path, calibration: Path, tmp_path: Path
) -> None:
    words = ["-m", str(tiny_folder), "-f", str(calibration), "-c", "64", "--chunks", "2", *options]
    assert_same_elsewhere(words, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_another_device_computes_deepseek_v4(calibration: Path, tmp_path: Path) -> None:
    folder = v4_model(tmp_path / "model")
    assert_same_elsewhere(["-m", str(folder), "-f", str(calibration), "-c", "130", "--chunks", "2"], tmp_path)


def assert_same_elsewhere(words: list[str], tmp_path: Path) -> None:
    from tests.imatrix.forward.pretended_device import pretended

    assert main([*words, "-o", str(tmp_path / "here.gguf"), "--device", "cpu"]) == 0
    with pretended() as device:
        assert main([*words, "-o", str(tmp_path / "there.gguf"), "--device", str(device)]) == 0
    here, there = load(tmp_path / "here.gguf").entries, load(tmp_path / "there.gguf").entries
    assert here.keys() == there.keys()
    for name, entry in here.items():
        # the CPU's sums of squares are taken by a kernel of its own
        np.testing.assert_allclose(there[name].values, entry.values, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(there[name].counts, entry.counts)


def test_tensors_elsewhere_do_not_mix_with_those_of_the_cpu() -> None:
    from tests.imatrix.forward.pretended_device import pretended

    with pretended() as device:
        there = torch.ones(2, 2, device=device)
        assert there.device == device
        assert (there + there.to(device)).cpu().tolist() == [[2, 2], [2, 2]]
        with pytest.raises(RuntimeError, match="different devices"):
            there + torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
