"""Calibrated files of the trained small model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import gguf_tools
import quantize
from gguf_tools.commands.quantize import main
from gguf_tools.errors import BadActivation, BadTensor, ToolkitError
from gguf_tools.findings import Finding
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.shards import open_gguf
from gguf_tools.progress import NoReport, ProgressState
from quantize.fill import session
from quantize.importances.text_sketch import TextSketch
from quantize.pipeline import plan_run

torch = pytest.importorskip("torch")

from imatrix.calibrate.plan import CalibrationPlan  # noqa: E402
from imatrix.calibrate.run import run  # noqa: E402
from imatrix.calibrate.run.layers import LayerRun  # noqa: E402
from imatrix.calibrate.run.report import ClassErrors  # noqa: E402
from imatrix.calibrate.statistics import gradients  # noqa: E402
from imatrix.calibrate.statistics.inputs import Capture, HoldoutSplit  # noqa: E402
from imatrix.calibrate.work import Work  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.mixture import read_text  # noqa: E402
from imatrix.texts.tokens import Cut, Text  # noqa: E402
from tests.imatrix.evaluate.trained_files import Damage  # noqa: E402
from tests.support.trained_model import calibration_text  # noqa: E402

Make = Callable[..., Path]
CUT = Cut(128, n_chunks=16)
FEW = Cut(64, n_chunks=4)
"""Enough of a text where the bytes are compared with those of another run, and nothing is measured."""


@pytest.fixture(scope="module")
def base(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model in F32, with split latent attention as llama.cpp wants it."""
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    convert.convert(tiny_folder, path, outtype="f32")
    return path


@pytest.fixture(scope="module")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of another kind than the one that calibrates."""
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_bytes((Path(__file__).parents[4] / "README.md").read_bytes())
    return path


def plainly(text: Path, cut: Cut = CUT) -> gguf_tools.Calibration:
    """Return a calibration under what the original multiplies, and nothing else."""
    return gguf_tools.Calibration(text, cut, sequential=False, method="one-sided", embedding=False)


def make_calibrated(
    source: Path, output: Path, text: Path, *, wholly: bool = False, **choices: object
) -> Path:
    """Calibrate a file to Q2_K, in the plain way or with all there is, and return it."""
    calibration = gguf_tools.Calibration(text, cut=CUT) if wholly else plainly(text)
    types = quantize.PlanOptions()
    options = quantize.QuantizeOptions(types=types, calibration=calibration)
    quantize.quantize(source, output, "Q2_K", options, **choices)  # type: ignore[arg-type]
    return output


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """Return the bytes of all tensors of a file."""
    with open_gguf(path) as file:
        return {
            name: file.read_rows(name, 0, tensor.n_rows).tobytes() for name, tensor in file.tensors.items()
        }


@pytest.fixture(scope="module")
def one_sided(base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_calibrated(base, tmp_path_factory.mktemp("one") / "one.gguf", text, n_threads=1)


def calibrate_little(source: Path, output: Path, text: Path, n_threads: int | None = None) -> Path:
    """Calibrate a file in the plain way on little text, without the experts, which hold most weights."""
    types = quantize.PlanOptions(overrides=quantize.parse_overrides(("exps=f16",)))
    options = quantize.QuantizeOptions(types=types, calibration=plainly(text, FEW))
    quantize.quantize(source, output, "Q2_K", options, n_threads=n_threads)
    return output


@pytest.fixture(scope="module")
def little(base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrate_little(base, tmp_path_factory.mktemp("little") / "little.gguf", text, n_threads=1)


@pytest.fixture(scope="module")
def whole(
    base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory, states: list[ProgressState]
) -> Path:
    output = tmp_path_factory.mktemp("whole") / "whole.gguf"
    return make_calibrated(base, output, text, wholly=True, n_threads=2, progress=states.append)


@pytest.fixture(scope="module")
def states() -> list[ProgressState]:
    """How far the run was that made the whole file, after every piece of work."""
    return []


@pytest.mark.slow
def test_a_run_says_how_far_it_has_come(whole: Path, states: list[ProgressState]) -> None:
    assert whole.exists()
    remarks = list(dict.fromkeys(state.remark for state in states if state.unit == "work"))
    assert [each for each in remarks if each] == [
        "gradients", "embeddings", "layer 1 of 3", "layer 2 of 3", "layer 3 of 3", "divergence",
    ]  # fmt: skip
    shares = [state.share for state in states if state.unit == "work"]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


@pytest.fixture(scope="module")
def stock(base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stock encoder makes with importances of the same text."""
    path = tmp_path_factory.mktemp("stock") / "stock.gguf"
    calibration = gguf_tools.Calibration(text, cut=CUT)
    with open_gguf(base) as file:
        promised = calibration.begin().promise(file.metadata, tuple(file.tensors.values()))
    entries = {
        name: quantize.Importance(np.ones(entry.shape, np.float32), entry.counts)
        for name, entry in promised.entries.items()
    }
    quantize.quantize(base, path, "Q2_K", importances=entries)
    return path


@pytest.mark.slow
def test_a_plan_and_its_run_read_the_text_once(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: Any) -> Text:
        texts.append(read_text(*arguments))
        return texts[-1]

    texts: list[Text] = []
    monkeypatch.setattr("imatrix.calibrate.calibration.read_text", read)
    path = tmp_path / "text.txt"
    path.write_bytes(calibration_text()[:8000])
    options = quantize.QuantizeOptions(calibration=plainly(path, Cut(128)).begin())
    with plan_run(base, tmp_path / "out.gguf", "Q2_K", options) as planned:
        assert list(planned.needs(quantize.RunOptions()))
    assert len(texts) == 1
    path.write_bytes(calibration_text()[:16000])
    with plan_run(base, tmp_path / "out.gguf", "Q2_K", options):
        assert texts[1].n_chunks > texts[0].n_chunks
    assert len(texts) == 2


@pytest.mark.slow
def test_the_model_errs_less_on_another_text_at_the_same_size(
    base: Path, one_sided: Path, whole: Path, stock: Path, other_text: Path
) -> None:
    options = gguf_tools.EvaluateOptions(Cut(256, n_chunks=8))
    evaluation = gguf_tools.evaluate(base, other_text, [stock, one_sided, whole], options)
    plain, one, everything = (model.divergence.kld.mean.value for model in evaluation.models)
    assert one < 0.85 * plain
    assert everything < 0.7 * one
    with open_gguf(stock) as expected:
        for path in (one_sided, whole):
            with open_gguf(path) as file:
                assert file.tensors == expected.tensors


@pytest.mark.slow
def test_the_run_tells_how_far_the_file_is_from_the_original(base: Path, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    calibration = gguf_tools.Calibration(text, CUT, method="one-sided", embedding=False)
    result = quantize.quantize(base, output, "Q2_K", calibration=calibration)
    (line,) = (line for line in result.written.calibration if line.startswith("divergence"))
    summed, held = (float(number) for number in re.findall(r"([0-9.]+) \+/-", line))
    evaluation = gguf_tools.evaluate(base, text, [output], gguf_tools.EvaluateOptions(CUT))
    expected = evaluation.models[0].divergence.kld.mean.value
    assert (14 * summed + 2 * held) / 16 == pytest.approx(expected, abs=1e-5)


def test_a_dry_run_tells_what_will_be_needed(
    base: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--dry-run",
        "--calibrate",
        text,
        "-c",
        "128",
        "--chunks",
        "16",
        base,
        tmp_path / "out.gguf",
        "Q2_K",
    )
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert "calibration: 2,048 tokens in 16 chunks" in lines
    assert "importance matrix" not in said.out + said.err
    for what in ("memory", "disk", "time"):
        assert sum(line.startswith(f"  {what}") for line in lines) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_any_number_of_threads_gives_the_same_bytes(
    base: Path, one_sided: Path, text: Path, tmp_path: Path
) -> None:
    again = make_calibrated(base, tmp_path / "again.gguf", text, n_threads=3)
    assert again.read_bytes() == one_sided.read_bytes()


@pytest.mark.slow
def test_threads_and_files_of_states_change_nothing_where_the_model_is_followed(
    base: Path, whole: Path, text: Path, tmp_path: Path
) -> None:
    from imatrix.forward.options import ForwardOptions

    calibration = gguf_tools.Calibration(text, cut=CUT, forward=ForwardOptions(memory_bytes=0))
    again = tmp_path / "again.gguf"
    quantize.quantize(base, again, "Q2_K", calibration=calibration, n_threads=1)
    assert tensor_bytes(again) == tensor_bytes(whole)


@pytest.mark.slow
def test_a_folder_gives_the_same_tensors(
    tiny_folder: Path, one_sided: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "folder.gguf"
    convert.convert(tiny_folder, path, outtype="Q2_K", calibration=plainly(text))
    assert tensor_bytes(path) == tensor_bytes(one_sided)


_KILLED = """
import os, signal, sys
from quantize.fill import session
import gguf_tools, quantize
from imatrix.texts.tokens import Cut

real, left = session.Session.done, int(sys.argv[4])

def done(self, number, digest):
    global left
    real(self, number, digest)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

session.Session.done = done
whole = sys.argv[5] == "whole"
method = "two-sided" if whole else "one-sided"
cut = Cut(128, n_chunks=16)
calibration = gguf_tools.Calibration(sys.argv[3], cut, sequential=whole, method=method, embedding=whole)
quantize.quantize(sys.argv[1], sys.argv[2], "Q2_K", calibration=calibration, n_threads=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one-sided", "whole"])
def test_killed_at_any_moment_the_next_run_gives_the_same_bytes(
    base: Path, one_sided: Path, whole: Path, text: Path, tmp_path: Path, way: str
) -> None:
    expected = one_sided if way == "one-sided" else whole
    output = tmp_path / "out.gguf"
    for n_chunks in (20, 45, 40):
        words = (base, output, text, n_chunks, way)
        killed = subprocess.run(
            [sys.executable, "-c", _KILLED, *map(str, words)], env={**os.environ}, check=False
        )
        assert killed.returncode == -signal.SIGKILL
        assert not output.exists()
    make_calibrated(base, output, text, wholly=way == "whole", n_threads=1, verify=True)
    assert output.read_bytes() == expected.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf"]


@pytest.mark.slow
def test_several_types_share_the_gradients(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are collected once, even by a run that is interrupted in the second type."""
    types, collected, left = ("Q2_K", "Q4_0"), [], [0]
    real_collect, real_done = gradients._collect, session.Session.done
    cut = Cut(64, n_chunks=2)
    calibration = gguf_tools.Calibration(text, cut, sequential=False, method="one-sided")
    options = quantize.QuantizeOptions(calibration=calibration)
    monkeypatch.setattr(run, "planned_work", lambda plan, _: Work(0, 0, 0, (0.0,) * plan.network.n_layers, 0))
    quantize.quantize(base, tmp_path / "alone.gguf", types[1], options)

    def collect(source: Any, *others: Any) -> None:
        collected.append(source.path)
        real_collect(source, *others)

    def done(self: session.Session, number: int, digest: int) -> None:
        real_done(self, number, digest)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(gradients, "_collect", collect)
    monkeypatch.setattr(session.Session, "done", done)
    output, n_tensors = tmp_path / "{FTYPE}.gguf", len(tensor_bytes(base))
    left[0] = n_tensors + n_tensors // 2
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_many(base, output, types, options)
    quantize.quantize_many(base, output, types, options)
    assert len(collected) == 1
    assert (tmp_path / "Q4_0.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Q2_K.gguf", "Q4_0.gguf", "alone.gguf"]


TYPES = ("Q2_K", "Q4_0")


def sequential(text: Path, memory: int | None = None) -> quantize.QuantizeOptions:
    """Return options of a calibration that follows the original layer by layer, on little text."""
    forward = ForwardOptions() if memory is None else ForwardOptions(memory_bytes=memory)
    calibration = gguf_tools.Calibration(text, FEW, method="one-sided", embedding=False, forward=forward)
    types = quantize.PlanOptions(overrides=quantize.parse_overrides(("exps=f16",)))
    return quantize.QuantizeOptions(types=types, calibration=calibration)


@pytest.fixture(scope="module")
def alone(base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files of several types, each made by a run of its own."""
    folder = tmp_path_factory.mktemp("alone")
    for name in TYPES:
        quantize.quantize(base, folder / f"{name}.gguf", name, sequential(text))
    return folder


def assert_same_files(folder: Path, alone: Path) -> None:
    for name in TYPES:
        assert (folder / f"{name}.gguf").read_bytes() == (alone / f"{name}.gguf").read_bytes()
    assert len(list(folder.iterdir())) == len(TYPES)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["for all", "for states", "none"])
def test_several_types_share_the_pass_of_the_original(
    base: Path, text: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    """Without room for the states of all, each type has a pass of its own. The bytes are always the same."""
    passed, real = [], LayerRun._pass_original

    def pass_original(self: LayerRun, *others: Any) -> Any:
        passed.append(self.number)
        return real(self, *others)

    monkeypatch.setattr(LayerRun, "_pass_original", pass_original)
    if room == "for states":
        monkeypatch.setattr(CalibrationPlan, "kept_bytes", 0)
    memory = 0 if room == "none" else None
    states: list[ProgressState] = []
    output = tmp_path / "{FTYPE}.gguf"
    quantize.quantize_many(base, output, TYPES, sequential(text, memory), progress=states.append)
    assert_same_files(tmp_path, alone)
    n_layers = max(passed) + 1
    assert passed == list(range(n_layers)) * (1 if memory is None else len(TYPES))
    bars = [state for state in states if state.unit == "work"]
    assert len({state.total for state in bars}) == 1
    assert bars[-1].done == pytest.approx(bars[-1].total)


@pytest.mark.slow
def test_a_type_that_is_done_shares_nothing_and_leaves_nothing(
    base: Path, text: Path, alone: Path, tmp_path: Path
) -> None:
    quantize.quantize(base, tmp_path / f"{TYPES[0]}.gguf", TYPES[0], sequential(text))
    quantize.quantize_many(base, tmp_path / "{FTYPE}.gguf", TYPES, sequential(text))
    assert_same_files(tmp_path, alone)


@pytest.mark.slow
@pytest.mark.parametrize("n_done", [150, 190, 230])
def test_types_that_were_interrupted_in_step_go_on(
    base: Path, text: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_done: int
) -> None:
    """Those that are behind come first, and compute the original anew where the others were."""
    left, real = [n_done], session.Session.done
    monkeypatch.setattr("imatrix.calibrate.run.context.SAVE_SECONDS", 0)

    def done(self: session.Session, number: int, digest: int) -> None:
        real(self, number, digest)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "done", done)
        with pytest.raises(KeyboardInterrupt):
            quantize.quantize_many(base, tmp_path / "{FTYPE}.gguf", TYPES, sequential(text))
    assert not (tmp_path / "Q4_0.gguf").exists()
    quantize.quantize_many(base, tmp_path / "{FTYPE}.gguf", TYPES, sequential(text))
    assert_same_files(tmp_path, alone)


@pytest.mark.parametrize("seconds", [0, pytest.param(1e9, marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_from_any_saved_layer(
    base: Path, little: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Layers whose states were not saved are computed again, and their tensors are not made again."""
    output, left, begun = tmp_path / "out.gguf", [140], []
    real_done, real_of = session.Session.done, LayerRun.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr("imatrix.calibrate.run.context.SAVE_SECONDS", seconds)

    def done(self: session.Session, number: int, digest: int) -> None:
        real_done(self, number, digest)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    def of(cls: type[LayerRun], context: Any, number: int) -> LayerRun:
        begun.append(number)
        layer: LayerRun = real_of(cls, context, number)
        return layer

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "done", done)
        with pytest.raises(KeyboardInterrupt):
            calibrate_little(base, output, text)
    monkeypatch.setattr(LayerRun, "of", classmethod(of))
    calibrate_little(base, output, text)
    assert output.read_bytes() == little.read_bytes()
    assert (begun[0] > 0) == (not seconds)


@pytest.mark.slow
def test_what_memory_or_disk_have_changed_is_found(
    base: Path, one_sided: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.gguf"
    real = session.Session._check

    def damage(self: session.Session, writer: object) -> object:
        layout = writer.layout  # type: ignore[attr-defined]
        offset = layout.offset_of("blk.1.ffn_down_exps.weight")
        writer.write(offset, b"\xff\xff")  # type: ignore[attr-defined]
        return real(self, writer)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "_check", damage)
        with pytest.raises(BadTensor, match=r"blk\.1\.ffn_down_exps\.weight: row 0 is not what was written"):
            make_calibrated(base, output, text, verify=True)
    assert not output.exists()
    make_calibrated(base, output, text, verify=True)
    assert output.read_bytes() == one_sided.read_bytes()


def test_a_file_of_which_nothing_is_calibrated_is_written(base: Path, text: Path, tmp_path: Path) -> None:
    """All of it is there when the calibration begins, and has no name yet; a kill may leave it so, too."""
    calibration = plainly(text, Cut(64, n_chunks=2))
    options = quantize.QuantizeOptions(calibration=calibration)
    quantize.quantize(base, tmp_path / "a.gguf", "F16", options)
    quantize.quantize(base, tmp_path / "b.gguf", "F16")
    assert tensor_bytes(tmp_path / "a.gguf") == tensor_bytes(tmp_path / "b.gguf")


@pytest.mark.slow
def test_a_seed_decides_what_gradients_decide(base: Path, text: Path, tmp_path: Path) -> None:
    def embedding(seed: int) -> bytes:
        calibration = replace(plainly(text, Cut(128, n_chunks=4)), embedding=True, seed=seed)
        types = quantize.PlanOptions(embedding_type=GGMLType.Q2_K)
        path = tmp_path / f"{seed}.gguf"
        quantize.quantize(base, path, "F16", types=types, calibration=calibration, n_threads=1)
        return tensor_bytes(path)["token_embd.weight"]

    assert embedding(0) != embedding(1)


def test_another_text_does_not_resume(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, left = tmp_path / "out.gguf", [30]
    real = session.Session.done

    def done(self: session.Session, number: int, digest: int) -> None:
        real(self, number, digest)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(session.Session, "done", done)
        with pytest.raises(KeyboardInterrupt):
            make_calibrated(base, output, text)
    longer = tmp_path / "longer.txt"
    longer.write_bytes(b"One more line.\n" + text.read_bytes())
    with pytest.raises(ToolkitError, match="calibration text was"):
        make_calibrated(base, output, longer)


def test_a_model_whose_activations_overflow_is_refused(damaged: Damage, text: Path, tmp_path: Path) -> None:
    def spoil(values: np.ndarray) -> None:
        values[7] = 1e38

    source = damaged("blk.1.attn_kv_a_norm.weight", spoil)
    with pytest.raises(BadActivation, match=r"blk\.1\..*have NaN or infinity"):
        make_calibrated(source, tmp_path / "out.gguf", text)


@pytest.mark.slow
def test_a_tensor_that_is_not_shown_is_made_without_importances(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Capture, "heads", lambda *shown: None)
    result = quantize.quantize(base, tmp_path / "out.gguf", "Q2_K", calibration=plainly(text))
    assert "shows nothing of 6 matrices" in "\n".join(result.written.calibration)
    quantize.quantize(base, tmp_path / "plain.gguf", "Q2_K")
    own, plain = tensor_bytes(tmp_path / "out.gguf"), tensor_bytes(tmp_path / "plain.gguf")
    assert own["blk.2.attn_v_b.weight"] == plain["blk.2.attn_v_b.weight"]


def test_a_short_text_is_told(base: Path, text: Path, tmp_path: Path) -> None:
    calibration = plainly(text, Cut(16, n_chunks=1))
    result = quantize.quantize(base, tmp_path / "out.gguf", "Q2_K", calibration=calibration)
    lines = "\n".join(result.written.calibration)
    assert "matrices saw fewer tokens than they have columns" in lines
    assert "no token reached" in lines
    assert "nothing was held back" in lines


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A folder of three classes: a file, a folder of files, and conversations."""
    folder, words = tmp_path / "classes", calibration_text().decode()
    (folder / "manuals").mkdir(parents=True)
    (folder / "source.txt").write_text(words[:6000], encoding="utf-8")
    for number in range(4):
        start = 20000 + 3000 * number
        (folder / "manuals" / f"{number}.md").write_text(words[start : start + 600], encoding="utf-8")
    talk = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": words[40000:40400]}]
    (folder / "talks.jsonl").write_text("\n".join([json.dumps({"messages": talk})] * 5), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_folder_of_classes_is_shared_equally_and_told_by_class(
    base: Path, classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [base, tmp_path / "out.gguf", "Q2_K", "1", "-c", "64", "--chunks", "12", "--calibrate", classes]
    assert main([str(word) for word in words]) == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("  class "))
    rows = [line.split() for line in lines[at + 1 : at + 4]]
    assert [row[:3] for row in rows] == [[name, "4", "1"] for name in ("manuals", "source", "talks")]
    for row in rows:
        assert 0 < float(row[3]) < 1
        assert 0 < float(row[4]) < 0.5
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.get("quantize.imatrix.dataset") == "classes"
        assert file.get("quantize.imatrix.chunks_count") == 12


@pytest.mark.slow
def test_a_class_that_is_not_better_is_told_with_q_too(
    base: Path, classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def worse(parts: object, holdout: HoldoutSplit) -> list[ClassErrors]:
        return [ClassErrors("talks", 4, 1.25, {}), ClassErrors("source", 4, 0.5, {})]

    monkeypatch.setattr("imatrix.calibrate.run.report.errors_by_class", worse)
    words = [base, tmp_path / "out.gguf", "Q2_K", "1", "-c", "32", "--chunks", "6", "--calibrate", classes]
    assert main([*map(str, words), "--one-sided", "--no-sequential", "--no-embedding", "-q"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "talks (1.25 of stock's error)" in printed.err
    assert "source" not in printed.err


def test_a_folder_is_no_text_to_evaluate_on(
    base: Path, classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(base), str(tmp_path / "out.gguf"), "Q8_0", "--evaluate", str(classes)]) == 1
    assert f"{classes}: is a folder, expected a file; evaluate --suite" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.slow
def test_another_text_makes_another_provenance(
    base: Path, one_sided: Path, text: Path, tmp_path: Path
) -> None:
    from quantize.fill.provenance import read_provenance

    longer = tmp_path / "longer.txt"
    longer.write_bytes(b"One more line.\n" + text.read_bytes())
    other = make_calibrated(base, tmp_path / "other.gguf", longer)
    with open_gguf(one_sided) as first, open_gguf(other) as second:
        numbers, others = read_provenance(first), read_provenance(second)
    assert numbers is not None
    assert others is not None
    assert numbers.keys() == others.keys()
    same = {name for name in numbers if numbers[name] == others[name]}
    assert same == {"token_embd.weight"}


class Told(NoReport):
    """A Reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def tell(self, finding: Finding) -> None:
        self.findings.append(finding)


def test_a_file_that_was_calibrated_on_a_text_is_told_when_it_is_measured_there(
    base: Path, little: Path, text: Path, other_text: Path
) -> None:
    for measured, warnings in ((text, 1), (other_text, 0)):
        told = Told()
        gguf_tools.evaluate(base, measured, [little], gguf_tools.EvaluateOptions(FEW), told)
        found = [finding.text for finding in told.findings if finding.kind == "calibrated on this"]
        assert len(found) == warnings
        assert all("little.gguf was calibrated on about 100 % of the text" in line for line in found)


@pytest.mark.slow
def test_a_file_without_provenance_keeps_no_sketch(
    base: Path, one_sided: Path, text: Path, tmp_path: Path
) -> None:
    silent = tmp_path / "silent.gguf"
    options = quantize.QuantizeOptions(calibration=plainly(text), provenance=False)
    quantize.quantize(base, silent, "Q2_K", options, n_threads=1)
    with open_gguf(one_sided) as told, open_gguf(silent) as untold:
        sketch = TextSketch.read(told.metadata)
        assert TextSketch.read(untold.metadata) is None
        assert not [key for key in untold.metadata if key.startswith("gguf_tools.")]
    assert tensor_bytes(silent) == tensor_bytes(one_sided)
    assert sketch is not None
    assert sketch.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
