"""Keys and tensors of a header count as in llama.cpp, or are refused (scripts/check/header_keys.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gguf_tools.format.values import Value
from tests.end_to_end.header_keys import Case, Outcome, judge, make_base, theirs, write_case
from tests.support import oracle

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

F32, U32, TEXT = Value.f32, Value.u32, Value.string
ONES = np.full(1, 1.5, np.float32)
YARN = {"rope.scaling.type": TEXT("yarn"), "rope.scaling.factor": F32(4.0),
        "rope.scaling.original_context_length": U32(32)}  # fmt: skip

CASES = {
    "llama-biases": [
        ({"rope.scale_linear": F32(4.0)}, Outcome.EQUAL),
        ({"rope.scaling.attn_factor": F32(1.3)}, Outcome.EQUAL),
        ({**YARN, "rope.scaling.attn_factor": F32(1.3)}, Outcome.EQUAL),
        ({**YARN, "rope.scaling.type": TEXT("none")}, Outcome.NO_EFFECT),
        ({"attention.scale": F32(0.3), "logit_scale": F32(2.0)}, Outcome.NO_EFFECT),
        ({"expert_weights_scale": F32(3.0), "final_logit_softcapping": F32(3.0)}, Outcome.NO_EFFECT),
        ({"attention.causal": Value.bool_(False)}, Outcome.WE_REFUSE),
        ({"attention.layer_norm_rms_epsilon": None}, Outcome.BOTH_REFUSE),
        ({"blk.0.attn_q.scale": ONES}, Outcome.EQUAL),
        ({"blk.0.ffn_up.scale": ONES, "blk.0.ffn_down.scale": ONES}, Outcome.EQUAL),
        ({"blk.0.ffn_up.input_scale": ONES}, Outcome.NO_EFFECT),
        ({"output.bias": np.ones(576, np.float32)}, Outcome.BOTH_REFUSE),
        ({"blk.0.mystery.weight": np.ones((8, 64), np.float32)}, Outcome.BOTH_REFUSE),
        ({"rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32)}, Outcome.EQUAL),
        # llama.cpp's context has 256 positions at least, so it is longer than this one.
        ({"rope.scaling.type": TEXT("longrope"), "rope.scaling.original_context_length": U32(128),
          "rope_factors_long.weight": np.linspace(1, 4, 8, dtype=np.float32),
          "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32)}, Outcome.EQUAL),
    ],
    "ministral3": [
        ({"rope.scaling.yarn_beta_fast": F32(0.5)}, Outcome.EQUAL),
        ({"rope.scaling.yarn_log_multiplier": F32(0.5)}, Outcome.EQUAL),
        ({"attention.temperature_scale": F32(0.5)}, Outcome.EQUAL),
    ],
    "gpt-oss": [
        ({"rope.freq_base_swa": F32(500.0)}, Outcome.EQUAL),
        ({"attention.sliding_window_pattern": U32(3)}, Outcome.EQUAL),
        ({"attention.sliding_window_pattern": Value.bools([False, True])}, Outcome.EQUAL),
        ({"blk.0.ffn_up_exps.scale": np.ones(6, np.float32)}, Outcome.WE_REFUSE),
    ],
    "mixtral": [
        ({"blk.1.ffn_up_exps.scale": np.linspace(1, 2, 6, dtype=np.float32)}, Outcome.EQUAL),
        ({"blk.1.ffn_down_exps.scale": np.linspace(1, 2, 6, dtype=np.float32)}, Outcome.EQUAL),
        ({"expert_group_count": U32(3), "expert_group_used_count": U32(2)}, Outcome.EQUAL),
        ({"expert_gating_func": U32(2)}, Outcome.NO_EFFECT),
    ],
    "mimo-v2-flash": [
        ({"blk.0.attn_q.bias": np.ones(96, np.float32)}, Outcome.WE_REFUSE),
        ({"blk.1.attn_k.scale": ONES}, Outcome.WE_REFUSE),
        ({"attention.value_scale": F32(0.5)}, Outcome.EQUAL),
    ],
    "ernie4.5-moe": [
        ({"blk.0.attn_output.bias": np.ones(64, np.float32)}, Outcome.WE_REFUSE),
        ({"rope.dimension_sections": Value.i32s([2, 2, 2, 0])}, Outcome.WE_REFUSE),
    ],
    "falcon-h1": [
        ({"blk.1.attn_output.bias": np.ones(64, np.float32)}, Outcome.WE_REFUSE),
        ({"attention.scale": F32(0.3)}, Outcome.NO_EFFECT),
    ],
    "step3.7": [
        ({"rope.scaling.attn_factor": F32(1.3)}, Outcome.EQUAL),
        ({**YARN, "rope.scaling.attn_factor": F32(1.3)}, Outcome.EQUAL),
    ],
    "laguna-by-column": [
        ({"attention.sliding_window": U32(16), "attention.sliding_window_pattern": U32(n)}, Outcome.EQUAL)
        for n in (0, 2)
    ],
    "cohere2moe": [({"attention.sliding_window_pattern": U32(3)}, Outcome.EQUAL)],
    "muse-glimmer": [({"logit_scale": F32(0.0)}, Outcome.WE_REFUSE)],
    "v2": [
        ({"rope.scaling.attn_factor": F32(1.2)}, Outcome.EQUAL),
        ({"rope.scaling.yarn_log_multiplier": None}, Outcome.EQUAL),
        ({"rope.scaling.yarn_beta_fast": F32(8.0)}, Outcome.NO_EFFECT),
    ],
}  # fmt: skip
"""Base -> changes of keys, without the architecture, and of tensors; and what comes of them."""


@pytest.mark.parametrize("name", CASES)
def test_a_header_counts_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    base = make_base(name, tmp_path)
    plain = theirs(write_case(base, Case("as it is"), tmp_path / "case.gguf"))
    assert isinstance(plain, np.ndarray)
    for changes, expected in CASES[name]:
        tensors = {key: value for key, value in changes.items() if isinstance(value, np.ndarray)}
        values = {f"{base.architecture}.{key}": value for key, value in changes.items() if key not in tensors}
        outcome, text = judge(base, Case(name, values, tensors), tmp_path, plain)
        assert outcome is expected, (changes, text)
        if outcome in (Outcome.WE_REFUSE, Outcome.BOTH_REFUSE):
            assert any(key in text for key in changes), (changes, text)
