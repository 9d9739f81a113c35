"""Files made again: which are the same, and what is said of those that are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
import gguf_tools
from convert.audit.base import open_audit_base
from convert.rederive.compare import Compared, chance_to_slip, sampled
from convert.rederive.recalibrate import judged
from convert.rederive.report import Rederivation
from gguf_tools import PlanOptions
from gguf_tools.commands.main import main
from gguf_tools.errors import BadArgument
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.bits import numbers_of
from quantize.padding import PadChoice
from quantize.padding.padding import is_padded
from quantize.plan.sensitivities import Sensitivities, TensorSensitivity, write_sensitivities
from tests.convert.audit.families import EXAMPLES, family_folder
from tests.end_to_end import arch_models
from tests.quantize.padding.ffn_files import write_ffn_file
from tests.quantize.simd.test_lanes import INSTRUCTION_SETS
from tests.quantize.whole_files import draw_case
from tests.support.checkpoints import to_fp8
from tests.support.published_models import write

DOWN = "blk.1.ffn_down.weight"
Importances = dict[str, np.ndarray]


def importances_of(source: Path, seed: int = 0) -> Importances:
    """Draw importances of every matrix of layers."""
    random = np.random.default_rng(seed)
    with open_gguf(source) as file:
        return {
            info.name: random.lognormal(size=info.n_cols).astype(np.float32)
            for info in file.tensors.values()
            if info.name.startswith("blk.") and len(info.shape) > 1
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_folder("llama", tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def source(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert.convert(folder, tmp_path_factory.mktemp("source") / "f16.gguf", "f16").paths[0]


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made") / "q.gguf"
    return gguf_tools.quantize(source, output, "Q4_K_M", n_threads=1).paths[0]


def chosen_for_a_size(source: Path, out: Path) -> Path:
    """Write a file of a size, with a file of losses that are made up."""
    with open_gguf(source) as file:
        shapes = {info.name: info.shape for info in file.tensors.values() if len(info.shape) > 1}
    damage = {name: 4.0 ** -by_name(name).bits_per_weight for name in ("Q3_K", "Q4_K", "Q8_0")}
    losses = out.with_name("losses.json")
    write_sensitivities(
        Sensitivities({name: TensorSensitivity.of(shape, damage) for name, shape in shapes.items()}), losses
    )
    return gguf_tools.quantize(source, out, "5bpw", losses=losses).paths[0]


def split(source: Path, out: Path) -> Path:
    made = gguf_tools.quantize(source, out, "Q8_0").paths[0]
    return gguf_tools.split(made, out.with_name("part"), max_tensors=20)[0]


def quantized(file_type: str, **choices: Any) -> Callable[[Path, Path], Path]:
    return lambda source, out: gguf_tools.quantize(source, out, file_type, **choices).paths[0]


OWN: dict[str, Callable[[Path, Path], Path]] = {
    "rules": quantized("Q4_0", types=PlanOptions(overrides=gguf_tools.parse_overrides(["ffn_up=Q8_0"]))),
    "ik": quantized("IQ4_KS"),
    "split": split,
    "without provenance": quantized("Q4_0", provenance=False),
    "pruned": quantized("Q8_0", types=PlanOptions(prune_layers=(1,))),
    "of a size": chosen_for_a_size,
}


@pytest.mark.parametrize("how", OWN)
def test_own_files_are_the_same(source: Path, tmp_path: Path, how: str) -> None:
    made = OWN[how](source, tmp_path / "q.gguf")
    result = gguf_tools.rederive(made, source, n_threads=2)
    assert result.is_as_claimed, list(result.lines())
    assert sum(each.n_rows for each in result.tensors) > 0


def test_a_padded_file_is_the_same(tmp_path: Path) -> None:
    """The base gets the sizes of the file."""
    model = write_ffn_file(tmp_path / "odd.gguf")
    made = gguf_tools.quantize(model, tmp_path / "q.gguf", "Q4_K_M", pad="256").paths[0]
    with open_gguf(made) as file:
        assert is_padded(file.metadata)
    result = gguf_tools.rederive(made, model)
    assert result.is_as_claimed, list(result.lines())


def test_a_file_that_keeps_a_grid_is_the_same(source: Path, tmp_path: Path) -> None:
    coded = gguf_tools.quantize(source, tmp_path / "a.gguf", "Q4_0", types=PlanOptions(pure=True)).paths[0]
    options = PlanOptions(allow_requantize=True)
    grid = gguf_tools.quantize(coded, tmp_path / "grid.gguf", "F16", types=options).paths[0]
    made = gguf_tools.quantize(grid, tmp_path / "q.gguf", "Q8_0", keep_grid=True).paths[0]
    result = gguf_tools.rederive(made, grid)
    assert result.is_same, list(result.lines())
    assert {each.type for each in result.tensors} >= {"Q4_0", "F32"}


def test_a_file_of_fp8_is_the_same(folder: Path, tmp_path: Path) -> None:
    stored = to_fp8(Path(shutil.copytree(folder, tmp_path / "fp8")))
    made = gguf_tools.quantize(stored, tmp_path / "q.gguf", "Q8_0").paths[0]
    between = convert.convert(stored, tmp_path / "bf16.gguf", "bf16").paths[0]
    through = gguf_tools.quantize(between, tmp_path / "r.gguf", "Q8_0").paths[0]
    for path, of, types in ((made, stored, {""}), (through, stored, {"", "BF16"}), (through, between, {""})):
        result = gguf_tools.rederive(path, of)
        assert result.is_as_claimed, list(result.lines())
        assert {each.through for each in result.tensors} == types


@pytest.mark.slow
@pytest.mark.parametrize("features", INSTRUCTION_SETS)
def test_other_instructions_make_the_same(source: Path, made: Path, tmp_path: Path, features: str) -> None:
    words = [sys.executable, "-m", "gguf_tools", "rederive", made, "--source", source, "-q", "-t", "1"]
    processor = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features}
    kept = {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(words, env={**os.environ, **kept, **processor}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "same: every byte" in run.stdout


def test_a_file_of_a_folder_is_the_same_through_16_bits(folder: Path, made: Path) -> None:
    result = gguf_tools.rederive(made, folder)
    assert result.is_same, list(result.lines())
    assert result.file_type == "Q4_K_M"


def test_matrices_that_stay_floats_are_no_types_by_hand(tmp_path: Path) -> None:
    folder = write("gemma-3n", tmp_path / "model")
    through = convert.convert(folder, tmp_path / "bf16.gguf", "bf16").paths[0]
    made = gguf_tools.quantize(through, tmp_path / "q.gguf", "Q4_K_M", n_threads=1).paths[0]
    done = gguf_tools.rederive(made, folder)
    assert done.is_same
    assert not done.findings


def test_importances_are_asked_for_and_used(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = importances_of(source)
    made = gguf_tools.quantize(source, tmp_path / "q.gguf", "IQ4_XS", importances=matrix).paths[0]
    with pytest.raises(BadArgument, match="importances"):
        gguf_tools.rederive(made, source)
    assert gguf_tools.rederive(made, source, importances=matrix).is_same
    other = gguf_tools.rederive(made, source, importances=importances_of(source, seed=1))
    kinds = {each.kind for each in other.tensors if each.verdict == "differs"}
    assert kinds == {"encoding"}
    assert all("other importances" in each.text for each in other.tensors if each.kind)
    assert "the importance matrix is another one: digest" in caplog.text  # while it was being made
    assert other.findings[0].kind == "digest"


def test_a_file_that_used_no_importances_is_told(source: Path, made: Path) -> None:
    result = gguf_tools.rederive(made, source, importances=importances_of(source))
    assert not result.is_same
    assert {each.kind for each in result.tensors if each.verdict == "differs"} == {"without-importances"}


def test_a_flipped_code_is_found(source: Path, made: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copy(made, tmp_path / "q.gguf"))
    flip(damaged, DOWN)
    result = gguf_tools.rederive(damaged, source)
    (wrong,) = (each for each in result.tensors if each.verdict == "differs")
    assert (wrong.name, wrong.n_differ, wrong.kind) == (DOWN, 1, "changed")
    assert "the first in row 2" in wrong.text
    stopped = gguf_tools.rederive(damaged, source, stop=True)
    assert stopped.tensors[-1].name == DOWN
    assert stopped.n_left > 0
    whole = gguf_tools.rederive(damaged, source, sample=100_000, seed=0)
    assert not whole.is_same
    assert set(whole.chances.values()) == {0.0}


def with_noise(source: Path, output: Path, name: str) -> Path:
    """Copy a file of F16 with other weights in a tensor."""
    shutil.copy(source, output)
    with open_gguf(source) as file:
        place, rows = file.file_of(name).data_offset(name), file.raw(name).view(np.float16).copy()
    noise = np.random.default_rng(0).standard_normal(rows.shape)
    with open(output, "r+b") as stream:
        stream.seek(place)
        stream.write((rows + rows.std() * noise).astype(np.float16).tobytes())
    return output


def test_another_revision_of_a_tensor_is_found(source: Path, made: Path, tmp_path: Path) -> None:
    other = with_noise(source, tmp_path / "other.gguf", DOWN)
    result = gguf_tools.rederive(made, other)
    (wrong,) = (each for each in result.tensors if each.verdict != "same")
    assert (wrong.name, wrong.kind) == (DOWN, "other-weights")
    assert not result.findings
    assert "by its provenance it was made of other weights" in wrong.text


def test_another_source_is_told_before_anything_is_made(
    folder: Path, source: Path, made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = with_noise(source, tmp_path / "other.gguf", "blk.0.attn_k.weight")  # the smallest
    result = gguf_tools.rederive(made, other, stop=True)
    assert result.n_left
    assert "the source is another one: digest" in caplog.text
    same_weights = convert.convert(folder, tmp_path / "bf16.gguf", "bf16").paths[0]
    assert not gguf_tools.rederive(made, same_weights).findings


def test_a_file_of_f32_between_is_not_another_source(folder: Path, tmp_path: Path) -> None:
    between = convert.convert(folder, tmp_path / "f32.gguf", "f32").paths[0]
    made = gguf_tools.quantize(between, tmp_path / "q.gguf", "Q8_0").paths[0]
    result = gguf_tools.rederive(made, folder)
    assert result.is_same
    assert not result.findings


def edited(source: Path, output: Path, key: str, value: str) -> Path:
    """Write a file with a key set."""
    changes = [gguf_tools.edit.parse_assignment(f"{key}={value}")]
    gguf_tools.edit.edit_model(
        source, lambda metadata, names: gguf_tools.edit.set_values(metadata, changes), output=output
    )
    return output


def test_a_renamed_file_type_is_found(source: Path, made: Path, tmp_path: Path) -> None:
    result = gguf_tools.rederive(edited(made, tmp_path / "r.gguf", keys.FILE_TYPE, "18"), source)
    assert {each.verdict for each in result.tensors} == {"same"}
    assert result.is_same
    assert not result.is_as_claimed
    assert "says Q6_K, and the types are those of Q4_K_M" in result.findings[0].text


@pytest.mark.parametrize(
    ("types", "level"), [(["ffn_=Q8_0", "attn_=Q3_K"], "bad"), (["attn_q=Q2_K"], "note")]
)
def test_a_file_type_that_gives_other_types_is_found(
    source: Path, tmp_path: Path, types: list[str], level: str
) -> None:
    """Types by hand are nothing bad, as long as the file type gives most of them."""
    by_hand = PlanOptions(overrides=gguf_tools.parse_overrides(types))
    made = gguf_tools.quantize(source, tmp_path / "q.gguf", "Q4_K_M", types=by_hand).paths[0]
    result = gguf_tools.rederive(made, source)
    assert result.is_same
    (finding,) = result.findings
    assert (str(finding.level), finding.about) == (level, (keys.FILE_TYPE,))
    assert "says Q4_K_M, by which" in finding.text


def change(path: Path, name: str, field: str, *, step: int, share: float) -> None:
    """Change numbers of the blocks of a tensor by a step: the first of some of its blocks."""
    with open_gguf(path) as file:
        info, place = file.tensor(name), file.file_of(name).data_offset(name)
        blocks = file.raw(name).reshape(-1, info.type.block_bytes).copy()
    chosen = np.arange(0, len(blocks), round(1 / share))
    numbers = numbers_of(info.type)
    read = {key: each.read(blocks[chosen]) for key, each in numbers.items()}
    old = read[field][:, 0].astype(int)
    read[field][:, 0] = np.where(old >= step, old - step, old + step)
    cleared = blocks[chosen]
    bits = np.unpackbits(cleared, axis=1, bitorder="little")
    for each in numbers.values():
        bits[:, each.positions.ravel()] = 0
    cleared = np.packbits(bits, axis=1, bitorder="little")
    for key, each in numbers.items():
        each.write(cleared, read[key])
    blocks[chosen] = cleared
    with open(path, "r+b") as stream:
        stream.seek(place)
        stream.write(blocks.tobytes())


@pytest.mark.parametrize(
    ("field", "step", "share", "kind", "said"),
    [("codes", 1, 0.005, "few-blocks", "of their codes differ, by up to 1 step;"),
     ("codes", 3, 1, "encoding", "of their codes differ, by up to 3 steps;"),
     ("scales", 1, 0.005, "few-blocks", "no code differs, scales do;")],
)  # fmt: skip
def test_other_bytes_are_described(
    source: Path, tmp_path: Path, field: str, step: int, share: float, kind: str, said: str
) -> None:
    made = gguf_tools.quantize(source, tmp_path / "q.gguf", "Q4_K_S", provenance=False).paths[0]
    change(made, DOWN, field, step=step, share=share)
    (wrong,) = (each for each in gguf_tools.rederive(made, source).tensors if each.verdict != "same")
    assert (wrong.name, wrong.kind) == (DOWN, kind), wrong.text
    assert said in wrong.text


def test_the_layout_of_latent_attention_is_asked_of_families_that_have_a_choice(tmp_path: Path) -> None:
    """Kimi Linear has attn_k_b, and no other layout."""
    for folder, layout in ((EXAMPLES / "tiny-deepseek-v3", "both"), (write("kimi-linear", tmp_path), None)):
        convert.convert(folder, tmp_path / "f.gguf", "f16", mla=layout, force=True)
        with open_gguf(tmp_path / "f.gguf") as file, open_audit_base(folder, file) as base:
            assert base.mla == layout


@pytest.mark.slow
@pytest.mark.parametrize("pad", [None, "256"])
def test_a_calibrated_file_is_calibrated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pad: PadChoice | None
) -> None:
    """Threads change nothing; a changed code, another text and a sample are told."""
    tiny = EXAMPLES / "tiny-deepseek-v3"
    text, source = tiny / "calibration.txt", tiny if pad is None else arch_models.model("llama-r1-distill")
    made, odd = tmp_path / "c.gguf", "blk.1.attn_output.weight"
    gguf_tools.calibrate(source, made, "Q4_0", text, chunk_size=64, n_chunks=4, seed=1, n_threads=2, pad=pad)
    with open_gguf(made) as file:
        assert is_padded(file.metadata) == (pad is not None)
        n_tensors = len(file.tensors)
    flip(made, odd)
    words = ["rederive", str(made), "--source", str(source), "-q", "-t", "1"]
    assert main([*words, "--calibrate", str(text), "--json"]) == 1
    found = {each["name"]: each["kind"] for each in json.loads(capsys.readouterr().out)["tensors"]}
    assert {name: kind for name, kind in found.items() if kind} == {odd: "changed"}
    assert len(found) == n_tensors
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[1000:])
    for more, said in (
        (["--calibrate", str(other)], "the text is another one: digest"),
        (
            ["--calibrate", str(text), "-c", "32"],
            "calibrated otherwise two-sided, layer after layer, chunks of 32",
        ),
        (["--calibrate", str(text), "--sample", "2"], "leave --sample out"),
        ([], "name the text alone, with --calibrate"),
    ):
        assert main([*words[:5], *(words[5:] if more else []), *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "drifts", "expected"),
    [(0.0402, True, "consistent"), (0.0402, False, "changed"), (0.05, True, "changed"),
     (0.9, True, "other-weights")],
)  # fmt: skip
def test_calibrated_bytes_are_consistent_at_most(found: float, drifts: bool, expected: str) -> None:
    info, compared = TensorInfo("a", (10, 32), by_name("Q4_0")), Compared(10, 10, 3, 3, (1, 2, 5))
    verdict = judged(info, compared, 0.04, found, drifts=drifts)
    assert expected in (verdict.verdict, verdict.kind)
    assert "70 % of its rows are the same" in verdict.text
    result = Rederivation(Path("f"), Path("s"), "Q4_0", (verdict,), (), None, None, {}, 0)
    assert not result.is_same
    assert ("no proof" in result.summary()) == (expected == "consistent")


def flip(path: Path, name: str, row: int = 2) -> None:
    """Change a code at the end of a row."""
    with open_gguf(path) as file:
        place = file.file_of(name).data_offset(name) + file.tensor(name).row_bytes * (row + 1) - 1
    with open(path, "r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("seed", [4, 5, 8, 11, 16, 18, 27])
def test_llama_cpps_files_are_the_same(tmp_path: Path, seed: int) -> None:
    """Files with the bytes of llama_model_quantize, see tests/golden/whole_files.json."""
    case = draw_case(seed)
    source = case.model.write(tmp_path / "in.gguf")
    made = case.make(source, tmp_path / "out.gguf")
    result = gguf_tools.rederive(made[0], source, importances=case.importances, n_threads=2)
    assert result.is_same, (str(case), list(result.lines()))
    assert result.file_type.startswith(case.file_type)
    is_renamed = any(key == keys.FILE_TYPE for key, _ in case.kv_overrides)
    assert result.is_as_claimed == (not is_renamed)
    assert ("--pure" in result.file_type) == case.types.pure


def test_a_sample_is_what_its_seed_says_and_cuts_no_group() -> None:
    info = TensorInfo("a", (3, 100, 256), by_name("Q4_K_R4"))
    rows = sampled(info, None, 40, seed=7)
    assert rows == sampled(info, None, 40, seed=7) != sampled(info, None, 40, seed=8)
    assert sum(map(len, rows)) == 40
    assert all(not each.start % 4 and not each.stop % 4 for each in rows)
    assert all(each.start // 100 == (each.stop - 1) // 100 for each in rows)


def test_the_chance_of_a_sample() -> None:
    info = TensorInfo("a", (10, 256), by_name("Q4_K"))
    assert chance_to_slip(iter([info]), 4, 1) == pytest.approx(0.6)
    assert chance_to_slip(iter([info]), 4, 2) == pytest.approx(6 * 5 / (10 * 9))
    assert chance_to_slip(iter([info]), 4, 7) == 0


def test_the_command(source: Path, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rederive", str(made), "--source", str(source), "-q"]
    assert main([*words, "--sample", "2", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert "2 rows of each tensor, chosen by --seed 5" in printed
    assert "slips through with a chance of up to" in printed
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert main(["rederive", str(made), "-q"]) == 2
    assert "--source" in capsys.readouterr().err
