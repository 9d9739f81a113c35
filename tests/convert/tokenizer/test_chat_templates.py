"""Chat templates: which file is believed, and which text is no template."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.files import MAX_PARSED
from gguf_tools.errors import BadTokenizer
from tests.convert.tokenizer.small_tokenizers import put, read, small

GOLDEN = Path(__file__).parents[2] / "golden" / "chat"


def chat_keys(folder: Path) -> dict[str, Any]:
    metadata = read(folder).metadata()
    return {key.removeprefix("tokenizer."): value.data for key, value in metadata.items() if "chat" in key}


def test_chat_template_of_tokenizer_config(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small(), tokenizer_config_json={"chat_template": "{{ x }}"})
    assert chat_keys(tmp_path) == {"chat_template": "{{ x }}"}


def test_chat_template_file_is_used_before_the_config(tmp_path: Path) -> None:
    put(
        tmp_path,
        tokenizer_json=small(),
        tokenizer_config_json={"chat_template": "old"},
        chat_template_jinja="new",
    )
    assert chat_keys(tmp_path) == {"chat_template": "new"}
    assert any("tokenizer_config.json has another one" in note for note in read(tmp_path).notes)


def test_additional_chat_templates(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    put(tmp_path / "additional_chat_templates", **{"tool-use_jinja": "t"})
    put(tmp_path, tokenizer_json=small(), chat_template_jinja="d")
    assert list(chat_keys(tmp_path).items()) == [
        ("chat_template.tool_use", "t"), ("chat_templates", ("tool_use",)), ("chat_template", "d"),
    ]  # fmt: skip


def test_list_of_named_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    put(tmp_path, tokenizer_json=small(), tokenizer_config_json={"chat_template": templates})
    assert chat_keys(tmp_path) == {"chat_template.rag": "r", "chat_templates": ("rag",), "chat_template": "d"}


def test_chat_template_json(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small(), chat_template_json={"chat_template": "j"})
    assert chat_keys(tmp_path) == {"chat_template": "j"}


def test_chat_template_of_a_processor(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small(), processor_config_json={"chat_template": "p"})
    assert chat_keys(tmp_path) == {"chat_template": "p"}
    put(tmp_path, chat_template_json={"chat_template": "j"})
    assert chat_keys(tmp_path) == {"chat_template": "j"}


@pytest.mark.parametrize("entry", [7, [{"name": "x"}], ["x"], {"default": "x"}])
def test_a_chat_template_that_is_none(entry: Any, tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small(), tokenizer_config_json={"chat_template": entry})
    with pytest.raises(BadTokenizer, match="chat_template is neither a text nor a list"):
        read(tmp_path)


# --- texts that are no templates ------------------------------------------------------------------------

BROKEN: dict[str, tuple[str, str]] = {
    "cut short": ("{% for m in messages %}\n{{ m.content }{% endfor %}", "line 2: unexpected '}'"),
    "an open block": ("\n\n{% if x %}x", "line 3: Unexpected end of template"),
    "an unknown tag": ("{% iff x %}", "line 1: Encountered unknown tag 'iff'"),
    "an unknown filter": ("\n{{ x | shouted }}", "line 2: No filter named 'shouted'"),
    "an unknown test": ("{{ x is odd_one }}", "line 1: No test named 'odd_one'"),
    "an open expression": ("{{ x", "line 1: unexpected end of template"),
    "nested too deeply": ("{{ " + "(" * 2000 + "x" + ")" * 2000 + " }}", "maximum recursion depth"),
    "a number of many digits": ("{{ " + "1" * 5000 + " }}", "Exceeds the limit"),
}


@pytest.mark.parametrize(("template", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_a_template_that_does_not_parse_is_noted(template: str, why: str, tmp_path: Path) -> None:
    alone = {"chat_template": template}
    named = [{"name": "default", "template": "fine"}, {"name": "tools", "template": template}]
    places: dict[str, dict[str, Any]] = {
        "chat_template.jinja": {"chat_template_jinja": template},
        "tokenizer_config.json: chat template 'default'": {"tokenizer_config_json": alone},
        "tokenizer_config.json: chat template 'tools'": {"tokenizer_config_json": {"chat_template": named}},
        "chat_template.json: chat template 'default'": {"chat_template_json": alone},
        "processor_config.json: chat template 'default'": {"processor_config_json": alone},
    }
    for number, (place, files) in enumerate(places.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer = read(put(folder, tokenizer_json=small(), **files))
        found = [note for note in tokenizer.notes if "no valid template" in note]
        assert [note.startswith(f"{place} is no valid template") for note in found] == [True]
        assert why in found[0]
        assert template in (tokenizer.chat_templates.default, *tokenizer.chat_templates.named.values())


def test_templates_that_parse_are_not_noted(tmp_path: Path) -> None:
    """Those of published models, and what transformers adds to jinja2."""
    (tmp_path / "additional_chat_templates").mkdir()
    for path in GOLDEN.glob("*.jinja"):
        (tmp_path / "additional_chat_templates" / path.name).write_bytes(path.read_bytes())
    theirs = "{% for m in x %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    put(tmp_path, tokenizer_json=small(), chat_template_jinja=theirs)
    assert [note for note in read(tmp_path).notes if "template:" in note] == []


def test_only_so_much_is_parsed(tmp_path: Path) -> None:
    put(tmp_path, tokenizer_json=small(), chat_template_jinja="{{ x" + " " * MAX_PARSED)
    assert [note for note in read(tmp_path).notes if "template:" in note] == []


def test_jinja2_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "jinja2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "gguf_tools.scanning.templates.rendering", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    put(tmp_path, tokenizer_json=small(), chat_template_jinja="{{ x")
    assert read(tmp_path).chat_templates.default == "{{ x"
