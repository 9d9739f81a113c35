"""Other layouts of latent attention: the converter's files, the quantizer's, and what llama.cpp computes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
import imatrix
import quantize
from gguf_tools import GGUFSet, open_gguf
from gguf_tools.commands import main as cli
from quantize.mla_layout import change_layout
from quantize.plan.decide import PlanOptions
from quantize.roles import LAYOUTS, MLALayout
from tests.end_to_end.conftest import GOLDEN
from tests.support import oracle
from tests.support.checkpoints import add_mtp_layer, micro_checkpoint, to_older_spelling
from tests.support.tokenizer_files import VOCAB_SIZES, copy_tokenizer

MATRIX = GOLDEN / "imatrix" / "tiny-deepseek-v3.imatrix.gguf"
PAIRS: list[tuple[MLALayout, MLALayout]] = list(itertools.permutations(LAYOUTS, 2))
N_TOKENS = VOCAB_SIZES["tiny"]
SHALLOW = {"num_hidden_layers": 4, "first_k_dense_replace": 2, "num_attention_heads": 16,
           "num_key_value_heads": 16}  # fmt: skip

Converted = Callable[..., Path]


@pytest.fixture(scope="session")
def converted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Return the file that the converter writes for a model in a layout, made once."""
    folder = tmp_path_factory.mktemp("layouts")
    makers: dict[str, Callable[[Path], Path]] = {
        "v2": lambda path: to_older_spelling(micro_checkpoint(path, "v2", vocab_size=N_TOKENS)),
        "v2-lite": lambda path: micro_checkpoint(path, "v2-lite", vocab_size=N_TOKENS, **SHALLOW),
        "v3 with MTP": lambda path: add_mtp_layer(micro_checkpoint(path, "v3", vocab_size=N_TOKENS)),
    }  # fmt: skip

    def make(name: str, mla: MLALayout, outtype: str, *, big_endian: bool = False) -> Path:
        path = folder / f"{name}-{mla}-{outtype}{'-big' * big_endian}.gguf"
        if not path.exists():
            source = tiny_folder if name == "tiny" else folder / name
            if not source.exists():
                copy_tokenizer("tiny", makers[name](source))
            convert.convert(source, path, outtype=outtype, mla=mla, mtp="MTP" in name, big_endian=big_endian)
        return path

    return make


# ---- the converter's files


@pytest.mark.parametrize(("found", "wanted"), PAIRS)
@pytest.mark.parametrize(
    ("name", "outtype"), [("tiny", "f32"), ("v2", "f16"), ("v2-lite", "bf16"), ("v3 with MTP", "bf16")]
)
def test_float_files_equal_the_converters(
    name: str, outtype: str, found: MLALayout, wanted: MLALayout, converted: Converted, tmp_path: Path
) -> None:
    change_layout(converted(name, found, outtype), tmp_path / "out.gguf", wanted)
    assert (tmp_path / "out.gguf").read_bytes() == converted(name, wanted, outtype).read_bytes()


@pytest.mark.parametrize(("found", "wanted"), [("both", "split"), ("both", "none"), ("split", "both")])
def test_big_endian_files_stay_so(
    found: MLALayout, wanted: MLALayout, converted: Converted, tmp_path: Path
) -> None:
    change_layout(converted("v2", found, "f16", big_endian=True), tmp_path / "out.gguf", wanted)
    expected = converted("v2", wanted, "f16", big_endian=True)
    assert (tmp_path / "out.gguf").read_bytes() == expected.read_bytes()


def test_a_split_set_gives_the_same_file(tiny_folder: Path, converted: Converted, tmp_path: Path) -> None:
    parts = convert.convert(
        tiny_folder, tmp_path / "in.gguf", outtype="f32", mla="both", split_max_tensors=20
    ).paths
    change_layout(parts[1], tmp_path / "out.gguf", "split")
    assert (tmp_path / "out.gguf").read_bytes() == converted("tiny", "split", "f32").read_bytes()
    many = change_layout(parts[0], tmp_path / "many.gguf", "split", keep_split=True).paths
    assert len(many) == len(parts)
    with open_gguf(many[0]) as set_, open_gguf(tmp_path / "out.gguf") as one:
        assert set_.metadata == one.metadata
        assert list(set_.tensors) == list(one.tensors)
        assert contents(set_) == contents(one)


def contents(file: GGUFSet) -> dict[str, bytes]:
    return {name: bytes(file.raw(name)) for name in file.tensors}


# ---- the quantizer's files


@pytest.fixture(scope="session")
def quantized(converted: Converted, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the trained model, quantized in a layout, made once."""
    folder = tmp_path_factory.mktemp("quantized")

    def make(mla: MLALayout, file_type: str) -> Path:
        path = folder / f"{mla}-{file_type}.gguf"
        if not path.exists():
            matrix = imatrix.load(MATRIX)
            source = converted("tiny", mla, "f32")
            quantize.quantize(source, path, file_type, importances=matrix, provenance=False)
        return path

    return make


@pytest.mark.parametrize("wanted", ["split", "none"])
def test_what_the_quantizer_made_of_both_is_what_it_makes_of_each(
    wanted: MLALayout, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    result = change_layout(quantized("both", "Q4_0"), tmp_path / "out.gguf", wanted)
    assert all(move.is_exact for move in result.change.moves)
    assert (tmp_path / "out.gguf").read_bytes() == quantized(wanted, "Q4_0").read_bytes()


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q8_0"])
def test_there_and_back_gives_the_same_file(
    file_type: str, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    split = quantized("split", file_type)
    change_layout(split, tmp_path / "both.gguf", "both")
    change_layout(tmp_path / "both.gguf", tmp_path / "back.gguf", "split")
    assert (tmp_path / "back.gguf").read_bytes() == split.read_bytes()


@pytest.mark.parametrize("wanted", ["split", "both"])
def test_value_rows_of_attn_kv_b_keep_their_blocks(
    wanted: MLALayout, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    change_layout(quantized("none", "Q4_K_M"), tmp_path / "out.gguf", wanted)
    with open_gguf(quantized("none", "Q4_K_M")) as before, open_gguf(tmp_path / "out.gguf") as after:
        for layer in range(3):
            rows = before.raw(f"blk.{layer}.attn_kv_b.weight").reshape(4, 256, -1)
            values = after.raw(f"blk.{layer}.attn_v_b.weight").reshape(4, 128, -1)
            assert (values == rows[:, 128:]).all()


# ---- llama.cpp

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")


def logits(path: Path) -> np.ndarray:
    with oracle.Model(path) as model:
        return model.logits([0, *range(40, 103)], n_threads=1)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def dequantized(path: Path, target: Path) -> Path:
    """Return an F32 file with the same numbers, on which llama.cpp computes exactly."""
    quantize.quantize(path, target, "F32", options=PlanOptions(allow_requantize=True))
    return target


@needs_llama_cpp
@pytest.mark.parametrize("found", ["both", "none"])
def test_llama_cpp_runs_what_became_split(
    found: MLALayout, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    change_layout(quantized(found, "Q4_K_M"), tmp_path / "split.gguf", "split")
    twin = dequantized(tmp_path / "split.gguf", tmp_path / "twin.gguf")
    # llama.cpp rounds activations to 8 bits before it multiplies with quantized weights: 1 to 2 %.
    assert relative_error(logits(tmp_path / "split.gguf"), logits(twin)) < 0.03


@needs_llama_cpp
@pytest.mark.parametrize(("found", "wanted"), [("none", "split"), ("split", "none")])
def test_llama_cpp_computes_the_same_from_either_layout(
    found: MLALayout, wanted: MLALayout, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp runs attn_kv_b alone as plain attention, and the two others as attention in the latent."""
    source = quantized(found, "Q4_K_M")
    twin = dequantized(source, tmp_path / "twin.gguf")
    change_layout(twin, tmp_path / "float.gguf", wanted)
    assert relative_error(logits(tmp_path / "float.gguf"), logits(twin)) < 1e-5

    change_layout(source, tmp_path / "quantized.gguf", wanted)
    changed = dequantized(tmp_path / "quantized.gguf", tmp_path / "changed.gguf")
    assert relative_error(logits(changed), logits(twin)) < 1e-3  # what Q8_0 on top costs


# ---- the command


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["mla-layout", *map(str, words)])
    return (code, *capsys.readouterr())


def test_the_command_says_what_it_did(
    quantized: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = quantized("none", "Q4_K_M"), tmp_path / "out.gguf"
    code, plan, error = run(capsys, source, "--to", "split", "--dry-run")
    assert (code, error, list(tmp_path.iterdir())) == (0, "", [])
    code, report, error = run(capsys, source, output, "--to", "split", "--threads", 1)
    assert (code, error, list(tmp_path.iterdir())) == (0, "", [output])
    assert report.startswith(plan)
    lines = report.splitlines()
    assert lines[0] == f"{source}: layout none -> split"
    assert "  attn_kv_b of 2 layers: dropped (Q4_K)" in lines
    assert (
        "  attn_k_b of 2 layers: key rows of attn_kv_b, transposed, encoded again from Q4_K to Q8_0" in lines
    )
    assert "  attn_v_b of 2 layers: value rows of attn_kv_b, as they are (Q4_K)" in lines
    assert "  deepseek2.attention.head_count_kv: 4 -> 1" in lines
    assert "  deepseek2.attention.key_length_mla: absent -> 192" in lines
    assert "3 of 52 tensors are encoded anew, the others keep every weight" in lines
    assert f"({output.stat().st_size:,} bytes)" in report
    assert lines[-1].startswith(f"wrote {output} in ")


def test_the_command_tells_lossless_changes(
    quantized: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, report, _ = run(capsys, quantized("both", "Q4_K_M"), "--to", "split", "--dry-run")
    assert "  attn_k_b of 3 layers: reshaped from 2-D to 3-D, as they are (Q5_0)" in report
    assert "lossless: every weight keeps its value" in report


def test_the_command_as_json(
    quantized: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = quantized("split", "Q4_K_M"), tmp_path / "out.gguf"
    words = (source, output, "--to", "both", "--tensor-type", "attn_kv_b=Q4_K", "--imatrix", MATRIX, "--json")
    plan = json.loads(run(capsys, *words, "--dry-run")[1])
    done = json.loads(run(capsys, *words)[1])
    assert done == plan | {"written": [str(output)]}
    assert (plan["from"], plan["to"], plan["needed"], plan["lossless"]) == ("split", "both", True, False)
    assert plan["total_bytes"] == output.stat().st_size
    made = {tensor["name"]: tensor for tensor in plan["tensors"]}["blk.1.attn_kv_b.weight"]
    assert made == {
        "name": "blk.1.attn_kv_b.weight", "shape": [1024, 256], "type": "Q4_K", "exact": False,
        "how": "attn_k_b transposed and attn_v_b, joined head by head", "importance": "blk.1.attn_v_b.weight",
        "of": [{"name": "blk.1.attn_k_b.weight", "type": "Q5_0"},
               {"name": "blk.1.attn_v_b.weight", "type": "Q4_K"}],
    }  # fmt: skip
    assert {"key": "deepseek2.attention.key_length_mla", "from": 192, "to": None} in plan["metadata"]


def test_the_command_leaves_a_file_that_has_the_layout_alone(
    quantized: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = quantized("split", "Q4_K_M")
    code, report, _ = run(capsys, source, tmp_path / "out.gguf", "--to", "split")
    assert (code, report) == (0, f"{source}: has layout split already; nothing is written\n")
    assert list(tmp_path.iterdir()) == []
    assert (
        json.loads(run(capsys, source, tmp_path / "out.gguf", "--to", "split", "--json")[1])["needed"]
        is False
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--to", "both"], 2, r"OUT is missing"),
        (["out.gguf"], 2, r"required: --to"),
        (["out.gguf", "--to", "all"], 2, r"invalid choice: 'all'"),
        (["out.gguf", "--to", "both", "--threads", "0"], 2, "is not a whole number from 1 to 1024"),
        (["out.gguf", "--to", "both", "--keep-split"], 1, r"--keep-split needs a split source"),
        (["out.gguf", "--to", "both", "--tensor-type", "k_b"], 2, r"expected REGEX=TYPE"),
        (["out.gguf", "--to", "both", "--exclude-weights", "k_b"], 2, r"need --imatrix"),
    ],
)
def test_errors_are_one_line(
    words: list[str], code: int, message: str, quantized: Callable[..., Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = quantized("split", "Q4_K_M")
    monkeypatch.chdir(tmp_path)
    found, out, error = run(capsys, source, *words)
    assert (found, out) == (code, "")
    assert re.search(message, error.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_the_input_is_never_written_over(
    quantized: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    source = quantized("split", "Q4_K_M")
    before = source.read_bytes()
    code, _, error = run(capsys, source, source, "--to", "both")
    assert (code, source.read_bytes()) == (1, before)
    assert "is an input of this run" in error
