"""Types chosen for a size: rules are obeyed, budgets kept, and the reasons are true."""

from __future__ import annotations

import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.format.ggml_types import by_name
from quantize.formats.codecs import CODECS
from quantize.plan.overrides import parse_overrides
from quantize.size.choose_types import SLOW, Share, TypeRules, choose_types, is_expert_stack
from quantize.size.parse import Size, parse_size
from tests.quantize.model_files import made_up_losses

LOSSES = made_up_losses()
DOWN = [name for name in LOSSES.tensors if "ffn_down_exps" in name]


def _all(n_bytes: int) -> list[Share]:
    return [Share(lambda name: True, n_bytes)]


def _bytes_at(bits: float) -> int:
    return sum(int(by_name("F32").tensor_bytes(each.shape) / 32 * bits) for each in LOSSES.tensors.values())


def test_the_choice_beats_one_type_for_all() -> None:
    budget = sum(by_name("Q3_K").tensor_bytes(each.shape) for each in LOSSES.tensors.values())
    chosen = choose_types(LOSSES, _all(budget))
    assert 0.995 * budget <= chosen.n_bytes <= budget
    assert chosen.predicted < 0.9 * LOSSES.predict(dict.fromkeys(LOSSES.tensors, "Q3_K"))
    assert chosen.predicted == pytest.approx(LOSSES.predict(chosen.types))


def test_calibration_counts_with_each_tensor_s_ratio() -> None:
    budget = _bytes_at(3.4)
    chosen = choose_types(LOSSES, _all(budget), calibrated=True)
    stock = choose_types(LOSSES, _all(budget))
    assert chosen.predicted == pytest.approx(LOSSES.predict(chosen.types, calibrated=True))
    assert chosen.predicted < LOSSES.predict(stock.types, calibrated=True)


def test_a_step_up_that_was_left_out_saves_less_than_the_price() -> None:
    chosen = choose_types(LOSSES, _all(_bytes_at(3.9)))
    assert all(each.saves <= chosen.price * 1.5 for each in chosen.tensors.values())
    assert any(each.next_up for each in chosen.tensors.values())


def test_rules() -> None:
    rules = TypeRules(
        fast_on=frozenset({"cpu"}),
        equal_experts=True,
        fixed=parse_overrides(["^output=Q6_K"]),
        at_least=parse_overrides(["attn_output=Q4_K"]),
        at_most=parse_overrides(["ffn_down_exps=IQ4_XS"]),
    )
    types = choose_types(LOSSES, _all(_bytes_at(3.6)), rules).types
    assert types["output.weight"] == "Q6_K"
    assert not set(types.values()) & SLOW["cpu"]
    for layer in range(3):
        assert by_name(types[f"blk.{layer}.attn_output.weight"]).bits_per_weight >= 4.5
        experts = {types[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")}
        assert len(experts) == 1
        assert by_name(experts.pop()).bits_per_weight <= 4.25


def test_tensors_without_importances_get_no_type_that_needs_them() -> None:
    rules = TypeRules(unweighed={"token_embd.weight": frozenset({"IQ2_XS"})})
    types = choose_types(LOSSES, _all(_bytes_at(2.35)), rules).types
    assert types["token_embd.weight"] != "IQ2_XS"
    assert "IQ2_XS" in types.values()


def test_two_budgets() -> None:
    experts, rest = _bytes_at(2.2), _bytes_at(0.4)
    shares = [Share(is_expert_stack, experts, "experts"), Share(lambda name: True, rest, "the rest")]
    chosen = choose_types(LOSSES, shares)
    in_memory = sum(each.n_bytes for each in chosen.tensors.values() if is_expert_stack(each.name))
    assert in_memory <= experts
    assert chosen.n_bytes - in_memory <= rest
    assert list(chosen.tensors) == list(LOSSES.tensors)
    with pytest.raises(
        BadRequest, match="the rest: a size of 1,000 bytes is too small: the smallest possible"
    ):
        choose_types(LOSSES, [shares[0], Share(lambda name: True, 1000, "the rest")])


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        ({"fixed": ("output=Q5_K",)}, "output.weight: output=Q5_K asks for Q5_K, and the losses have IQ2_XS"),
        ({"at_least": ("output=F16",)}, "output.weight: the rules leave none of the types IQ2_XS, Q2_K"),
        (
            {"equal_experts": True, "fixed": ("ffn_up_exps=Q4_K", "ffn_down_exps=Q2_K")},
            "experts of layer 0: the rules leave no type that all of blk.0.ffn_gate_exps.weight",
        ),
    ],
)
def test_rules_that_leave_nothing_are_refused(rules: dict[str, object], complaint: str) -> None:
    parsed = {
        key: parse_overrides(value) if isinstance(value, tuple) else value for key, value in rules.items()
    }
    with pytest.raises(BadRequest) as caught:
        choose_types(LOSSES, _all(10**9), TypeRules(**parsed))  # type: ignore[arg-type]
    assert complaint in str(caught.value)


def test_the_tables_name_types_that_exist() -> None:
    for names in SLOW.values():
        assert names <= set(CODECS)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12.5GiB", Size("bytes", 12.5 * 2**30)),
        ("700M", Size("bytes", 700 * 2**20)),
        ("1 GB", Size("bytes", 1e9)),
        ("12345", Size("bytes", 12345)),
        ("3.4bpw", Size("bpw", 3.4)),
        ("q4_k_m", Size("recipe", recipe="Q4_K_M")),
    ],
)
def test_sizes(text: str, size: Size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["3.4", "12", "700"])
def test_a_number_without_a_unit_is_asked_about(text: str) -> None:
    """It was taken for bytes, which no file is as small as."""
    with pytest.raises(BadRequest, match=rf"size '{text}': .* is {text}bpw .* or {text}GiB meant\?"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "GiB", "3.4xyz", "-5GiB", "0bpw", "Q4_KM", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="size '"):
        parse_size(text)
