"""Everything that looks at two files copes with one of them padded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gguf_tools
import imatrix
from convert.audit.pipeline import audit
from gguf_tools import open_gguf
from gguf_tools.commands.main import main
from gguf_tools.look.compare import compare
from imatrix.check import check, read_model
from quantize import quantize
from quantize.fill.sources import GGUFTensor
from quantize.padding import PadChoice
from tests.end_to_end import arch_models

pytest.importorskip("torch")
CASE = "kimi-k2"
"""With latent attention, dense blocks, routed and shared experts, of 128 and 32 inner columns."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import convert

    path = tmp_path_factory.mktemp("pairs") / "plain.gguf"
    return convert.convert(arch_models.model(CASE), path, outtype="f32").paths[0]


@pytest.fixture(scope="module")
def padded(plain: Path) -> Path:
    return quantize(plain, plain.with_name("padded.gguf"), "F32", pad="256").paths[0]


@pytest.fixture(scope="module")
def text(plain: Path) -> Path:
    path = plain.with_name("text.txt")
    path.write_text(" ".join(f"The {n} brown foxes jump over {n * n} lazy dogs." for n in range(120)))
    return path


def test_evaluate(plain: Path, padded: Path, text: Path) -> None:
    q8 = quantize(plain, plain.with_name("q8.gguf"), "Q8_0", pad="256").paths[0]
    for base in (plain, padded):
        found = gguf_tools.evaluate(base, text, [padded, q8, plain], chunk_size=64, n_chunks=2)
        same, coarse, original = found.models
        assert same.divergence.kld.mean.value < 1e-9
        assert original.divergence.kld.mean.value < 1e-9 < coarse.divergence.kld.mean.value
        assert same.bits_per_weight > original.bits_per_weight == 32


@pytest.fixture(scope="module")
def hidden_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same with its hidden size padded from 64 to 256."""
    import convert

    plain = tmp_path_factory.mktemp("hidden") / "plain.gguf"
    convert.convert(arch_models.model("llama-r1-distill"), plain, outtype="f32")
    made = quantize(plain, plain.with_name("padded.gguf"), "F32", pad="256", pad_hidden=True)
    return plain, made.paths[0]


def test_a_padded_hidden_size_is_evaluated(
    hidden_pair: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    plain, padded = hidden_pair
    for base in (plain, padded):
        for _ in range(2):  # computed, and from the states that were kept
            found = gguf_tools.evaluate(
                base, text, [padded, plain], chunk_size=64, n_chunks=2, keep=tmp_path / base.stem
            )
            for each in found.models:
                assert each.divergence.kld.mean.value < 1e-9
                assert max(layer.drift for layer in each.layers) < 1e-5


def test_a_padded_hidden_size_is_audited_and_listed(hidden_pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain, padded = hidden_pair
    coarse = quantize(plain, tmp_path / "c.gguf", "Q4_K_M", pad="256", pad_hidden=True).paths[0]
    for file, base in ((coarse, plain), (coarse, padded), (padded, plain)):
        report = audit(file, base)
        assert not report.is_wrong, [finding.text for finding in report.findings]
    again = quantize(padded, tmp_path / "again.gguf", "Q4_K_M", reuse=[coarse])
    assert again.written.reused[coarse] > 0
    assert again.paths[0].read_bytes() == coarse.read_bytes()


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q8_0"])
def test_audit(plain: Path, padded: Path, tmp_path: Path, file_type: str) -> None:
    longer = quantize(plain, tmp_path / "l.gguf", file_type, pad="256").paths[0]
    shorter = quantize(plain, tmp_path / "s.gguf", file_type).paths[0]
    for file, base in ((longer, plain), (longer, padded), (shorter, padded), (padded, plain)):
        report = audit(file, base)
        assert not report.is_wrong, [finding.text for finding in report.findings]
        assert len(report.tensors) > 40


def test_diff(plain: Path, padded: Path) -> None:
    with open_gguf(plain) as a, open_gguf(padded) as b:
        found = {each.name: each for each in compare(a, b) if each.section == "tensors"}
    longer = {name for name in found if "ffn" in name}
    assert longer
    assert all((found[name].b or "").endswith("the same with zeros behind it") for name in longer)


def test_reuse(plain: Path, padded: Path, tmp_path: Path) -> None:
    first = quantize(plain, tmp_path / "first.gguf", "Q3_K_M", pad="256").paths[0]
    for source, pad in ((plain, "256"), (padded, None)):
        again = quantize(source, tmp_path / f"again-{pad}.gguf", "Q3_K_M", pad=pad, reuse=[first])
        assert again.written.reused[first] == sum(not t.is_copied for t in again.preparation.plan.tensors)
        assert again.paths[0].read_bytes() == first.read_bytes()
    other = quantize(plain, tmp_path / "other.gguf", "Q3_K_M", reuse=[first])
    assert 0 < other.written.reused[first] < again.written.reused[first]


def test_verified_and_split(padded: Path, plain: Path, tmp_path: Path) -> None:
    result = quantize(plain, tmp_path / "v.gguf", "IQ3_S", pad="256", verify=True)
    assert result.written.verification is not None
    words = ["split", "--split-max-tensors", "20", str(padded), str(tmp_path / "parts")]
    assert main(words) == 0
    (first,) = tmp_path.glob("parts-00001-of-*.gguf")
    back = quantize(first, tmp_path / "back.gguf", "F32", pad="off", keep_split=True)
    assert len(back.paths) > 1
    whole = quantize(plain, tmp_path / "whole.gguf", "F32").paths[0]
    with open_gguf(back.paths[0]) as a, open_gguf(whole) as b:
        assert a.tensors.keys() == b.tensors.keys()
        for name in b.tensors:
            assert bytes(a.read_bytes(name, 0, 1 << 30)) == bytes(b.read_bytes(name, 0, 1 << 30))


def test_another_layout_of_attention(padded: Path, tmp_path: Path) -> None:
    both, back = tmp_path / "both.gguf", tmp_path / "back.gguf"
    assert main(["mla-layout", str(padded), str(both), "--to", "both"]) == 0
    assert main(["mla-layout", str(both), str(back), "--to", "split"]) == 0
    with open_gguf(back) as a, open_gguf(padded) as b:
        assert not [each for each in compare(a, b) if each.section == "tensors" and each.name != "order"]


def test_importances_of_either(plain: Path, padded: Path, text: Path, tmp_path: Path) -> None:
    made = {}
    for model in (plain, padded):
        path = tmp_path / f"{model.stem}.imatrix.gguf"
        imatrix.collect(model, text, path, chunk_size=64, n_chunks=4, any_text=True)
        made[model] = imatrix.load(path)
    down = "blk.1.ffn_down_exps.weight"
    short, long = (made[model].entries[down].read() for model in (plain, padded))
    assert (short.shape[1], long.shape[1]) == (32, 256)
    np.testing.assert_allclose(long[:, :32], short, rtol=1e-4, atol=1e-7)
    assert not long[:, 32:].any()
    for contents in made.values():
        for model in (plain, padded):
            bad = [finding for finding in check(contents, read_model(model), "IQ3_XXS") if finding.is_bad]
            assert not bad
            gaps = [finding.text for finding in check(contents, read_model(model)) if finding.kind == "gaps"]
            assert not any("224" in gap for gap in gaps)
    for pad in ("256", "off"):
        files = [
            quantize(plain, tmp_path / f"{model.stem}-{pad}.gguf", "Q4_0", importances=of, pad=pad)
            for model, of in made.items()
        ]
        types = [result.preparation.plan.infos for result in files]
        assert types[0] == types[1]


@pytest.mark.slow
def test_types_of_ik_llama(plain: Path, tmp_path: Path) -> None:
    from quantize.plan.decide import PlanOptions
    from quantize.plan.overrides import parse_custom_q

    options = PlanOptions(overrides=parse_custom_q("ffn_down_exps=iq3_k,ffn_.*_exps=iq4_ks"))
    made = quantize(plain, tmp_path / "ik.gguf", "IQ4_KS", types=options, pad="256")
    types = {info.name: info.type.name for info in made.preparation.plan.infos}
    assert (types["blk.1.ffn_down_exps.weight"], types["blk.0.ffn_down.weight"]) == ("IQ3_K", "IQ4_KS")


@pytest.mark.slow
@pytest.mark.parametrize("file_type", ["Q4_K_S", "IQ3_XXS"])
def test_calibrated_padding_carries_nothing(
    plain: Path, padded: Path, text: Path, tmp_path: Path, file_type: str
) -> None:
    from gguf_tools import Calibration
    from imatrix.texts.tokens import Cut

    def calibrated(source: Path, name: str, pad: PadChoice | None) -> Path:
        calibration = Calibration(text, cut=Cut(64, 4), any_text=True)
        return quantize(source, tmp_path / name, file_type, calibration=calibration, pad=pad).paths[0]

    one, two = calibrated(plain, "one.gguf", "256"), calibrated(padded, "two.gguf", None)
    with open_gguf(one) as a, open_gguf(two) as b, open_gguf(plain) as real:
        assert not [each for each in compare(a, b) if each.section == "tensors"]
        for name in a.tensors:
            if "ffn_gate" in name or "ffn_up" in name:
                tensor, n_real = GGUFTensor(a, name), real.tensors[name].shape[-2]
                n_rows = tensor.shape[-2]
                rows = tensor.read_rows(0, a.tensors[name].n_rows)
                assert not rows.reshape(-1, n_rows, tensor.shape[-1])[:, n_real:].any()
