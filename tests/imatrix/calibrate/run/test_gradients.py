"""Gradients of predictions: against plain autograd, drawn labels, and whatever happens on the way."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gguf_tools.errors import BadActivation, BadRequest, OutputError
from gguf_tools.files.leftovers import forget
from gguf_tools.files.owned_folder import work_path
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.tensors import TensorInfo
from imatrix.forward.open import open_model
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Text
from tests.convert.architectures.deepseek2.test_logits import write_f32
from tests.imatrix.forward.small_models import CHUNKS, V2_WITHOUT_Q_LORA
from tests.support.checkpoints import edit_tensors, transformers_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.calibrate.statistics import gradients as collecting  # noqa: E402
from imatrix.calibrate.statistics.gradient_factors import GradientFactors  # noqa: E402
from imatrix.calibrate.statistics.gradients import (  # noqa: E402  # noqa: E402
    BLOCK_ROWS,
    Covariances,
    GradientOptions,
    collect_gradients,
    disk_bytes,
    row_pieces,
)
from imatrix.forward.gradients.backward import uniform  # noqa: E402
from imatrix.forward.work_folder import EMBEDDING  # noqa: E402
from tests.imatrix.calibrate.run.whole_model import WholeModel, names_of, whole_covariance  # noqa: E402

TEXT = Text(CHUNKS, CHUNKS)
OPTIONS = GradientOptions(ForwardOptions(device="cpu", n_threads=1))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


def collect(model: Path, output: Path, **options: Any) -> dict[str, np.ndarray]:
    """Return all that is collected, by a name of its own."""
    options.setdefault("forward", OPTIONS.forward)
    with (
        open_model(model) as source,
        collect_gradients(source, TEXT, output, replace(OPTIONS, **options)) as found,
    ):
        arrays: dict[str, np.ndarray] = {
            "embedding": found.embedding(),
            "labels": np.asarray(found.folder.arrays(EMBEDDING)["labels"]),
        }
        for number in range(found.n_layers):
            arrays |= {f"{number} {name}": value for name, value in found.layer(number).arrays.items()}
    return arrays


@pytest.mark.parametrize(
    ("style", "changes", "mla"),
    [
        ("v3", {}, "folder"),
        ("v2", {}, "folder"),
        ("v2", V2_WITHOUT_Q_LORA, "folder"),
        ("v3", {}, "split"),
        ("v2", {}, "both"),
        ("v3", {"num_hidden_layers": 1}, "none"),
        ("v2", {"num_hidden_layers": 1, "tie_word_embeddings": True}, "folder"),
    ],
)
def test_covariances_equal_those_of_plain_autograd(
    style: str, changes: dict[str, Any], mla: str, tmp_path: Path
) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", style, **changes)
    model = folder if mla == "folder" else write_f32(folder, tmp_path / "model.gguf", mla=mla)
    whole = WholeModel(folder)
    torch.set_num_threads(1)
    with open_model(model) as source, collect_gradients(source, TEXT, tmp_path / "out", OPTIONS) as found:
        drawn = found.folder.arrays(EMBEDDING)
        loss = whole.differentiate(CHUNKS, drawn["labels"].reshape(CHUNKS.shape))
        assert drawn["losses"].sum() == pytest.approx(loss, rel=1e-5)
        assert relative_error(found.embedding(), whole.embedding) < 1e-5
        tied = found.tied_output()
        assert (tied is not None) == changes.get("tie_word_embeddings", False)
        assert tied is None or relative_error(tied, whole.tied_output) < 1e-5
        assert drawn["squares"].sum() == pytest.approx(whole.output.sum(), rel=1e-5)
        layers = [found.layer(number) for number in range(source.network.n_layers)]
        assert {name for layer in layers for name in names_of(layer)} == whole.covariances.keys()
        for number, layer in enumerate(layers):
            assert relative_error(layer.sizes(), whole.sizes[number]) < 1e-5
            for name in names_of(layer):
                at_product = layer.sizes_at(name)
                assert (at_product is None) == ("_exps" in name)
                assert at_product is None or relative_error(at_product, whole.sizes_at[name]) < 1e-5, name
                expected = whole.covariances[name]
                for index, matrix in enumerate(expected):
                    mine = whole_covariance(layer, name, index)
                    assert mine is not None
                    mean_size = np.trace(matrix) / max(1, layer.n_tokens(name, index))
                    assert relative_error(mine, mean_size * matrix) < 1e-5, (name, index)
                assert [block.start for block in layer.blocks(name)] == [
                    index * expected.shape[1] for index in range(len(expected))
                ]
        tokens = CHUNKS.size
        if style == "v3" and len(layers) > 1:
            assert layers[1].n_tokens("blk.1.ffn_down_exps.weight", 5) == 3 * tokens
            by_expert = [layers[1].n_tokens("blk.1.ffn_up_exps.weight", expert) for expert in range(8)]
            assert sum(by_expert) == 3 * tokens
        assert layers[0].n_tokens("blk.0.attn_k_b.weight", 1) == tokens
        assert whole_covariance(layers[0], "blk.0.attn_norm.weight") is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_threads_and_where_states_are_kept_change_no_bit(model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = collect(model, tmp_path / "a")
    torch.set_num_threads(3)
    same(collect(model, tmp_path / "b"), expected)
    same(collect(model, tmp_path / "two", at_once=2), expected)
    torch.set_num_threads(1)
    in_files = ForwardOptions(device="cpu", n_threads=1, memory_bytes=0)
    same(collect(model, tmp_path / "c", forward=in_files), expected)


@pytest.mark.slow
def test_states_are_in_memory_while_they_are_needed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imatrix.forward.hidden_states import MemoryStates

    def n_alive() -> int:
        gc.collect()
        return sum(type(each) is MemoryStates for each in gc.get_objects())

    on_the_way_back: list[int] = []

    def observer(expert_bytes: int) -> Covariances:
        on_the_way_back.append(n_alive())
        return Covariances(expert_bytes)

    before = n_alive()
    monkeypatch.setattr(collecting, "Covariances", observer)
    with open_model(model) as source, collect_gradients(source, TEXT, tmp_path / "out", OPTIONS):
        # Gradients before and after a layer, and two of scratch. Hidden states are read from files by then.
        assert on_the_way_back == [before + 4] * 2
        assert n_alive() == before


def test_slices_of_the_vocabulary_change_no_label(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imatrix.forward import logits

    expected = collect(model, tmp_path / "a")
    monkeypatch.setattr(logits, "SLICE_ROWS", 100)
    found = collect(model, tmp_path / "b")
    np.testing.assert_array_equal(found["labels"], expected["labels"])
    assert relative_error(found["embedding"], expected["embedding"]) < 1e-5
    other = collect(model, tmp_path / "c", seed=1)
    assert 0.9 < (other["labels"] != expected["labels"]).mean() < 1


@pytest.mark.slow
def test_labels_are_drawn_as_the_model_predicts(model: Path, tmp_path: Path) -> None:
    """Drawn often enough, a token comes as often as the sum of its probabilities, within the noise."""
    from tests.imatrix.forward.small_models import run_all_layers

    with open_model(model) as source:
        logits, _ = run_all_layers(source, CHUNKS)
    p = np.exp(logits - logits.max(-1, keepdims=True)).reshape(CHUNKS.size, -1).astype(np.float64)
    p /= p.sum(-1, keepdims=True)
    n_seeds = 20
    counts = np.zeros(p.shape[1])
    for seed in range(n_seeds):
        counts += np.bincount(
            collect(model, tmp_path / f"{seed}", seed=seed)["labels"], minlength=len(counts)
        )
    expected, variance = n_seeds * p.sum(0), n_seeds * (p * (1 - p)).sum(0)
    z = (counts - expected) / np.sqrt(variance)
    assert abs(z).max() < 5
    assert 0.8 < z.std() < 1.2


def test_random_numbers_are_those_of_their_position() -> None:
    numbers = uniform(7, 10000)
    np.testing.assert_array_equal(uniform(7, 100), numbers[:100])
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0], 1000, atol=150)
    assert abs(np.corrcoef(numbers, uniform(8, 10000))[0, 1]) < 0.05


def test_large_experts_have_no_covariance_of_their_own(model: Path, tmp_path: Path) -> None:
    found = collect(model, tmp_path / "a", expert_bytes=1000)
    experts = {name.split(":")[1] for name in found if "_exps" in name}
    assert experts == {"blk.1.ffn_down_exps.weight"}


def test_many_rows_go_in_pieces() -> None:
    for n_rows in (1, 96, 2048, 2049, 7168, 10944, 18432):
        pieces = list(row_pieces(n_rows))
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
        assert pieces[-1][1] == n_rows
        assert max(stop - start for start, stop in pieces) <= BLOCK_ROWS
    gradient = torch.from_numpy(np.random.default_rng(2).standard_normal((5, 1, 4500)).astype(np.float32))
    whole = Covariances(0)
    part = whole.fresh()
    part.gradient("blk.0.ffn_gate.weight", 0, 1, gradient[:, :, :8], gradient)
    whole.merge(part)
    layer = collecting.LayerGradients(whole.arrays())
    blocks = layer.blocks("blk.0.ffn_gate.weight")
    assert [(block.start, block.stop) for block in blocks] == list(row_pieces(4500))
    for block in blocks:
        rows = gradient[:, 0, block.start : block.stop].double().numpy()
        sizes = np.linalg.norm(rows, axis=1)
        even = rows * np.sqrt(sizes.mean() / sizes)[:, None]
        np.testing.assert_allclose(block.covariance, even.T @ even, rtol=1e-5, atol=1e-5)
        assert block.fourth == pytest.approx((np.square(even).sum(axis=1) ** 2).sum())


@pytest.mark.parametrize("stop_after", ["forward", 0, 1, 2])
def test_an_interrupted_run_goes_on(
    stop_after: object, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = collect(model, tmp_path / "a")
    output = tmp_path / "b"
    with monkeypatch.context() as patched:
        _stop(patched, stop_after)
        with pytest.raises(KeyboardInterrupt):
            collect(model, output)
    assert (tmp_path / "b.work/backward.work").exists()
    same(collect(model, output), expected)
    with monkeypatch.context() as patched:
        _stop(patched, "forward")  # nothing is computed again
        same(collect(model, output), expected)
        with pytest.raises(BadRequest, match=r"begun with another seed \(0, now 1\); restart=True"):
            collect(model, output, seed=1)
    forget(work_path(output))
    assert not list(tmp_path.glob("b.*"))


def _stop(patched: pytest.MonkeyPatch, after: object) -> None:
    from imatrix.forward.gradients import backward

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    if after == "forward":
        patched.setattr(backward, "draw_labels", interrupted)
        return
    differentiate: Callable[..., None] = backward.differentiate_layer
    calls: Iterator[int] = iter(range(10))

    def some(*arguments: Any) -> None:
        if next(calls) == after:
            raise KeyboardInterrupt
        differentiate(*arguments)

    patched.setattr(backward, "differentiate_layer", some)
    patched.setattr(collecting, "embedding_arrays", interrupted)


def test_a_small_disk_is_refused_before_anything_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    with pytest.raises(
        OutputError, match=r"out\.work/backward\.work: hidden states and gradients need .* use fewer chunks"
    ):
        collect(model, tmp_path / "out")
    assert not list(tmp_path.glob("out.work/forward.work/hidden.*"))


def test_the_disk_that_is_needed_is_known(model: Path, tmp_path: Path) -> None:
    with open_model(model) as source:
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        promised = disk_bytes(source.network, shapes, TEXT.inputs.size, OPTIONS.expert_bytes)
    collect(model, tmp_path / "a", forward=ForwardOptions(device="cpu", n_threads=1, memory_bytes=0))
    taken = sum(path.stat().st_size for path in tmp_path.glob("a.work/*.work/*"))
    assert 0.5 * promised < taken < promised


def test_infinity_names_layer_and_tensor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imatrix.forward.gradients import backward

    draw = backward.draw_labels

    def infinite(head: Any, chunks: Any, seed: int, gradients: Any, n_workers: int) -> Any:
        drawn = draw(head, chunks, seed, gradients, n_workers)
        gradients.write(7, torch.full((1, gradients.n_cols), torch.inf))
        return drawn

    monkeypatch.setattr(backward, "draw_labels", infinite)
    expected = (
        r"blk\.1\.ffn_down_exps\.weight: the gradients at its product have NaN or infinity; the 0 layers"
    )
    with pytest.raises(BadActivation, match=expected):
        collect(model, tmp_path / "out")
    assert json.loads((tmp_path / "out.work/backward.work" / "run.json").read_text())["chunks"] == 3


def test_a_model_without_predictions_names_the_output(tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=1)

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * np.float32(np.nan)

    edit_tensors(folder, edit)
    with pytest.raises(BadActivation, match=r"output\.weight: the logits have NaN or infinity"):
        collect(folder, tmp_path / "out")


def test_another_device_gives_the_same(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that say they are elsewhere: see tests/imatrix/forward/pretended_device.py."""
    from tests.imatrix.forward.pretended_device import keep_to_one_thread, pretended

    expected = collect(model, tmp_path / "here")
    keep_to_one_thread(monkeypatch)
    with pretended() as device:
        found = collect(model, tmp_path / "there", forward=ForwardOptions(device=str(device)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5 * abs(value).max(), err_msg=name)


def test_heads_without_a_gradient_leave_the_others_theirs() -> None:
    gradient = torch.from_numpy(np.random.default_rng(3).standard_normal((40, 3, 16)).astype(np.float32))
    gradient[:, 2] = 0  # a head of padding
    whole = Covariances(0)
    part = whole.fresh()
    part.gradient("blk.0.attn_q.weight", 0, 3, gradient[:, :1, :8], gradient)
    whole.merge(part)
    layer = collecting.LayerGradients(whole.arrays())
    factors = GradientFactors(cast(Any, SimpleNamespace(layer=lambda number: layer)))
    factors.open("blk.0.attn_q.weight")
    blocks = factors.blocks(TensorInfo("blk.0.attn_q.weight", (48, 8), F32), 0, 48)
    assert [(block.start, block.stop) for block in blocks] == [(0, 16), (16, 32), (32, 48)]
    assert [bool(block.covariance.any()) for block in blocks] == [True, True, False]
