"""A feed-forward block: down(silu(gate(x)) * up(x)), or with another activation.

Dense blocks, shared experts and each routed expert are such blocks. Some have biases, and some no gate. The
output of Qwen's shared expert is multiplied by the sigmoid of a number that one row makes of the input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from imatrix.forward.layers.activations import USUAL, Gated, Ungated
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
    activation                     of gate and up
    post_norm                      of the output; None for none
    share                          what the output is multiplied by; None for one, as in routed experts
    ungated                        the activation where `gate` is up, and there is no gate; None: there is one
    """

    names: BlockNames
    gate: torch.Tensor
    up: torch.Tensor | None
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: Gated = USUAL
    ungated: Ungated | None = None
    share: Share | None = None
    post_norm: RMSNorm | None = None

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
        if self.ungated is not None:
            return self.ungated(gate)
        if self.up is None:
            gate, up = gate.chunk(2, -1)
        else:
            up = linear(x, self.up, self.up_bias)
            watch(observer, self.names.up, x, up, index, n_mats)
        return self.activation(gate, up)

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
    activation: Gated = USUAL,
    ungated: Ungated | None = None,
) -> FeedForward:
    """Read a block's matrices, biases and the row of its share where the model has them."""
    is_one = names.gate == names.up
    first_rows = width * (1 + (is_one and ungated is None))
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
        activation,
        ungated,
        Share(row, load.float32(row, 1, hidden_size)) if has_share else None,
    )
