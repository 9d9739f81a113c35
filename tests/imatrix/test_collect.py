"""Collecting from the trained small model: against llama-imatrix, and whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import quantize
from gguf_tools import FileLayout, GGUFWriter, TensorInfo, open_gguf
from gguf_tools.commands.imatrix import main
from gguf_tools.errors import OutputError
from gguf_tools.format.ggml_types import Q4_0, Q4_0_R8
from imatrix.merge import merge
from imatrix.store import load
from quantize.formats.ik.interleaved.interleaved import from_base
from quantize.importances.entries import Importance
from tests.convert.tokenizer.test_vocab_spm import train_spm
from tests.support import oracle
from tests.support.checkpoints import edit_tensors

torch = pytest.importorskip("torch")

GOLDEN = Path(__file__).parents[1] / "golden" / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
ROOT = Path(__file__).parents[2]
SMALL = ["--threads", "1", "-c", "64", "--chunks", "3"]


def collect(model: Path, text: Path, out: Path, *options: str) -> bytes:
    assert main(["-m", str(model), "-f", str(text), "-o", str(out), *options]) == 0
    assert not out.with_name(out.name + ".work").exists()
    return out.read_bytes()


def with_sentencepiece(model: Path, tmp_path: Path) -> Path:
    """Return a copy of a model's folder that has a tokenizer.model instead of a tokenizer.json."""
    folder = tmp_path / "sentencepiece"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    return train_spm(folder)


def relative_error(found: Importance, expected: Importance) -> float:
    difference = found.values.astype(np.float64).reshape(-1) - expected.values.reshape(-1)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.values.astype(np.float64)))


def interleave(path: Path, out: Path) -> int:
    """Write a file of Q4_0 as one of Q4_0_R8 where eight rows can be had; return how many tensors can."""
    with open_gguf(path) as file:
        infos = {
            name: TensorInfo(name, info.shape, Q4_0_R8)
            if info.type == Q4_0 and not info.shape[-2] % 8
            else info
            for name, info in file.tensors.items()
        }
        layout = FileLayout.of(file.metadata, list(infos.values()))
        with GGUFWriter(out, layout) as writer:
            for name, info in infos.items():
                raw = np.frombuffer(file.raw(name), np.uint8)
                if info.type == Q4_0_R8:
                    raw = from_base(Q4_0_R8, raw.reshape(info.n_rows, -1), info.n_cols).reshape(-1)
                writer.write(layout.offset_of(name), raw)
            writer.publish()
    return sum(info.type == Q4_0_R8 for info in infos.values())


def test_rows_that_are_stored_interleaved_say_the_same(
    tiny_folder: Path, calibration: Path, tmp_path: Path
) -> None:
    convert.convert(tiny_folder, tmp_path / "bf16.gguf", outtype="bf16")
    quantize.quantize(tmp_path / "bf16.gguf", tmp_path / "plain.gguf", "Q4_0")
    assert interleave(tmp_path / "plain.gguf", tmp_path / "r8.gguf") > 10
    expected = collect(tmp_path / "plain.gguf", calibration, tmp_path / "a.gguf", *SMALL)
    assert collect(tmp_path / "r8.gguf", calibration, tmp_path / "b.gguf", *SMALL) == expected


@pytest.mark.slow
def test_everything_that_llama_imatrix_collects(tiny_folder: Path, calibration: Path, tmp_path: Path) -> None:
    collect(tiny_folder, calibration, tmp_path / "m.gguf", "--chunks", "64", "--threads", "1")
    found, expected = load(tmp_path / "m.gguf"), load(GOLDEN)
    assert (found.chunk_count, found.chunk_size, found.datasets) == (64, 512, ("calibration.txt",))
    extra = {f"blk.{layer}.attn_kv_b.weight" for layer in range(3)}
    assert found.entries.keys() == expected.entries.keys() | extra
    for name, entry in expected.entries.items():
        mine = found.entries[name]
        assert mine.values.shape == entry.values.shape
        assert relative_error(mine, entry) < 1e-3, name
        # where two experts score alike to the last bit or so, a token may go to the other one
        assert np.abs(mine.counts - entry.counts).max() <= (2 if "_exps" in name else 0), name


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("source", ["folder", "gguf", "q8_0", "SentencePiece folder", "SentencePiece gguf"])
def test_perplexity_is_llama_cpps(
    source: str, tiny_folder: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By llama.cpp's own tokens and logits: BOS first in a chunk, and the second half counts."""
    outtype = "q8_0" if source == "q8_0" else "f32"
    gguf = tmp_path / "model.gguf"
    folder = with_sentencepiece(tiny_folder, tmp_path) if "SentencePiece" in source else tiny_folder
    convert.convert(folder, gguf, outtype=outtype)
    text = calibration.read_text()[:6000]
    (tmp_path / "t.txt").write_text(text + "\n")
    expected = []
    with oracle.Model(gguf) as model:
        tokens = model.tokenize(text, add_special=True)
        for start in (0, 128, 256):
            chunk = [tokens[0], *tokens[start + 1 : start + 128]]
            logits = model.logits(chunk, n_threads=1).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
            expected += [-logs[i, chunk[i + 1]] for i in range(64, 127)]
    model_path = folder if source.endswith("folder") else gguf
    collect(
        model_path, tmp_path / "t.txt", tmp_path / "m.gguf", "-c", "128", "--chunks", "3", "--threads", "1"
    )
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("perplexity "))
    value, error = float(line.split()[1]), float(line.split()[3])
    # llama.cpp quantizes activations for Q8_0 weights, we don't
    assert value == pytest.approx(np.exp(np.mean(expected)), rel=2e-2 if source == "q8_0" else 1e-4)
    standard_error = np.std(expected) / np.sqrt(len(expected) - 1)
    assert error == pytest.approx(standard_error * value, rel=2e-2 if source == "q8_0" else 1e-3)


def test_a_folder_of_texts_gives_its_classes_equal_shares(
    tiny_folder: Path, calibration: Path, tmp_path: Path
) -> None:
    text, options = calibration.read_text(), ["-c", "64", "--no-ppl", "-t", "1"]
    (tmp_path / "texts").mkdir()
    for name, start in (("a", 0), ("b", 9000)):
        (tmp_path / "texts" / f"{name}.txt").write_text(text[start : start + 3000])
        own = tmp_path / "texts" / f"{name}.txt"
        collect(tiny_folder, own, tmp_path / f"{name}.gguf", *options, "--chunks", "1")
    expected = merge([load(tmp_path / "a.gguf"), load(tmp_path / "b.gguf")]).importances
    collect(tiny_folder, tmp_path / "texts", tmp_path / "both.gguf", *options, "--chunks", "2")
    found = load(tmp_path / "both.gguf")
    assert (found.datasets, found.chunk_count) == (("texts",), 2)
    for name, entry in expected.entries.items():
        assert relative_error(found.entries[name], entry) < 1e-5
        assert np.array_equal(found.entries[name].counts, entry.counts)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_threads_and_where_hidden_states_live_change_nothing(
    dtype: str, tiny_folder: Path, calibration: Path, tmp_path: Path
) -> None:
    options = ["-c", "64", "--chunks", "3", "--dtype", dtype]
    expected = collect(tiny_folder, calibration, tmp_path / "a.gguf", *options, "--threads", "1")
    assert collect(tiny_folder, calibration, tmp_path / "b.gguf", *options, "--threads", "3") == expected
    in_file = ["--threads", "2", "--memory", "0"]
    assert collect(tiny_folder, calibration, tmp_path / "c.gguf", *options, *in_file) == expected


@pytest.mark.slow
def test_bfloat16_is_near_float32(tiny_folder: Path, calibration: Path, tmp_path: Path) -> None:
    options = ["--threads", "1", "-c", "256", "--chunks", "4", "--no-ppl"]
    for dtype in ("float32", "bfloat16"):
        collect(tiny_folder, calibration, tmp_path / f"{dtype}.gguf", *options, "--dtype", dtype)
    found, expected = load(tmp_path / "bfloat16.gguf"), load(tmp_path / "float32.gguf")
    assert found.entries.keys() == expected.entries.keys()
    errors = {name: relative_error(found.entries[name], entry) for name, entry in expected.entries.items()}
    # an expert's sums also change with every token that goes elsewhere, where two experts score alike
    assert max(error for name, error in errors.items() if "_exps" not in name) < 0.01
    assert max(errors.values()) < 0.05
    assert min(errors.values()) > 0


def test_layouts_change_nothing(tiny_folder: Path, calibration: Path, tmp_path: Path) -> None:
    expected = collect(tiny_folder, calibration, tmp_path / "a.gguf", *SMALL)
    assert collect(tiny_folder, calibration, tmp_path / "c.gguf", *SMALL, "--no-ppl") == expected
    convert.convert(tiny_folder, tmp_path / "model.gguf", outtype="bf16", split_max_tensors=20)
    (shard, *_) = sorted(tmp_path.glob("model-*"))
    collect(shard, calibration, tmp_path / "d.gguf", *SMALL)
    found, wanted = load(tmp_path / "d.gguf").entries, load(tmp_path / "a.gguf").entries
    assert found.keys() == wanted.keys()
    for name, entry in wanted.items():
        assert relative_error(found[name], entry) < 1e-5, name


def test_options_that_choose_the_text(tiny_folder: Path, calibration: Path, tmp_path: Path) -> None:
    whole = ["--threads", "1", "-c", "64", "--no-ppl"]
    collect(tiny_folder, calibration, tmp_path / "123.gguf", *whole, "--chunks", "3")
    collect(tiny_folder, calibration, tmp_path / "1.gguf", *whole, "--chunks", "1", "--dataset-name", "first")
    earlier = ["--in-file", str(tmp_path / "1.gguf")]
    collect(
        tiny_folder,
        calibration,
        tmp_path / "sum.gguf",
        *whole,
        "--from-chunk",
        "1",
        "--chunks",
        "2",
        *earlier,
    )
    found, wanted = load(tmp_path / "sum.gguf"), load(tmp_path / "123.gguf")
    assert (found.chunk_count, found.chunk_size) == (3, 64)
    assert found.datasets == ("first", "calibration.txt")
    for name, entry in wanted.entries.items():
        assert np.array_equal(found.entries[name].counts, entry.counts)
        assert relative_error(found.entries[name], entry) < 1e-6, name


def test_options_that_choose_what_is_seen(tiny_folder: Path, calibration: Path, tmp_path: Path) -> None:
    collect(
        tiny_folder, calibration, tmp_path / "m.dat", *SMALL, "--all-experts", "--process-output", "--no-ppl",
        "--output-format", "gguf", "--output-frequency", "1", "--dtype", "bfloat16",
    )  # fmt: skip
    found = load(tmp_path / "m.dat")
    assert found.format == "gguf"
    assert found.entries["blk.1.ffn_up_exps.weight"].counts.tolist() == [3 * 64] * 16
    assert found.entries["output.weight"].values.shape == (1, 256)


def test_output_frequency_writes_what_is_known(
    tiny_folder: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import imatrix.run

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(imatrix.run, "_measure", stop)
    out = tmp_path / "m.gguf"
    arguments = ["-m", str(tiny_folder), "-f", str(calibration), "-o", str(out), *SMALL]
    assert main([*arguments, "--output-frequency", "2"]) == 130
    assert {name.split(".")[1] for name in load(out).entries} == {"0", "1"}


@pytest.mark.slow
def test_kill_and_go_on_gives_the_same_bytes(
    tiny_folder: Path, calibration: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--threads", "1", "--chunks", "6", "-c", "256"]
    expected = collect(tiny_folder, calibration, tmp_path / "whole.gguf", *options)
    out = tmp_path / "killed.gguf"
    command = [
        sys.executable, "-m", "gguf_tools", "imatrix", "-m", str(tiny_folder), "-f", str(calibration),
        "-o", str(out),
        *options,
    ]  # fmt: skip
    work = tmp_path / "killed.gguf.work"
    n_killed = 0
    for wanted in ("hidden.1", "sums.00000.npz", "sums.00001.npz"):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (work / wanted).exists():
            time.sleep(0.005)
        time.sleep(0.05)  # somewhere within the next layer
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        n_killed += process.returncode == -signal.SIGKILL
        assert not out.exists()
    assert n_killed == 3
    capfd.readouterr()
    assert collect(tiny_folder, calibration, out, *options) == expected
    assert "resuming after" in capfd.readouterr().err
    assert not work.exists()


@pytest.mark.parametrize("memory", ["1", "0"])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_disk_that_fails_leaves_what_a_rerun_needs(
    layer: int, memory: str, tiny_folder: Path, calibration: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from imatrix.forward.work_folder import WorkFolder

    options = [*SMALL, "--no-ppl", "--memory", memory]
    expected = collect(tiny_folder, calibration, tmp_path / "whole.gguf", *options)
    out = tmp_path / "m.gguf"
    finish = WorkFolder.finish_layer

    def full(folder: WorkFolder, number: int, arrays: Any, states: Iterable[Path] = ()) -> None:
        if number == layer:
            raise OutputError(f"{folder.folder}: can't be written (No space left on device)")
        finish(folder, number, arrays, states)

    with monkeypatch.context() as patched:
        patched.setattr(WorkFolder, "finish_layer", full)
        assert main(["-m", str(tiny_folder), "-f", str(calibration), "-o", str(out), *options]) == 1
    assert "No space left on device" in capsys.readouterr().err
    found = sorted(path.name for path in out.with_name("m.gguf.work").glob("sums.*.npz"))
    assert found == [f"sums.{done:05d}.npz" for done in range(layer)]
    assert collect(tiny_folder, calibration, out, *options) == expected


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that the command prints for an error."""
    capsys.readouterr()
    assert main(list(arguments)) == 1
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if not line.startswith(("going on", "warning: "))]
    assert len(lines) == 1, err
    return lines[0]


def test_another_run_in_the_same_place_is_refused(
    tiny_folder: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import imatrix.run
    from imatrix.forward.work_folder import WorkFolder

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "m.gguf"
    arguments = ["-m", str(tiny_folder), "-f", str(calibration), "-o", str(out), *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr(imatrix.run, "_measure", stop)
        assert main(arguments) == 130
    line = fails(capsys, *arguments, "--all-experts")
    assert "begun with another all_experts (False, now True); --restart" in line
    import json

    about = json.loads((tmp_path / "m.gguf.work" / "run.json").read_text())
    with WorkFolder(out, about):
        assert "another run is writing this output" in fails(capsys, *arguments)
    collect(tiny_folder, calibration, out, *SMALL, "--all-experts", "--restart")


def test_bad_input_is_one_line(
    tiny_folder: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text, out = str(tiny_folder), str(calibration), tmp_path / "m.gguf"
    short = tmp_path / "short.txt"
    short.write_text("only a few words")
    assert "expected a chunk of 512 or more" in fails(capsys, "-m", model, "-f", str(short), "-o", str(out))
    too_far = ["--from-chunk", "5000"]
    assert "--from-chunk 5000" in fails(capsys, "-m", model, "-f", text, "-o", str(out), *too_far)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 at byte 0" in fails(capsys, "-m", model, "-f", str(binary), "-o", str(out))
    assert "not a GGUF file" in fails(capsys, "-m", text, "-f", text, "-o", str(out))
    assert "no such file" in fails(capsys, "-m", str(tmp_path / "no"), "-f", text, "-o", str(out))
    convert.convert(tiny_folder, tmp_path / "model.gguf", outtype="bf16")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    assert "half.gguf" in fails(capsys, "-m", str(tmp_path / "half.gguf"), "-f", text, "-o", str(out))
    copy = tmp_path / "copy.txt"
    copy.write_bytes(calibration.read_bytes())
    assert "is an input" in fails(capsys, "-m", model, "-f", str(copy), "-o", str(copy))
    assert copy.read_bytes() == calibration.read_bytes()
    assert "torch can't use it" in fails(capsys, "-m", model, "-f", text, "-o", str(out), "--device", "nodev")
    assert not out.exists()
    assert list(tmp_path.glob("*.work")) == []


def test_nan_names_layer_and_tensor_and_keeps_what_is_done(
    tiny_folder: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "nan"))
    name = "model.layers.1.self_attn.q_b_proj.weight"

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][3, 5] = np.nan

    edit_tensors(folder, edit)
    out = tmp_path / "m.gguf"
    line = fails(capsys, "-m", str(folder), "-f", str(calibration), "-o", str(out), *SMALL)
    assert "blk.1.attn_" in line
    assert "NaN" in line
    assert (tmp_path / "m.gguf.work" / "sums.00000.npz").exists()
    assert not out.exists()


def test_without_torch_one_line_says_what_to_install(
    tiny_folder: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = fails(capsys, "-m", str(tiny_folder), "-f", str(calibration))
    assert "pip install 'gguf-tools[torch]'" in line


def test_importances_of_another_model_are_refused_first(
    tiny_folder: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    import imatrix.run
    from quantize.importances.entries import Importance

    def computed(*_: object) -> None:
        raise AssertionError("a layer was computed")

    monkeypatch.setattr(imatrix.run, "forward_pass", computed)
    other = Importance(np.ones((1, 12), np.float32), np.ones(1, np.float32))
    imatrix.save(
        tmp_path / "other.gguf", imatrix.ImportanceFile({"blk.0.attn_output.weight": other}, (), 1, 8)
    )
    words = ["-m", str(tiny_folder), "-f", str(calibration), "-o", str(tmp_path / "m.gguf"), *SMALL]
    line = fails(capsys, *words, "--in-file", str(tmp_path / "other.gguf"))
    assert "other.gguf: blk.0.attn_output.weight has 12 values, and the rows of" in line
    assert not (tmp_path / "m.gguf.work").exists()
