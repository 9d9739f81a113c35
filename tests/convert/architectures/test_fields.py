"""Every field of config.json is read by its family, means nothing, or is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convert.architectures import config_reader, find_architecture, supported
from convert.architectures.config_reader import ConfigReader, Fields, known_fields, merged, unread_notes
from convert.checkpoint.checkpoint import read_config
from gguf_tools.errors import UnsupportedCheckpoint
from tests.support.published_models import PUBLISHED

MODELS = Path(__file__).parents[2] / "golden" / "arch" / "models"
NAMES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def notes(raw: dict[str, Any]) -> list[str]:
    config = Fields(raw)
    find_architecture(raw).read_config(config, Path("config.json"))
    return list(unread_notes(config))


def recorded(name: str, **changes: Any) -> dict[str, Any]:
    return {**read_config(MODELS / name), **changes}


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_the_class_does_not_know_is_listed(name: str) -> None:
    before = notes(recorded(name))
    after = notes(recorded(name, gate_of_the_week=3))
    (new,) = set(after) - set(before)
    assert "gate_of_the_week" in new
    assert len(after) <= len(before) + 1, "all such fields stand in one note"


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_the_class_is_unread_in_a_published_model(name: str) -> None:
    assert [note for note in notes(recorded(name)) if " is " in note] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_field_at_its_default_needs_no_word(name: str) -> None:
    raw = recorded(name)
    defaults = known_fields(raw["architectures"][0])
    assert notes({**defaults, **raw}) == notes(raw)


def test_a_field_of_the_class_is_told_with_its_value() -> None:
    raw = recorded("llama-r1-distill")
    raw["rope_scaling"] = {**raw["rope_scaling"], "mrope_section": [4, 4]}
    (note,) = set(notes(raw)) - set(notes(recorded("llama-r1-distill")))
    assert "rope_scaling.mrope_section is [4, 4]" in note


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama-r1-distill", "num_local_experts"),
        ("command-r7b", "num_experts"),
        ("command-r7b", "rms_norm_eps"),
        ("starcoder2", "rms_norm_eps"),
        ("lfm2", "rms_norm_eps"),
        ("mimo-v2-flash", "attention_chunk_size"),
        ("mimo-v2-flash", "hybrid_block_size"),
    ],
)
def test_a_field_that_others_have_is_listed(name: str, field: str) -> None:
    raw = recorded(name) if name in NAMES else {**PUBLISHED[name].config}
    raw.pop(field, None)
    (new,) = set(notes({**raw, field: 8})) - set(notes(raw))
    assert field in new


def test_what_is_asked_for_is_recorded_through_copies_and_inside() -> None:
    config = Fields({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": 4, "g": {"h": 5}})
    copy = merged({"x": 0}, merged(config, {"f": 5}))
    assert copy["b"]["d"].get("e") == 3
    assert "a" in copy
    assert ConfigReader(copy, "config.json").size("f") == 5
    assert config.asked == {"a", "b", "b.d", "b.d.e", "f"}


@pytest.mark.parametrize("name", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_the_pattern_of_gemma_3_s_windows_is_read(name: str) -> None:
    raw = {"architectures": ["Gemma3ForCausalLM"], "vocab_size": 64, name: 6}
    assert notes(raw) == []
    with pytest.raises(UnsupportedCheckpoint, match=f"{name} is 4, expected 6"):
        notes({**raw, name: 4})


def test_fields_are_recorded_of_families_that_are_known() -> None:
    path = Path(config_reader.__file__).with_name("config_fields.json")
    recorded = json.loads(path.read_text(encoding="utf-8"))["families"]
    assert not [name for name in recorded if name not in supported()]
    assert all(not known_fields(name) for name in set(supported()) - set(recorded))
