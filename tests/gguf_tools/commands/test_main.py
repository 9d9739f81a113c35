"""The `gguf-tools` command: what it prints, and how it ends."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import gguf_tools
import gguf_tools.commands.quantize
from gguf_tools import FileLayout, GGUFWriter, Kind, TensorInfo, Value
from gguf_tools.commands.main import main
from gguf_tools.format import ggml_types as types
from gguf_tools.format.block_layouts import swap_bytes
from gguf_tools.look.compare import Difference, as_lines
from tests.gguf_tools.sample_files import METADATA, TENSORS, finite_bytes, write_file
from tests.quantize.model_files import write_mixture_model

ROOT = Path(__file__).parents[3]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.gguf"
    write_file(path)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "b.gguf"


def deepseek_v3(**changes: Value) -> dict[str, Value]:
    numbers = {
        "block_count": 61, "embedding_length": 7168, "attention.head_count": 128,
        "attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "attention.kv_lora_rank": 512, "rope.dimension_count": 64,
    }  # fmt: skip
    metadata = {f"deepseek2.{key}": Value.u32(number) for key, number in numbers.items()}
    metadata["general.architecture"] = Value.string("deepseek2")
    return metadata | {f"deepseek2.{key.replace('__', '.')}": value for key, value in changes.items()}


# --- show -----------------------------------------------------------------------------------


def test_show_prints_what_is_in_the_file(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, out, err = run(capsys, "show", path)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"Metadata ({len(METADATA)} keys)" in lines
    assert "general.name string 'Größe 深度 🐳'" in lines
    assert "blk.0.ffn_gate.weight 2 x 256 Q4_K 4.5 288" in lines
    assert "type tensors weights bytes of all bits/weight" in lines
    n_elems = sum(info.n_elems for info in TENSORS)
    n_bytes = sum(info.n_bytes for info in TENSORS)
    assert f"all 6 {n_elems:,} {n_bytes:,} 100.0 % {8 * n_bytes / n_elems:.4g}" in lines


def test_show_json_is_complete(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    _, out, _ = run(capsys, "show", path, "--json")
    data = json.loads(out)
    assert data["metadata"]["a.u64"] == {"type": "uint64", "value": str(2**64 - 1)}
    assert [tensor["name"] for tensor in data["tensors"]] == [info.name for info in TENSORS]
    assert data["tensors"][2]["shape"] == [2, 3, 64]
    assert data["tensor_bytes"] == sum(info.n_bytes for info in TENSORS)
    assert {entry["type"]: entry["tensors"] for entry in data["types"]} == {
        "F32": 2, "Q8_0": 1, "F16": 1, "Q4_K": 1, "BF16": 1,
    }  # fmt: skip


def test_long_arrays_are_cut_unless_asked_for(capsys: pytest.CaptureFixture[str], other: Path) -> None:
    write_file(other, {"tokens": Value.strings(map(str, range(1000))), "text": Value.string("x" * 500)}, ())
    _, out, _ = run(capsys, "show", other)
    assert "'5', ... 1,000 in all]" in out
    assert "500 characters" in out
    assert "'999'" not in out
    _, out, _ = run(capsys, "show", other, "--full")
    assert "'999'" in out
    assert "x" * 500 in out
    _, out, _ = run(capsys, "show", other, "--json")
    entry = json.loads(out)["metadata"]["tokens"]
    assert (len(entry["value"]), entry["length"], entry["shortened"]) == (6, 1000, True)
    _, out, _ = run(capsys, "show", other, "--json", "--full")
    assert len(json.loads(out)["metadata"]["tokens"]["value"]) == 1000


def test_terminal_sees_no_control_characters(capsys: pytest.CaptureFixture[str], other: Path) -> None:
    nested = Value.array(Kind.ARRAY, [Value.strings(["\x1b[2J"])])
    metadata = {"k\x1b[2J": Value.string("\x1b]0;x\x07\u202e"), "n": nested, "b": Value.string(b"\xff\n")}
    write_file(other, metadata, (TensorInfo("t\r\n", (4,), types.F32),))
    for arguments in (["show", other], ["show", "--full", other], ["show", "--json", other], ["hash", other]):
        _, out, _ = run(capsys, *arguments)
        assert all(line.isprintable() for line in out.split("\n"))


def test_non_finite_metadata_are_valid_json(capsys: pytest.CaptureFixture[str], other: Path) -> None:
    write_file(other, {"nan": Value.f32(float("nan")), "infs": Value.f32s([float("inf"), 1.0])}, ())
    _, out, _ = run(capsys, "show", "--json", other)
    metadata = json.loads(out, parse_constant=lambda text: pytest.fail(text))["metadata"]
    assert (metadata["nan"]["value"], metadata["infs"]["value"]) == ("nan", ["inf", 1.0])


PLAIN = {
    "general.architecture": Value.string("llama"), "llama.block_count": Value.u32(32),
    "llama.embedding_length": Value.u32(4096), "llama.attention.head_count": Value.u32(32),
}  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "plain", "mla"),
    [
        (deepseek_v3(), 61 * 128 * (192 + 128) * 2, 61 * (512 + 64) * 2),
        (deepseek_v3(nextn_predict_layers=Value.u32(1), block_count=Value.u32(62)),
         61 * 128 * (192 + 128) * 2, 61 * (512 + 64) * 2),
        (PLAIN, 32 * 32 * (128 + 128) * 2, None),
        (PLAIN | {"llama.attention.head_count_kv": Value.u32(8)}, 32 * 8 * (128 + 128) * 2, None),
        (PLAIN | {"llama.attention.head_count_kv": Value.i32s([8] * 30 + [0, 0])},
         30 * 8 * (128 + 128) * 2, None),
        (PLAIN | {"llama.attention.recurrent_layers": Value.bools([True, True, True, False] * 8)},
         8 * 32 * (128 + 128) * 2, None),
        ({}, None, None),
        ({"general.architecture": Value.u8(1)}, None, None),
        (PLAIN | {"llama.block_count": Value.string("many")}, None, None),
    ],
)  # fmt: skip
def test_kv_cache_per_token(
    capsys: pytest.CaptureFixture[str], other: Path, metadata: dict[str, Value], plain: int, mla: int
) -> None:
    write_file(other, metadata, ())
    _, out, _ = run(capsys, "show", "--json", other)
    assert json.loads(out)["kv_cache_bytes_per_token"] == {"plain": plain, "mla": mla}
    _, out, _ = run(capsys, "show", other)
    assert (f"{mla:,} bytes" if mla else "MLA ") in out or not mla


# --- diff -----------------------------------------------------------------------------------


def test_same_files_do_not_differ(capsys: pytest.CaptureFixture[str], path: Path, other: Path) -> None:
    write_file(other)
    assert run(capsys, "diff", path, other) == (0, "metadata and tensors are the same\n", "")


def test_every_difference_is_listed(capsys: pytest.CaptureFixture[str], path: Path, other: Path) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "a.bool"}
    metadata |= {"a.u32": Value.i32(7), "new": Value.u8(1), "a.f64": Value.f64(0.1 + 1e-16)}
    renamed = [TensorInfo("renamed", TENSORS[0].shape, TENSORS[0].type), *TENSORS[1:]]
    renamed[4] = TensorInfo(renamed[4].name, (2, 256), types.Q6_K)
    write_file(other, metadata, tuple(renamed), seed=1)
    code, out, _ = run(capsys, "diff", path, other)
    assert code == 1
    assert "metadata: a.u32: uint32 4294967295 in A, int32 7 in B" in out
    assert "metadata: a.bool: only in A: bool True" in out
    assert "metadata: new: only in B: uint8 1" in out
    assert "metadata: a.f64: float64 0.1 (differs from its last digits on) in A" in out
    assert "tensors: token_embd.weight: only in A: F32 3 x 64" in out
    assert "tensors: blk.0.ffn_gate.weight: Q4_K 2 x 256 in A, Q6_K 2 x 256 in B" in out
    assert "tensors: blk.0.attn_k_b.weight: F16 2 x 4 x 32, other data from row 0 on" in out
    _, out, _ = run(capsys, "diff", "--no-data", path, other)
    assert "attn_k_b" not in out
    _, out, _ = run(capsys, "diff", "--json", path, other)
    entry = {"section": "metadata", "name": "new", "a": None, "b": "uint8 1"}
    assert entry in json.loads(out)


def test_lines_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Value.strings(f"token {number}" for number in range(1000))
    prompt = Value.string("You are a helpful assistant. " * 50)
    metadata = {**METADATA, "tokenizer.ggml.tokens": texts, "general.description": prompt}
    write_file(other, metadata)
    monkeypatch.chdir(path.parent)
    for words in (("show", other.name), ("diff", path.name, other.name)):
        _, out, _ = run(capsys, *words)
        assert max(map(len, out.splitlines())) <= 100
        assert "... 1,000 in all]" in out
        assert "1,450 characters" in out


def test_layers_that_differ_alike_are_one_line() -> None:
    ways = [(f"blk.{layer}.attn_q.weight", "Q4_K 2 x 256", "Q5_K 2 x 256") for layer in (0, 1, 2, 5)]
    found = [Difference("tensors", *way) for way in (*ways, ("output.weight", "Q6_K 2 x 256", None))]
    assert list(as_lines([Difference("file", "version", "2", "3"), *found])) == [
        "file: version: 2 in A, 3 in B",
        "tensors: blk.0-2,5.attn_q.weight: Q4_K 2 x 256 in A, Q5_K 2 x 256 in B",
        "tensors: output.weight: only in A: Q6_K 2 x 256",
        "5 tensors differ",
    ]


def test_one_changed_byte_is_found_in_its_row(
    capsys: pytest.CaptureFixture[str], path: Path, other: Path
) -> None:
    layout = FileLayout.of(METADATA, TENSORS)
    data = bytearray(path.read_bytes())
    data[layout.offset_of("blk.0.ffn_down_exps.weight") + 4 * 68 + 3] ^= 1
    other.write_bytes(data)
    code, out, _ = run(capsys, "diff", path, other)
    assert code == 1
    same = "Q8_0 2 x 3 x 64, other data from row 4 on"
    assert out == f"tensors: blk.0.ffn_down_exps.weight: {same}\n"


def test_order_and_byte_order_are_differences(
    capsys: pytest.CaptureFixture[str], path: Path, other: Path
) -> None:
    write_file(other, tensors=TENSORS[::-1], endian="big")
    code, out, _ = run(capsys, "diff", path, other)
    assert code == 1
    assert "file: byte order: little in A, big in B" in out
    assert "tensors: order: token_embd.weight at 0 in A, blk.1.four_d.weight at 0 in B" in out


def test_the_same_values_in_another_byte_order_are_no_other_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, other: Path
) -> None:
    little = write_file(tmp_path / "a.gguf")
    layout = FileLayout.of(METADATA, TENSORS, endian="big")
    with GGUFWriter(other, layout) as writer:
        for info in TENSORS:
            data = np.frombuffer(little[info.name], np.uint8)
            writer.write(layout.offset_of(info.name), swap_bytes(info.type, data))
        writer.publish()
    code, out, _ = run(capsys, "diff", tmp_path / "a.gguf", other)
    assert (code, out) == (1, "file: byte order: little in A, big in B\n")


# --- verify ---------------------------------------------------------------------------------


def test_good_file_verifies(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    assert run(capsys, "verify", path) == (0, f"{path}: 6 tensors, all good\n", "")


def test_nan_scale_is_found(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    layout = FileLayout.of(METADATA, TENSORS)
    data = bytearray(path.read_bytes())
    start = layout.offset_of("blk.0.ffn_gate.weight") + 144
    data[start : start + 4] = b"\x00\x7c\xff\xff"  # d infinite and dmin NaN of the second row
    start = layout.offset_of("output_norm.weight")
    data[start : start + 4] = np.float32("nan").tobytes()
    path.write_bytes(data)
    code, out, _ = run(capsys, "verify", path)
    assert code == 1
    assert out.splitlines() == [
        f"{path}: output_norm.weight: 1 F32 weights are NaN or infinite, the first in row 0",
        f"{path}: blk.0.ffn_gate.weight: 2 Q4_K scales are NaN or infinite, the first in row 1",
        f"{path}: 6 tensors, 2 bad findings",
    ]
    _, out, _ = run(capsys, "verify", "--json", path)
    report = json.loads(out)
    assert (report["ok"], len(report["findings"])) == (False, 2)


def test_gap_stray_bytes_and_unchecked_types_are_told(
    capsys: pytest.CaptureFixture[str], other: Path
) -> None:
    tensors = (TensorInfo("a", (32,), types.F32), TensorInfo("b", (2, 64), types.NVFP4))
    write_file(other, {}, tensors)
    data = other.read_bytes()
    layout = FileLayout.of({}, tensors)
    moved = data[: layout.data_start].replace((128).to_bytes(8, "little"), (160).to_bytes(8, "little"))
    other.write_bytes(moved + data[layout.data_start :] + bytes(200))
    code, out, _ = run(capsys, "verify", other)
    assert code == 1
    offset = layout.data_start + 160
    assert f"{other}: b: data at byte {offset}, llama.cpp expects them at {offset - 32}" in out
    assert f"{other}: note: 168 bytes behind the last tensor belong to nothing" in out
    assert f"{other}: b: note: scales of NVFP4 are not checked" in out


def test_cut_group_of_rows_is_bad(capsys: pytest.CaptureFixture[str], other: Path) -> None:
    write_file(other, {}, (TensorInfo("t", (6, 32), types.Q5_0_R4),))
    code, out, _ = run(capsys, "verify", other)
    assert code == 1
    assert "t: 6 rows, but Q5_0_R4 keeps 4 together" in out


# --- hash -----------------------------------------------------------------------------------


def test_hashes_are_those_of_the_bytes(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    code, out, _ = run(capsys, "hash", path)
    assert code == 0
    lines = out.splitlines()
    for info, line in zip(TENSORS, lines, strict=False):
        assert line == f"{hashlib.sha256(finite_bytes(info)).hexdigest()}  {info.name}"
    assert lines[len(TENSORS)] == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}"
    data = json.loads(run(capsys, "hash", "--json", path)[1])
    assert list(data["tensors"]) == [info.name for info in TENSORS]
    assert lines[-1] == f"{data['content']}  content"


def test_content_hash_ignores_metadata_and_order(
    capsys: pytest.CaptureFixture[str], path: Path, other: Path
) -> None:
    def content(file: Path) -> str:
        return json.loads(run(capsys, "hash", "--json", file)[1])["content"]

    write_file(other, {}, TENSORS[::-1])
    assert content(path) == content(other)
    write_file(other, {}, TENSORS, seed=1)
    assert content(path) != content(other)


# --- how it ends ----------------------------------------------------------------------------


def test_split_set_is_shown_as_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from gguf_tools.format.shards import group_tensors, layouts_of, shard_paths

    layouts = layouts_of(METADATA, group_tensors(TENSORS, max_tensors=4))
    paths = shard_paths(tmp_path / "m.gguf", len(layouts))
    for shard, layout in zip(paths, layouts, strict=True):
        with GGUFWriter(shard, layout) as writer:
            for info in layout.tensors:
                writer.write(layout.offset_of(info.name), finite_bytes(info))
            writer.publish()
    write_file(tmp_path / "whole.gguf")
    assert run(capsys, "diff", paths[1], tmp_path / "whole.gguf")[0] == 0
    assert run(capsys, "verify", paths[0])[0] == 0


@pytest.mark.parametrize("command", ["show", "verify", "hash"])
def test_bad_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    code, out, err = run(capsys, command, bad)
    assert (code, out) == (1, "")
    assert err == f"gguf-tools: error: {bad}: begins with b'not ', expected b'GGUF'; not a GGUF file\n"
    code, _, err = run(capsys, command, tmp_path / "nope")
    assert (code, err) == (1, f"gguf-tools: error: {tmp_path / 'nope'}: No such file or directory\n")


@pytest.mark.parametrize("arguments", [["--verbose", "show"], ["show", "--verbose"]])
def test_verbose_adds_the_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    code, _, err = run(capsys, *arguments, tmp_path / "nope")
    assert code == 1
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("gguf-tools: error: ")


def test_bad_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show")[0] == 2
    assert run(capsys)[0] == 2
    assert run(capsys, "frobnicate")[0] == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "gguf_tools.__version__"}}
    assert run(capsys, "--version") == (0, f"gguf-tools {gguf_tools.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["quantize", "a.gguf"], "gguf-tools quantize: error: TYPE is missing"),
        (["--verbose", "quantize", "a.gguf"], "gguf-tools quantize: error: TYPE is missing"),
        (["quantize", "lint", "Q4_K"], "gguf-tools quantize lint: error: "),
        (["lint", "Q4_K_M", "none.gguf"], "gguf-tools lint: error: none.gguf: "),
        (["imatrix", "show", "none.gguf"], "gguf-tools imatrix: error: none.gguf: "),
        (["imatrix", "show"], "gguf-tools imatrix show: error: "),
        (["convert"], "gguf-tools convert: error: MODEL_DIR is missing"),
        (["evaluate", "a.gguf"], "gguf-tools evaluate: error: -f TEXT or --suite is missing"),
        (["sensitivity", "a.gguf"], "gguf-tools sensitivity: error: "),
    ],
)
def test_all_commands_are_under_one_roof(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert code in (1, 2)
    assert out == ""
    assert err.splitlines()[-1].startswith(error)


def test_a_command_under_the_roof_makes_the_same_file(
    capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path
) -> None:
    write_mixture_model(path)
    alone, roof = tmp_path / "alone.gguf", tmp_path / "roof.gguf"
    assert run(capsys, "quantize", "-q", path, roof, "Q8_0", "1")[0] == 0
    assert gguf_tools.commands.quantize.main(["-q", str(path), str(alone), "Q8_0", "1"]) == 0
    assert alone.read_bytes() == roof.read_bytes()


def test_help_teaches_at_once() -> None:
    """It waits for no other package to load, nor for a large part of the standard library."""
    code = (
        "import sys; before = set(sys.modules); from gguf_tools.commands.main import main; main(['--help']);"
        " print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout
    loaded = done.stderr.split()
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= {"gguf_tools", "quantize", "convert"}
    assert len(loaded) < 200


def test_show_does_not_import_numpy(path: Path) -> None:
    run = "import sys; from gguf_tools.commands.main import main; main(sys.argv[1:])"
    code = f"{run}; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "show", path], cwd=ROOT, check=True, capture_output=True)
