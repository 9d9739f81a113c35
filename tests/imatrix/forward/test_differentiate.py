"""The differentiated pass against plain autograd through the whole model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from gguf_tools.errors import BadActivation
from imatrix.forward.open import ModelSource, open_model
from tests.convert.f32_files import write_f32
from tests.imatrix.forward.small_models import CHUNKS, V2_WITHOUT_Q_LORA, YARN_WITH_MSCALE
from tests.support.checkpoints import load_transformers, transformers_checkpoint

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from imatrix.forward.gradients.differentiate import BackwardStates, differentiate_layer  # noqa: E402
from imatrix.forward.hidden_states import MemoryStates  # noqa: E402
from imatrix.forward.observe import ObservesGradients, Silent  # noqa: E402
from imatrix.forward.run import embed  # noqa: E402
from imatrix.forward.sweep import Execution, LayerBuffers, Sweep, run_layer  # noqa: E402
from imatrix.texts.tokens import Text  # noqa: E402

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {}),
    "v3 unnormalised": ("v3", {"norm_topk_prob": False}),
    "v3 with YaRN": ("v3", {"max_position_embeddings": 2560, "rope_parameters": YARN_WITH_MSCALE}),
    "v2": ("v2", {}),
    "v2 without q_lora": ("v2", V2_WITHOUT_Q_LORA),
    "v2-lite": ("v2-lite", {}),
    "v3.2 choosing": ("v3.2", {}),
    "glm-5 sharing a choice": (
        "glm-5",
        {"num_hidden_layers": 4, "index_topk": 16, "indexer_types": ["full", "shared", "shared", "full"]},
    ),
}


class WeightGradients(Silent):
    """Adds up g x^T by block of rows: the gradient of the loss at the weights."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[int, Any]] = {}
        self.n_blocks: dict[str, int] = {}

    def tokens(self, numbers: Any) -> None:
        assert (numbers.diff() > 0).all()
        self.n_tokens = len(numbers)

    def gradient(self, name: str, first: int, n_blocks: int, x: Any, gradient: Any) -> None:
        assert not x.requires_grad
        assert 0 < len(x) <= self.n_tokens
        assert not gradient.requires_grad
        n_some = gradient.shape[1]
        products = torch.einsum("tbr,tbc->brc", gradient.double(), x.double().expand(-1, n_some, -1))
        for block, product in enumerate(products, first):
            self._add(name, n_blocks, block, product)

    def fresh(self) -> Self:
        return type(self)()

    def merge(self, other: Self) -> None:
        for name, blocks in other.blocks.items():
            for block, product in blocks.items():
                self._add(name, other.n_blocks[name], block, product)

    def of(self, name: str) -> np.ndarray:
        """Return the gradient at the whole tensor, its rows in one dimension."""
        blocks = self.blocks[name]
        empty = torch.zeros_like(next(iter(blocks.values())))
        whole = torch.cat([blocks.get(block, empty) for block in range(self.n_blocks[name])])
        return np.asarray(whole.numpy())

    def _add(self, name: str, n_blocks: int, block: int, product: Any) -> None:
        assert block < self.n_blocks.setdefault(name, n_blocks)
        blocks = self.blocks.setdefault(name, {})
        blocks[block] = blocks[block] + product if block in blocks else product


def directions(n_tokens: int, hidden: int) -> Any:
    """Return gradients at the last hidden states, different for every token."""
    return torch.from_numpy(np.random.default_rng(1).standard_normal((n_tokens, hidden)).astype(np.float32))


def differentiate(
    model: ModelSource,
    observer: Any,
    *,
    n_workers: int = 1,
    last: Any = None,
    chunks: np.ndarray = CHUNKS,
    behind_end: bool = False,
) -> np.ndarray:
    """Return the gradients at the embeddings, float32 (n_tokens, hidden_size).

    last        gradients at the last hidden states, those of all strands; None: `directions`
    behind_end  whether they are those at what the output matrix multiplies
    """
    torch.set_num_threads(1)
    network, n_tokens = model.network, chunks.size
    load = model.loader(torch.device("cpu"), torch.float32)
    text = Text(chunks, chunks).chunks
    rotate = network.rope.rotation(text.longest, load.device)
    shares: list[float] = []
    sweep = Sweep(
        build=lambda number: network.build(load, number, rotate), device=load.device, dtype=load.dtype,
        chunks=text, all_experts=False,
    )  # fmt: skip
    execution = Execution(n_workers, shares.append)

    def states(n_cols: int = network.state_size) -> MemoryStates:
        return MemoryStates(n_tokens, n_cols)

    def scratch() -> MemoryStates:
        return states(network.hidden_size)

    borders = [states() for _ in range(network.n_layers + 1)]
    embed(load, text, borders[0], network)
    for layer in range(network.n_layers):
        rows = LayerBuffers(borders[layer], scratch(), borders[layer + 1], states(network.latent_cols))
        run_layer(sweep, execution, layer, rows, Silent())
    above, below = states(), states()
    handed = torch.zeros((n_tokens, network.n_handed))
    own = directions(n_tokens, network.state_size - network.n_handed) if last is None else last
    if behind_end:
        hidden = borders[-1].read(0, n_tokens).requires_grad_()
        behind = network.load_end(load)(hidden)
        (whole,) = torch.autograd.grad(behind, hidden, directions(*behind.shape))
        above.write(0, whole)
    else:
        above.write(0, torch.cat((own, handed), 1))
    shares.clear()
    for layer in reversed(range(network.n_layers)):
        latent = states(network.latent_cols)
        backward = BackwardStates(borders[layer], above, below, scratch(), scratch(), latent)
        differentiate_layer(sweep, execution, layer, backward, observer)
        above, below = below, above
    assert sum(shares) == pytest.approx(network.n_layers)
    gradients: np.ndarray = network.at_embeddings(above.read(0, n_tokens)).numpy()
    return gradients


def expected_gradients(folder: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the gradients at the embeddings and at all weights, under GGUF names, rows in one dimension."""
    torch.set_num_threads(1)
    model: Any = load_transformers(folder).requires_grad_()
    model.set_attn_implementation("eager")
    kept: list[Any] = []
    model.model.layers[-1].register_forward_hook(
        lambda _m, _i, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    embeddings = model.model.embed_tokens(torch.from_numpy(CHUNKS)).detach().requires_grad_()
    model.model(inputs_embeds=embeddings)
    (last,) = kept
    last.backward(directions(CHUNKS.size, last.shape[-1]).view_as(last))
    weights: dict[str, np.ndarray] = {}
    for number, layer in enumerate(model.model.layers):
        for name, gradient in _of_layer(layer, model.config):
            weights[f"blk.{number}.{name}.weight"] = gradient.flatten(0, -2).double().numpy()
    return embeddings.grad.flatten(0, 1).numpy(), weights


def _of_layer(layer: Any, config: Any) -> Sequence[tuple[str, Any]]:
    attention, block = layer.self_attn, layer.mlp
    parts = {
        "q_proj": "attn_q", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "o_proj": "attn_output",
        "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_b_proj": "attn_kv_b",
    }  # fmt: skip
    modules = {ours: getattr(attention, part, None) for part, ours in parts.items()}
    of = [(ours, module.weight.grad) for ours, module in modules.items() if module is not None]
    heads = attention.kv_b_proj.weight.grad.unflatten(0, (attention.num_heads, -1))
    keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    of += [("attn_k_b", keys.transpose(1, 2)), ("attn_v_b", values)]
    if not hasattr(block, "experts"):
        return of + _of_block(block, "")
    gate, up = block.experts.gate_up_proj.grad.chunk(2, 1)
    of += [("ffn_gate_exps", gate), ("ffn_up_exps", up), ("ffn_down_exps", block.experts.down_proj.grad)]
    return of + _of_block(block.shared_experts, "_shexp")


def _of_block(block: Any, kind: str) -> list[tuple[str, Any]]:
    parts = ("gate", "up", "down")
    return [(f"ffn_{part}{kind}", getattr(block, f"{part}_proj").weight.grad) for part in parts]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    style, changes = VARIANTS[name]
    folder = transformers_checkpoint(tmp_path / "hf", style, **changes)
    at_embeddings, weights = expected_gradients(folder)
    observer = WeightGradients()
    assert isinstance(observer, ObservesGradients)
    with open_model(folder) as model:
        found = differentiate(model, observer)
    assert relative_error(found, at_embeddings) < 1e-5
    assert observer.blocks.keys() == weights.keys()
    for name, expected in weights.items():
        assert relative_error(observer.of(name), expected) < 1e-5, name


@pytest.mark.parametrize("style", ["v3", "v2"])
@pytest.mark.parametrize("mla", ["split", "both"])
def test_any_layout_has_the_same_gradients(style: str, mla: str, tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", style, num_hidden_layers=2)
    at_embeddings, weights = expected_gradients(folder)
    observer = WeightGradients()
    with open_model(write_f32(folder, tmp_path / "model.gguf", mla=mla)) as model:
        found = differentiate(model, observer)
    assert relative_error(found, at_embeddings) < 1e-5
    for name, expected in weights.items():
        assert relative_error(observer.of(name), expected) < 1e-5, name


def test_threads_change_no_bit(tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    with open_model(folder) as model:
        one, three = WeightGradients(), WeightGradients()
        np.testing.assert_array_equal(differentiate(model, one), differentiate(model, three, n_workers=3))
    assert one.blocks.keys() == three.blocks.keys()
    for name in one.blocks:
        np.testing.assert_array_equal(one.of(name), three.of(name), err_msg=name)


def test_queries_in_blocks_have_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from imatrix.forward.layers.attention import mla

    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    with open_model(folder) as model:
        whole, blocks = WeightGradients(), WeightGradients()
        expected = differentiate(model, whole)
        monkeypatch.setattr(mla, "QUERY_BLOCK", 20)
        assert relative_error(differentiate(model, blocks), expected) < 1e-5
    for name in whole.blocks:
        assert relative_error(blocks.of(name), whole.of(name)) < 1e-5, name


def test_infinity_names_the_layer(tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    with open_model(folder) as model:
        last = directions(CHUNKS.size, model.network.hidden_size)
        last[7, 3] = torch.inf
        with pytest.raises(
            BadActivation, match=r"blk\.1\.attn_norm\.weight: the gradients before it have NaN"
        ):
            differentiate(model, Silent(), last=last)
