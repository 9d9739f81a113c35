"""What messages quote of strangers' files: cut short, and without what would control a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from convert.architectures.config_reader import Fields, unread_notes
from convert.audit.metadata import metadata_findings
from convert.audit.report import where_text
from convert.tokenizer.files import _broken_templates
from convert.tokenizer.pretokenizers import find_pre_tokenizer
from gguf_tools.commands.convert import main as convert
from gguf_tools.errors import BadRequest, ToolkitError
from gguf_tools.expressions import parse_expression
from gguf_tools.files.documents import parse_yaml
from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.values import Value

EXAMPLE = Path(__file__).parents[2] / "examples" / "small-llama"
LONG = "Z" * 10_000
HOSTILE = "\x1b[31m" + LONG


def is_short(text: str) -> bool:
    return "Z" * 81 not in text and text.isprintable()


def test_an_error_has_nothing_that_controls_a_terminal() -> None:
    assert str(BadRequest("a\x1b[31m\u202e\nb")) == r"a\x1b[31m\u202e\nb"


@pytest.mark.parametrize(
    "text",
    [
        f"a: !{LONG}!x y",
        f"a: !<{LONG}> y",
        f"%YAML 1.{'9' * 5000}\n---\na: 1",
        f'a: "\\x{LONG}"',
        f"a: [{LONG}",
        f"a: &{LONG} 1\nb: *{LONG}x",
    ],
)
def test_yaml_of_any_words_is_told_shortly(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_yaml("suite.yaml", text)
    assert is_short(str(caught.value))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "text", [f"(?P<1{LONG}>x)", f"(?P={LONG})", f"\\N{{{LONG}}}", f"(?P<{LONG}>x)(?P={LONG}y)"]
)
def test_an_expression_of_any_words_is_told_shortly(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_expression(text)
    assert is_short(str(caught.value))


def test_a_replacement_is_told_shortly() -> None:
    with pytest.raises(BadRequest) as caught:
        parse_expression("(a)").replaced(f"\\g<{LONG}>", "a")
    assert is_short(str(caught.value))


@pytest.mark.parametrize("template", [f"{{{{ x|{LONG} }}}}", f"{{% {LONG} %}}", "{{ 'a' " + LONG + " }}"])
def test_a_template_is_told_shortly(template: str) -> None:
    (note,) = _broken_templates({"default": template}, None)
    assert is_short(note)


def test_fields_that_nothing_reads_are_told_shortly() -> None:
    config = {"architectures": ["LlamaForCausalLM"], HOSTILE: 1} | {f"field_{n}": n for n in range(1000)}
    (note,) = unread_notes(Fields(config))
    assert is_short(note)
    assert len(note) < 1000
    assert "field_1, " in note
    assert note.endswith(" and 961 more")


@pytest.mark.parametrize("extra", [[], ["--mmproj"]])
def test_an_architecture_is_told_shortly(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"architectures": [HOSTILE]}))
    assert convert([str(tmp_path / "m"), "--outfile", str(tmp_path / "o.gguf"), *extra]) == 1
    said = capsys.readouterr().err
    assert is_short(said.strip())


def test_an_affix_that_the_library_panics_at_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(EXAMPLE, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["continuing_subword_prefix"] = HOSTILE
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert convert([str(folder), "--outfile", str(tmp_path / "o.gguf"), "--dry-run", "--quiet"]) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "continuing_subword_prefix" in said
    assert is_short(said.strip())


def test_a_pre_tokenizer_is_told_shortly() -> None:
    split = {"type": "Split", "pattern": {"Regex": f"a|{LONG}"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(ToolkitError, match="pre-tokenizer not recognised: found split ") as caught:
        find_pre_tokenizer(Path("tokenizer.json"), split, ignore_merges=False)
    assert is_short(str(caught.value))


def test_a_merge_is_told_shortly() -> None:
    from imatrix.texts.tokens import make_encoder

    vocab = VOCAB | {keys.TOKENIZER_MODEL: Value.string("gpt2"), keys.TOKENIZER_PRE: Value.string("gpt-2")}
    with pytest.raises(ToolkitError, match="can't use the vocabulary") as caught:
        make_encoder(vocab | {MERGES: Value.strings([f"{HOSTILE} {HOSTILE}"])})
    assert is_short(str(caught.value))


def test_a_key_is_cut_in_an_audit() -> None:
    assert len(where_text(Finding("metadata", "x", Level.NOTE, (HOSTILE,)))) < 250


TOKENS, KINDS, MERGES = keys.TOKENIZER_TOKENS, keys.TOKENIZER_TOKEN_TYPE, keys.TOKENIZER_MERGES
VOCAB = {TOKENS: Value.strings(["a", "b"]), KINDS: Value.i32s([1, 1]), MERGES: Value.strings(["a b"])}


@pytest.mark.parametrize("key", VOCAB)
@pytest.mark.parametrize(
    "value", [Value.u64(2**64 - 1), Value.string("ab"), Value.i32s([]), Value.f32s([1.5, 2.5])]
)
def test_keys_of_another_type_are_found(key: str, value: Value) -> None:
    for found, wanted in ((VOCAB | {key: value}, VOCAB), (VOCAB, VOCAB | {key: value})):
        assert [each.about for each in metadata_findings(found, wanted, "f")] == [(key,)]


def test_a_vocabulary_of_another_type_is_refused() -> None:
    from imatrix.texts.tokens import Vocabulary

    for key, value in ((TOKENS, Value.u64(1)), (KINDS, Value.strings(["a"])), (MERGES, Value.string(LONG))):
        with pytest.raises(ToolkitError, match=f"^m: {key} is .*, expected array of "):
            Vocabulary(VOCAB | {key: value}, Path("m"))
    assert Vocabulary(VOCAB | {keys.TOKENIZER_BOS_ID: Value.i32(1)})


def test_a_bos_beyond_the_tokens_is_refused() -> None:
    from imatrix.texts.tokens import bos_of

    vocab = VOCAB | {keys.TOKENIZER_ADD_BOS: Value.bool_(True), keys.TOKENIZER_MODEL: Value.string("gpt2")}
    vocab[keys.TOKENIZER_BOS_ID] = Value.u64(2**64 - 1)
    with pytest.raises(ToolkitError, match="expected one of 2 tokens"):
        bos_of(vocab)
