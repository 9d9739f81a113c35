"""Routed experts: which of them a token goes to, and with which weight.

Scores are a softmax of the router's output, sigmoids, or roots of softplus, in float32. The experts with the
highest scores are chosen; a model may add a bias per expert for choosing only. The weights of the chosen
experts are their scores without bias, normalised to a sum of one where the model does that, and scaled.

Where experts are in groups, only the experts of the best groups can be chosen. A group's score is the sum of
its best one (DeepSeek-V2) or two (V3). In the first layers of DeepSeek V4 a table says which experts a token
goes to; scores are their weights all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn.functional import linear, softplus

from imatrix.forward.layers.activations import USUAL, Gated, Ungated
from imatrix.forward.layers.ffn import BlockNames, FeedForward
from imatrix.forward.layers.latent_experts import LatentColumns
from imatrix.forward.layers.load import Loader

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]

_TINY = 1e-20
"""The number that DeepSeek-V3 adds to the sum that it divides by."""


@dataclass(frozen=True)
class Groups:
    """How experts are grouped.

    count   groups, all of the same size
    used    groups whose experts a token may choose
    n_best  experts of a group whose scores are added up as the group's
    """

    count: int
    used: int
    n_best: int


@dataclass(frozen=True)
class Routing:
    """How a model routes tokens.

    n_used     experts per token
    groups     None where every expert can be chosen
    normalise  make the weights of a token's experts add up to one
    scale      what the weights are multiplied by
    weighs_inputs  whether weights are multiplied by the inputs of experts, not by their outputs
    """

    n_used: int
    scoring: Scoring
    groups: Groups | None
    normalise: bool
    scale: float
    weighs_inputs: bool = False


@dataclass(frozen=True)
class Router:
    """The router of one layer.

    name    of its matrix
    weight  float32 (n_experts, hidden_size)
    bias    float32 (n_experts,): added to scores for choosing alone; None where there is none
    offset  float32 (n_experts,): added to what the matrix makes; None where there is none
    factors float32 (n_experts,): what each expert's weight is multiplied by; None where there is none
    table   int64 (vocab_size, n_used): the experts of each token of the vocabulary; None where scores choose
    """

    name: str
    routing: Routing
    weight: torch.Tensor
    bias: torch.Tensor | None
    offset: torch.Tensor | None = None
    table: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def chosen_by(self, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """Return the experts that the table has for tokens, (n_tokens, n_used); None where there is none."""
        if self.table is None:
            return None
        assert tokens is not None, f"{self.name}: goes by the ids of tokens"
        return self.table[tokens.to(self.table.device)]

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts, int64, and their weights, float32; both (n_tokens, n_used).

        chosen  experts that have been chosen before; None: choose them
        """
        routing = self.routing
        logits = linear(x.float(), self.weight, self.offset)
        scores = _scores(logits, routing.scoring)
        if chosen is None:
            choice = scores if self.bias is None else scores + self.bias
            if routing.groups is not None:
                choice = _within_groups(choice, routing.groups)
            chosen = torch.topk(choice, routing.n_used, -1, sorted=True).indices
        weights = scores.gather(-1, chosen)
        if routing.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        return chosen, weights * routing.scale


def _scores(logits: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    if scoring == "sqrtsoftplus":
        return softplus(logits).sqrt()
    return torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)


def _within_groups(choice: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return `choice` with -inf for the experts of groups that can't be chosen."""
    grouped = choice.unflatten(-1, (groups.count, -1))
    best = grouped.topk(groups.n_best, -1).values.sum(-1).topk(groups.used, -1).indices
    left_out = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=choice.device)
    left_out.scatter_(-1, best, False)
    return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer: their router, and stacks from which each expert is read.

    names    of the stacks, (n_experts, width, n_cols) and for down (n_experts, n_cols, width)
    n_cols   what an expert multiplies: hidden_size, or the columns of `latent`
    activation, ungated  see FeedForward
    latent   the way to the experts' columns and back; None: they work in those of hidden states
    """

    load: Loader
    router: Router
    names: BlockNames
    n_experts: int
    n_cols: int
    width: int
    activation: Gated = USUAL
    ungated: Ungated | None = None
    latent: LatentColumns | None = None

    @property
    def work(self) -> int:
        """Multiplications per token and expert."""
        return (2 + (self.ungated is None)) * self.width * self.n_cols

    def working_in(self, latent: LatentColumns) -> Experts:
        """Return the same experts, stored with fewer columns than hidden states have."""
        return replace(self, n_cols=latent.n_cols, latent=latent)

    def read(self, expert: int) -> FeedForward:
        """Read one expert."""
        names, n_experts, cols, width = self.names, self.n_experts, self.n_cols, self.width
        is_one = names.gate == names.up
        first_rows = width * (1 + (is_one and self.ungated is None))
        return FeedForward(
            names,
            self.load.stacked(names.gate, expert, n_experts, first_rows, cols),
            None if is_one else self.load.stacked(names.up, expert, n_experts, width, cols),
            self.load.stacked(names.down, expert, n_experts, cols, width),
            self._bias(names.gate, expert, first_rows),
            None if is_one else self._bias(names.up, expert, width),
            self._bias(names.down, expert, cols),
            self.activation,
            self.ungated,
        )

    def _bias(self, name: str, expert: int, n_rows: int) -> torch.Tensor | None:
        biases = self.load.bias(name, self.n_experts, n_rows)
        return None if biases is None else biases[expert]

    def read_ahead(self) -> Iterator[tuple[int, FeedForward]]:
        """Yield every expert; the next one is read while its predecessor is in use."""
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(self.read, 0)
            for expert in range(self.n_experts):
                block = coming.result()
                if expert + 1 < self.n_experts:
                    coming = reader.submit(self.read, expert + 1)
                yield expert, block
                del block


def load_experts(
    load: Loader,
    layer: int,
    routing: Routing,
    n_experts: int,
    hidden_size: int,
    width: int,
    activation: Gated = USUAL,
) -> Experts:
    """Read a layer's router; of its experts, no weight is read.

    raises  FormatError for a table of other experts
    """
    name, bias = f"blk.{layer}.ffn_gate_inp.weight", f"blk.{layer}.exp_probs_b"  # so in Hy V3's files
    bias = bias if load.has(bias) else f"{bias}.bias"
    weight = load.float32(name, n_experts, hidden_size)
    offset, table = f"blk.{layer}.ffn_gate_inp.bias", f"blk.{layer}.ffn_gate_tid2eid.weight"
    router = Router(
        name,
        routing,
        weight,
        load.float32(bias, n_experts) if load.has(bias) else None,
        load.float32(offset, n_experts) if load.has(offset) else None,
        load.table(table, routing.n_used, n_experts) if load.has(table) else None,
    )
    names, both = BlockNames.of(layer, "_exps"), f"blk.{layer}.ffn_gate_up_exps.weight"
    if load.has(both):
        names = BlockNames(both, both, names.down)
    return Experts(load, router, names, n_experts, hidden_size, width, activation)
