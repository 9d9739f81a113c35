"""Attention to keys and values of another layer, which stand beside the hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from imatrix.forward.layers.attention.shared_keys import SharedKeyAttention
from imatrix.forward.observe import Observer


@dataclass(frozen=True)
class HandedKeys:
    """Where keys and values of a kind of layers stand, which a layer makes and later ones attend to.

    first    the first of their columns: those of all heads' keys, then those of values
    n_heads  of keys
    n_cols   of a head
    """

    first: int
    n_heads: int
    n_cols: int

    @property
    def width(self) -> int:
        """Columns of keys and values together."""
        return 2 * self.n_heads * self.n_cols

    def read(self, hidden: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, both (n_tokens, n_heads, n_cols)."""
        both = hidden[:, self.first : self.first + self.width].to(dtype)
        key, value = both.unflatten(-1, (2, self.n_heads, self.n_cols)).unbind(1)
        return key, value


@dataclass(frozen=True)
class HandedKeyAttention:
    """The attention of a layer whose keys are handed on, or are another layer's.

    inner  the attention itself; without a matrix of keys, it attends to what it is handed
    """

    inner: SharedKeyAttention
    handed: HandedKeys

    def work(self, n_tokens: int) -> int:
        return self.inner.work(n_tokens)

    def __call__(self, hidden: torch.Tensor, observer: Observer) -> torch.Tensor:
        """Attend within one chunk; return what is added to hidden states, and to what stands beside them.

        hidden  float32 (n_tokens, hidden_size and more)
        """
        inner, handed = self.inner, self.handed
        x = inner.normed(hidden[:, : inner.sizes.hidden], observer)
        query, own_key, own_value = inner.heads(x, observer)
        if own_key is None or own_value is None:
            return inner.attend(query, *handed.read(hidden, x.dtype), observer)
        key, value = inner.keys_and_values(own_key, own_value)
        output = inner.attend(query, key, value, observer)
        change = torch.cat((key.flatten(1), value.flatten(1)), -1).float()
        n_before = handed.first - output.shape[1]
        n_behind = hidden.shape[1] - handed.first - handed.width
        zeros = output.new_zeros(len(output), n_before), output.new_zeros(len(output), n_behind)
        return torch.cat((output, zeros[0], change, zeros[1]), -1)
