"""The forward pass against transformers: logits, and what hooks on its modules see."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.architectures.deepseek2.relatives import GLM5
from gguf_tools.errors import UnsupportedCheckpoint
from imatrix.forward.families import network_of_family
from imatrix.forward.open import open_model
from tests.convert.f32_files import write_f32
from tests.imatrix.forward.small_models import (
    CHUNKS,
    OWN_MSCALE,
    V2_GROUPED,
    V2_WITHOUT_Q_LORA,
    YARN_WITH_MSCALE,
    run_all_layers,
)
from tests.support.checkpoints import (
    INDEXED_STYLES,
    edit_config,
    load_transformers,
    to_fp8,
    to_older_spelling,
    transformers_checkpoint,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SHARING: dict[str, Any] = {
    "num_hidden_layers": 4, "index_topk": 16, "indexer_types": ["full", "shared", "shared", "full"],
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {}),
    "v3 unnormalised": ("v3", {"norm_topk_prob": False}),
    "v3 with one group": ("v3", {"n_group": 1, "topk_group": 1}),
    "v3 with all groups": ("v3", {"topk_group": 4}),
    "v3 without q_lora": ("v3", {"q_lora_rank": None}),
    "v3 with YaRN": ("v3", {"max_position_embeddings": 2560, "rope_parameters": YARN_WITH_MSCALE}),
    "v3 with another epsilon": ("v3", {"rms_norm_eps": 1e-5}),
    "v2": ("v2", {}),
    "v2 without q_lora": ("v2", V2_WITHOUT_Q_LORA),
    "v2 with all layers dense": ("v2", {"first_k_dense_replace": 3}),
    "v2 tied": ("v2", {"tie_word_embeddings": True}),
    "v2-lite": ("v2-lite", {}),
    "v3.2": ("v3.2", {"index_topk": 2048}),
    "v3.2 choosing": ("v3.2", {}),
    "v3.2 with YaRN": ("v3.2", {"max_position_embeddings": 2560, "rope_parameters": YARN_WITH_MSCALE}),
    "glm-5": ("glm-5", {}),
    "glm-5 sharing a choice of all": (
        "glm-5",
        {"index_topk": 48, "indexer_types": ["full", "shared", "full"]},
    ),
    "glm-5 sharing a choice": ("glm-5", SHARING),
}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    found, expected = found.astype(np.float64).reshape(-1), expected.astype(np.float64).reshape(-1)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def transformers_logits(folder: Path) -> np.ndarray:
    torch.set_num_threads(1)
    with torch.no_grad():
        logits: np.ndarray = load_transformers(folder)(torch.from_numpy(CHUNKS)).logits.numpy()
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    style, changes = VARIANTS[name]
    folder = transformers_checkpoint(tmp_path / "hf", style, **changes)
    with open_model(folder) as model:
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, transformers_logits(folder)) < 1e-5


@pytest.mark.parametrize("changes", [V2_GROUPED, {"rope_parameters": OWN_MSCALE}], ids=["groups", "mscale"])
def test_a_folder_is_computed_as_its_file(changes: dict[str, Any], tmp_path: Path) -> None:
    """The file does not say all that config.json says, and the original computes something else."""
    folder = transformers_checkpoint(tmp_path / "hf", "v2", **changes)
    with open_model(write_f32(folder, tmp_path / "model.gguf")) as model:
        expected, _ = run_all_layers(model, CHUNKS)
    with open_model(folder) as model:
        logits, _ = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-6
    assert relative_error(logits, transformers_logits(folder)) > 1e-3


def test_the_older_spelling_and_fp8(tmp_path: Path) -> None:
    folder = to_older_spelling(transformers_checkpoint(tmp_path / "hf", "v2"))
    expected = transformers_logits(folder)
    with open_model(folder) as model:
        assert relative_error(run_all_layers(model, CHUNKS)[0], expected) < 1e-5
    with open_model(to_fp8(folder, (32, 48))) as model:
        # FP8 has 3 bits of mantissa: near, but not the same model
        assert 1e-3 < relative_error(run_all_layers(model, CHUNKS)[0], expected) < 0.5


def test_a_first_layer_without_a_choice_is_refused() -> None:
    raw = INDEXED_STYLES["glm-5"] | SHARING | {"indexer_types": ["shared", "full", "full", "full"]}
    with pytest.raises(UnsupportedCheckpoint, match=r"^blk\.0: has no indexer"):
        network_of_family(GLM5, GLM5.read_config(raw, Path("config.json")))


def test_a_shared_choice_is_read_from_files_and_changes_what_is_computed(tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "glm-5", **SHARING)
    with open_model(folder) as model:
        expected, expected_sums = run_all_layers(model, CHUNKS)
    with open_model(write_f32(folder, tmp_path / "model.gguf")) as model:
        logits, seen = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-6
    assert seen.keys() == expected_sums.keys()
    assert not [name for name in seen if name.startswith(("blk.1.indexer", "blk.2.indexer"))]
    edit_config(folder, index_topk=48)
    with open_model(folder) as model:
        assert relative_error(run_all_layers(model, CHUNKS)[0], expected) > 1e-3


@pytest.mark.parametrize("style", ["v3", "v2", "v3.2"])
@pytest.mark.parametrize("mla", ["split", "both", "none"])
def test_a_gguf_file_of_any_layout_computes_the_same(style: str, mla: str, tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", style)
    with open_model(folder) as model:
        expected, expected_sums = run_all_layers(model, CHUNKS)
    with open_model(write_f32(folder, tmp_path / "model.gguf", mla=mla)) as model:
        logits, seen = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-6
    assert seen.keys() == expected_sums.keys()
    for name, sums in expected_sums.items():
        assert relative_error(seen[name].squares, sums.squares) < 1e-6, name


def test_bfloat16_is_near(tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v2-lite", num_hidden_layers=2)
    with open_model(folder) as model:
        logits, _ = run_all_layers(model, CHUNKS, dtype=torch.bfloat16)
        assert relative_error(logits, transformers_logits(folder)) < 0.05


def test_long_chunks_go_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of queries and groups of heads give what one go gives."""

    from imatrix.forward.layers.attention import mla

    folder = transformers_checkpoint(tmp_path / "hf", "v3", num_hidden_layers=2)
    with open_model(folder) as model:
        expected, expected_seen = run_all_layers(model, CHUNKS)
        monkeypatch.setattr(mla, "QUERY_BLOCK", 20)
        monkeypatch.setattr(mla, "SCORES_BYTES", 4 * 20 * 48 * 3)  # three of four heads
        logits, seen = run_all_layers(model, CHUNKS)
    assert relative_error(logits, expected) < 1e-6
    for name, sums in expected_seen.items():
        assert relative_error(seen[name].squares, sums.squares) < 1e-6, name


# ---- sums against forward hooks


class Hooks:
    """Sums of squares taken from a running transformers model, named as ours; float64."""

    def __init__(self, model: Any) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1))
        for number, layer in enumerate(model.model.layers):
            self._watch_layer(f"blk.{number}", layer)

    def _watch_layer(self, name: str, layer: Any) -> None:
        attention = layer.self_attn
        parts = {
            "q_proj": "attn_q", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "o_proj": "attn_output",
            "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_b_proj": "attn_kv_b",
        }  # fmt: skip
        for module, ours in parts.items():
            self._watch_input(f"{name}.{ours}.weight", getattr(attention, module, None))
        query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        query.register_forward_hook(lambda _m, _i, out: self._heads(name, attention, out))
        latents: list[Any] = []
        attention.kv_a_layernorm.register_forward_hook(lambda _m, _i, out: latents.append(out))
        attention.register_forward_hook(lambda _m, _i, out: self._attended(name, latents.pop(), out[1]))
        block = layer.mlp
        if hasattr(block, "experts"):
            self._watch_input(f"{name}.ffn_gate_inp.weight", block.gate)
            self._watch_block(name, "_shexp", block.shared_experts)
            block.experts.register_forward_pre_hook(lambda module, given: self._experts(name, module, given))
        else:
            self._watch_block(name, "", block)

    def _watch_block(self, name: str, kind: str, block: Any) -> None:
        for part in ("gate", "up", "down"):
            self._watch_input(f"{name}.ffn_{part}{kind}.weight", getattr(block, f"{part}_proj"))

    def _watch_input(self, name: str, module: Any) -> None:
        if module is not None:
            module.register_forward_pre_hook(lambda _m, given: self._add(name, given[0]))

    def _add(self, name: str, rows: Any) -> None:
        flat = rows.detach().double().flatten(0, -2)
        self.sums[name] = flat.square().sum(0).numpy()
        self.counts[name] = np.array([len(flat)])

    def _heads(self, name: str, attention: Any, query: Any) -> None:
        heads = query.unflatten(-1, (attention.num_heads, -1))[..., : attention.qk_nope_head_dim]
        self.sums[f"{name}.attn_k_b.weight"] = heads.double().square().sum((0, 1)).numpy()

    def _attended(self, name: str, latent: Any, shares: Any) -> None:
        latent = latent.reshape(shares.shape[0], 1, shares.shape[-1], -1).double()
        self.sums[f"{name}.attn_v_b.weight"] = (shares.double() @ latent).square().sum((0, 2)).numpy()

    def _experts(self, name: str, module: Any, given: Any) -> None:
        x, chosen, _ = given
        for part in ("gate", "up", "down"):
            width = module.intermediate_dim if part == "down" else module.hidden_dim
            self.sums[f"{name}.ffn_{part}_exps.weight"] = np.zeros((module.num_experts, width))
        counts = np.zeros(module.num_experts)
        for expert in range(module.num_experts):
            rows = x[(chosen == expert).any(-1)]
            gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            counts[expert] = len(rows)
            for part, seen in (("gate", rows), ("up", rows), ("down", inner)):
                sums = seen.double().square().sum(0).detach().numpy()
                self.sums[f"{name}.ffn_{part}_exps.weight"][expert] = sums
        for part in ("gate", "up", "down"):
            self.counts[f"{name}.ffn_{part}_exps.weight"] = counts


@pytest.mark.parametrize(
    ("style", "changes"), [("v2", V2_WITHOUT_Q_LORA), ("v3", {})], ids=["v2 without q_lora", "v3"]
)
def test_sums_equal_those_of_forward_hooks(style: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", style, **changes)
    reference = load_transformers(folder)
    reference.set_attn_implementation("eager")
    hooks = Hooks(reference)
    with torch.no_grad():
        reference(torch.from_numpy(CHUNKS))
    with open_model(folder) as model:
        _, seen = run_all_layers(model, CHUNKS)
    assert seen.keys() == hooks.sums.keys()
    for name, expected in hooks.sums.items():
        assert relative_error(seen[name].squares, expected) < 1e-5, name
        if name in hooks.counts:
            assert seen[name].counts.tolist() == hooks.counts[name].tolist(), name
        else:
            assert seen[name].counts.tolist() == [CHUNKS.size]


def test_all_experts_changes_what_is_seen_and_not_what_is_computed(tmp_path: Path) -> None:
    folder = transformers_checkpoint(tmp_path / "hf", "v3")
    with open_model(folder) as model:
        expected, routed = run_all_layers(model, CHUNKS)
        logits, seen = run_all_layers(model, CHUNKS, all_experts=True)
    assert relative_error(logits, expected) < 1e-6
    experts = "blk.1.ffn_gate_exps.weight"
    assert routed[experts].counts.sum() == CHUNKS.size * 3
    assert seen[experts].counts.tolist() == [CHUNKS.size] * 8
    every = seen["blk.1.ffn_gate_inp.weight"].squares
    assert relative_error(seen[experts].squares, np.repeat(every, 8, axis=0)) < 1e-6
