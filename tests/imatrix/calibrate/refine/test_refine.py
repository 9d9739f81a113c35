"""Refining a file: gradients against differences, a smaller divergence, resuming, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gguf_tools.commands.main import main
from gguf_tools.errors import BadArgument, BadRequest, OutputError
from gguf_tools.files.owned_folder import work_path
from gguf_tools.files.run_lock import in_use
from gguf_tools.format.shards import open_gguf
from quantize import quantize
from quantize.importances.text_sketch import TextSketch
from tests.convert.f32_files import write_f32
from tests.support.checkpoints import transformers_checkpoint
from tests.support.decoder_models import decoder_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.calibrate.refine import pipeline as front  # noqa: E402
from imatrix.calibrate.refine import steps  # noqa: E402
from imatrix.calibrate.refine.descent import Descent, RefinedTensor, RowGradients  # noqa: E402
from imatrix.calibrate.refine.gradients import Batch, Original, Student  # noqa: E402
from imatrix.calibrate.refine.scales import row_scales  # noqa: E402
from imatrix.calibrate.statistics.inputs import HoldoutSplit  # noqa: E402
from imatrix.forward.hidden_states import MemoryStates  # noqa: E402
from imatrix.forward.logits import Head  # noqa: E402
from imatrix.forward.open import ModelSource, open_model  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.tokens import Text  # noqa: E402
from tests.imatrix.forward.small_models import CHUNKS  # noqa: E402

refine = front.refine


def student_of(file: ModelSource, chunks: np.ndarray) -> Student:
    """Make the student of a whole file over random tokens."""
    tensors = {
        name: RefinedTensor(tensor, scales)
        for name, tensor in file.tensors.items()
        if (scales := row_scales(tensor.type, tensor.shape[-1])) is not None
    }
    load = file.loader(torch.device("cpu"), torch.float32)
    load = type(load)(load.path, {**file.tensors, **tensors}, load.device, load.dtype)
    return Student(file.network, load, tensors, Text(chunks, chunks).chunks, 1, lambda share: None)


def last_states(student: Student, wanted: range) -> MemoryStates:
    """Compute the last hidden states of chunks; a base is a student that nobody refines."""
    batch = student.batch(wanted)
    here, there = (batch.states(student.network.state_size) for _ in range(2))
    student._embed(batch, here)
    for layer in range(student.network.n_layers):
        student.compute(batch, layer, here, there)
        here, there = there, here
    return here


@contextmanager
def pair(base: Path, file: Path) -> Iterator[tuple[Student, Original]]:
    """Open a file and its base as one run sees them."""
    torch.set_num_threads(1)
    with open_model(file) as opened, open_model(base) as original:
        teacher = student_of(original, CHUNKS)
        states = last_states(teacher, range(len(CHUNKS)))
        head = Head.of(original.network, teacher.load, states)
        yield student_of(opened, CHUNKS), Original.of(head, teacher.chunks, 1)


EVERY_EXPERT = {
    "v3": {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    "qwen3moe": {"num_experts": 4, "num_experts_per_tok": 4},
}
"""Choices that have all experts take every token: no step, however small, sends a token to another one."""


def models(tmp_path: Path, name: str) -> Path:
    """Write a small F32 file; v3 has latent attention and experts."""
    folder, sizes = tmp_path / "hf", EVERY_EXPERT.get(name, {})
    if name == "v3":
        transformers_checkpoint(folder, name, num_hidden_layers=2, q_lora_rank=64, **sizes)
    else:
        decoder_model(name, folder, **sizes)
    return write_f32(folder, tmp_path / "base.gguf")


@pytest.mark.parametrize(
    "name",
    ["v3", "qwen2-tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3moe", "gemma4"))],
)
def test_gradients_are_those_of_differences(name: str, tmp_path: Path) -> None:
    base = models(tmp_path, name)
    quantize(base, tmp_path / "file.gguf", "Q4_0")
    with pair(base, tmp_path / "file.gguf") as (student, original):
        wanted = [0, 2]
        divergence, gradients = student.gradients(original, wanted)
        assert divergence == pytest.approx(student.divergences(original, wanted).mean(), rel=1e-5)
        by_tensor = {key: np.zeros_like(tensor.changes) for key, tensor in student.tensors.items()}
        for each in gradients:
            by_tensor[each.tensor][each.first : each.first + len(each.values)] += each.values
        assert sum(bool(np.any(each)) for each in by_tensor.values()) > len(by_tensor) / 2
        largest = sorted(by_tensor, key=lambda key: -np.abs(by_tensor[key]).sum())[:12]
        for key in {*largest, "token_embd.weight", student.network.output}:
            uphill, ends = np.sign(by_tensor[key]) / 256, []
            for sign in (1, -1):
                student.tensors[key].changes[:] = sign * uphill
                ends.append(student.divergences(original, wanted).mean())
            student.tensors[key].changes[:] = 0
            expected = float(np.sum(by_tensor[key] * uphill) * 2)
            assert ends[0] - ends[1] == pytest.approx(expected, rel=0.1), key


def test_steps_are_as_long_as_they_should_be(tmp_path: Path) -> None:
    base = models(tmp_path, "qwen2-tied")
    quantize(base, tmp_path / "file.gguf", "Q8_0")
    with open_model(tmp_path / "file.gguf") as opened:
        tensors = student_of(opened, CHUNKS).tensors
        tensor = tensors["blk.0.attn_q.weight"]
        descent = Descent(tensors)
        gradient = np.ones_like(tensor.changes[:2])
        half = gradient / 2  # what two chunks say of the same rows adds up
        descent.step([RowGradients(tensor.name, 4, half), RowGradients(tensor.name, 4, half)], 0.01)
        moved = tensor.changes.copy()
        assert np.all(moved[4:6] < 0)
        assert not np.any(np.delete(moved, [4, 5], axis=0))
        assert not any(np.any(other.changes) for name, other in tensors.items() if name != tensor.name)
        again = Descent({name: RefinedTensor(each.tensor, each.scales) for name, each in tensors.items()})
        again.load(descent.arrays())
        for each in (descent, again):
            each.step([RowGradients(tensor.name, 0, gradient)], 0.01)
        np.testing.assert_array_equal(again.tensors[tensor.name].changes, tensor.changes)


FORWARD = ForwardOptions(n_threads=1)


def test_a_refined_file_diverges_less_and_keeps_its_codes(made: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    paths = made / "file.gguf", made / "base.gguf", made / "text.txt", output
    done = refine(*paths, chunk_size=64, n_chunks=24, steps=6, rate=0.02, forward=FORWARD)
    assert done.before is not None
    assert done.after is not None
    assert done.after.value < 0.95 * done.before.value
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    with open_gguf(made / "file.gguf") as before, open_gguf(output) as after:
        assert [*after.tensors] == [*before.tensors]
        assert after.get("gguf_tools.provenance") is None
        n_moved = 0
        for name, info in before.tensors.items():
            scales = row_scales(info.type, info.n_cols)
            old, new = (file.raw(name).reshape(info.n_rows, -1) for file in (before, after))
            if scales is None:
                np.testing.assert_array_equal(old, new)
                continue
            n_moved += bool(np.any(scales.read(old) != scales.read(new)))
            np.testing.assert_array_equal(scales.replaced(new, scales.read(old)), old)
        assert n_moved > 8
    stamp = output.stat().st_mtime_ns
    with in_use(work_path(output)):  # a run that was killed after the output had its name leaves such a lock
        shutil.copytree(work_path(output), tmp_path / "left")
    (tmp_path / "left").rename(work_path(output))
    found = refine(*paths, chunk_size=64, n_chunks=24, steps=6, rate=0.02, forward=FORWARD)
    assert found.is_found
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert output.stat().st_mtime_ns == stamp
    with pytest.raises(OutputError, match="exists already; force=True replaces it"):
        refine(*paths, chunk_size=64, n_chunks=24, steps=7, forward=FORWARD)


def test_an_interrupted_run_makes_the_same_file(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_SAVE_SECONDS", 0.0)
    inputs = made / "file.gguf", made / "base.gguf", made / "text.txt"
    choices = {"chunk_size": 64, "n_chunks": 24, "steps": 5, "forward": FORWARD}
    refine(*inputs, tmp_path / "whole.gguf", **choices)
    step, taken = Descent.step, []

    def interrupted(self: Descent, gradients: list[RowGradients], rate: float) -> None:
        taken.append(self.n_steps)
        if len(taken) == 3:
            raise KeyboardInterrupt
        step(self, gradients, rate)

    monkeypatch.setattr(Descent, "step", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        refine(*inputs, tmp_path / "out.gguf", **choices)
    assert "2 of 5 steps are kept: the same command resumes from there" in caught.value.__notes__
    assert not (tmp_path / "out.gguf").exists()
    refine(*inputs, tmp_path / "out.gguf", **choices)
    assert taken == [0, 1, 2, 2, 3, 4]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert not list(tmp_path.glob("*.work"))


def test_scales_stay_where_no_step_is_of_use(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--base", str(made / "base.gguf"), "-f", str(made / "text.txt")]
    args += ["-o", str(tmp_path / "out.gguf"), "-c", "64", "--chunks", "16"]
    args += ["--steps", "2", "--rate", "1", "-t", "1"]
    assert main(["refine", str(made / "file.gguf"), *args]) == 0
    assert "note: no step improved the chunks held back" in capsys.readouterr().out
    with open_gguf(made / "file.gguf") as before, open_gguf(tmp_path / "out.gguf") as after:
        for name in before.tensors:
            np.testing.assert_array_equal(before.raw(name), after.raw(name))


def test_of_a_folder_of_texts_a_chunk_of_each_class_is_held_back(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[HoldoutSplit] = []
    of = HoldoutSplit.of
    monkeypatch.setattr(HoldoutSplit, "of", lambda *what: splits.append(of(*what)) or splits[-1])
    (tmp_path / "texts").mkdir()
    words = (made / "text.txt").read_text()
    for name, start in (("a", 0), ("b", 9000)):
        (tmp_path / "texts" / f"{name}.txt").write_text(words[start : start + 3000])
    inputs = made / "file.gguf", made / "base.gguf", tmp_path / "texts"
    done = refine(*inputs, tmp_path / "o.gguf", chunk_size=64, n_chunks=8, steps=1, forward=FORWARD)
    assert done.n_steps == 1
    assert [split.classes for split in splits] == [("a", "b") * 4]


@pytest.mark.parametrize("passes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_steps_have_all_threads(
    passes: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks share two workers, and a single one has both threads in each operation."""
    seen: list[tuple[int, int]] = []
    compute = Student.compute

    def noted(self: Student, batch: Batch, *rest: object) -> None:
        n_chunks = batch.chunks.n_chunks
        seen.append((n_chunks, torch.get_num_threads() * min(self.n_workers, n_chunks)))
        compute(self, batch, *rest)

    monkeypatch.setattr(Student, "compute", noted)
    inputs = made / "file.gguf", made / "base.gguf", made / "text.txt"
    choices = {"chunk_size": 64, "n_chunks": 8, "steps": 1, "passes": passes}
    refine(*inputs, tmp_path / "o.gguf", **choices, forward=ForwardOptions(n_threads=2))
    assert {threads for n_chunks, threads in seen if n_chunks == 2} == {2}
    assert not passes or {threads for n_chunks, threads in seen if n_chunks == 1} >= {2}


def test_minutes_are_made_into_steps(made: Path, tmp_path: Path) -> None:
    inputs = made / "file.gguf", made / "base.gguf", made / "text.txt"
    done = refine(*inputs, tmp_path / "o.gguf", chunk_size=64, n_chunks=16, minutes=1e-4, forward=FORWARD)
    assert done.n_steps == 1


def test_bad_input_is_refused_in_one_line(made: Path, tmp_path: Path) -> None:
    file, base, text, output = made / "file.gguf", made / "base.gguf", made / "text.txt", tmp_path / "o.gguf"
    with pytest.raises(BadRequest, match=r"base\.gguf: has no tensor of a type whose scales can be refined"):
        refine(base, base, text, output, chunk_size=64)
    with pytest.raises(BadRequest, match=r"is an input or another output of this command"):
        refine(file, base, text, file, chunk_size=64)
    with pytest.raises(OutputError, match=r"create it first"):
        refine(file, base, text, tmp_path / "none" / "o.gguf", chunk_size=64)
    with pytest.raises(BadArgument, match=r"rate: found -1, expected a number above 0"):
        refine(file, base, text, output, rate=-1)
    folder = transformers_checkpoint(tmp_path / "v3", "v3", num_hidden_layers=2)
    other = write_f32(folder, tmp_path / "v3.gguf")
    with pytest.raises(BadRequest, match=r"576 tokens in the vocabulary, the base has 320; it is of another"):
        refine(file, other, text, output, chunk_size=64)
    assert [path.name for path in tmp_path.iterdir() if "o.gguf" in path.name] == []


def test_chunks_that_the_file_was_calibrated_on_are_not_held_back(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    splits: list[HoldoutSplit] = []
    of = HoldoutSplit.of
    monkeypatch.setattr(HoldoutSplit, "of", lambda *what: splits.append(of(*what)) or splits[-1])
    text = ["-f", str(made / "text.txt"), "-c", "64", "--steps", "1", "-t", "1"]
    refining = ["refine", "--base", str(made / "base.gguf"), *text]
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    assert main([*refining, "--chunks", "8", "-o", str(first), str(made / "file.gguf")]) == 0
    assert splits[-1].held == (4,)
    assert main([*refining, "--chunks", "16", "-o", str(second), str(first)]) == 0
    assert splits[-1].held == (12,)
    assert "was calibrated on all of these chunks" not in capsys.readouterr().err
    assert main([*refining, "--chunks", "8", "-o", str(tmp_path / "third.gguf"), str(first)]) == 0
    assert splits[-1].held == (4,)
    assert "the file was calibrated on all of these chunks" in capsys.readouterr().err


def test_a_refined_file_knows_what_it_was_calibrated_on_before(made: Path, tmp_path: Path) -> None:
    outputs = [made / "file.gguf", tmp_path / "first.gguf", tmp_path / "second.gguf"]
    of_text: dict[str, int] = {"chunk_size": 64, "n_chunks": 8, "steps": 1}
    for number, (file, output) in enumerate(pairwise(outputs)):
        options = {**of_text, "from_chunk": 8 * number}
        refine(file, made / "base.gguf", made / "text.txt", output, **options, forward=FORWARD)
    sketches = []
    for output in outputs[1:]:
        with open_gguf(output) as opened:
            sketches.append(TextSketch.read(opened.metadata))
    first, both = sketches
    assert first is not None
    assert both is not None
    assert set(first.hashes) < set(both.hashes)
