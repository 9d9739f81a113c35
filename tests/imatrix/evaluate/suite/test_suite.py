"""Suites are read as they are written, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gguf_tools.errors import BadRequest
from imatrix.texts.suite import Suite, TextClass, read_suite

ASKED = {"role": "user", "content": "Add"}
CHAT = json.dumps({"messages": [ASKED, {"role": "assistant", "content": "Hello"}]})
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

CALLED = '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]}'


def lay(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def shape(of: Suite) -> dict[str, tuple[str, int, str, list[str]]]:
    return {
        each.name: (each.read, each.context, each.scored, [text.name for text in each.texts])
        for each in of.classes
    }


def test_a_folder_is_classes(tmp_path: Path) -> None:
    folder = lay(tmp_path, {
        "prose.txt": "a", "talk.jsonl": CHAT, "code/b.py": "b", "code/deep/a.rs": "c", "code/LICENSE": "x",
        "README.md": "about", ".hidden": "no", "manifest.yaml": "a: b",
    })  # fmt: skip
    assert shape(read_suite(folder)) == {
        "code": ("plain", 512, "second-half", ["code/b.py", "code/deep/a.rs"]),
        "prose": ("plain", 512, "second-half", ["prose.txt"]),
        "talk": ("chat", 512, "assistant", ["talk.jsonl"]),
    }


def test_a_folder_may_have_a_file_that_says_more(tmp_path: Path) -> None:
    lay(tmp_path, {"suite.yaml": "title: Mine\ncontext: 64", "a.txt": "a", "b.txt": "b"})
    suite = read_suite(tmp_path, quick=True)
    assert (suite.name, suite.title, suite.quick) == (tmp_path.name, "Mine", True)
    assert shape(suite) == {
        "a": ("plain", 64, "second-half", ["a.txt"]), "b": ("plain", 64, "second-half", ["b.txt"]),
    }  # fmt: skip


def test_a_yaml_file_names_classes(tmp_path: Path) -> None:
    lay(tmp_path, {
        "mine.yaml": """
            context: 100
            classes:
              letters: {texts: [l/*.txt, more.md, l/b.txt], title: Letters, scored: all}
              talk: {texts: t.jsonl, context: 9, scored: all, template: x.jinja}
              raw: {texts: [t.jsonl], read: plain}
              more:
              dull: {texts: t.jsonl, template: plain}
        """,
        "l/b.txt": "b", "l/a.txt": "a", "l/.c.txt": b"\xff", "more.md": "m", "x.jinja": "{{ 1 }}",
        "t.jsonl": f"{CHAT}\n\n{CHAT}\n",
    })  # fmt: skip
    suite = read_suite(tmp_path / "mine.yaml")
    assert suite.name == "mine"
    assert shape(suite) == {
        "letters": ("plain", 100, "all", ["l/a.txt", "l/b.txt", "more.md"]),
        "talk": ("chat", 9, "all", ["t.jsonl"]),
        "raw": ("plain", 100, "second-half", ["t.jsonl"]),
        "more": ("plain", 100, "second-half", ["more.md"]),
        "dull": ("chat", 100, "assistant", ["t.jsonl"]),
    }
    letters, talk, raw, _, dull = suite.classes
    assert letters.title == "Letters"
    assert talk.template is not None
    assert (talk.template.name, talk.template.source) == ("x.jinja", "{{ 1 }}")
    assert dull.template is not None
    assert dull.template.name == "plain"
    assert [len(each.conversations) for each in (talk, raw)] == [2, 0]
    assert talk.conversations[1].place.endswith("t.jsonl: line 3")


def test_a_suite_is_shown_in_a_few_words(tmp_path: Path) -> None:
    assert len(repr(read_suite(lay(tmp_path, {"a.txt": "a" * 9999, "t.jsonl": CHAT})))) < 600


def test_arguments_of_calls_become_objects(tmp_path: Path) -> None:
    line = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    lay(tmp_path, {"t.jsonl": json.dumps(line)})
    message = only(read_suite(tmp_path)).conversations[0].messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def only(suite: Suite) -> TextClass:
    (found,) = suite.classes
    return found


def classes(said: str) -> dict[str, str | bytes]:
    return {"s.yaml": f"classes:\n  one:\n    texts: a.txt\n    {said}\n", "a.txt": "a", "t.jsonl": CHAT}


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"s.yaml": "a: b: c"}, r"e.yaml: line 1, column 5: mapping values"),
        ({"s.yaml": "- 1"}, "e.yaml: found no keys"),
        ({"s.yaml": "name: x\nnmae: y"}, r"e.yaml: line 2: unknown key 'nmae'; did you mean name\?"),
        ({"s.yaml": "name: x\nname: y"}, "e.yaml: line 2: key 'name' is given twice"),
        ({"code/README.md": "about"}, "code: has no texts"),
        ({"s.yaml": "classes:\n  a: {texts: [b]}", "b/.hidden": "a"}, "line 2: classes.a.texts: .*b: has no"),
        ({"s.yaml": "name: 3"}, "e.yaml: line 1: name: found 3, expected a text"),
        ({"s.yaml": "name: x\nclasses: 7"}, "e.yaml: line 2: classes: expected names of classes"),
        ({"s.yaml": "classes: {a b: {texts: a}}"}, "e.yaml: line 1: classes: a class 'a b'"),
        ({"s.yaml": "classes:\n  one: 5"}, "e.yaml: line 2: classes.one: found 5"),
        ({"s.yaml": "classes:\n  one:"}, "e.yaml: line 2: classes.one: class 'one' is empty"),
        ({"s.yaml": "context: 1", "a.txt": "a"}, "e.yaml: line 1: context: found 1, expected a number"),
        (classes("contxt: 512"), r"e.yaml: line 4: unknown key 'contxt'; did you mean context\?"),
        (classes("context: 1"), "e.yaml: line 4: classes.one.context: found 1, expected .* 2 or more"),
        (classes("context: yes"), "e.yaml: line 4: classes.one.context: found true"),
        (classes("read: chta"), r"e.yaml: line 4: classes.one.read: found 'chta'; did you mean chat\?"),
        (classes("scored: assistant"), "line 4: classes.one.scored: found 'assistant', expected second"),
        (classes("template: x"), "line 4: classes.one.template: only a chat has a template"),
        ({"s.yaml": "classes:\n  t: {texts: t.jsonl, template: x}", "t.jsonl": CHAT}, "x: no such file"),
        ({"s.yaml": "classes:\n  a: {texts: [a.txt, b*.md]}", "a.txt": "a"}, "line 2: .*b.*: no such file"),
        ({"s.yaml": "classes:\n  a: {texts: [t.jsonl, a.txt]}", "a.txt": "a", "t.jsonl": CHAT}, "say read:"),
        ({"s.yaml": "classes:\n  a: {texts: [[]]}"}, "line 2: classes.a.texts: expected a file or a list"),
        ({"s.yaml": "title: x", "a.txt": b"ab\xff"}, "a.txt: not UTF-8 at byte 2; expected a text"),
        ({"s.yaml": "title: x", "a.txt": " \n"}, "a.txt: is empty, expected a text of class 'a'"),
        ({"s.yaml": "title: x", "a.txt": "a", "a.md": "a"}, "a.txt: another class 'a' is .*a.md"),
        ({"s.yaml": "title: x"}, "e.yaml: no texts"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(tmp_path: Path, files: dict[str, str | bytes], error: str) -> None:
    lay(tmp_path, {name.replace("s.yaml", "suite.yaml"): text for name, text in files.items()})
    with pytest.raises(BadRequest, match=error) as raised:
        read_suite(tmp_path)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "line 2: no JSON at character 2: Expecting property name"),
        ("[1]", r"line 2: found \[1\], expected an object"),
        ("{}", "line 2: no messages"),
        ('{"messages": []}', "line 2: no messages"),
        ('{"mesages": []}', r"line 2: unknown key 'mesages'; did you mean messages\?"),
        ('{"messages": ["a"]}', 'line 2: message 1: found \'a\', expected an object'),
        ('{"messages": [{"role": "asistant", "content": "a"}]}', "message 1: no such role 'asistant'; did"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "message 1: no such role 'bot', expected one of"),
        ('{"messages": [{"role": "user", "contents": "a"}]}', "unknown key 'contents'; did you mean content"),
        ('{"messages": [{"role": "user", "content": 1}]}', "message 1: content is not a text"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 1: content is not a text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the role 'assistant'"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "tools are not a list of objects"),
        ('{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}', "expected a list of calls"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "a tool call without the name"),
        (CALLED % '"{"', "arguments of f: no JSON at character 2"),
        (CALLED % "3", "arguments of f are not an object"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_refused_with_its_line(tmp_path: Path, line: str, error: str) -> None:
    lay(tmp_path, {"t.jsonl": f"{CHAT}\n{line}\n"})
    with pytest.raises(BadRequest, match=f"t.jsonl: .*{error}"):
        read_suite(tmp_path)


def test_what_is_no_suite_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, {"text.txt": "a"})
    with pytest.raises(BadRequest, match="single text is given with -f"):
        read_suite(tmp_path / "text.txt")
    with pytest.raises(BadRequest, match=r"defualt: no such suite.*; did you mean default\?"):
        read_suite("defualt")
    with pytest.raises(BadRequest, match=r"none.yaml: can't be read"):
        read_suite(tmp_path / "none.yaml")
