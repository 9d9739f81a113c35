"""Covariances of gradients by plain autograd through the whole model of transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from imatrix.calibrate.statistics.gradients import LayerGradients
from tests.support.checkpoints import load_transformers


def names_of(layer: LayerGradients) -> list[str]:
    """Return the tensors that have covariances."""
    return [key.removeprefix("rows:") for key in layer.arrays if key.startswith("rows:")]


def whole_covariance(layer: LayerGradients, name: str, index: int | None = None) -> np.ndarray | None:
    """Return the covariance of `blocks` as one matrix, zero between the blocks; None where there is none."""
    blocks = layer.blocks(name, index)
    if not blocks:
        return None
    whole = np.zeros((blocks[-1].stop, blocks[-1].stop))
    for block in blocks:
        whole[block.start : block.stop, block.start : block.stop] = block.covariance
    return whole


class WholeModel:
    """A model of transformers whose products are hooked.

    covariances  sum of g g^T / |g| by our names: (n_rows, n_rows), or one for each head or expert
    embedding    the same at the embeddings, of the gradient at all places of a token in a chunk
    output       sum of g^2 at every logit, (vocab_size,)
    sizes        norm of each token's gradient at the hidden states after each layer, (n_tokens,)
    sizes_at     the same at each product of our names that all tokens go through
    tied_output  sum of |g|^2 x x^T, g at the logits of a token and x what the output matrix multiplies
    """

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self.covariances: dict[str, np.ndarray] = {}
        self.sizes: dict[int, np.ndarray] = {}
        self.sizes_at: dict[str, np.ndarray] = {}
        self.model: Any = load_transformers(folder).requires_grad_()
        self.model.set_attn_implementation("eager")
        self._latents: dict[Any, Any] = {}
        module = sys.modules[type(self.model).__module__]
        self._module, self._eager = module, module.eager_attention_forward
        for number, layer in enumerate(self.model.model.layers):
            self._watch_layer(f"blk.{number}", layer)
            layer.register_forward_hook(lambda _m, _i, out, number=number: self._watch_size(number, out))

    def differentiate(self, tokens: np.ndarray, labels: np.ndarray) -> float:
        """Differentiate the sum of -log p(label), and return it."""
        import torch

        embeddings = self.model.model.embed_tokens(torch.from_numpy(tokens)).detach().requires_grad_()
        self._module.eager_attention_forward = self._attend
        inputs: list[Any] = []
        watch = self.model.lm_head.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].detach()))
        try:
            logits = self.model(inputs_embeds=embeddings).logits
        finally:
            self._module.eager_attention_forward = self._eager
            watch.remove()
        logits.retain_grad()
        wanted = torch.from_numpy(labels).flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
        loss.backward()
        self.embedding = np.zeros((embeddings.shape[-1], embeddings.shape[-1]))
        for chunk, gradients in zip(tokens, embeddings.grad.double().numpy(), strict=True):
            for token in np.unique(chunk):
                at_token = gradients[chunk == token].sum(0)
                self.embedding += np.outer(at_token, at_token)
        self.output = logits.grad.flatten(0, 1).double().square().sum(0).numpy()
        x, squares = inputs[0].flatten(0, 1).double(), logits.grad.flatten(0, 1).double().square().sum(1)
        self.tied_output = ((x * squares[:, None]).T @ x).numpy()
        return float(loss.detach())

    def _watch_layer(self, name: str, layer: Any) -> None:
        attention, block = layer.self_attn, layer.mlp
        attention.name = name
        n_heads = attention.num_heads
        for part, ours in (
            ("q_a_proj", "attn_q_a"),
            ("kv_a_proj_with_mqa", "attn_kv_a_mqa"),
            ("o_proj", "attn_output"),
        ):
            self._watch_output(f"{name}.{ours}", getattr(attention, part, None))
        for part, ours in (("q_proj", "attn_q"), ("q_b_proj", "attn_q_b"), ("kv_b_proj", "attn_kv_b")):
            self._watch_output(f"{name}.{ours}", getattr(attention, part, None), n_heads)
        attention.kv_a_layernorm.register_forward_hook(
            lambda _m, _i, out: self._latents.__setitem__(attention, out.detach())
        )
        if hasattr(block, "experts"):
            self._watch_block(name, "_shexp", block.shared_experts)
            block.experts.forward = lambda x, chosen, weights: self._experts(
                name, block.experts, x, chosen, weights
            )
        else:
            self._watch_block(name, "", block)

    def _watch_block(self, name: str, kind: str, block: Any) -> None:
        for part in ("gate", "up", "down"):
            self._watch_output(f"{name}.ffn_{part}{kind}", getattr(block, f"{part}_proj"))

    def _watch_output(self, name: str, module: Any, n_heads: int = 1) -> None:
        if module is not None:
            module.register_forward_hook(
                lambda _m, _i, out: self._watch(name, out.flatten(0, -2).unflatten(-1, (n_heads, -1)), out)
            )

    def _watch_size(self, layer: int, out: Any) -> None:
        """Keep the norms of the gradients at the hidden states after a layer."""
        hidden = out[0] if isinstance(out, tuple) else out

        def at_hidden(gradient: Any) -> None:
            self.sizes[layer] = gradient.flatten(0, 1).double().norm(dim=1).numpy()

        hidden.register_hook(at_hidden)

    def _watch(self, name: str, product: Any, hooked: Any = None) -> None:
        """Keep the gradient at `product`, (n_tokens, n_blocks, n_rows), a view of what is hooked."""
        shape = product.shape
        hooked = product if hooked is None else hooked
        hooked.register_hook(lambda gradient: self._add(name, gradient.reshape(shape)))

    def _add(self, name: str, gradient: Any) -> None:
        gradient = gradient.detach().double().transpose(0, 1)
        self.sizes_at[f"{name}.weight"] = gradient.norm(dim=(0, 2)).numpy()
        sizes = gradient.norm(dim=2, keepdim=True).clamp_min(1e-30)
        added = (gradient.transpose(1, 2) @ (gradient / sizes)).numpy()
        self.covariances[f"{name}.weight"] = self.covariances.get(f"{name}.weight", 0) + added

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[Any, Any]:
        scores = query @ key.transpose(2, 3) * scaling
        latent = self._latents[module][:, None]

        def at_scores(gradient: Any) -> None:
            product = (gradient * scaling) @ latent
            self._add(f"{module.name}.attn_k_b", product.transpose(1, 2).flatten(0, 1))

        def at_values(gradient: Any) -> None:
            self._add(f"{module.name}.attn_v_b", gradient.transpose(1, 2).flatten(0, 1))

        scores.register_hook(at_scores)
        shares = (scores + mask[..., : key.shape[2]]).softmax(-1)
        attended = shares @ value
        attended.register_hook(at_values)
        return attended.transpose(1, 2).contiguous(), shares

    def _experts(self, name: str, module: Any, x: Any, chosen: Any, weights: Any) -> Any:
        import torch

        out = torch.zeros_like(x)
        for expert in range(module.num_experts):
            tokens, slots = torch.nonzero(chosen == expert, as_tuple=True)
            gate, up = (x[tokens] @ part.T for part in module.gate_up_proj[expert].chunk(2))
            down = (torch.nn.functional.silu(gate) * up) @ module.down_proj[expert].T
            for part, product in (("gate", gate), ("up", up), ("down", down)):
                self._watch_expert(f"{name}.ffn_{part}_exps", expert, module.num_experts, product)
            out = out.index_add(0, tokens, down * weights[tokens, slots, None])
        return out

    def _watch_expert(self, name: str, expert: int, n_experts: int, product: Any) -> None:
        def add(gradient: Any) -> None:
            rows = gradient.detach().double().numpy()
            by_size = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
            if name.endswith("down_exps"):
                sums = self.covariances.setdefault(
                    f"{name}.weight", np.zeros((1, rows.shape[1], rows.shape[1]))
                )
                sums[0] += rows.T @ by_size
            else:
                shape = n_experts, rows.shape[1], rows.shape[1]
                self.covariances.setdefault(f"{name}.weight", np.zeros(shape))[expert] += rows.T @ by_size

        product.register_hook(add)
