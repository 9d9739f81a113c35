"""ConvertOptions as a value and as keyword arguments of `convert`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import convert
from convert.options import ConvertOptions
from gguf_tools import open_gguf
from quantize.run_options import RunOptions
from tests.support.checkpoints import micro_checkpoint
from tests.support.tokenizer_files import copy_tokenizer


def test_convert_has_four_arguments() -> None:
    assert list(inspect.signature(convert.convert).parameters) == [
        "folder", "outfile", "outtype", "options", "run", "choices"
    ]  # fmt: skip


def test_an_unknown_keyword_argument_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'out_type'; did you mean outtype"):
        convert.convert(tmp_path, out_type="bf16")  # type: ignore[call-arg]


def test_the_type_comes_third_as_in_quantize(tmp_path: Path) -> None:
    folder = copy_tokenizer("tiny", micro_checkpoint(tmp_path / "v3", "v3", vocab_size=4096))
    for number, result in enumerate(
        (
            convert.convert(folder, tmp_path / "0.gguf", "f32"),
            convert.convert(folder, tmp_path / "1.gguf", outtype="f32"),
            convert.convert(folder, tmp_path / "2.gguf", options=ConvertOptions(outtype="f32")),
        )
    ):
        assert result.preparation.plan.file_type == "F32", number
    with pytest.raises(TypeError, match=r"outtype: found a value of type convert\.options\.ConvertOptions"):
        convert.convert(folder, tmp_path / "3.gguf", ConvertOptions())  # type: ignore[arg-type]


def test_keyword_arguments_replace_fields_of_the_options(tmp_path: Path) -> None:
    folder = copy_tokenizer("tiny", micro_checkpoint(tmp_path / "v3", "v3", vocab_size=4096))
    options = ConvertOptions(vocab_only=True, model_name="Given")
    run = RunOptions(n_threads=1)
    convert.convert(folder, tmp_path / "vocab.gguf", options=options, run=run, model_name="Replaced")
    with open_gguf(tmp_path / "vocab.gguf") as file:
        assert (file.get("general.name"), len(file.tensors)) == ("Replaced", 0)


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        (ConvertOptions(), {}),
        (ConvertOptions(mla="both"), {"mla": "both"}),
        (ConvertOptions(mtp=False, family={"rope_rows": "pairs"}), {"mtp": False, "rope_rows": "pairs"}),
    ],
)
def test_only_given_options_reach_the_family(options: ConvertOptions, choices: dict[str, object]) -> None:
    assert options.family_choices == choices
