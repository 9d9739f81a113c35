"""A size becomes a mixture, the mixture a file that keeps to it, and the recipe a file that says the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from gguf_tools import open_gguf
from gguf_tools.commands.quantize import main
from gguf_tools.errors import BadRequest
from quantize.formats.codecs import CODECS, needs_importances, requires_importances
from quantize.pipeline import plan_run
from quantize.plan.overrides import find_override, parse_override_file, parse_overrides
from quantize.plan.recipe_files import Mixture, read_recipe_file
from quantize.plan.sensitivities import Sensitivities, write_sensitivities
from quantize.run import Run
from quantize.size.choose_types import TypeRules
from quantize.size.parse import parse_size
from quantize.size.show import (
    custom_q,
    map_lines,
    recipe_lines,
    rules_of,
    sized_lines,
    tensor_list_lines,
    tensor_type_lines,
)
from quantize.size.solve import SizeRequest, curve, size_mixture
from tests.quantize.model_files import made_up_losses, write_mixture_model

LOSSES = made_up_losses()
NO_GRIDS = TypeRules(fast_on=frozenset({"cpu"}))
"""Rules without types that need importances, which the files of this module lack."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sizing") / "model-f32.gguf"
    write_mixture_model(path)
    return path


@pytest.fixture
def planner(model: Path, tmp_path: Path) -> Callable[[Mixture], AbstractContextManager[Run]]:
    return partial(plan_run, model, tmp_path / "out.gguf", allow_problems=True)


@pytest.mark.parametrize("size", ["3.4bpw", "Q4_K_M", "Q2_K", "2500000"])
def test_the_file_has_the_chosen_types_and_keeps_to_the_size(
    size: str, planner: Callable[[Mixture], AbstractContextManager[Run]]
) -> None:
    sized = size_mixture(planner, SizeRequest(LOSSES, parse_size(size), rules=NO_GRIDS))
    with planner(sized.mixture) as run:
        result = run.execute()
    (path,) = result.paths
    assert path.stat().st_size == sized.total_bytes <= sized.budget
    assert sized.used > 0.98
    with open_gguf(path) as file:
        types = {name: file.tensors[name].type.name for name in LOSSES.tensors}
    assert types == sized.chosen.types


def test_a_recipe_s_own_size_is_spent_better(
    planner: Callable[[Mixture], AbstractContextManager[Run]],
) -> None:
    sized = size_mixture(planner, SizeRequest(LOSSES, parse_size("Q4_K_S"), rules=NO_GRIDS))
    with planner(Mixture(sized.base, sized.mixture.recipe)) as run:
        stock = {tensor.name: tensor.target_type.name for tensor in run.preparation.plan.tensors}
        assert sized.total_bytes <= run.preparation.total_bytes
    assert sized.base == "Q4_K_S"
    assert sized.chosen.predicted < LOSSES.predict(stock)


def test_two_budgets(planner: Callable[[Mixture], AbstractContextManager[Run]]) -> None:
    sized = size_mixture(planner, SizeRequest(LOSSES, vram=700_000, ram=2_000_000, rules=NO_GRIDS))
    with planner(sized.mixture) as run:
        infos = run.preparation.plan.infos
        experts = sum(info.n_bytes for info in infos if "_exps" in info.name)
        assert experts <= 2_000_000
        assert run.preparation.total_bytes - experts <= 700_000


def test_the_curve_falls(planner: Callable[[Mixture], AbstractContextManager[Run]]) -> None:
    request = SizeRequest(LOSSES, parse_size("Q4_K_M"), rules=NO_GRIDS)
    points = curve(size_mixture(planner, request), request, planner, n_points=6)
    assert len(points) == 6
    for (smaller, more), (larger, less) in pairwise(points):
        assert smaller <= larger
        assert more >= less


def test_the_report_names_every_rule(planner: Callable[[Mixture], AbstractContextManager[Run]]) -> None:
    sized = size_mixture(planner, SizeRequest(LOSSES, parse_size("3.4bpw"), rules=NO_GRIDS))
    head, predicted, *lines = sized_lines(sized)
    assert f"{sized.total_bytes:,} of the " in head
    assert f"{sized.chosen.predicted:.5f}" in predicted
    assert len(lines) == len(rules_of(sized.chosen.types))


def test_the_map_has_a_line_for_each_part_and_a_character_for_each_layer() -> None:
    types = {
        "token_embd.weight": "Q4_K", "blk.0.attn_q.weight": "Q2_K", "blk.1.ffn_down_exps.weight": "Q4_K",
        "blk.1.attn_q.weight": "Q6_K",
    }  # fmt: skip
    assert list(map_lines(types)) == [
        "types by layer: 1 Q2_K, 2 Q4_K, 3 Q6_K",
        "  token_embd     2",
        "  attn_q         13",
        "  ffn_down_exps  .2",
    ]


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (SizeRequest(LOSSES, parse_size("1bpw")), "bytes is too small: the smallest possible is"),
        (SizeRequest(LOSSES), "no size: expected one for the file, or both vram and ram"),
        (
            SizeRequest(Sensitivities({"x": LOSSES.tensors["output.weight"]}), parse_size("3bpw")),
            "another model",
        ),
    ],
)
def test_what_can_t_be_done_is_said(
    request_: SizeRequest, complaint: str, planner: Callable[[Mixture], AbstractContextManager[Run]]
) -> None:
    with pytest.raises(BadRequest) as caught:
        size_mixture(planner, request_)
    assert complaint in str(caught.value)


def test_the_smallest_file_that_is_named_can_be_had(
    planner: Callable[[Mixture], AbstractContextManager[Run]],
) -> None:
    request = SizeRequest(LOSSES, parse_size("1bpw"), rules=NO_GRIDS, base="Q2_K")
    with pytest.raises(BadRequest) as caught:
        size_mixture(planner, request)
    named = re.search(r"the smallest possible is ([\d,]+) bytes", str(caught.value))
    assert named is not None
    least = named[1].replace(",", "")
    sized = size_mixture(planner, replace(request, size=parse_size(least)))
    assert sized.total_bytes <= int(least)
    with pytest.raises(BadRequest, match="the smallest possible"):
        size_mixture(planner, replace(request, size=parse_size(str(int(least) - 1))))


@pytest.mark.parametrize("type_", [name for name in CODECS if needs_importances(name)])
def test_what_is_chosen_without_importances_is_what_the_planner_takes(
    type_: str, model: Path, tmp_path: Path
) -> None:
    """llama-quantize makes no such matrix, except of the embeddings and the output."""
    tensors = {
        name: replace(each, by_type={type_: 1e-6, "Q8_0": 1e-3}) for name, each in LOSSES.tensors.items()
    }
    strict = partial(plan_run, model, tmp_path / "out.gguf")
    sized = size_mixture(strict, SizeRequest(replace(LOSSES, tensors=tensors), parse_size("8.6bpw")))
    expected = {
        name: "Q8_0" if name.startswith("blk") or requires_importances(type_) else type_ for name in tensors
    }
    assert sized.chosen.types == expected


TYPES = {
    "token_embd.weight": "Q4_K", "blk.0.attn_k.weight": "Q4_K", "blk.1.attn_k.weight": "IQ4_XS",
    "blk.10.attn_k.weight": "Q4_K", "blk.1.attn_k_b.weight": "Q8_0",
}  # fmt: skip


def test_rules_mean_the_tensors_that_they_were_made_of() -> None:
    overrides = parse_overrides(rules_of(TYPES))
    assert len(overrides) == 4
    for name, type_ in TYPES.items():
        override = find_override(overrides, name)
        assert override is not None
        assert override.type.name == type_
    assert find_override(overrides, "blk.11.attn_k.weight") is None
    assert find_override(overrides, "blk.0.attn_k.weight.bias") is None


def test_a_recipe_file_reads_as_what_was_chosen(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(recipe_lines("mine", "Q4_K_M", TYPES, ["for a test"])))
    mixture = read_recipe_file(path)
    assert (mixture.name, mixture.recipe.name) == ("mine", "Q4_K_M")
    assert [override.text for override in mixture.options.overrides] == list(rules_of(TYPES))


def test_other_programs_notations() -> None:
    lines = list(tensor_type_lines(TYPES))
    assert lines[0] == r"^token_embd\.weight$=q4_K"
    assert r"^blk\.(0|10)\.attn_k\.weight$=q4_K" in lines
    assert [override.text for override in parse_override_file("\n".join(lines), "rules.txt")] == lines
    assert custom_q(TYPES).split(",") == lines
    assert list(tensor_list_lines(TYPES, ["why"]))[:2] == ["# why", r"^token_embd\.weight$=q4_K"]


def _run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def losses_file(tmp_path: Path) -> Path:
    write_sensitivities(LOSSES, tmp_path / "losses.json")
    return tmp_path / "losses.json"


def test_the_command_writes_the_file_and_its_recipe(
    model: Path, losses_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--size", "3.4bpw", "--losses", losses_file, "--fast-on", "cpu", "--tensor-type", "^output=Q6_K"]
    saves = [word for option in ("recipe", "tensor-types", "custom-q", "tensor-list")
             for word in (f"--save-{option}", tmp_path / f"{option}.yaml")]  # fmt: skip
    code, out, err = _run(capsys, *sizes, *saves, model, tmp_path / "out.gguf")
    assert code == 0, err
    assert out.startswith("types chosen: ")
    recipe = ["--tensor-type-file", tmp_path / "tensor-types.yaml", model, tmp_path / "again.gguf"]
    assert _run(capsys, *recipe, read_recipe_file(tmp_path / "recipe.yaml").recipe.name)[0] == 0
    same = [model, tmp_path / "third.gguf", tmp_path / "recipe.yaml"]
    assert _run(capsys, *same)[0] == 0
    names = ("out.gguf", "again.gguf", "third.gguf")
    contents = []
    for name in names:
        with open_gguf(tmp_path / name) as file:
            assert file.tensors["output.weight"].type.name == "Q6_K"
            tensors = file.tensors.items()
            contents.append({each: file.read_rows(each, 0, info.n_rows).tobytes() for each, info in tensors})
    assert contents[0] == contents[1] == contents[2]
    assert (tmp_path / names[1]).read_bytes() == (tmp_path / names[2]).read_bytes()


def test_a_dry_run_writes_nothing_but_what_is_asked_for(
    model: Path, losses_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--size", "Q3_K_M", "--losses", losses_file, "--fast-on", "cpu"]
    code, out, err = _run(
        capsys, "--dry-run", "--curve", tmp_path / "curve.svg", *sizes, model, tmp_path / "out.gguf"
    )
    assert code == 0, err
    assert "3.85bpw: " in out
    assert re.search(r"expected divergence \d\.\d{5} \(\d\.\d{5} to \d\.\d{5}\) nats a token", out)
    assert "types by layer: 1 " in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.svg", "losses.json"]
    svg = (tmp_path / "curve.svg").read_text()
    assert "predicted divergence" in svg
    assert "var(--chosen)" in svg
    assert "prefers-color-scheme: dark" in svg


@pytest.mark.parametrize(
    ("code", "words", "complaint"),
    [
        (1, ["--size", "1bpw", "--losses", "LOSSES"], "the smallest possible is"),
        (2, ["--size", "3.4", "--losses", "LOSSES"], "is 3.4bpw (bits per weight) or 3.4GiB meant?"),
        (2, ["--size", "3bpw"], "--losses FILE.json, or a text to measure it on with --sensitivity-text"),
        (2, ["--vram", "3GiB", "--losses", "LOSSES"], "--vram and --ram go together"),
        (2, ["--vram", "Q4_K_M", "--ram", "3GiB", "--losses", "L"], "'Q4_K_M': expected bytes"),
        (2, ["--size", "3bpw", "--vram", "3GiB", "--losses", "LOSSES"], "can't be used together"),
        (1, ["--size", "3bpw", "--losses", "nowhere.json"], "nowhere.json: can't be read"),
        (2, ["--size", "big", "--losses", "LOSSES"], "size 'big': expected one like 12.5GiB"),
    ],
)
def test_bad_arguments_get_one_line(
    code: int, words: list[str], complaint: str, model: Path, losses_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = [str(losses_file) if word == "LOSSES" else word for word in words]
    found, _, err = _run(capsys, *words, model, tmp_path / "out.gguf")
    assert found == code
    assert complaint in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.gguf").exists()
