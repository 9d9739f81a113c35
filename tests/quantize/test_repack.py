"""Repacking: rows regrouped for ik_llama.cpp, there and back without a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import gguf_tools.commands.main
import gguf_tools.commands.quantize
from gguf_tools import open_gguf
from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format.block_layouts import count_nonfinite
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import FileLayout
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Metadata, Value
from quantize.fill.provenance import PROVENANCE_KEY
from quantize.fill.sources import GGUFTensor
from quantize.formats.codecs import REGROUPED
from quantize.formats.ik.interleaved.interleaved import from_base
from quantize.repack import RepackOptions, repack
from quantize.repack.pipeline import FILE_TYPE_BEFORE, PROVENANCE_BEFORE
from quantize.repack.rules import plan_regroupings

N_COLS = 512

TENSORS = (
    ("token_embd.weight", "Q4_0", (64, N_COLS)),
    ("blk.0.attn_norm.weight", "F32", (N_COLS,)),
    ("blk.0.attn_q.weight", "Q8_0", (32, N_COLS)),
    ("blk.0.ffn_up_exps.weight", "Q4_0", (3, 24, N_COLS)),
    ("blk.0.ffn_down_exps.weight", "Q4_0", (3, 20, N_COLS)),
    ("blk.0.attn_v_b.weight", "IQ4_KS", (12, N_COLS)),
    ("output.weight", "BF16", (32, N_COLS)),
)
"""Experts of ffn_down_exps have 20 rows, which are no whole groups of eight, though all 60 together were."""

METADATA: Metadata = {
    "general.architecture": Value.string("deepseek2"),
    "general.file_type": Value.u32(2),
    PROVENANCE_KEY: Value.u32s(range(2 * len(TENSORS))),
    "deepseek2.block_count": Value.u32(1),
}


def write(path: Path, tensors: Any = TENSORS, metadata: Metadata = METADATA) -> Path:
    """Write a file with these tensors, whose blocks are any bytes with finite scales; floats are small."""
    infos = [TensorInfo(name, shape, by_name(type_)) for name, type_, shape in tensors]
    layout = FileLayout.of(metadata, infos)
    numbers = np.random.default_rng(3)
    with GGUFWriter(path, layout) as writer:
        for info in infos:
            data = numbers.integers(0, 256, info.n_bytes, np.uint8)
            if not info.type.is_quantized:
                data = np.zeros(info.n_bytes, np.uint8) | data & 0x3F
            make_finite(info, data)
            writer.write(layout.offset_of(info.name), data)
        writer.publish()
    return path


def make_finite(info: TensorInfo, data: npt.NDArray[np.uint8]) -> None:
    """Change rows with scales that are NaN or infinite: files with such rows are refused."""
    for rows in data.reshape(-1, info.type.rows_interleaved * info.row_bytes):
        if count_nonfinite(info.type, rows, info.row_bytes)[0]:
            rows &= 0x3F


def types_of(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: info.type.name for name, info in file.tensors.items()}


def test_there_and_back_is_the_same_file_byte_for_byte(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf")
    result = repack(source, tmp_path / "r.gguf")
    assert result.paths == (tmp_path / "r.gguf",)
    assert types_of(tmp_path / "r.gguf") == {
        "token_embd.weight": "Q4_0",
        "blk.0.attn_norm.weight": "F32",
        "blk.0.attn_q.weight": "Q8_0_R8",
        "blk.0.ffn_up_exps.weight": "Q4_0_R8",
        "blk.0.ffn_down_exps.weight": "Q4_0",
        "blk.0.attn_v_b.weight": "IQ4_KS_R4",
        "output.weight": "BF16",
    }
    repack(tmp_path / "r.gguf", tmp_path / "back.gguf", undo=True)
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


def test_experts_are_interleaved_one_by_one_and_weights_stay(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf")
    repack(source, tmp_path / "r.gguf")
    with open_gguf(source) as old, open_gguf(tmp_path / "r.gguf") as new:
        name = "blk.0.ffn_up_exps.weight"
        stored = np.frombuffer(old.raw(name), np.uint8).reshape(3, 24, -1)
        experts = [from_base(by_name("Q4_0_R8"), expert, N_COLS) for expert in stored]
        assert bytes(new.raw(name)) == b"".join(expert.tobytes() for expert in experts)
        for name in ("blk.0.attn_q.weight", "blk.0.attn_v_b.weight"):
            with np.errstate(all="ignore"):
                rows = [GGUFTensor(file, name).read_rows(0, 12).view(np.uint32) for file in (old, new)]
            np.testing.assert_array_equal(*rows)


def test_the_file_type_and_provenance_wait_for_the_way_back(tmp_path: Path) -> None:
    for number, new in ((2, 202), (15, 214), (14, 214), (1, 1)):
        source = write(tmp_path / "in.gguf", metadata={**METADATA, "general.file_type": Value.u32(number)})
        repack(source, tmp_path / "r.gguf", force=True)
        with open_gguf(tmp_path / "r.gguf") as file:
            assert file.get("general.file_type") == new
            assert (FILE_TYPE_BEFORE in file.metadata) == (new != number)
            assert PROVENANCE_KEY not in file.metadata
            assert file.metadata[PROVENANCE_BEFORE] == METADATA[PROVENANCE_KEY]
        repack(tmp_path / "r.gguf", tmp_path / "back.gguf", undo=True, force=True)
        assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


def test_a_file_that_ik_llama_cpp_repacked_is_taken_apart(tmp_path: Path) -> None:
    metadata = {**METADATA, "general.file_type": Value.u32(214)}
    source = write(tmp_path / "r.gguf", [("blk.0.attn_q.weight", "Q4_K_R4", (8, 512))], metadata)
    repack(source, tmp_path / "out.gguf", undo=True)
    assert types_of(tmp_path / "out.gguf") == {"blk.0.attn_q.weight": "Q4_K"}
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.get("general.file_type") == 14


@pytest.mark.parametrize("name", REGROUPED)
def test_every_type_is_there_and_back(name: str, tmp_path: Path) -> None:
    type_, rows = by_name(name), np.random.default_rng(5).integers(0, 256, (48, 2000), np.uint8)
    base, group = by_name(REGROUPED[name]), type_.rows_interleaved
    shape = (2, group, N_COLS)
    info = TensorInfo("blk.0.attn_q.weight", shape, base)
    data = rows.reshape(-1)[: info.n_bytes].copy()
    make_finite(info, data)
    if name == "Q8_KV_R8":
        blocks = data.reshape(2 * group, -1)
        blocks[:, 4:8] = blocks[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32).view(np.uint8).reshape(-1, 4)
    elif not base.is_quantized:
        data &= 0x3F
    layout = FileLayout.of({"general.architecture": Value.string("deepseek2")}, [info])
    with GGUFWriter(tmp_path / "in.gguf", layout) as writer:
        writer.write(layout.offset_of(info.name), data)
        writer.publish()
    repack(tmp_path / "in.gguf", tmp_path / "r.gguf", to=(name.lower(),))
    assert types_of(tmp_path / "r.gguf") == {"blk.0.attn_q.weight": name}
    repack(tmp_path / "r.gguf", tmp_path / "back.gguf", undo=True)
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "in.gguf").read_bytes()


def test_parts_stay_parts(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf")
    words = ["split", str(source), str(tmp_path / "parts"), "--max-tensors", "3"]
    assert gguf_tools.commands.main.main(words) == 0
    first = next(iter(sorted(tmp_path.glob("parts-*"))))
    result = repack(first, tmp_path / "r.gguf", keep_split=True)
    assert len(result.paths) == 3
    repack(result.paths[0], tmp_path / "back.gguf", undo=True)
    assert types_of(tmp_path / "back.gguf") == types_of(source)
    with pytest.raises(BadRequest, match="keep_split=True needs a split source"):
        repack(source, tmp_path / "r.gguf", keep_split=True)


def test_only_what_is_named_is_regrouped(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf")
    repack(source, tmp_path / "r.gguf", only=("attn_q", "up_exps"))
    changed = {name for name, type_ in types_of(tmp_path / "r.gguf").items() if type_ in REGROUPED}
    assert changed == {"blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"}
    repack(source, tmp_path / "r.gguf", to=("BF16_R16", "Q8_0_R8"), force=True)
    changed = {name for name, type_ in types_of(tmp_path / "r.gguf").items() if type_ in REGROUPED}
    assert changed == {"blk.0.attn_q.weight", "output.weight"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (RepackOptions(to=("Q4_K",)), "to Q4_K: not an interleaved type, expected some of Q4_0_R8, "),
        (RepackOptions(to=("iq1_s_r4",)), "to iq1_s_r4: no type is iq1_s_r4 regrouped: its rows have one"),
        (RepackOptions(to=("Q4_0_R8",), undo=True), "to and undo=True can't be used together"),
        (RepackOptions(only=("(",)), r"only '\(' is not a regular expression"),
    ],
)
def test_wrong_orders_are_refused(options: RepackOptions, complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        plan_regroupings((), options)


def test_rows_that_a_named_type_cannot_hold_stop_before_anything_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "in.gguf")
    said = (
        "blk.0.ffn_down_exps.weight: 20 rows are no multiple of 8, which Q4_0_R8 keeps together; leave them"
    )
    with pytest.raises(BadRequest, match=said):
        repack(source, tmp_path / "r.gguf", to=("Q4_0_R8",))
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]


def test_what_has_no_base_type_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "r.gguf", [("blk.0.attn_q.weight", "Q8_K_R8", (8, 512))], {**METADATA})
    with pytest.raises(BadRequest, match="Q8_K_R8 can't be taken apart: its scales are float16"):
        repack(source, tmp_path / "out.gguf", undo=True)


def run(capsys: pytest.CaptureFixture[str], main: Any, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, other = write(tmp_path / "in.gguf"), tmp_path / "a.gguf", tmp_path / "b.gguf"
    code, text, _ = run(capsys, gguf_tools.commands.main.main, "repack", "-q", source, out)
    assert (code, text) == (0, "")
    code, text, _ = run(capsys, gguf_tools.commands.quantize.main, "--repack", source, other, "Q4_0_R8")
    assert code == 0
    assert out.read_bytes() == other.read_bytes()
    assert text.splitlines()[:4] == [
        "Q8_0 -> Q8_0_R8: 1 tensors",
        "Q4_0 -> Q4_0_R8: 1 tensors",
        "IQ4_KS -> IQ4_KS_R4: 1 tensors",
        "as they are: 4 tensors",
    ]
    assert "note: as they are, because their rows are looked up one by one: token_embd.weight" in text
    assert "note: as they are, because their rows fill no group: blk.0.ffn_down_exps.weight" in text
    code, text, _ = run(capsys, gguf_tools.commands.main.main, "repack", out, "--dry-run", "--json", "--undo")
    assert json.loads(text)["tensors"][2] == {
        "name": "blk.0.attn_q.weight", "from": "Q8_0_R8", "to": "Q8_0",
    }  # fmt: skip
    code, text, _ = run(
        capsys, gguf_tools.commands.main.main, "repack", source, tmp_path / "c.gguf", "--undo"
    )
    assert (code, text) == (0, f"{source}: nothing to regroup; nothing is written\n")
    assert not (tmp_path / "c.gguf").exists()


def test_an_output_that_is_there_is_replaced_by_force_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by all commands but `quantize`, which replaces as llama-quantize does."""
    source, out = write(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    out.write_text("mine")
    code, _, err = run(capsys, gguf_tools.commands.main.main, "repack", source, out)
    assert (code, "out.gguf: exists already; --force replaces it" in err) == (1, True)
    assert out.read_text() == "mine"
    assert run(capsys, gguf_tools.commands.main.main, "repack", source, out, "--force")[0] == 0
    made = out.read_bytes()
    assert run(capsys, gguf_tools.commands.quantize.main, "--repack", source, out, "Q4_0_R8")[0] == 0
    assert out.read_bytes() == made


def test_options_that_do_not_go_with_it_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, main = write(tmp_path / "in.gguf"), gguf_tools.commands.quantize.main
    assert run(capsys, main, "--repack", source)[0] == 2
    assert run(capsys, main, "--repack", "--pure", source, tmp_path / "out.gguf")[0] == 2
    assert run(capsys, main, "--repack-pattern", "x", source, tmp_path / "out.gguf", "Q8_0")[0] == 2
    assert run(capsys, gguf_tools.commands.main.main, "repack", source)[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["in.gguf"]
