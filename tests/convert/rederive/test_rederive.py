"""Files made again: which are the same, and what is said of those that are not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
from convert.rederive.compare import chance_to_slip, sampled
from gguf_tools import PlanOptions
from gguf_tools.commands.main import main
from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import open_gguf
from gguf_tools.format.tensors import TensorInfo
from quantize.options import METHOD_KEY
from tests.convert.audit.families import family_folder
from tests.quantize.whole_files import draw_case

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


OWN: dict[str, Callable[[Path, Path], Path]] = {
    "rules": lambda source, out: gguf_tools.quantize(
        source, out, "Q4_0", types=PlanOptions(overrides=gguf_tools.parse_overrides(["ffn_up=Q8_0"]))
    ).paths[0],
    "ik": lambda source, out: gguf_tools.quantize(source, out, "IQ4_KS").paths[0],
    "padded": lambda source, out: gguf_tools.quantize(source, out, "Q4_0", pad="256").paths[0],
    "split": lambda source, out: gguf_tools.split(
        gguf_tools.quantize(source, out, "Q8_0").paths[0], out.with_name("part"), max_tensors=20
    )[0],
    "without provenance": lambda source, out: gguf_tools.quantize(
        source, out, "Q4_0", provenance=False
    ).paths[0],
}  # fmt: skip


@pytest.mark.parametrize("how", OWN)
def test_own_files_are_the_same(source: Path, tmp_path: Path, how: str) -> None:
    result = gguf_tools.rederive(OWN[how](source, tmp_path / "q.gguf"), source, n_threads=2)
    assert result.is_same, list(result.lines())
    assert sum(each.n_rows for each in result.tensors) > 0


def test_a_file_of_a_folder_is_the_same_through_16_bits(folder: Path, made: Path) -> None:
    result = gguf_tools.rederive(made, folder)
    assert result.is_same, list(result.lines())
    assert result.file_type == "Q4_K_M"


def test_importances_are_asked_for_and_used(source: Path, tmp_path: Path) -> None:
    matrix = importances_of(source)
    made = gguf_tools.quantize(source, tmp_path / "q.gguf", "IQ4_XS", importances=matrix).paths[0]
    with pytest.raises(BadArgument, match="importances"):
        gguf_tools.rederive(made, source)
    assert gguf_tools.rederive(made, source, importances=matrix).is_same
    other = gguf_tools.rederive(made, source, importances=importances_of(source, seed=1))
    kinds = {each.kind for each in other.tensors if each.verdict == "differs"}
    assert kinds == {"encoding"}
    assert all("other importances" in each.text for each in other.tensors if each.kind)


def test_a_file_that_used_no_importances_is_told(source: Path, made: Path) -> None:
    result = gguf_tools.rederive(made, source, importances=importances_of(source))
    assert not result.is_same
    assert {each.kind for each in result.tensors if each.verdict == "differs"} == {"without-importances"}


def test_a_flipped_code_is_found(source: Path, made: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copy(made, tmp_path / "q.gguf"))
    with open_gguf(made) as file:
        place = file.file_of(DOWN).data_offset(DOWN) + file.tensor(DOWN).row_bytes * 3 - 1
    with open(damaged, "r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 0x10]))
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


def test_another_revision_of_a_tensor_is_found(source: Path, made: Path, tmp_path: Path) -> None:
    other = Path(shutil.copy(source, tmp_path / "other.gguf"))
    with open_gguf(source) as file:
        place, rows = file.file_of(DOWN).data_offset(DOWN), file.raw(DOWN).view(np.float16).copy()
    noise = np.random.default_rng(0).standard_normal(rows.shape)
    with open(other, "r+b") as stream:
        stream.seek(place)
        stream.write((rows + rows.std() * noise).astype(np.float16).tobytes())
    (wrong,) = (each for each in gguf_tools.rederive(made, other).tensors if each.verdict != "same")
    assert (wrong.name, wrong.kind) == (DOWN, "other-weights")
    assert "by its provenance it was made of other weights" in wrong.text


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


def test_a_calibrated_file_is_refused(source: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="calibrated"):
        gguf_tools.rederive(edited(made, tmp_path / "c.gguf", METHOD_KEY, "str:x"), source)


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


def test_an_attestation_names_all_by_digest(source: Path, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert main(["attest", str(made), "--source", str(source), "-o", str(out)]) == 0
    said = json.loads(out.read_text())
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    build = said["predicate"]["buildDefinition"]
    for path, found in ((made, said["subject"]), (source, build["resolvedDependencies"])):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == [{"name": path.name, "digest": {"sha256": digest}}]
    assert build["externalParameters"]["files"] == {made.name: {keys.FILE_TYPE: 15}}
    assert main(["attest", str(made), "-o", str(out)]) == 1


def test_files_of_one_name_have_no_statement_together(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "a.json", Path(shutil.copy(made, tmp_path / made.name))
    assert main(["attest", str(made), str(other), "-o", str(out)]) == 1
    assert f"{other}: another file has this name" in capsys.readouterr().err
    assert not out.exists()
