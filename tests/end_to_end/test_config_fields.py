"""A changed field of config.json is computed by llama.cpp from our file, noted or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.config_fields.judge import SILENT, Judge
from tests.end_to_end.config_fields.llama import Llama
from tests.end_to_end.config_fields.models import BASES, as_in_llama_cpp
from tests.end_to_end.config_fields.mutations import mutations
from tests.support import oracle

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")

TELLING = (
    ("llama", "rope_scaling (type)", "yarn attention_factor", "equal"),
    ("qwen3", "rope_parameters", "llama3", "noted"),
    ("phi4", "rope_parameters", "longrope attention_factor", "equal"),
    ("gemma4-small", "num_kv_shared_layers", "1", "refused"),
    ("minimax-m2", "rope_parameters.partial_rotary_factor", "0.25", "refused"),
    ("nemotron-h", "time_step_min", "0.3", "noted"),
    ("qwen35", "rms_norm_eps", "0.01", "noted"),
    ("deepseek32", "mlp_layer_types", "['sparse', 'sparse', 'sparse']", "equal"),
)


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    started = Llama()
    with as_in_llama_cpp():
        yield started
    started.close()


@pytest.mark.parametrize(("base", "field", "value", "kind"), TELLING, ids=lambda text: str(text)[:30])
def test_a_field_has_the_effect_that_it_has_in_transformers(
    base: str, field: str, value: str, kind: str, tmp_path: Path, llama: Llama
) -> None:
    judge = Judge(BASES[base], tmp_path, llama)
    every = mutations(BASES[base], judge.raw)
    outcome = judge.outcome(next(one for one in every if (one.field, one.value) == (field, value)))
    assert outcome.has_effect
    assert outcome.kind == kind, outcome.told


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_no_change_of_a_sample_is_silent(base: str, tmp_path: Path, llama: Llama) -> None:
    judge = Judge(BASES[base], tmp_path, llama)
    sample = random.Random(base).sample([*mutations(BASES[base], judge.raw)], 20)
    outcomes = {(one.field, one.value): judge.outcome(one) for one in sample}
    assert {key: each.told for key, each in outcomes.items() if each.kind == SILENT} == {}
