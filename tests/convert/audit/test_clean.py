"""No alarm on files in which nothing is wrong: ours of every type, and llama.cpp's."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools
import quantize
from convert.audit import diagnose
from convert.audit.expected import as_encoded, read_rows
from convert.audit.report import AuditReport
from gguf_tools.findings import Level
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.shards import open_gguf
from quantize.fill.sources import FLOAT_DTYPES, GGUFTensor
from quantize.formats.codecs import requires_importances
from quantize.mla_layout.pipeline import change_layout
from quantize.options import METHOD_KEY
from quantize.plan.plan import PlanOptions
from quantize.repack.pipeline import repack
from tests.convert.audit.conftest import Base, Make
from tests.convert.audit.families import FAMILIES
from tests.support import oracle
from tests.support.published_models import write

PLAIN = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_1", "Q4_K_M", "Q3_K_L", "Q2_K", "IQ4_XS",
    "IQ4_NL", "IQ3_S", "MXFP4_MOE", "TQ2_0", "Q1_0", "Q2_0",
)  # fmt: skip
WEIGHTED = (
    "Q8_0", "Q6_K", "Q5_K_S", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "Q2_K_S", "IQ4_XS", "IQ3_M", "IQ3_XXS",
    "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0", "Q6_0", "IQ2_KS", "IQ2_K", "IQ2_KL",
    "IQ3_K", "IQ4_KS", "IQ4_KSS", "IQ4_K", "IQ5_KS", "IQ6_K", "IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT",
    "Q4_K_R4", "IQ3_S_R4",
)  # fmt: skip
CALIBRATED = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ4_XS")
QUICK = {("llama", "Q4_K_M"), ("deepseek2", "Q4_K_M"), ("glm4moe", "Q8_0"), ("qwen3", "F16")}

RECIPES = [
    *(f"{name}" for name in PLAIN), *(f"imatrix {name}" for name in WEIGHTED),
    *(f"calibrated {name}" for name in CALIBRATED),
]  # fmt: skip


def alarms(report: AuditReport) -> list[str]:
    return [f"{each.where}: {each.text}" for each in report.findings if each.level is not Level.NOTE]


@pytest.mark.parametrize(
    ("family", "how"),
    [
        pytest.param(family, how, marks=() if (family, how) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for how in RECIPES
    ],
)
def test_ours(family: str, how: str, base: Base, made: Make) -> None:
    report = gguf_tools.audit(made(family, how), base(family))
    assert alarms(report) == []
    assert len(report.tensors) > 20


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["Q4_K_M", "imatrix IQ2_XS", "calibrated Q2_K"])
def test_a_sample_of_rows(family: str, how: str, base: Base, made: Make) -> None:
    assert alarms(gguf_tools.audit(made(family, how), base(family), every_row=False)) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of", ["F32", "BF16", "F16", "Q8_0"])
def test_a_file_as_base(family: str, of: str, base: Base, made: Make) -> None:
    """Q8_0 is itself off by half a percent, which hides nothing of a file of four bits."""
    report = gguf_tools.audit(made(family, "imatrix Q4_K_M"), made(family, of))
    assert alarms(report) == []


@pytest.mark.slow
@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how", ["Q8_0", "Q4_K_M", "Q2_K", "IQ4_XS", "imatrix Q4_K_M", "imatrix IQ2_XS", "imatrix IQ3_XXS"]
)
def test_llama_cpps(family: str, how: str, base: Base, made: Make, tmp_path: Path) -> None:
    """Every encoded tensor is encoded by ggml; importances are drawn, and spiky."""
    path = Path(shutil.copy(made(family, how), tmp_path / "file.gguf"))
    rng = np.random.default_rng(1)
    with open_gguf(path) as file, open_gguf(made(family, "F32")) as exact, open(path, "r+b") as out:
        for info in file.tensors.values():
            if info.type in FLOAT_DTYPES:
                continue
            rows = read_rows(GGUFTensor(exact, info.name), np.arange(info.n_rows))
            needs = how.startswith("imatrix") or requires_importances(info.type.name)
            weights = rng.exponential(1, info.n_cols).astype(np.float32) ** 2 if needs else None
            out.seek(file.data_offset(info.name))
            out.write(oracle.quantize(info.type.id, rows, weights).tobytes())
    assert alarms(gguf_tools.audit(path, base(family))) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["both", "none"])
@pytest.mark.parametrize("file_type", ["F32", "Q8_0", "Q4_K_M"])
def test_layouts_of_latent_attention(
    layout: str, file_type: str, base: Base, made: Make, tmp_path: Path
) -> None:
    path = tmp_path / "file.gguf"
    convert.convert(base("deepseek2"), path, outtype=file_type, mla=layout)  # type: ignore[arg-type]
    assert alarms(gguf_tools.audit(path, base("deepseek2"))) == []
    assert alarms(gguf_tools.audit(path, made("deepseek2", "F32"))) == []
    assert alarms(gguf_tools.audit(made("deepseek2", file_type), path)) == [] or file_type != "F32"


@pytest.mark.slow
def test_what_a_changed_layout_has_encoded_twice_is_a_warning(base: Base, made: Make, tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    change_layout(made("deepseek2", "Q4_K_M"), path, "none")
    report = gguf_tools.audit(path, base("deepseek2"))
    assert not report.is_wrong
    assert [each.where for each in report.at(Level.WARNING)] == [
        f"blk.{layer}.attn_kv_b.weight" for layer in range(3)
    ]


def test_pruned_layers_are_a_warning(base: Base, made: Make, tmp_path: Path) -> None:
    path = tmp_path / "pruned.gguf"
    quantize.quantize(made("llama", "F32"), path, "Q4_K_M", types=PlanOptions(prune_layers=(2, 3)))
    (alarm,) = alarms(gguf_tools.audit(path, base("llama")))
    assert alarm == ": layers 2-3 of the base left out (pruned, or for multi-token prediction)"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_split_repacked_and_chosen_types(family: str, base: Base, made: Make, tmp_path: Path) -> None:
    done = convert.convert(base(family), tmp_path / "part.gguf", outtype="Q4_K_M", split_max_tensors=10)
    assert len(done.paths) > 2
    assert alarms(gguf_tools.audit(done.paths[0], base(family))) == []
    repack(made(family, "Q4_K_M"), tmp_path / "r4.gguf")
    assert alarms(gguf_tools.audit(tmp_path / "r4.gguf", base(family))) == []
    options = PlanOptions(leave_output=True, embedding_type=by_name("Q5_1"))
    quantize.quantize(made(family, "F32"), tmp_path / "own.gguf", "Q5_K_S", types=options)
    assert alarms(gguf_tools.audit(tmp_path / "own.gguf", base(family))) == []


@pytest.mark.parametrize("name", ["hy-v3", "mimo-v2-flash", "qwen3-next"])
def test_mtp_layers_that_are_left_out_on_purpose_are_no_fault(name: str, tmp_path: Path) -> None:
    """Their number has another name in each of these config.json."""
    folder = write(name, tmp_path / "model")
    path = convert.convert(folder, tmp_path / "file.gguf", "f32", mtp=False).paths[0]
    assert alarms(gguf_tools.audit(path, folder)) == []


@pytest.mark.slow
def test_calibrations_of_a_random_model_lean(calibration: Path, tmp_path: Path) -> None:
    """What makes up for the large errors of earlier tensors shrinks weights, in finer types as well."""
    folder, path = write("mistral", tmp_path / "model"), tmp_path / "file.gguf"
    gguf_tools.calibrate(folder, path, "Q3_K_S", calibration, chunk_size=64, n_chunks=24)
    assert alarms(gguf_tools.audit(path, folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("share", "level"), [(0.0, Level.BAD), (1.0, Level.WARNING)])
def test_a_row_that_a_calibration_may_have_given_up_is_no_error(
    share: float, level: Level, base: Base, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real models have such rows, one of 576; in small ones no share is so small."""
    monkeypatch.setattr(diagnose, "SACRIFICED", share)
    name = "blk.1.ffn_down.weight"
    path = Path(shutil.copy(made("llama", "calibrated Q2_K"), tmp_path / "file.gguf"))
    with open_gguf(path) as file, open(path, "r+b") as out:
        row = file.read_rows(name, 3, 4).tobytes()
        out.seek(file.data_offset(name) + 3 * len(row))
        out.write(file.read_rows(name, 9, 10).tobytes())
    (found,) = (each for each in gguf_tools.audit(path, base("llama")).findings if name in each.about)
    assert found.level is level
    assert found.text.startswith("row 3: ")
    assert ("few tokens" in found.text) == (level is Level.WARNING)


@pytest.mark.parametrize(("is_shrunk", "level"), [(True, Level.WARNING), (False, Level.BAD)])
def test_what_a_calibration_shrinks_is_no_other_revision(
    is_shrunk: bool, level: Level, base: Base, made: Make, tmp_path: Path
) -> None:
    """Where inputs are mostly errors of earlier tensors, the best weights are shrunk in most directions."""
    name, rng = "blk.1.ffn_down.weight", np.random.default_rng(0)
    path = tmp_path / "file.gguf"
    method = [gguf_tools.edit.parse_assignment(f"{METHOD_KEY}=str:calibrated")]
    edit = gguf_tools.edit.edit_model
    edit(made("llama", "Q8_0"), lambda keys, _: gguf_tools.edit.set_values(keys, method), output=path)
    with open_gguf(path) as file, open(path, "r+b") as out:
        rows = read_rows(GGUFTensor(file, name), np.arange(file.tensor(name).n_rows))
        directions = np.linalg.qr(rng.standard_normal((rows.shape[1], rows.shape[1] // 8)))[0]
        noise = rows.std() * rng.standard_normal(rows.shape)
        other = rows - 0.9 * rows @ directions @ directions.T if is_shrunk else rows + 0.35 * noise
        out.seek(file.data_offset(name))
        encoded = as_encoded(file.tensor(name).type, other.astype(np.float32))
        assert encoded is not None
        out.write(encoded[0].tobytes())
    (found,) = (each for each in gguf_tools.audit(path, base("llama")).findings if name in each.about)
    assert found.level is level
    assert ("makes up for" in found.text) == is_shrunk
