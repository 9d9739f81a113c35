"""The commands with --reuse, --verify and --no-provenance, on the trained model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.quantize
import imatrix
import quantize
from gguf_tools import open_gguf
from quantize.fill.provenance import PROVENANCE_KEY, read_provenance
from quantize.importances.entries import Importance, ImportanceFile
from tests.end_to_end.conftest import GOLDEN
from tests.support import oracle

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
CHANGED = ("blk.0.attn_output.weight", "blk.1.ffn_down_exps.weight", "blk.2.attn_q_a.weight")


def changed_matrix() -> ImportanceFile:
    """The recorded importance matrix, with other data for three tensors."""
    found = imatrix.load(MATRIX)
    entries = dict(found.entries)
    for name in CHANGED:
        entries[name] = Importance(entries[name].values[:, ::-1].copy(), entries[name].counts)
    return ImportanceFile(entries, found.datasets, found.chunk_count, found.chunk_size, found.path)


@pytest.fixture(scope="module")
def old(tiny_gguf: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old") / "old.gguf"
    quantize.quantize(tiny_gguf("bf16"), path, "Q4_K_M", importances=imatrix.load(MATRIX))
    return path


def n_encoded(path: Path) -> int:
    with open_gguf(path) as file:
        found = read_provenance(file)
    assert found is not None
    return len(found)


def test_three_tensors_with_other_importances(
    old: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    data = changed_matrix()
    fresh, new = tmp_path / "fresh.gguf", tmp_path / "new.gguf"
    quantize.quantize(tiny_gguf("bf16"), fresh, "Q4_K_M", importances=data)
    result = quantize.quantize(tiny_gguf("bf16"), new, "Q4_K_M", importances=data, reuse=[old], verify=True)
    assert result.written.reused == {old: n_encoded(old) - len(CHANGED)}
    assert new.read_bytes() == fresh.read_bytes()
    with open_gguf(old) as before, open_gguf(new) as after:
        differ = {name for name in after.tensors if (before.raw(name) != after.raw(name)).any()}
    assert differ == {*CHANGED}


def test_the_command_says_what_it_reused_and_verified(
    old: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another file type has some tensors in common; the older file may be the output itself."""
    source, output = str(tiny_gguf("bf16")), tmp_path / "out.gguf"
    shutil.copy(old, output)
    words = ["--imatrix", str(MATRIX), "--verify", "--reuse", str(output), source, str(output), "Q4_K_S"]
    assert gguf_tools.commands.quantize.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (reused,) = (line for line in lines if line.startswith("reused "))
    (verified,) = (line for line in lines if line.startswith("verified "))
    assert reused.endswith(f" tensors from {output}")
    assert 0 < int(reused.split()[1]) < n_encoded(old)
    assert "worst relative error " in verified
    quantize.quantize(source, tmp_path / "fresh.gguf", "Q4_K_S", importances=imatrix.load(MATRIX))
    assert output.read_bytes() == (tmp_path / "fresh.gguf").read_bytes()


def test_one_pass(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reuse works from a checkpoint, over a split set, in both commands that take a folder."""
    out = tmp_path / "out.gguf"
    convert.convert(tiny_folder, out, outtype="Q8_0", split_max_tensors=25)
    parts = sorted(tmp_path.glob("out-*.gguf"))
    n_tensors = n_encoded(parts[0])
    words = ["--outtype", "Q8_0", "--outfile", str(out), "--split-max-tensors", "25", "--verify"]
    before = {path: path.read_bytes() for path in parts}
    assert (
        gguf_tools.commands.convert.main([str(tiny_folder), *words, "--force", "--reuse", str(parts[1])]) == 0
    )
    assert f"reused {n_tensors} of " in capsys.readouterr().out
    assert {path: path.read_bytes() for path in parts} == before
    single = tmp_path / "single.gguf"
    assert (
        gguf_tools.commands.quantize.main(["--reuse", str(parts[0]), str(tiny_folder), str(single), "Q8_0"])
        == 0
    )
    assert f"reused {n_tensors} of " in capsys.readouterr().out
    assert n_encoded(single) == n_tensors


def test_no_provenance(
    old: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plain, new = str(tiny_gguf("bf16")), tmp_path / "plain.gguf", tmp_path / "new.gguf"
    words = ["--imatrix", str(MATRIX), "--no-provenance", "--reuse", str(old), source]
    assert gguf_tools.commands.quantize.main([*words, str(plain), "Q4_K_M"]) == 0
    assert f"reused {n_encoded(old)} of " in capsys.readouterr().out
    with open_gguf(plain) as file:
        assert PROVENANCE_KEY not in file.metadata
    assert (
        gguf_tools.commands.quantize.main(
            ["--imatrix", str(MATRIX), "--reuse", str(plain), source, str(new), "Q4_K_M"]
        )
        == 0
    )
    assert f"note: {plain}: doesn't say what its tensors were made of" in capsys.readouterr().out
    assert new.read_bytes() == old.read_bytes()


def test_it_is_not_carried_on(old: Path, tmp_path: Path) -> None:
    """A tensor made from a quantized file has another provenance, or none if it is only copied."""
    quantize.quantize(old, tmp_path / "copy.gguf", "COPY")
    with open_gguf(tmp_path / "copy.gguf") as file:
        assert PROVENANCE_KEY not in file.metadata


def test_dry_run_and_lint_know_the_size(
    old: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, size = str(tiny_gguf("bf16")), old.stat().st_size
    assert gguf_tools.commands.quantize.main(["--dry-run", "--imatrix", str(MATRIX), source, "Q4_K_M"]) == 0
    assert f"({size:,} bytes)" in capsys.readouterr().out
    assert gguf_tools.commands.quantize.main(["lint", "--imatrix", str(MATRIX), "Q4_K_M", source]) == 0
    assert f"{size:,} bytes" in capsys.readouterr().out


@pytest.mark.skipif(not oracle.available(), reason="needs llama.cpp")
def test_llama_cpp_runs_it(old: Path, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    plain = tmp_path / "plain.gguf"
    data = imatrix.load(MATRIX)
    quantize.quantize(tiny_gguf("bf16"), plain, "Q4_K_M", importances=data, provenance=False)
    tokens = [1, 5, 9, 200, 31]
    with oracle.Model(old) as model, oracle.Model(plain) as same:
        np.testing.assert_array_equal(model.logits(tokens), same.logits(tokens))
