"""The commands as users type them: what they print, what they refuse, and that nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gguf_tools.commands.convert
import gguf_tools.commands.imatrix
import gguf_tools.commands.main
import gguf_tools.commands.quantize
from gguf_tools import open_gguf
from tests.end_to_end.conftest import GOLDEN
from tests.support.checkpoints import edit_config, edit_tensors

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
MAINS = {
    "convert-hf-to-gguf": gguf_tools.commands.convert.main,
    "quantize": gguf_tools.commands.quantize.main,
    "gguf-tools": gguf_tools.commands.main.main,
    "imatrix": gguf_tools.commands.imatrix.main,
}


def one_line_error(capsys: pytest.CaptureFixture[str], prog: str) -> str:
    """Return the error that a command printed, after checking that it is one line and no traceback."""
    err = capsys.readouterr().err
    assert err.startswith(f"{prog}: error: "), err
    assert err.count("\n") == 1, err
    return err


@pytest.fixture
def broken(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder for a test to damage."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


# ---- the way through


def test_the_way_of_the_readme(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bf16, q4 = tmp_path / "model-bf16.gguf", tmp_path / "model-Q4_K_M.gguf"
    assert (
        gguf_tools.commands.convert.main([str(tiny_folder), "--outfile", str(bf16), "--outtype", "bf16"]) == 0
    )
    assert (
        gguf_tools.commands.quantize.main(["--imatrix", str(MATRIX), str(bf16), str(q4), "Q4_K_M", "2"]) == 0
    )
    out = capsys.readouterr().out
    assert f"wrote {q4}" in out
    assert gguf_tools.commands.main.main(["show", str(q4)]) == 0
    assert "Q4_K" in capsys.readouterr().out
    assert gguf_tools.commands.main.main(["verify", str(q4)]) == 0
    with open_gguf(q4) as file:
        assert file.get("quantize.imatrix.file") == MATRIX.name
        assert file.get("quantize.imatrix.entries_count") == 35
        assert file.get("quantize.imatrix.chunks_count") == 64


@pytest.mark.parametrize("prog", MAINS)
def test_help_teaches(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAINS[prog](["--help"]) == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("prog", MAINS)
def test_no_arguments_are_bad_arguments(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAINS[prog]([]) == 2
    assert "error: " in capsys.readouterr().err


# ---- looking before writing


@pytest.mark.slow
def test_dry_run_as_json_is_what_is_then_written(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--imatrix", str(MATRIX), str(tiny_gguf("bf16")), str(tmp_path / "q.gguf"), "Q3_K_M"]
    assert gguf_tools.commands.quantize.main(["--dry-run", "--json", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    assert gguf_tools.commands.quantize.main(words) == 0
    assert plan["total_bytes"] == (tmp_path / "q.gguf").stat().st_size
    with open_gguf(tmp_path / "q.gguf") as file:
        written = [(t.name, list(t.shape), t.type.name) for t in file.tensors.values()]
    assert [(t["name"], t["shape"], t["to"]) for t in plan["tensors"]] == written
    assert {t["from"] for t in plan["tensors"]} == {"BF16", "F32"}
    assert all(t["reason"] for t in plan["tensors"])


def test_dry_run_shows_what_a_run_would_refuse(
    tiny_gguf: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gguf_tools.commands.quantize.main(["--dry-run", str(tiny_gguf("bf16")), "IQ2_XXS"]) == 0
    assert "warning: this plan can't be run" in capsys.readouterr().out


def test_overrides_without_effect_are_reported(
    tiny_gguf: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--tensor-type",
        "ffn_down=Q6_K",
        "--tensor-type",
        "blk.0.ffn_down=Q8_0",
        "--custom-q",
        "xyz=Q8_0",
    ]
    assert gguf_tools.commands.quantize.main(["--dry-run", *words, str(tiny_gguf("bf16")), "Q4_K_M"]) == 0
    out = capsys.readouterr().out
    assert "override 'xyz=Q8_0' matches no tensor" in out
    assert "override 'blk.0.ffn_down=Q8_0' is shadowed" in out


def test_convert_dry_run_writes_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        gguf_tools.commands.convert.main(
            [str(tiny_folder), "--outfile", str(tmp_path / "m-{ftype}.gguf"), "--dry-run"]
        )
        == 0
    )
    assert f"would write {tmp_path / 'm-bf16.gguf'}" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# ---- quantize's other flags


def test_copy_keeps_every_byte(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    assert (
        gguf_tools.commands.quantize.main([str(tiny_gguf("q8_0")), str(tmp_path / "copy.gguf"), "COPY"]) == 0
    )
    with open_gguf(tmp_path / "copy.gguf") as copy, open_gguf(tiny_gguf("q8_0")) as source:
        assert copy.get("general.file_type") == source.get("general.file_type")
        for name in source.tensors:
            assert (copy.raw(name) == source.raw(name)).all()


def test_override_kv_and_prune_layers(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "q.gguf"
    words = ["--override-kv", "general.name=str:Pruned", "--override-kv", "x.y=int:7", "--prune-layers", "0"]
    assert (
        gguf_tools.commands.quantize.main(
            [*words, "--imatrix", str(MATRIX), str(tiny_gguf("bf16")), str(output), "Q4_0"]
        )
        == 0
    )
    with open_gguf(output) as file, open_gguf(tiny_gguf("bf16")) as source:
        assert file.get("general.name") == "Pruned"
        assert file.get("x.y") == 7
        assert file.get("deepseek2.block_count") == 2
        assert file.get("deepseek2.leading_dense_block_count") == 0
        assert "blk.2.attn_norm.weight" not in file.tensors
        assert (file.raw("blk.1.attn_norm.weight") == source.raw("blk.2.attn_norm.weight")).all()


def test_keep_split(tiny_folder: Path, tmp_path: Path) -> None:
    words = [str(tiny_folder), "--outfile", str(tmp_path / "s.gguf"), "--split-max-tensors", "20"]
    assert gguf_tools.commands.convert.main(words) == 0
    first = tmp_path / "s-00001-of-00003.gguf"
    assert (
        gguf_tools.commands.quantize.main(["--keep-split", str(first), str(tmp_path / "q.gguf"), "Q4_K_M"])
        == 0
    )
    with open_gguf(tmp_path / "q-00002-of-00003.gguf") as kept, open_gguf(first) as source:
        assert [len(shard.tensors) for shard in kept.shards] == [20, 20, 12]
        assert list(kept.tensors) == list(source.tensors)
        assert kept.get("general.file_type") == 15


def test_requantizing_needs_leave(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_gguf("q8_0")), str(tmp_path / "q.gguf"), "Q4_0"]
    assert gguf_tools.commands.quantize.main(words) == 1
    assert "--allow-requantize" in one_line_error(capsys, "quantize")
    assert gguf_tools.commands.quantize.main(["--allow-requantize", *words]) == 0


# ---- bad input: one line, exit code 1, and what was there stays


def damage_truncate(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(5_000_000)


def damage_nan(folder: Path) -> None:
    def put(tensors: dict[str, np.ndarray]) -> None:
        weight = tensors["model.layers.1.self_attn.o_proj.weight"].copy()
        weight[3, 5] = np.nan
        tensors["model.layers.1.self_attn.o_proj.weight"] = weight

    edit_tensors(folder, put)


def damage_missing(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.experts.7.up_proj.weight"))


def damage_unexpected(folder: Path) -> None:
    edit_tensors(
        folder,
        lambda tensors: tensors.update({"model.layers.1.mlp.odd.weight": np.ones((2, 2), np.float32)}),
    )


def damage_shape(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:, :-1].copy()}))


def damage_architecture(folder: Path) -> None:
    edit_config(folder, architectures=["BloomForCausalLM"])


def damage_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated": (damage_truncate, ["model.safetensors"]),
    "nan": (damage_nan, ["blk.1.attn_output.weight", "row 3, column 5", "nan", "finite"]),
    "missing tensor": (damage_missing, ["model.layers.2.mlp.experts.7.up_proj.weight"]),
    "unexpected tensor": (damage_unexpected, ["model.layers.1.mlp.odd.weight"]),
    "wrong shape": (damage_shape, ["model.layers.0.mlp.down_proj.weight", "767", "768"]),
    "architecture": (damage_architecture, ["config.json", "BloomForCausalLM", "DeepseekV3ForCausalLM"]),
    "tokenizer": (damage_tokenizer, ["--pre-tokenizer"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["safetensors"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(damage: str, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, expected = DAMAGES[damage]
    spoil(broken)
    output = broken.parent / "out.gguf"
    output.write_bytes(b"the old file")
    assert gguf_tools.commands.convert.main([str(broken), "--outfile", str(output), "--force"]) == 1
    message = one_line_error(capsys, "convert-hf-to-gguf")
    for part in expected:
        assert part in message
    assert output.read_bytes() == b"the old file"
    left = {path.name for path in broken.parent.iterdir()}
    # What is only seen while chunks are filled leaves those that are done, for the run after the repair.
    kept = {"out.gguf.partial", "out.gguf.journal"} if damage == "nan" else set()
    assert left - kept == {"model", "out.gguf"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["MISSING.gguf", "OUT", "Q4_0"], ["MISSING.gguf"]),
        (["CUT", "OUT", "Q4_0"], ["cut.gguf"]),
        (["TEXT", "OUT", "Q4_0"], ["text.gguf", "not a GGUF"]),
        (["IN", "IN", "Q4_0"], ["is an input"]),
        (["IN", "/proc/nowhere/x.gguf", "Q4_0"], ["/proc/nowhere"]),
        (["--imatrix", "TEXT", "IN", "OUT", "Q4_0"], ["text.gguf", "importance matrix"]),
        (["--tensor-type", "attn_q_a=Q99", "IN", "OUT", "Q4_0"], ["Q99"]),
        (["--fallback", "attn_k_b", "IN", "OUT", "Q4_0"], ["REGEX=TYPE"]),
        (["--override-kv", "nonsense", "IN", "OUT", "Q4_0"], ["KEY=TYPE:VALUE"]),
        (["--prune-layers", "one", "IN", "OUT", "Q4_0"], ["'one'"]),
        (["--include-weights", "attn", "IN", "OUT", "Q4_0"], ["--imatrix"]),
        (["--prune-layers", "9", "IN", "OUT", "Q4_0"], ["9", "0 to 2"]),
        (["--keep-split", "IN", "OUT", "Q4_0"], ["split"]),
        (["IN", "OUT", "IQ4_XS"], ["IQ4_XS"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_quantize_input(
    words: list[str],
    expected: list[str],
    tiny_gguf: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = shutil.copy(tiny_gguf("q8_0" if "IQ4_XS" in words else "bf16"), tmp_path / "in.gguf")
    before = source.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(before[:3_000_000])
    (tmp_path / "text.gguf").write_text("This is not a model at all.\n" * 40)
    (tmp_path / "out.gguf").write_bytes(b"the old file")
    places = {
        "IN": source,
        "OUT": tmp_path / "out.gguf",
        "CUT": tmp_path / "cut.gguf",
        "TEXT": tmp_path / "text.gguf",
    }
    means_nothing = words[1] in ("attn_q_a=Q99", "attn_k_b", "nonsense", "one", "attn")
    code = 2 if means_nothing else 1  # what contradicts the files is no bad argument
    assert gguf_tools.commands.quantize.main([str(places.get(word, word)) for word in words]) == code
    message = one_line_error(capsys, "quantize")
    for part in expected:
        assert part in message
    assert (tmp_path / "out.gguf").read_bytes() == b"the old file"
    assert source.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut.gguf", "in.gguf", "out.gguf", "text.gguf"]


def test_an_importance_matrix_of_another_model(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dataclasses import replace

    from imatrix.store import load, save
    from quantize.importances.entries import Importance

    found = load(MATRIX)
    wrong = Importance(np.ones((1, 300), np.float32), np.ones(1, np.float32))
    save(tmp_path / "m.gguf", replace(found, entries={**found.entries, "blk.0.attn_q_a.weight": wrong}))
    words = [
        "--imatrix",
        str(tmp_path / "m.gguf"),
        str(tiny_gguf("bf16")),
        str(tmp_path / "q.gguf"),
        "Q4_K_M",
    ]
    assert gguf_tools.commands.quantize.main(words) == 1
    message = one_line_error(capsys, "quantize")
    assert "blk.0.attn_q_a.weight" in message
    assert "300" in message
    assert "256" in message


def test_a_full_disk_is_one_line_and_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    """A limit on file size stands in for a disk that fills up."""
    code = (
        "import resource, sys, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000));"
        "from gguf_tools.commands.convert import main; sys.exit(main(sys.argv[1:]))"
    )
    output = tmp_path / "out.gguf"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tiny_folder), "--outfile", str(output)],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "0"},
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 1
    assert run.stderr.startswith("convert-hf-to-gguf: error: ")
    assert run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
