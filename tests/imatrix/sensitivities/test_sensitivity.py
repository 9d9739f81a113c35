"""The damage of a tensor at a type: against gradients of the whole model, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import convert
import gguf_tools
from gguf_tools.commands.sensitivity import main
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.format.shards import open_gguf
from quantize import quantize
from quantize.formats import get_format
from quantize.importances.weighting import ColumnWeights
from quantize.plan.sensitivities import read_sensitivities
from tests.convert.architectures.deepseek2.test_logits import write_f32
from tests.imatrix.forward.small_models import CHUNKS
from tests.support.checkpoints import load_transformers, transformers_checkpoint
from tests.support.decoder_models import decoder_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.forward.work_folder import EMBEDDING  # noqa: E402
from imatrix.sensitivities import run  # noqa: E402
from imatrix.sensitivities.type_errors import spread  # noqa: E402
from imatrix.texts.mixture import mixture_sha256  # noqa: E402
from imatrix.texts.tokens import Cut, Text  # noqa: E402

TYPES = ("Q4_0", "IQ4_NL", "Q8_0")
EVERYTHING = gguf_tools.SensitivityOptions(types=TYPES, rows=10**6, tokens=10**6, cut=Cut(CHUNKS.shape[1]))


@pytest.fixture
def random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every text be the same random tokens: the models have no tokenizer."""

    monkeypatch.setattr(run, "read_text", lambda path, *_: Text(CHUNKS, CHUNKS, sha256=mixture_sha256(path)))
    monkeypatch.setattr(
        "convert.tokenizer.tokenizer.read_tokenizer",
        lambda *_, **__: SimpleNamespace(metadata=dict, notes=()),
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("random tokens")
    return path


def stock_errors(weights: np.ndarray, type_: str, mean_squares: np.ndarray | None) -> np.ndarray:
    codec = get_format(type_)
    weighting = None if mean_squares is None else ColumnWeights(mean_squares.astype(np.float32))
    return weights - codec.decode(codec.encode(weights, weighting), weights.shape[1])


def by_chunk(folder: Path, labels: np.ndarray) -> list[Any]:
    """Return the whole model for every chunk, with the gradients of the chunk's loss."""
    models = []
    for tokens, theirs in zip(CHUNKS, labels.reshape(CHUNKS.shape), strict=True):
        model: Any = load_transformers(folder).requires_grad_()
        logits = model(torch.from_numpy(tokens[None])).logits[0]
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(theirs), reduction="sum").backward()
        models.append(model)
    return models


def drawn_labels(folder: Path, output: Path) -> dict[str, np.ndarray]:
    """Return the labels that a measurement draws; they depend on model, text and seed."""
    from imatrix.calibrate.statistics.gradients import GradientOptions, collect_gradients
    from imatrix.forward.open import open_model

    with (
        open_model(folder) as source,
        collect_gradients(source, Text(CHUNKS, CHUNKS), output, GradientOptions()) as found,
    ):
        return dict(found.folder.arrays(EMBEDDING))


@pytest.mark.usefixtures("random_tokens")
@pytest.mark.parametrize("style", ["v3", "v2"])
def test_damages_are_those_of_the_whole_models_gradients(style: str, tmp_path: Path, text: Path) -> None:
    torch.set_num_threads(1)
    folder = transformers_checkpoint(tmp_path / "hf", style, num_hidden_layers=2, q_lora_rank=64)
    gguf = write_f32(folder, tmp_path / "model.gguf", mla="both")
    losses = gguf_tools.sensitivity(gguf, text, tmp_path / "losses.json", EVERYTHING)
    assert not list(tmp_path.glob("losses.json.*"))
    assert read_sensitivities(tmp_path / "losses.json") == losses
    before = (tmp_path / "losses.json").stat().st_mtime_ns
    assert gguf_tools.sensitivity(gguf, text, tmp_path / "losses.json", EVERYTHING) == losses
    assert (tmp_path / "losses.json").stat().st_mtime_ns == before
    with pytest.raises(OutputError, match="exists already; force=True replaces it"):
        gguf_tools.sensitivity(gguf, text, tmp_path / "losses.json", EVERYTHING, seed=7)
    drawn = drawn_labels(folder, tmp_path / "gradients")
    models = by_chunk(folder, drawn["labels"])

    def expected(name: str, weights: np.ndarray, gradients: list[np.ndarray], type_: str) -> float:
        """Return the damage without regard to importances, which Q8_0 has none of."""
        n_cols = weights.shape[1]
        longer = np.pad(weights, ((0, 0), (0, -n_cols % 32)))
        errors = stock_errors(longer, type_, None)[:, :n_cols].astype(np.float64)
        moved = [np.einsum("rc,rc->r", errors, gradient) for gradient in gradients]
        return 0.5 * float(np.sum(np.square(moved))) / CHUNKS.size

    def check(name: str, part: Any) -> None:
        weights = part(models[0]).detach().float().numpy()
        gradients = [part(model, "grad").double().numpy() for model in models]
        found = {**losses.tensors[name].by_type, **losses.tensors[name].padded}["Q8_0"]
        assert found == pytest.approx(expected(name, weights, gradients, "Q8_0"), rel=1e-4), name

    def of(path: str) -> Any:
        def get(model: Any, what: str = "data") -> Any:
            return getattr(model.get_parameter(path), what)

        return get

    def stacked(path: str, rows: slice) -> Any:
        return lambda model, what="data": getattr(model.get_parameter(path), what)[:, rows].flatten(0, 1)

    layer = "model.layers.1"
    check("blk.1.attn_output.weight", of(f"{layer}.self_attn.o_proj.weight"))
    check("blk.1.attn_kv_b.weight", of(f"{layer}.self_attn.kv_b_proj.weight"))
    check("blk.0.attn_q_b.weight", of("model.layers.0.self_attn.q_b_proj.weight"))
    check("blk.0.ffn_down.weight", of("model.layers.0.mlp.down_proj.weight"))
    check("blk.1.ffn_up_shexp.weight", of(f"{layer}.mlp.shared_experts.up_proj.weight"))
    # rows of 48 columns fit no type's blocks, so ffn_down_exps has losses with padding alone
    assert not losses.tensors["blk.1.ffn_down_exps.weight"].by_type
    check("blk.1.ffn_down_exps.weight", stacked(f"{layer}.mlp.experts.down_proj", slice(None)))
    check("blk.1.ffn_gate_exps.weight", stacked(f"{layer}.mlp.experts.gate_up_proj", slice(0, 48)))
    check("blk.1.ffn_up_exps.weight", stacked(f"{layer}.mlp.experts.gate_up_proj", slice(48, 96)))
    with open_gguf(gguf) as file:
        for name, each in losses.tensors.items():
            assert each.shape == file.tensor(name).shape
            damage = {**each.by_type, **each.padded}
            assert set(damage) == set(TYPES)
            assert damage["Q8_0"] < damage["IQ4_NL"]
            assert damage["Q8_0"] < damage["Q4_0"]
    assert 0.7 < losses.tensors["output.weight"].by_type["Q4_0"] / _damage_of_output(models[0]) < 1.4


@pytest.mark.usefixtures("random_tokens")
@pytest.mark.parametrize(
    "name",
    ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4-experts", "gemma4-small"))],
)
def test_damages_of_a_gemma_are_those_of_the_whole_models_gradients(
    name: str, tmp_path: Path, text: Path
) -> None:
    """Their logits are bounded, and their embeddings scaled, and the output matrix, too."""
    torch.set_num_threads(1)
    decoder_model(name, tmp_path / "hf")
    losses = gguf_tools.sensitivity(tmp_path / "hf", text, tmp_path / "losses.json", EVERYTHING)
    models = by_chunk(tmp_path / "hf", drawn_labels(tmp_path / "hf", tmp_path / "gradients")["labels"])
    layer = "model.layers.5"
    paths = {"attn_q": f"{layer}.self_attn.q_proj.weight", "ffn_down": f"{layer}.mlp.down_proj.weight"}
    if name == "gemma4-small":
        paths |= {"inp_gate": f"{layer}.per_layer_input_gate.weight"}
    if name == "gemma4-experts":
        paths |= {"ffn_gate_up_exps": f"{layer}.experts.gate_up_proj"}
    for ours, path in paths.items():
        weights = models[0].get_parameter(path).detach().numpy()
        errors = stock_errors(weights.reshape(-1, weights.shape[-1]), "Q8_0", None).reshape(weights.shape)
        total = 0.0
        for model in models:
            moved = (errors * model.get_parameter(path).grad.double().numpy()).sum(-1)
            total += 0.5 * float(np.square(moved).sum()) / CHUNKS.size
        assert losses.tensors[f"blk.5.{ours}.weight"].by_type["Q8_0"] == pytest.approx(total, rel=1e-3), ours
    assert losses.tensors["token_embd.weight"].by_type["Q8_0"] > 0


def _damage_of_output(model: Any) -> float:
    """Return the damage of the output matrix as Q4_0, by all probabilities instead of one label."""
    weights = model.lm_head.weight.detach().numpy()
    errors = stock_errors(weights, "Q4_0", None)
    total = 0.0
    for tokens in CHUNKS:
        with torch.no_grad():
            states = model.model(torch.from_numpy(tokens[None])).last_hidden_state[0].numpy()
        logits = states @ weights.T
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        total += 0.5 * float((p * (1 - p) * (states @ errors.T) ** 2).sum())
    return total / CHUNKS.size


@pytest.mark.usefixtures("random_tokens")
def test_embeddings_count_all_places_of_a_token_together(tmp_path: Path, text: Path) -> None:
    torch.set_num_threads(1)
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=1)
    losses = gguf_tools.sensitivity(folder, text, tmp_path / "losses.json", EVERYTHING)
    models = by_chunk(folder, drawn_labels(folder, tmp_path / "gradients")["labels"])
    weights = models[0].model.embed_tokens.weight.detach().numpy()
    gradients = [model.model.embed_tokens.weight.grad.double().numpy() for model in models]
    errors = stock_errors(weights, "Q8_0", None)
    total = 0.5 * sum(np.square((errors * gradient).sum(-1)).sum() for gradient in gradients)
    assert losses.tensors["token_embd.weight"].by_type["Q8_0"] == pytest.approx(total / CHUNKS.size, rel=1e-4)


@pytest.mark.usefixtures("random_tokens")
def test_a_padded_file_has_the_losses_of_the_model(tmp_path: Path, text: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    plain = write_f32(folder, tmp_path / "model.gguf")
    padded = quantize(plain, tmp_path / "padded.gguf", "F32", pad="256").paths[0]
    types = replace(EVERYTHING, types=("Q2_K", "Q4_0", "IQ3_S", "Q8_0"))
    of_plain = gguf_tools.sensitivity(plain, text, tmp_path / "a.json", types)
    of_padded = gguf_tools.sensitivity(padded, text, tmp_path / "b.json", types)
    assert of_plain.tensors.keys() == of_padded.tensors.keys()
    down = of_plain.tensors["blk.1.ffn_down_exps.weight"]
    assert (down.shape, set(down.padded)) == ((8, 96, 48), {"Q2_K", "Q4_0", "IQ3_S", "Q8_0"})
    for name, each in of_plain.tensors.items():
        other = of_padded.tensors[name]
        assert other.shape == each.shape
        # Sums of other lengths are rounded otherwise, so importances are, and one code may be another.
        assert dict(other.by_type) == pytest.approx(dict(each.by_type), rel=1e-3), name
        assert dict(other.padded) == pytest.approx(dict(each.padded), rel=1e-3), name


@pytest.mark.usefixtures("random_tokens")
def test_rows_of_a_padded_hidden_size(tmp_path: Path, text: Path) -> None:
    """A file whose hidden size is padded has the losses of the model, norms that are scaled and all."""
    decoder_model("llama-biases", tmp_path / "hf")
    plain = convert.convert(tmp_path / "hf", tmp_path / "model.gguf", outtype="f32").paths[0]
    padded = quantize(plain, tmp_path / "padded.gguf", "F32", pad="256", pad_hidden=True).paths[0]
    types = replace(EVERYTHING, types=("Q3_K", "Q8_0"))
    inner = gguf_tools.sensitivity(plain, text, tmp_path / "inner.json", types)
    assert "Q3_K" not in inner.tensors["blk.0.attn_q.weight"].padded
    whole = gguf_tools.sensitivity(plain, text, tmp_path / "whole.json", types, pad_hidden=True)
    other = gguf_tools.sensitivity(padded, text, tmp_path / "padded.json", types, pad_hidden=True)
    assert read_sensitivities(tmp_path / "whole.json").text["pad_hidden"]
    for name, each in whole.tensors.items():
        assert each.padded["Q3_K"] == pytest.approx(other.tensors[name].padded["Q3_K"], rel=1e-3), name
        assert other.tensors[name].shape == each.shape


@pytest.mark.usefixtures("random_tokens")
def test_a_hidden_size_that_can_not_be_padded(tmp_path: Path, text: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    with pytest.raises(BadRequest, match="deepseek2; the hidden size can be padded for"):
        gguf_tools.sensitivity(folder, text, tmp_path / "v3.json", EVERYTHING, pad_hidden=True)


@pytest.mark.slow
@pytest.mark.usefixtures("random_tokens")
def test_a_folder_has_the_losses_of_its_conversion(tmp_path: Path, text: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    of_folder = gguf_tools.sensitivity(folder, text, tmp_path / "a.json", EVERYTHING)
    gguf = write_f32(folder, tmp_path / "model.gguf", mla="split")
    of_file = gguf_tools.sensitivity(gguf, text, tmp_path / "b.json", EVERYTHING)
    assert of_folder.tensors.keys() == of_file.tensors.keys()
    assert "blk.1.attn_k_b.weight" in of_folder.tensors
    for name, each in of_folder.tensors.items():
        assert dict(each.by_type) == pytest.approx(dict(of_file.tensors[name].by_type), rel=1e-3), name


def test_the_command_resumes_and_gives_the_same_file(
    tiny_folder: Path, text_of_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from imatrix.forward.gradients import backward

    words = [str(tiny_folder), "-f", str(text_of_tiny), "-c", "64", "--chunks", "3", "--rows", "16"]
    words += ["--types", "q4_k,q2_k,iq4_nl"]
    assert main([*words, "--threads", "1", "-o", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "tensors, of which" in out
    assert f"wrote {tmp_path / 'a.json'}" in out
    with monkeypatch.context() as patched:
        differentiate, calls = backward.differentiate_layer, []

        def interrupted(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 2:
                raise KeyboardInterrupt
            differentiate(*arguments)

        patched.setattr(backward, "differentiate_layer", interrupted)
        assert main([*words, "-o", str(tmp_path / "b.json")]) == 130
    assert not (tmp_path / "b.json").exists()
    assert main([*words, "--threads", "3", "-o", str(tmp_path / "b.json")]) == 0
    assert "resuming after" in capsys.readouterr().err
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()
    assert [path.name for path in tmp_path.glob("*.json*")] in (["a.json", "b.json"], ["b.json", "a.json"])
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["text"]["chunks"] == 3
    assert 0 < data["tensors"]["token_embd.weight"]["ratio"] < 0.7
    assert all(0 < each["ratio"] <= 1 for each in data["tensors"].values())
    assert "blk.1.attn_k_b.weight" in data["tensors"]
    assert list(data["tensors"]["blk.1.attn_k_b.weight"]["damage"]) == ["IQ4_NL"]  # rows of 128


def test_a_quiet_run(
    tiny_folder: Path, text_of_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_folder), "-f", str(text_of_tiny), "-c", "64", "--chunks", "1", "--rows", "16", "-q"]
    assert main([*words, "--types", "q2_k", "-o", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_folder_of_texts_is_one_text(
    tiny_folder: Path, text_of_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    words, content = [str(tiny_folder), "-f", str(tmp_path / "texts")], text_of_tiny.read_text()
    words += ["-c", "64", "--chunks", "2", "--rows", "16", "--types", "q2_k", "-o", str(tmp_path / "a.json")]
    for name, start in (("a", 0), ("b", 9000)):
        (tmp_path / "texts" / f"{name}.txt").write_text(content[start : start + 3000])
    assert main([*words, "-q"]) == 0
    said = json.loads((tmp_path / "a.json").read_text())["text"]
    assert (said["path"], said["chunks"]) == ("texts", 2)
    assert main(words) == 0
    assert "exists already, and is what you asked for" in capsys.readouterr().out


def test_bad_input_is_one_line(
    tiny_folder: Path, text_of_tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*words: str, code: int = 1) -> str:
        assert main([str(tiny_folder), "-f", str(text_of_tiny), *words]) == code
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    output = ("-o", str(tmp_path / "a.json"))
    assert "'Q9' is not a ggml type" in fails(*output, "--types", "Q4_K,Q9", code=2)
    assert "Q4_K_M is a mixture of types; Q4_K is" in fails(*output, "--types", "q4_k_m", code=2)
    assert "IQ1_BN: no codec for this type" in fails(*output, "--types", "IQ1_BN")
    assert "is a folder, expected a file to write" in fails("-o", str(tmp_path), "--force")
    assert "create it first" in fails("-o", str(tmp_path / "no" / "a.json"))
    assert "expected a chunk of 100000 or more" in fails("-o", str(tmp_path / "a.json"), "-c", "100000")
    assert not list(tmp_path.glob("a.json*"))


@pytest.fixture(scope="session")
def text_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.trained_model import calibration_text

    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_bytes(calibration_text()[:40000])
    return path


def test_rows_are_spread_evenly() -> None:
    assert spread(10, 4).tolist() == [1, 3, 6, 8]
    assert spread(3, 8).tolist() == [0, 1, 2]
    assert spread(4096, 512).tolist() == list(range(4, 4096, 8))
