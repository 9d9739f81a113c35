"""A family is a module with FAMILIES: one that the project doesn't know, registered, goes all the way."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import convert
import gguf_tools.commands.convert
import gguf_tools.commands.main
import gguf_tools.commands.quantize
import quantize
from convert import architectures
from convert.architectures.options import DECLARED
from gguf_tools import open_gguf
from gguf_tools.errors import MissingTensor, UnexpectedTensors, UnsupportedCheckpoint
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.shards import GGUFSet
from imatrix.forward.open import open_model
from quantize import Importance
from tests.contract.import_graph import PACKAGES, files_of
from tests.end_to_end.toy_family.checkpoint import CONFIG, toy_checkpoint
from tests.end_to_end.toy_family.family import NAME, ToyOptions
from tests.support.checkpoints import STYLES, edit_config, edit_tensors, micro_checkpoint, read_tensors
from tests.support.published_models import write as write_published
from tests.support.tokenizer_files import copy_tokenizer


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the family's module and its options; nothing else knows of it."""
    register("tests.end_to_end.toy_family.family", monkeypatch)
    monkeypatch.setattr(gguf_tools.commands.convert, "DECLARED", (*DECLARED, ToyOptions))


def register(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "MODULES", (*architectures.MODULES, module))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return toy_checkpoint(tmp_path / "toy")


def pairs(weight: np.ndarray) -> np.ndarray:
    """Return rows i and i + half of each head side by side, by reshaping."""
    heads = weight.reshape(-1, 2, CONFIG["head_dim"] // 2, weight.shape[-1])
    return heads.transpose(0, 2, 1, 3).reshape(weight.shape)


def float32(file: GGUFSet, name: str) -> np.ndarray:
    return file.raw(name).view(np.float32).reshape(file.tensors[name].shape)


def test_every_tensor_and_key_is_in_the_file(toy: Path, tmp_path: Path) -> None:
    stored = read_tensors(toy)
    convert.convert(toy, tmp_path / "toy.gguf", outtype="f32")
    with open_gguf(tmp_path / "toy.gguf") as file:
        assert file.get("general.architecture") == "toy"
        assert file.get("toy.block_count") == 2
        assert file.get("toy.attention.head_count_kv") == 2
        assert len(file.tensors) == len(stored)
        for name, source, arranged in [
            ("token_embd.weight", "model.embed_tokens.weight", False),
            ("output_norm.weight", "model.norm.weight", False),
            ("output.weight", "lm_head.weight", False),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", True),
            ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight", True),
            ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight", False),
            ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", False),
        ]:
            expected = stored[source].astype(np.float32)
            assert file.tensors[name].type == F32
            assert np.array_equal(float32(file, name), pairs(expected) if arranged else expected), name


def test_stored_rows_are_copied_into_their_new_places(toy: Path, tmp_path: Path) -> None:
    stored = read_tensors(toy)["model.layers.0.self_attn.q_proj.weight"]
    convert.convert(toy, tmp_path / "toy.gguf", outtype="auto")
    with open_gguf(tmp_path / "toy.gguf") as file:
        rows = file.raw("blk.0.attn_q.weight").view(stored.dtype).reshape(stored.shape)
    assert np.array_equal(rows, pairs(stored))


def test_one_pass_to_a_mixture_equals_two(toy: Path, tmp_path: Path) -> None:
    importances = {
        f"blk.{layer}.ffn_up.weight": Importance(
            np.linspace(1, 2, CONFIG["hidden_size"], dtype=np.float32)[None], np.array([64])
        )
        for layer in range(2)
    }
    data = quantize.ImportanceFile(importances)
    convert.convert(toy, tmp_path / "f32.gguf", outtype="f32")
    quantize.quantize(
        tmp_path / "f32.gguf", tmp_path / "two.gguf", "Q4_K_M", importances=data, provenance=False
    )
    convert.convert(toy, tmp_path / "one.gguf", outtype="Q4_K_M", importances=data, provenance=False)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    with open_gguf(tmp_path / "one.gguf") as file:
        assert {"Q4_K", "Q6_K", "F32"} == {tensor.type.name for tensor in file.tensors.values()}


def test_the_commands_take_it_from_folder_to_verified_file(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    f32, q4 = tmp_path / "toy-f32.gguf", tmp_path / "toy-Q4_K_M.gguf"
    assert (
        gguf_tools.commands.convert.main([str(toy), "--outfile", str(q4), "--outtype", "Q4_K_M", "--dry-run"])
        == 0
    )
    assert "BF16 -> Q4_K" in capsys.readouterr().out
    assert not q4.exists()
    assert gguf_tools.commands.convert.main([str(toy), "--outfile", str(q4), "--outtype", "Q4_K_M"]) == 0
    assert gguf_tools.commands.convert.main([str(toy), "--outfile", str(f32), "--outtype", "f32"]) == 0
    assert gguf_tools.commands.quantize.main(["lint", "Q4_K_M", str(f32)]) == 0
    assert gguf_tools.commands.quantize.main(["--dry-run", str(toy), "Q4_K_M"]) == 0
    assert gguf_tools.commands.main.main(["verify", str(q4)]) == 0
    assert gguf_tools.commands.main.main(["show", str(q4)]) == 0
    capsys.readouterr()
    assert gguf_tools.commands.main.main(["checkpoint", "--json", str(toy)]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == len(read_tensors(toy))


def test_the_tokenizer_alone(toy: Path, tmp_path: Path) -> None:
    convert.convert(toy, tmp_path / "vocab.gguf", vocab_only=True)
    with open_gguf(tmp_path / "vocab.gguf") as file:
        assert (len(file.tensors), file.get("toy.embedding_length")) == (0, CONFIG["hidden_size"])


def test_it_is_listed_among_the_supported(capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_tools.commands.convert.main(["--print-supported-models"]) == 0
    assert NAME in capsys.readouterr().out.splitlines()


# ---- its own option


def test_its_option_is_a_flag_and_an_argument(toy: Path, tmp_path: Path) -> None:
    stored = read_tensors(toy)["model.layers.0.self_attn.q_proj.weight"].astype(np.float32)
    words = [str(toy), "--outtype", "f32", "--rope-rows", "halves", "--outfile"]
    assert gguf_tools.commands.convert.main([*words, str(tmp_path / "flag.gguf")]) == 0
    convert.convert(toy, tmp_path / "argument.gguf", outtype="f32", family={"rope_rows": "halves"})
    for name in ("flag", "argument"):
        with open_gguf(tmp_path / f"{name}.gguf") as file:
            assert np.array_equal(float32(file, "blk.0.attn_q.weight"), stored)


@pytest.mark.parametrize("more", [[], ["--vocab-only"], ["--dry-run"]])
def test_an_option_of_another_family_is_refused(
    more: list[str], toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--outfile", str(tmp_path / "toy.gguf"), *more]
    assert gguf_tools.commands.convert.main([str(toy), "--mtp", *out]) == 1
    assert capsys.readouterr().err == f"convert-hf-to-gguf: error: --mtp: {NAME} has no such option\n"
    deepseek = copy_tokenizer("tiny", micro_checkpoint(tmp_path / "v3", "v3", vocab_size=4096))
    assert gguf_tools.commands.convert.main([str(deepseek), "--rope-rows", "pairs", *out]) == 1
    architecture = STYLES["v3"]["architectures"][0]
    assert capsys.readouterr().err.endswith(f"error: --rope-rows: {architecture} has no such option\n")
    assert not (tmp_path / "toy.gguf").exists()


# ---- what is wrong is named


def test_a_missing_and_an_unexpected_tensor_are_named(toy: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(toy, lambda tensors: tensors.update({"model.extra": tensors["model.norm.weight"]}))
    with pytest.raises(UnexpectedTensors, match=r"unexpected 1 tensor: model\.extra"):
        convert.convert(toy, tmp_path / "toy.gguf")
    edit_tensors(toy, lambda tensors: tensors.pop(name))
    with pytest.raises(MissingTensor, match=rf"missing 1 tensor: {name}.*no rule claims 1 tensor: model"):
        convert.convert(toy, tmp_path / "toy.gguf")


def test_the_forward_pass_says_which_families_it_knows(toy: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"general\.architecture is 'toy': convert-hf-to-gguf"):
        open_model(toy)


# ---- the page that says how to add one

PAGE = Path(__file__).parents[2] / "docs" / "add-a-family.md"


def code_of_the_page() -> list[tuple[str, str]]:
    """Return the pieces of code that the page shows, each with the file that it is of."""
    block = r"^`(\S+\.py)`:\n\n```python\n(.*?)```$"
    return re.findall(block, PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_is_the_code() -> None:
    code = code_of_the_page()
    assert len(code) == PAGE.read_text().count("```python") == 4
    for name, text in code:
        assert text in (PAGE.parents[1] / name).read_text(), name


def convert_as_page(folder: Path, block: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register a block of the page under another name, and convert a folder with it and without.

    block   name of the family in the block, which stands in the module `source`
    """
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    (text,) = (text for path, text in code_of_the_page() if path.endswith(source))
    head, *_ = (PAGE.parents[1] / "convert/architectures" / source).read_text().partition("# ----")
    text = text.replace(name, "PageForCausalLM")
    (folder.parent / "family_of_the_page.py").write_text(f"{head}{text}\nFAMILIES = ({block},)\n")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "family_of_the_page", raising=False)
    register("family_of_the_page", monkeypatch)
    convert.convert(folder, folder / "expected.gguf", outtype="bf16")
    edit_config(folder, architectures=["PageForCausalLM"])
    convert.convert(folder, folder / "out.gguf", outtype="bf16")
    assert (folder / "out.gguf").read_bytes() == (folder / "expected.gguf").read_bytes()


def test_the_family_of_the_page_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered under another name, it makes of a Seed-OSS what the project does, which is computed."""
    folder = write_published("seed-oss", tmp_path / "model")
    convert_as_page(folder, "_SEED_OSS", "dense.py", monkeypatch)
    with open_model(folder / "out.gguf") as source:
        assert source.network.n_layers == 3


def test_the_relative_of_the_page_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered under another name, it makes of a Youtu what the project does."""
    folder = copy_tokenizer("tiny", micro_checkpoint(tmp_path / "model", "v3", vocab_size=4096))
    edit_config(folder, architectures=["YoutuForCausalLM"], routed_scaling_factor=None)
    convert_as_page(folder, "_YOUTU", "deepseek2/relatives.py", monkeypatch)


def test_the_page_names_every_place_of_an_ordinary_family() -> None:
    """Those in the library that name Seed-OSS: it is in no table besides."""
    root = PAGE.parents[1]
    files = (path for package in PACKAGES for path in files_of(package))
    naming = {str(path) for path in files if re.search("seed_?oss", (root / path).read_text(), re.IGNORECASE)}
    places = PAGE.read_text().partition("## The two places")[2].partition("##")[0]
    places = places.partition("The family has all")[0]
    assert naming == set(re.findall(r"`((?:convert|gguf_tools)/\S+?\.py)`", places))
    assert len(naming) == 2


def test_its_lines_are_counted_right() -> None:
    """A row is a module, a folder without the relatives that have rows, or the block under a heading."""
    folder = Path(architectures.__file__).parent
    blocks = [
        block
        for path in folder.glob("**/*.py")
        for block in re.split("^(?=# ---- )|^(?=FAMILIES)", path.read_text(), flags=re.MULTILINE)
    ]
    rows = re.findall(r"\| ([\w`. -]+) \| (\d+) (?=\|)", PAGE.read_text().split("## How many lines")[1])
    assert len(rows) > 30
    modules = {name.strip("`") for name, _ in rows if "`" in name}
    for family, lines in rows:
        name = family.strip("`")
        if name == family:
            (found,) = (block.rstrip() for block in blocks if re.match(rf"# ---- {name}\b", block))
        else:
            inside = (path for path in (folder / name).glob("*.py") if path.stem not in modules)
            found = "".join(path.read_text() for path in (*folder.glob(f"**/{name}.py"), *inside))
        count = len(found.splitlines())
        assert abs(count - int(lines)) <= 0.1 * count, (family, count)
