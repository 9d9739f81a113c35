"""The type table against ggml itself, gguf-py, and facts recorded from ik_llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from gguf_tools.errors import FormatError, ShapeError
from gguf_tools.format import ggml_types
from tests.support import oracle

#: Recorded with a build of ik_llama.cpp of 2026-08-15: sizes of its own types, row_bytes of 512 columns.
IK_FACTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "ik_types.json").read_text()
)


@pytest.mark.parametrize("name", IK_FACTS)
def test_type_is_as_in_ik_llama_cpp(name: str) -> None:
    type_ = ggml_types.by_name(name)
    found = {
        "id": type_.id,
        "block_elems": type_.block_elems,
        "block_bytes": type_.block_bytes,
        "row_meta_bytes": type_.row_meta_bytes,
        "row_bytes": type_.row_bytes(512),
        "rows_interleaved": type_.rows_interleaved,
    }
    assert found == {key: IK_FACTS[name][key] for key in found}


@pytest.mark.skipif(not oracle.available(), reason="needs the xllamacpp wheel")
@pytest.mark.parametrize("type_", [t for t in ggml_types.TYPES if t.id <= 42], ids=str)
def test_type_is_as_in_llama_cpp(type_: ggml_types.GGMLType) -> None:
    facts = oracle.type_facts(type_.id)
    if facts.block_elems == 0:
        assert type_.note, "a type that llama.cpp has removed says so"
    else:
        assert (facts.name.upper(), facts.block_elems, facts.block_bytes) == (
            type_.name,
            type_.block_elems,
            type_.block_bytes,
        )


@pytest.mark.parametrize("member", gguf.GGMLQuantizationType, ids=lambda member: member.name)
def test_type_is_as_in_gguf_py(member: gguf.GGMLQuantizationType) -> None:
    type_ = ggml_types.by_id(member)
    assert type_.name == member.name
    if member.name != "Q8_1":  # gguf-py still has its first layout, with float32 scales
        assert (type_.block_elems, type_.block_bytes) == gguf.GGML_QUANT_SIZES[member]


def test_ids_and_names_are_unique() -> None:
    assert len({type_.id for type_ in ggml_types.TYPES}) == len(ggml_types.TYPES)
    assert len({type_.name for type_ in ggml_types.TYPES}) == len(ggml_types.TYPES)


def test_names_are_found_in_any_case_and_by_the_other_projects_name() -> None:
    assert ggml_types.by_name("iq2_xxs") is ggml_types.IQ2_XXS
    assert ggml_types.by_name("Q1_0_g128") is ggml_types.Q1_0


def test_unknown_types_are_errors() -> None:
    with pytest.raises(FormatError, match="type id 43"):
        ggml_types.by_id(43)
    with pytest.raises(FormatError, match="'Q9_Z'"):
        ggml_types.by_name("Q9_Z")


def test_sizes() -> None:
    assert ggml_types.Q4_K.row_bytes(512) == 2 * 144
    assert ggml_types.IQ4_KS.tensor_bytes((3, 256)) == 3 * (4 + 136)
    assert ggml_types.I2_S.tensor_bytes((4, 128)) == 4 * 128 // 4 + 32
    assert ggml_types.F32.tensor_bytes(()) == 4
    assert ggml_types.Q4_K.bits_per_weight == 4.5
    with pytest.raises(ShapeError, match=r"1407 is not a multiple of 256 \(Q4_K\)"):
        ggml_types.Q4_K.row_bytes(1407)


def test_floats_and_integers_are_not_quantized() -> None:
    plain = {type_.name for type_ in ggml_types.TYPES if not type_.is_quantized}
    assert plain == {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "BF16_R16"}
