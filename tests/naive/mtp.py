"""DeepSeek V3's MTP module in plain torch, from section 2.2 of its report (arXiv 2412.19437).

Transformers has the decoder layer, and no MTP. As in llama.cpp, the row at position p takes token p with the
hidden state of position p - 1, behind the output norm, and zeros before the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.checkpoints import load_transformers, read_tensors


class WholeDraft:
    """A V3 of transformers and its MTP layer, whole and differentiable.

    layer    the decoder layer
    eh_proj  Linear
    head     (vocab_size, hidden_size)
    """

    def __init__(self, folder: Path) -> None:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

        self.model: Any = load_transformers(folder)
        config = self.model.config
        self.prefix = f"model.layers.{config.num_hidden_layers}."
        self.own = {
            name.removeprefix(self.prefix).removesuffix(".weight"): torch.tensor(value.astype(np.float32))
            for name, value in read_tensors(folder).items()
            if name.startswith(self.prefix)
        }
        self.eps = config.rms_norm_eps
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        state = {name: self._parameter(name) for name in self.layer.state_dict()}
        self.layer.load_state_dict(state)
        hidden = config.hidden_size
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.eh_proj.weight.data = self.own["eh_proj"]
        self.head = self.own.get("shared_head.head", self.model.lm_head.weight.detach())

    def _parameter(self, name: str) -> torch.Tensor:
        """Return a weight of the decoder layer, experts as transformers stacks them."""
        stack = "mlp.experts."
        parts = {f"{stack}gate_up_proj": ("gate_proj", "up_proj"), f"{stack}down_proj": ("down_proj",)}
        if name not in parts:
            return self.own[name.removesuffix(".weight")]
        experts = (
            torch.cat([self.own[f"{stack}{expert}.{part}"] for part in parts[name]])
            for expert in range(self.model.config.n_routed_experts)
        )
        return torch.stack(list(experts))

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.own[name]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits for chunks of tokens, (n_chunks, n_tokens, n_vocab)."""
        n_tokens = tokens.shape[1]
        hidden = self.model.model(tokens).last_hidden_state.detach()
        before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)
        table = self.own.get("embed_tokens", self.model.model.embed_tokens.weight.detach())
        x = torch.cat((self.norm("enorm", table[tokens]), self.norm("hnorm", before)), -1)
        rows = self.eh_proj(x)
        positions = torch.arange(n_tokens)[None]
        later = torch.full((n_tokens, n_tokens), float("-inf")).triu(1).expand(len(tokens), 1, -1, -1)
        after = self.layer(
            rows,
            attention_mask=later,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(rows, positions),
        )
        return self.norm("shared_head.norm", after) @ self.head.T
