from __future__ import annotations

import pytest

from gguf_tools.errors import BadOverride
from gguf_tools.format.values import Value
from quantize.plan.overrides import (
    find_override,
    fit_kv_overrides,
    idle_overrides,
    parse_custom_q,
    parse_kv_override,
    parse_layers,
    parse_override,
    parse_override_file,
    parse_overrides,
    parse_type,
)


def test_an_override_is_found_anywhere_in_a_name_in_any_case() -> None:
    override = parse_override(r"blk\.\d+\.FFN_(up|gate)_exps=q4_k")
    assert override.type.name == "Q4_K"
    assert override.matches("blk.17.ffn_gate_exps.weight")
    assert not override.matches("blk.17.ffn_down_exps.weight")


def test_the_first_match_wins() -> None:
    overrides = parse_overrides(["exps=Q4_0", "ffn=Q8_0"])
    found = [find_override(overrides, name) for name in ("ffn_up_exps", "ffn_up", "attn")]
    assert [None if o is None else o.text for o in found] == ["exps=Q4_0", "ffn=Q8_0", None]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ffn_down", "expected REGEX=TYPE"),
        ("=Q4_K", "expected REGEX=TYPE"),
        ("ffn_down=", "expected REGEX=TYPE"),
        ("ffn_down=Q4_X", "'Q4_X' is not a ggml type"),
        ("ffn_(down=Q4_K", r"'ffn_\(down' is not a regular expression"),
    ],
)
def test_bad_override(text: str, complaint: str) -> None:
    with pytest.raises(BadOverride, match=complaint) as error:
        parse_override(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


def test_override_file() -> None:
    found = parse_override_file("a=Q4_0 b=Q5_0\n\n  c=F16\n", "rules.txt")
    assert [o.text for o in found] == ["a=Q4_0", "b=Q5_0", "c=F16"]
    assert parse_override_file(" \n", "rules.txt") == ()


def test_override_file_of_another_maker() -> None:
    lines = ("\ufeff## Mix = mine", "", "  # ^a=Q4_0", r"^blk\.([0-1])\.x#y$=q5_K # 5 bits", "#a", "^b$=f32")
    found = parse_override_file("\r\n".join(lines), "rules.txt")
    assert [o.text for o in found] == [r"^blk\.([0-1])\.x#y$=q5_K", "^b$=f32"]


def test_a_mistake_in_an_override_file() -> None:
    with pytest.raises(BadOverride, match=r"^rules\.txt: line 3: 'b=Q9': 'Q9' is not a ggml type"):
        parse_override_file("# mine\na=Q4_0\nb=Q9\n", "rules.txt")
    with pytest.raises(BadOverride, match=r"^rules\.txt: line 1: 'file_type:': expected REGEX=TYPE"):
        parse_override_file("file_type: Q4_K\n", "rules.txt")


def test_parse_type() -> None:
    assert parse_type("iq4_nl").name == "IQ4_NL"
    with pytest.raises(BadOverride, match=r"^'q4' is not a ggml type: .*; the nearest here is Q4_K$"):
        parse_type("q4")
    with pytest.raises(BadOverride, match="Q8_K is used while computing, not in files"):
        parse_type("q8_k")


def test_partly_shadowed_overrides_have_an_effect() -> None:
    overrides = parse_overrides(["up=Q4_0", "ffn=Q8_0", "gate|up=Q4_0"])
    (idle,) = idle_overrides(overrides, ["ffn_up", "ffn_gate"])
    assert idle.override is overrides[2]
    assert idle.names == ("ffn_up", "ffn_gate")
    assert idle.shadowed_by == overrides[:2]
    (idle,) = idle_overrides(overrides[:2], ["ffn_gate"])
    assert (idle.override, idle.names, idle.shadowed_by) == (overrides[0], (), ())
    (idle,) = idle_overrides(parse_overrides(["up=Q4_0", "up=Q4_0"]), ["ffn_up"])
    assert idle.names == ("ffn_up",)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("deepseek2.expert_used_count=int:6", "deepseek2.expert_used_count", Value.u32(6)),
        ("a=float:0.5", "a", Value.f32(0.5)),
        ("tokenizer.ggml.add_bos_token=bool:false", "tokenizer.ggml.add_bos_token", Value.bool_(False)),
        ("general.name=str:a=b:c", "general.name", Value.string("a=b:c")),
        ("general.name=str:", "general.name", Value.string("")),
    ],
)
def test_kv_override(text: str, key: str, value: Value) -> None:
    assert parse_kv_override(text) == (key, value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a", "expected KEY=TYPE:VALUE"),
        ("=int:3", "expected KEY=TYPE:VALUE"),
        ("a=3", "expected KEY=TYPE:VALUE"),
        ("a=i32:3", "found type 'i32'"),
        ("a=int:x", "is not a whole number from 0"),
        ("a=int:-1", "is not a whole number from 0"),
        ("a=int:4294967296", "is not a whole number from 0"),
        ("a=float:nan", "expected a finite number"),
        ("a=float:1e39", "expected a finite number"),
        ("a=float:one", "expected a finite number"),
        ("a=bool:True", "expected true or false"),
    ],
)
def test_bad_kv_override(text: str, complaint: str) -> None:
    with pytest.raises(BadOverride, match=complaint) as error:
        parse_kv_override(text)
    assert repr(text) in str(error.value)


LLAMA = {"general.architecture": Value.string("llama")}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("llama.rope.freq_base=int:1000000", r"is uint32, llama\.cpp reads float32; write llama"),
        ("llama.block_count=float:2", "write llama.block_count=int:VALUE"),
        ("llama.block_count=str:2", "is string, llama.cpp reads uint32"),
        ("llama.attention.head_count_kv=bool:true", "reads uint32 or array of int32 or array of uint32"),
        ("llama.attention.causal=int:1", "write llama.attention.causal=bool:VALUE"),
        ("llama.expert_weights_norm=int:1", "reads bool"),
        ("llama.rope.scaling.type=int:1", "write llama.rope.scaling.type=str:VALUE"),
        ("tokenizer.ggml.add_bos_token=int:1", "reads bool"),
        ("tokenizer.ggml.eos_token_id=str:</s>", "reads uint32"),
        ("tokenizer.ggml.tokens=str:a", "reads array of string; see gguf-tools set"),
        ("general.name=int:7", "reads string"),
        ("general.alignment=float:64", "reads uint32"),
        ("split.count=int:2", "holds a split set together"),
    ],
)
def test_a_kind_that_does_not_load_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadOverride, match=complaint) as error:
        fit_kv_overrides([parse_kv_override(text)], LLAMA)
    assert text.partition("=")[0] in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("llama.rope.freq_base=float:1000000", Value.f32(1e6)),
        ("llama.attention.head_count_kv=int:2", Value.u32(2)),
        ("general.sampling.top_k=int:40", Value.i32(40)),
        ("qwen2.rope.freq_base=int:1", Value.u32(1)),  # nobody reads it in a llama
        ("own.key=str:x", Value.string("x")),
    ],
)
def test_kinds_that_load(text: str, value: Value) -> None:
    assert fit_kv_overrides([parse_kv_override(text)], LLAMA) == ((text.partition("=")[0], value),)


def test_layers() -> None:
    assert parse_layers("7, 3,3,10") == (3, 7, 10)
    for text in ("", "1,", "-1", "1-3", "x"):
        with pytest.raises(BadOverride, match="expected layer numbers"):
            parse_layers(text)


def test_custom_q_is_a_list_with_commas() -> None:
    found = parse_custom_q(r"blk\.0\.=q6_K,ffn_.*_exps=iq2_ks,output=q8_KV_r8")
    assert [o.type.name for o in found] == ["Q6_K", "IQ2_KS", "Q8_KV_R8"]
    assert find_override(found, "blk.0.ffn_up_exps.weight") is found[0]
    for text in ("a{1,2}=q4_0", "a=q4_0,"):
        with pytest.raises(BadOverride, match="expected REGEX=TYPE; an expression can't have a comma") as e:
            parse_custom_q(text)
        assert repr(text) in str(e.value)
