"""Which experts a token goes to, and with which weight.

    greedy                the best experts by score
    group_limited_greedy  experts in groups; a group counts as its best expert, the best groups take part (V2)
    noaux_tc              a group counts as the sum of its two best, and a bias per expert is added to the
                          scores for choosing only (V3)

Scores are a softmax (V2) or sigmoids (V3) of the router's output, in float32. The weights of the chosen
experts are their scores without bias, normalised to a sum of one where the model says so, and scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from convert.config import DeepseekConfig
from forward.load import Loader

# What DeepSeek-V3 adds to the sum that it divides by.
_TINY = 1e-20


@dataclass(frozen=True)
class Router:
    """The router of one layer.

    weight  float32 (n_experts, hidden_size)
    bias    float32 (n_experts,), None where there is none
    """

    config: DeepseekConfig
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts, int64, and their weights, float32; both (n_tokens, n_chosen)."""
        config = self.config
        logits = linear(x.float(), self.weight)
        scores = torch.softmax(logits, -1) if config.scoring_func == "softmax" else torch.sigmoid(logits)
        choice = scores if self.bias is None else scores + self.bias
        chosen = torch.topk(self._within_groups(choice), config.num_experts_per_tok, -1, sorted=True).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return chosen, weights * config.routed_scaling_factor

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Return `choice` with -inf for the experts of groups that do not take part."""
        n_groups, n_used = self.config.expert_groups or (1, 1)
        if n_groups == n_used:
            return choice
        grouped = choice.unflatten(-1, (n_groups, -1))
        n_best = 2 if self.config.topk_method == "noaux_tc" else 1
        best = grouped.topk(n_best, -1).values.sum(-1).topk(n_used, -1).indices
        left_out = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=choice.device)
        left_out.scatter_(-1, best, False)
        return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)


def load_router(load: Loader, layer: int) -> Router:
    """Return the router of a layer with its weights."""
    config, name = load.model.config, f"blk.{layer}"
    n_experts = config.n_routed_experts
    bias = f"{name}.exp_probs_b.bias"
    return Router(
        config,
        load.float32(f"{name}.ffn_gate_inp.weight", n_experts, config.hidden_size),
        load.float32(bias, n_experts) if load.has(bias) else None,
    )
