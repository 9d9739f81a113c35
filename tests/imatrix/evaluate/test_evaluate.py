"""Evaluating the trained small model: against transformers, against itself, damaged, and interrupted."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest

import convert
import gguf_tools
from gguf_tools.commands.evaluate import main
from gguf_tools.errors import BadActivation, BadRequest
from gguf_tools.format.shards import open_gguf
from gguf_tools.progress import NoReport
from imatrix.evaluate.divergence import TokenValues, measure
from quantize.fill.sources import GGUFTensor
from tests.imatrix.evaluate.token_values import token_values
from tests.imatrix.evaluate.trained_files import Damage, change_tensor
from tests.support.checkpoints import Tensors, edit_config, edit_tensors, load_transformers

torch = pytest.importorskip("torch")

from imatrix.evaluate.bases.base import compute_layer  # noqa: E402
from imatrix.evaluate.run import temporary_folder  # noqa: E402
from imatrix.forward import logits  # noqa: E402
from imatrix.forward.options import ForwardOptions  # noqa: E402
from imatrix.texts.mixture import read_text  # noqa: E402
from imatrix.texts.tokens import Cut  # noqa: E402

OPTIONS = gguf_tools.EvaluateOptions(cut=Cut(64, n_chunks=3), forward=ForwardOptions(n_threads=1))
Made = Callable[[str], Path]


def hugging_face_name(name: str, expert: int) -> str:
    """Return what a checkpoint calls the tensor `name` of a GGUF file, or one expert of it."""
    plain = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in plain:
        return plain[name]
    _, layer, part, kind = name.split(".")
    parts = {
        "attn_norm": "input_layernorm", "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate",
        "exp_probs_b": "mlp.gate.e_score_correction",
    }  # fmt: skip
    for matrix in ("gate", "up", "down"):
        parts[f"ffn_{matrix}"] = f"mlp.{matrix}_proj"
        parts[f"ffn_{matrix}_shexp"] = f"mlp.shared_experts.{matrix}_proj"
        parts[f"ffn_{matrix}_exps"] = f"mlp.experts.{expert}.{matrix}_proj"
    separator = "_" if part == "exp_probs_b" else "."
    return f"model.layers.{layer}.{parts[part]}{separator}{kind}"


def dequantized_folder(tiny_folder: Path, file: Path, folder: Path) -> Path:
    """Return a copy of the model's folder with the weights of a GGUF file, decoded by the gguf package."""
    shutil.copytree(tiny_folder, folder)

    def fill(tensors: Tensors) -> None:
        wanted = set(tensors)
        for tensor in gguf.GGUFReader(file).tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            stacked = "_exps." in tensor.name
            for expert, matrix in enumerate(values if stacked else values[None]):
                name = hugging_face_name(tensor.name, expert)
                tensors[name] = np.ascontiguousarray(matrix.reshape(tensors[name].shape), np.float32)
                wanted.discard(name)
        assert not wanted

    return edit_tensors(folder, fill)


def transformers_log_probs(folder: Path, inputs: np.ndarray) -> np.ndarray:
    """Return the log probabilities of all tokens of the second halves, float64."""
    model = load_transformers(folder)
    with torch.no_grad():
        found = torch.log_softmax(model(torch.from_numpy(inputs)).logits.double(), -1)
    half: np.ndarray = found[:, inputs.shape[1] // 2 : -1].numpy()
    return half


def twin(tiny_folder: Path, file: Path, tokens: np.ndarray, inputs: np.ndarray, folder: Path) -> TokenValues:
    """Return the values of all measured tokens from whole logits."""
    base = transformers_log_probs(tiny_folder, inputs)
    model = transformers_log_probs(dequantized_folder(tiny_folder, file, folder), inputs)
    targets = tokens[:, tokens.shape[1] // 2 + 1 :, None]
    return token_values(
        np.take_along_axis(base, targets, -1)[..., 0],
        np.take_along_axis(model, targets, -1)[..., 0],
        (np.exp(base) * (base - model)).sum(-1),
        base.argmax(-1) == model.argmax(-1),
        first=tokens.shape[1] // 2,
    )


@pytest.mark.parametrize("file_type", ["Q2_K", "IQ3_XXS", "Q4_K_M", "Q8_0"])
def test_measures_are_those_of_transformers(
    file_type: str, tiny_folder: Path, made: Made, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "SLICE_ROWS", 1000)  # several slices, of which the last is smaller
    evaluation = gguf_tools.evaluate(tiny_folder, text, [made(file_type)], OPTIONS)
    (found,) = evaluation.models
    chunks = read_text(text, _vocab(tiny_folder), 4096, OPTIONS.cut)
    tokens = twin(tiny_folder, made(file_type), chunks.tokens, chunks.inputs, tmp_path / "dequantized")
    expected = measure(tokens)
    # Hidden states in float32 move the divergence of a token by about 1e-8, here as in transformers.
    near = {"rel": 1e-4, "abs": 5e-8}
    assert evaluation.alone.base_ppl.value == pytest.approx(expected.base_ppl.value, **near)
    assert found.divergence.ppl.value == pytest.approx(expected.ppl.value, **near)
    assert found.divergence.kld.mean.value == pytest.approx(expected.kld.mean.value, **near)
    assert found.divergence.kld.mean.error == pytest.approx(expected.kld.mean.error, **near)
    for name in ("median", "p90", "p95", "p99", "p99_9", "max"):
        wanted = expected.kld.percentiles[name]
        assert found.divergence.kld.percentiles[name] == pytest.approx(wanted, **near), name
    assert found.divergence.rms_delta_p.value == pytest.approx(expected.rms_delta_p.value, **near)
    assert found.divergence.same_top == expected.same_top
    assert (found.tokens.same_top == tokens.same_top).all()


def _vocab(folder: Path) -> Any:
    from imatrix.forward.open import open_model

    with open_model(folder) as source:
        return source.vocab()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_model_does_not_diverge_from_itself(
    n_threads: int, dtype: Literal["float32", "bfloat16"], tiny_folder: Path, made: Made, text: Path
) -> None:
    options = replace(OPTIONS, forward=ForwardOptions(n_threads=n_threads, dtype=dtype))
    evaluation = gguf_tools.evaluate(tiny_folder, text, [made("F32"), tiny_folder], options)
    for model in evaluation.models:
        assert not model.tokens.kld.any()
        assert model.divergence.same_top.value == 1
        assert [layer.drift for layer in model.layers] == [0, 0, 0]
        assert [layer.routing_changed for layer in model.layers] == [None, 0, 0]
    assert repr(evaluation) == (
        "<Evaluation of tiny-deepseek-v3 on 93 tokens:"
        " F32.gguf: KLD 0.000000, tiny-deepseek-v3: KLD 0.000000>"
    )


def test_drift_shows_in_which_layer_a_tensor_is_damaged(made: Made, damaged: Damage, text: Path) -> None:
    path = damaged("blk.1.ffn_down_shexp.weight", lambda values: values.__imul__(-1))
    (found,) = gguf_tools.evaluate(made("F32"), text, [path], OPTIONS).models
    assert found.layers[0].drift == 0
    assert found.layers[1].drift > 0.1
    assert found.layers[1].routing_changed == 0  # the router comes before the experts
    assert found.layers[2].routing_changed
    assert found.divergence.kld.mean.value > 0
    assert found.worst_layer.layer == 1
    worst, second = found.worst_layer.tensors[:2]
    assert (worst.name, worst.error) == ("blk.1.ffn_down_shexp.weight", 2)
    assert second.error == 0


@pytest.mark.parametrize("name", ["blk.2.attn_k_b.weight", "blk.2.attn_v_b.weight", "output.weight"])
def test_a_damaged_tensor_is_named_in_another_layout(
    name: str, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "split.gguf"
    convert.convert(tiny_folder, path, outtype="f32")
    change_tensor(path, name, lambda values: values.__imul__(-1))
    (found,) = gguf_tools.evaluate(tiny_folder, text, [path], OPTIONS).models
    assert found.worst_layer.tensors[0].name == name
    assert found.worst_layer.tensors[0].error == pytest.approx(2)


def test_nan_is_found_with_model_layer_and_tensor(made: Made, damaged: Damage, text: Path) -> None:
    def spoil(values: np.ndarray) -> None:
        values[100] = np.nan

    path = damaged("blk.1.attn_output.weight", spoil)
    with pytest.raises(BadActivation, match=rf"{path}: blk\.1\.attn_output\.weight"):
        gguf_tools.evaluate(made("F32"), text, [path], OPTIONS)
    path = damaged("output.weight", spoil)
    with pytest.raises(BadActivation, match=rf"{path}: the logits have NaN"):
        gguf_tools.evaluate(made("F32"), text, [path], OPTIONS)


class Killed(Exception):
    pass


class KillAfter(NoReport):
    """A Reporter that ends the run after so many calls."""

    def __init__(self, n_calls: int) -> None:
        self.left, self.done = n_calls, -1

    def start(self, work: float, done: float) -> None:
        self.done = done

    def advance(self, amount: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed


@pytest.mark.parametrize("memory", [4 << 30, 0], ids=["memory", "files"])
def test_an_interrupted_run_resumes(memory: int, made: Made, text: Path, tmp_path: Path) -> None:
    quants = [made("Q2_K"), made("Q8_0")]
    expected = gguf_tools.evaluate(made("F32"), text, quants, OPTIONS).to_json()
    forward = replace(OPTIONS.forward, memory_bytes=memory)
    options = replace(OPTIONS, work=tmp_path / "work", forward=forward)
    resumed_after = []
    for n_calls in (4, 25, 1, 25, 25):
        killer = KillAfter(n_calls)
        with pytest.raises(Killed):
            gguf_tools.evaluate(made("F32"), text, quants, options, killer)
        resumed_after.append(killer.done)
    assert resumed_after == sorted(resumed_after)
    assert resumed_after[-1] > 0
    assert gguf_tools.evaluate(made("F32"), text, quants, options).to_json() == expected
    assert not (tmp_path / "work").exists()


def test_every_model_is_computed_by_all_threads(
    made: Made, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def note(model: Any, layer: int) -> Any:
        seen.append(model.n_workers)
        return compute_layer(model, layer)

    monkeypatch.setattr("imatrix.evaluate.bases.base.compute_layer", note)
    monkeypatch.setattr("imatrix.evaluate.bases.base.compute_layer", note)
    before = torch.get_num_threads()
    options = replace(OPTIONS, forward=ForwardOptions(n_threads=2))
    gguf_tools.evaluate(made("F32"), text, [made("Q2_K"), made("Q8_0")], options)
    assert seen == [2] * 9
    assert torch.get_num_threads() == before


def test_a_folder_with_other_files_keeps_them(made: Made, text: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], replace(OPTIONS, work=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_temporary_files_spare_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr("imatrix.evaluate.run._LASTING", tmp_path)
    assert temporary_folder() == tmp_path
    monkeypatch.setenv("TMPDIR", str(tmp_path / "mine"))
    assert temporary_folder() is None
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr("imatrix.evaluate.run._LASTING", tmp_path / "none")
    assert temporary_folder() is None


def shorter_folder(tiny_folder: Path, folder: Path) -> Path:
    """Return a copy of the model without its last layer."""
    shutil.copytree(tiny_folder, folder)
    edit_config(folder, num_hidden_layers=2)

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    return edit_tensors(folder, drop)


def test_a_file_with_fewer_layers_has_no_drift(
    tiny_folder: Path, made: Made, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = shorter_folder(tiny_folder, tmp_path / "shorter")
    result = tmp_path / "r.json"
    words = [str(made("F32")), "-f", str(text), "-c", "64", "--chunks", "3", str(shorter), str(made("Q8_0"))]
    assert main([*words, "--json", str(result), "--html", str(tmp_path / "page.html")]) == 0
    said = f"note: {shorter}: 2 layers, and {made('F32')} has 3: layers are not compared"
    assert said in capsys.readouterr().err
    pruned, like = json.loads(result.read_text())["models"]
    assert pruned["kld"]["mean"] > 10 * like["kld"]["mean"] > 0
    (alone,) = gguf_tools.evaluate(shorter, text, [shorter], OPTIONS).models
    assert pruned["ppl"] == pytest.approx(alone.divergence.ppl.value, rel=1e-5)
    assert pruned.get("layers") in (None, [])
    assert len(like["layers"]) == 3


def test_chunks_longer_than_trained_are_told_once(
    tiny_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    edit_config(folder, max_position_embeddings=48)
    for chunk_size, n_told in ((64, 1), (48, 0)):
        assert main([str(folder), "-f", str(text), "-c", str(chunk_size), "--chunks", "1", str(folder)]) == 0
        assert capsys.readouterr().err.count("and the model was trained with 48 at most") == n_told


def test_another_model_is_refused_before_anything_is_computed(made: Made, text: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed.gguf"
    content = made("F32").read_bytes()
    renamed.write_bytes(
        content.replace(b"\x05\0\0\0\0\0\0\0\xc4\xa0the", b"\x05\0\0\0\0\0\0\0\xc4\xa0tha", 1)
    )
    assert renamed.read_bytes() != content
    with pytest.raises(BadRequest, match=r"1 tokens differ: .* is of another model than"):
        gguf_tools.evaluate(made("F32"), text, [renamed], OPTIONS)
    with pytest.raises(BadRequest, match="quants: found none"):
        gguf_tools.evaluate(made("F32"), text, [], OPTIONS)


def test_a_text_that_is_no_use_is_refused(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("short")
    with pytest.raises(BadRequest, match="expected a chunk of 64 or more"):
        gguf_tools.evaluate(made("F32"), path, [made("F32")], OPTIONS)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadRequest, match="not UTF-8"):
        gguf_tools.evaluate(made("F32"), path, [made("F32")], OPTIONS)


def test_the_command_prints_a_table_and_writes_json(
    made: Made, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e.json"
    files = [str(made("F32")), "-f", str(text), str(made("Q8_0")), "--json", str(out)]
    assert main([*files, "-c", "64", "--chunks", "3", "--threads", "1"]) == 0
    found = json.loads(out.read_text())
    assert found == gguf_tools.evaluate(made("F32"), text, [made("Q8_0")], OPTIONS).to_json()
    assert found["text"].keys() == {"path", "sha256", "n_chunks", "chunk_size", "n_tokens_measured"}
    assert found["base"].keys() == {"path", "ppl", "ppl_error"}
    (model,) = found["models"]
    assert model["n_bytes"] == made("Q8_0").stat().st_size
    assert 8.5 < model["bits_per_weight"] < 9
    assert model.keys() >= {"path", "ppl", "ppl_error", "kld", "same_top", "rms_delta_p", "layers"}
    percentiles = {"median", "p90", "p95", "p99", "p99_9", "max"}
    assert model["kld"].keys() >= {"mean", "error", *percentiles}
    assert [layer["layer"] for layer in model["layers"]] == [0, 1, 2]
    printed = capsys.readouterr().out
    assert f"{text}: 3 chunks of 64 tokens, 93 measured" in printed
    assert f"{model['kld']['mean']:.6f} +/- {model['kld']['error']:.6f}" in printed
    assert not out.with_name("e.json.work").exists()


def test_the_command_does_not_overwrite_an_input(
    made: Made, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(made("F32")), str(made("F32")), "-f", str(text), "--json", str(text)]) == 1
    assert "is an input or another output of this command" in capsys.readouterr().err
    nowhere = text.parent / "none" / "e.json"
    assert main([str(made("F32")), str(made("F32")), "-f", str(text), "--json", str(nowhere)]) == 1
    assert f"{nowhere}: there is no folder" in capsys.readouterr().err


def test_equal_files_in_one_run_are_decoded_once(
    made: Made, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_rows, decoded = GGUFTensor.read_rows, Counter[str]()

    def count(tensor: GGUFTensor, start: int, stop: int) -> Any:
        if tensor.type.name != "F32":
            decoded[tensor.name] += stop - start
        return read_rows(tensor, start, stop)

    monkeypatch.setattr(GGUFTensor, "read_rows", count)
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(made("Q2_K"), copy)
    alone = gguf_tools.evaluate(made("F32"), text, [made("Q2_K")], OPTIONS).models[0]
    once = Counter(decoded)
    both = gguf_tools.evaluate(made("F32"), text, [made("Q2_K"), made("Q8_0"), copy], OPTIONS).models
    assert both[0].divergence == both[2].divergence == alone.divergence
    with open_gguf(made("Q2_K")) as file:
        same = {name for name, tensor in file.tensors.items() if tensor.type.name != "F32"}
    kept_apart = {"token_embd.weight", *(error.name for error in both[0].worst_layer.tensors)}
    assert same - kept_apart
    for name in same - kept_apart:
        # Q8_0 decodes its own, and Q2_K's rows serve the copy.
        assert decoded[name] - once[name] == 2 * once[name], name
