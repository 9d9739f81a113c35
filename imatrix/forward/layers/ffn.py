"""A feed-forward block: down(silu(gate(x)) * up(x)).

Dense blocks, shared experts and each routed expert are such blocks. Some have biases. gpt-oss clamps what
gate and up give and has another gate: gate * sigmoid(1.702 * gate) * (up + 1). DeepSeek V4 clamps both and
has the usual gate, and Ling 3 clamps silu(gate) and up. Kimi K3 bounds both by tanh, see `Situ`. Nemotron has
no gate: down(relu(up(x)) ** 2); nor has BERT: down(gelu(up(x))), nor Apertus: down(xielu(up(x))). The output
of Qwen's shared expert is multiplied by the sigmoid of a number that one row makes of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import gelu, linear, silu, softplus

from imatrix.forward.layers.load import Loader
from imatrix.forward.layers.residual import RMSNorm
from imatrix.forward.observe import Observer, watch


@dataclass(frozen=True)
class BlockNames:
    """Names of a block's tensors: gate and up multiply its input, down what they make of it.

    One tensor may have the rows of gate and, behind them, those of up; both are then called by its name. So
    they are where there is no gate.
    """

    gate: str
    up: str
    down: str

    @classmethod
    def of(cls, layer: int, kind: str = "") -> BlockNames:
        """Return the names in a layer; `kind` is "", "_shexp" or "_exps"."""
        return cls(*(f"blk.{layer}.ffn_{part}{kind}.weight" for part in ("gate", "up", "down")))

    @property
    def without_gate(self) -> BlockNames:
        """The same where there is no gate."""
        return BlockNames(self.up, self.up, self.down)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of what multiplies the block's input: gate and up, or the one that stands for both."""
        return tuple(dict.fromkeys((self.gate, self.up)))


Gelu = Literal["", "tanh", "none"]
"""No GELU, its approximation by tanh, or GELU itself, by torch's names."""


@dataclass(frozen=True)
class XIELU:
    """The activation xIELU: a parabola above zero, and an exponential that flattens below.

    alpha_n, alpha_p  how much the part below zero and that above it are bent, before softplus
    beta              the slope at zero
    eps               the largest number whose exponential is taken, just below zero
    """

    alpha_n: float
    alpha_p: float
    beta: float
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to every number."""
        alpha_n, alpha_p = softplus(torch.tensor([self.alpha_n, self.alpha_p])).tolist()
        below = (torch.expm1(x.clamp(max=self.eps)) - x) * (self.beta + alpha_n)
        return torch.where(x > 0, alpha_p * x * x, below) + self.beta * x


CLAMP, SHARPNESS = 7.0, 1.702
"""Where gpt-oss clamps its gate from above, and up from both sides; and how steep its gate is."""


@dataclass(frozen=True)
class Situ:
    """Activation in place of SiLU: beta tanh(gate / beta) sigmoid(gate), times up.

    up_beta  bounds up in the same way, up_beta tanh(up / up_beta); None for no bound
    """

    beta: float
    up_beta: float | None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.up_beta is not None:
            up = _bounded(up, self.up_beta)
        return _bounded(gate, self.beta) * torch.sigmoid(gate) * up


def _bounded(x: torch.Tensor, bound: float) -> torch.Tensor:
    return bound * torch.tanh(x / bound)


@dataclass(frozen=True)
class Share:
    """The row that makes the factor of a block's output, float32 (1, hidden_size)."""

    name: str
    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the factor of each token, float32 (n_tokens, 1)."""
        observer.rows((self.name,), x)
        return torch.sigmoid(linear(x.float(), self.weight))


@dataclass(frozen=True)
class FeedForward:
    """A block with its weights: gate, up (width, hidden_size); down (hidden_size, width).

    up                             None where gate has the rows of both, or is up itself
    gate_bias, up_bias, down_bias  None where there is none
    clamped                        whether it has gpt-oss's gate
    limit                          what gate is clamped to from above, up from both sides; None: not at all
    after_silu                     whether it is silu(gate) that the limit holds for
    gelu                           how GELU is computed in place of SiLU, see Gelu; "" where it is not
    xielu                          the activation where there is no gate; None where it is another one
    post_norm                      of the output; None for none
    share                          what the output is multiplied by; None for one, as in routed experts
    gated                          whether there is a gate; otherwise `gate` is up, and without another
                                   activation relu is squared
    situ                           in place of SiLU; None: SiLU
    """

    names: BlockNames
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    clamped: bool = False
    limit: float | None = None
    after_silu: bool = False
    share: Share | None = None
    gelu: Gelu = ""
    post_norm: RMSNorm | None = None
    gated: bool = True
    xielu: XIELU | None = None
    situ: Situ | None = None

    @property
    def work(self) -> int:
        """Multiplications per token."""
        return self.gate.numel() + (0 if self.up is None else self.up.numel()) + self.down.numel()

    def gate_up(self, x: torch.Tensor, observer: Observer, index: int = 0, n_mats: int = 1) -> torch.Tensor:
        """Multiply by gate and up, and apply the gate; return the input of `down`, (n_tokens, width).

        index, n_mats  the place of the block's matrices in their stacks, which `watch` is told
        """
        gate = linear(x, self.gate, self.gate_bias)
        watch(observer, self.names.gate, x, gate, index, n_mats)
        if self.xielu is not None:
            return self.xielu(gate)
        if not self.gated:
            return gelu(gate, approximate=self.gelu) if self.gelu else gate.relu().square()
        if self.up is None:
            gate, up = gate.chunk(2, -1)
        else:
            up = linear(x, self.up, self.up_bias)
            watch(observer, self.names.up, x, up, index, n_mats)
        if self.gelu:
            return gelu(gate, approximate=self.gelu) * up
        if self.situ is not None:
            return self.situ(gate, up)
        if not gate.requires_grad and not self.clamped and self.limit is None:
            return silu(gate, inplace=True).mul_(up)
        if self.clamped:
            gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
            return gate * torch.sigmoid(SHARPNESS * gate) * (up + 1)
        if self.limit is not None and self.after_silu:
            return silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return silu(gate) * up

    def project_down(
        self, gated: torch.Tensor, observer: Observer, index: int = 0, n_mats: int = 1
    ) -> torch.Tensor:
        """Multiply by `down`; return (n_tokens, hidden_size). index and n_mats as in `gate_up`."""
        output = linear(gated, self.down, self.down_bias)
        watch(observer, self.names.down, gated, output, index, n_mats)
        return output

    def __call__(self, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the block's output for `x`, float32 (n_tokens, hidden_size)."""
        gated = self.gate_up(x, observer)
        observer.rows(self.names.inputs, x)
        observer.rows((self.names.down,), gated)
        return self.finish(gated, x, observer)

    def finish(self, gated: torch.Tensor, x: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Return the block's output for `x`, given what `gate_up` makes of it."""
        output = self.project_down(gated, observer).float()
        if self.post_norm is not None:
            output = self.post_norm(output)
        return output if self.share is None else output * self.share(x, observer)


_BLOCK_ROWS = 1024
"""Number of tokens that go through a block at a time."""


def through(block: FeedForward, x: torch.Tensor, observer: Observer) -> torch.Tensor:
    """Apply a block; a long chunk goes through it in pieces, as it makes several times as many columns."""
    if x.requires_grad or len(x) <= _BLOCK_ROWS:
        return block(x, observer)
    return torch.cat([block(some, observer) for some in x.split(_BLOCK_ROWS)])


def load_ffn(
    load: Loader,
    names: BlockNames,
    hidden_size: int,
    width: int,
    *,
    limit: float | None = None,
    gated: bool = True,
) -> FeedForward:
    """Read a block's matrices, biases and the row of its share where the model has them."""
    is_one = names.gate == names.up
    first_rows = width * (1 + (is_one and gated))
    row = names.gate.replace("ffn_gate_shexp", "ffn_gate_inp_shexp")
    has_share = row != names.gate and load.has(row)
    return FeedForward(
        names,
        load.matrix(names.gate, first_rows, hidden_size),
        None if is_one else load.matrix(names.up, width, hidden_size),
        load.matrix(names.down, hidden_size, width),
        load.bias(names.gate, first_rows),
        None if is_one else load.bias(names.up, width),
        load.bias(names.down, hidden_size),
        limit=limit,
        share=Share(row, load.float32(row, 1, hidden_size)) if has_share else None,
        gated=gated,
    )
