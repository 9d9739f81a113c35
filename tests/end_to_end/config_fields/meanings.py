"""Words that tell of a field without its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_MEANINGS: Mapping[str, str] = {
    r"hidden_act|hidden_activation|mlp_hidden_act|mamba_hidden_act": r"activation|silu|gelu|relu",
    r".*bias": r"bias",
    r".*sliding_window.*|max_window_layers": r"window|sliding|last \d+ positions",
    r"layer_types|layers_block_type|hybrid_override_pattern": r"window|sliding|layers|last \d+ positions",
    r"num_experts|num_local_experts|n_routed_experts": r"experts|block_sparse_moe",
    r"tie_word_embeddings": r"tied|lm_head|output\.weight",
    r"rope_.*|original_max_position_embeddings|factor|attention_factor|beta_.*|mscale.*|truncate|.*_factor":
        r"rope|yarn|rotat|longrope",
    r".*softcapping": r"soft.?cap",
    r"use_bidirectional_attention|is_causal|is_decoder": r"causal|bidirectional",
}  # fmt: skip
"""Pattern of fields -> pattern of what a note or a refusal may say instead of the name."""


def tells_of(text: str, names: Sequence[str]) -> bool:
    """Return whether a note or a refusal tells of one of the fields."""
    for name in names:
        if re.search(rf"(?<![a-z_]){re.escape(name)}(?![a-z_])", text):
            return True
        for fields, words in _MEANINGS.items():
            if re.fullmatch(fields, name) and re.search(words, text, re.IGNORECASE):
                return True
    return False
