from __future__ import annotations

import json
from pathlib import Path

import pytest

from gguf_tools.errors import BadOverride, BadRequest
from gguf_tools.format.ggml_types import F16, Q5_0, Q8_0
from quantize.plan.decide import PlanOptions
from quantize.plan.overrides import parse_overrides
from quantize.plan.recipe_files import find_mixture, is_recipe_file, read_recipe_file
from quantize.plan.recipes import RECIPES

YAML = r"""
name: attention-8bit
file_type: q4_k_m
tensor-type:
  - blk\.[0-3]\.attn_output=Q8_0
  - ffn_down_exps=Q6_K
fallback: [attn_k_b=Q8_0]
output-tensor-type: Q8_0
token-embedding-type: f16
pure: false
leave-output-tensor: true
"""

SAME_AS_JSON = json.dumps(
    {
        "name": "attention-8bit",
        "file_type": "Q4_K_M",
        "tensor-type": [r"blk\.[0-3]\.attn_output=Q8_0", "ffn_down_exps=Q6_K"],
        "fallback": ["attn_k_b=Q8_0"],
        "output-tensor-type": "Q8_0",
        "token-embedding-type": "F16",
        "pure": False,
        "leave-output-tensor": True,
    },
    indent="\t",
)


@pytest.mark.parametrize(("ending", "text"), [("yaml", YAML), ("YML", YAML), ("json", SAME_AS_JSON)])
def test_every_key(tmp_path: Path, ending: str, text: str) -> None:
    path = tmp_path / f"recipe.{ending}"
    path.write_text(text)
    mixture = find_mixture(str(path))
    assert mixture.name == "attention-8bit"
    assert mixture.recipe is RECIPES["Q4_K_M"]
    assert mixture.options == PlanOptions(
        overrides=parse_overrides([r"blk\.[0-3]\.attn_output=Q8_0", "ffn_down_exps=Q6_K"]),
        fallbacks=parse_overrides(["attn_k_b=Q8_0"]),
        output_type=Q8_0,
        embedding_type=F16,
        leave_output=True,
    )


def test_only_the_file_type_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "small one.yaml"
    path.write_text("file_type: '15'\n")
    mixture = read_recipe_file(path)
    assert (mixture.name, mixture.recipe.name) == ("small one", "Q4_K_M")
    assert mixture.options == PlanOptions()


def test_a_file_type_is_a_mixture_without_options() -> None:
    mixture = find_mixture("q4_k")
    assert (mixture.name, mixture.options) == ("Q4_K_M", PlanOptions())
    with pytest.raises(BadRequest, match="unknown file type"):
        find_mixture("recipe.toml")


def test_endings() -> None:
    assert all(map(is_recipe_file, ("a.json", "b.yaml", "c/d.YML")))
    assert not any(map(is_recipe_file, ("Q4_K_M", "json", "a.json.gguf")))


def test_options_go_on_top(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "file_type: Q4_0\ntensor-type: [a=Q8_0]\nfallback: [k=Q8_0]\noutput-tensor-type: F16\npure: true\n"
    )
    options = PlanOptions(
        overrides=parse_overrides(["b=Q5_0"]),
        fallbacks=parse_overrides(["k=Q5_0"]),
        embedding_type=Q5_0,
        prune_layers=(1,),
    )
    merged = read_recipe_file(path).with_options(options).options
    assert [override.text for override in merged.overrides] == ["b=Q5_0", "a=Q8_0"]
    assert [override.text for override in merged.fallbacks] == ["k=Q5_0", "k=Q8_0"]
    assert (merged.output_type, merged.embedding_type, merged.pure) == (F16, Q5_0, True)
    assert merged.prune_layers == (1,)
    over = read_recipe_file(path).with_options(PlanOptions(output_type=Q8_0)).options
    assert over.output_type == Q8_0


@pytest.mark.parametrize(
    ("ending", "text", "complaint"),
    [
        ("yaml", "", "found no keys, expected at least file_type: TYPE"),
        ("yaml", "Q4_0", "found no keys"),
        ("json", "[]", "found no keys"),
        ("yaml", "pure: true", "file_type is missing, expected a file type such as Q4_K_M"),
        ("yaml", "file_type: Q9", "file_type: unknown file type 'Q9'; quantize --help lists"),
        ("yaml", "file_type: 15", "file_type: found 15, expected a file type such as Q4_K_M"),
        ("yaml", "file_type: Q4_0\nfile_type: Q5_0", "key 'file_type' is given twice"),
        ("json", '{"file_type": "Q4_0", "file_type": "Q5_0"}', "key 'file_type' is given twice"),
        ("yaml", "file_type: Q4_0\ntensor_type: []", "unknown key 'tensor_type', expected one of name"),
        ("yaml", "file_type: Q4_0\n5: 6", "unknown key 5, expected one of name"),
        ("yaml", "file_type: Q4_0\npure: 'yes'", 'pure: found \'yes\', expected true or false'),
        ("json", '{"file_type": "Q4_0", "pure": 1}', "pure: found 1, expected true or false"),
        ("yaml", "file_type: Q4_0\nname:", "name: found null, expected a name"),
        ("yaml", "file_type: Q4_0\nname: ../a", "name: found '../a', expected up to 80 letters, digits"),
        ("yaml", "file_type: Q4_0\ntensor-type: a=Q8_0", 'tensor-type: found \'a=Q8_0\', expected a list'),
        ("yaml", "file_type: Q4_0\ntensor-type: {a: Q8_0}", "expected a list of REGEX=TYPE"),
        ("yaml", "file_type: Q4_0\ntensor-type: [a: Q8_0]", "expected REGEX=TYPE"),
        ("yaml", "file_type: Q4_0\ntensor-type: [a=Q99]", "tensor-type: 'a=Q99': 'Q99' is not a ggml type"),
        ("yaml", "file_type: Q4_0\nfallback: ['(=Q4_0']", r"fallback: '\(=Q4_0': '\(' is not a regular"),
        ("yaml", "file_type: Q4_0\noutput-tensor-type: Q4_K_M", "type: Q4_K_M is a mixture"),
        ("yaml", "file_type: [", "line 1, column 13: expected the node content"),
        ("yaml", "? [a]\n: 3", "line 1: a key is \\['a'\\], expected a text"),
        ("yaml", "file_type: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("yaml", "\x07", "special characters are not allowed"),
        ("json", '{"file_type": "Q4_0",}', "line 1, column 22: "),
        ("json", "[" * 100_000, "nested too deeply"),
        ("yaml", "[" * 10_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(tmp_path: Path, ending: str, text: str, complaint: str) -> None:
    path = tmp_path / f"recipe.{ending}"
    path.write_text(text)
    with pytest.raises(BadOverride, match=complaint) as error:
        read_recipe_file(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_recipe_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"file_type: \xff")
    with pytest.raises(BadRequest, match="not UTF-8 at byte 11"):
        read_recipe_file(path)
    with pytest.raises(BadRequest, match="can't be read"):
        find_mixture(str(tmp_path / "none.yaml"))


def test_custom_q_comes_after_tensor_types(tmp_path: Path) -> None:
    path = tmp_path / "for-ik.yaml"
    rules = "custom-q: ffn_up=iq3_k,ffn_=iq4_ks\ntensor-type: [ffn_up_exps=Q8_0]\n"
    path.write_text(f"file_type: IQ4_KSS\n{rules}")
    mixture = read_recipe_file(path)
    assert mixture.recipe.name == "IQ4_KSS"
    assert mixture.options.overrides == parse_overrides(["ffn_up_exps=Q8_0", "ffn_up=iq3_k", "ffn_=iq4_ks"])
    path.write_text("file_type: IQ4_KSS\ncustom-q: [ffn_up=iq3_k]\n")
    with pytest.raises(BadOverride, match=r"custom-q: found .* expected REGEX=TYPE,"):
        read_recipe_file(path)
