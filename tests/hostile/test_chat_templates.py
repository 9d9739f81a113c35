"""Chat templates of strangers: whatever they do, a command goes on or ends in one line."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from convert.tokenizer.files import TokenizerFiles, read_chat_templates
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from imatrix.texts import rendering
from imatrix.texts.chat import Renderer
from imatrix.texts.conversations import Conversation
from imatrix.texts.mixture import read_text
from imatrix.texts.rendering import ChatRenderer
from imatrix.texts.suite import read_suite
from imatrix.texts.templates import PLAIN, Template
from imatrix.texts.tokenise import tokenise
from imatrix.texts.tokens import Cut, Vocabulary
from tests.imatrix.evaluate.suite.chats import vocabulary

TALK = Conversation(
    "c.jsonl: line 1", ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."})
)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
KEY = "x.gguf: tokenizer.chat_template"

STOPPED = {
    "a break outside of a loop": ("{% break %}", "can't be compiled: 'break' outside loop"),
    "no template": ("{% if %}", "line 1: Expected an expression"),
    "nested too deeply": ("{{ " + "(" * 9000 + ")" * 9000 + "}}", "nested too deeply"),
    "many digits": ("{{ 10 ** 5000 }}", "can't be compiled: "),
}
REFUSED = {
    "a text that doubles": (
        "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "needs more memory",
    ),
    "a long list": ("{{ [1] * 999999999 }}", "needs more memory"),
    "a wide field": ("{{ '%0999999999d'|format(1) }}", "needs more memory"),
    "a macro that calls itself": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "half of a character": ("{{ '\\ud800' }}", "half of a character"),
    "much text": ("{% for i in range(9000) %}{{ 'x' * 1000 }}{% endfor %}", "makes more than 4194304"),
}


def rendered(source: str, *talks: Conversation) -> list[object]:
    with ChatRenderer({}, ("<|end|>",)) as renderer:
        return list(renderer.render(talks, [Template("the model's", source, KEY)] * len(talks)))


@pytest.mark.parametrize("case", STOPPED)
def test_what_is_no_template_is_refused(case: str) -> None:
    source, why = STOPPED[case]
    with pytest.raises(BadRequest, match=rf"^{KEY}: the model's template.*{why}") as caught:
        rendered(source, TALK)
    assert str(caught.value).isprintable()


def test_a_refused_conversation_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process does them all, and all the templates."""
    templates = [Template("the model's", source, KEY) for source, _ in REFUSED.values()]
    with ChatRenderer({}, ()) as renderer:
        found = list(renderer.render([TALK] * (len(templates) + 1), [*templates, PLAIN]))
    for answer, (_, why) in zip(found, REFUSED.values(), strict=False):
        assert isinstance(answer, str)
        assert answer.startswith("c.jsonl: line 1: the model's template: ")
        assert why in answer
    assert found[-1].text.startswith("User: Hello.")  # type: ignore[union-attr]


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "WALL_SECONDS", 2.0)
    began, before = time.monotonic(), set(threading.enumerate())
    with pytest.raises(BadRequest, match=rf"^{KEY}: this chat template .*: c\.jsonl: line 1$"):
        rendered("{% if messages|length > 2 %}" + LOOPS + "{% endif %}x", *talks_of(2), *talks_of(4))
    assert time.monotonic() - began < 30
    assert set(threading.enumerate()) <= before, "another test's threads may have ended; none may be left"


def talks_of(n_messages: int) -> list[Conversation]:
    return [Conversation("c.jsonl: line 1", TALK.messages * (n_messages // 2))]


@pytest.mark.slow
def test_one_that_does_not_end_is_ended_by_the_time_that_it_computes() -> None:
    for source in (LOOPS, "{{ ('a' * 1000000)|wordwrap(1) }}"):
        with pytest.raises(BadRequest, match=rf"^{KEY}: this chat template takes too long"):
            rendered(source, TALK)


def test_the_process_ends_with_its_user() -> None:
    with ChatRenderer({}, ()) as renderer:
        next(renderer.render([TALK] * 1000, [PLAIN] * 1000))
        process = renderer._process
    assert process is not None
    assert process.poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    "said",
    [
        {"text": "abc", "spans": [[0, 9]], "missed": []},
        {"text": "abc", "spans": [[2, 1]], "missed": []},
        {"text": "abc", "spans": [[0]], "missed": []},
        {"text": "abc", "spans": [["0", "1"]], "missed": []},
        {"text": "abc", "spans": [], "missed": [0]},
        {"text": "abc", "spans": [], "missed": [[]]},
        {"text": "\ud800", "spans": [], "missed": []},
        {"text": 5, "spans": [], "missed": []},
        {},
    ],
)
def test_what_a_process_answers_is_checked(said: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="breaks out of its process"):
        rendering._checked(said, TALK, PLAIN)


def test_the_model_and_the_key_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": TALK.messages}) + "\n")
    vocab = Vocabulary(
        {**vocabulary(), keys.TOKENIZER_CHAT_TEMPLATE: Value.string("{% break %}")}, Path("m.gguf")
    )
    for read in (
        lambda: tokenise(read_suite(tmp_path), vocab, 10_000),
        lambda: read_text(tmp_path, vocab, 10_000, Cut(8)),
    ):
        with pytest.raises(
            BadRequest, match=r"^m\.gguf: tokenizer\.chat_template: the model's template: can't"
        ):
            read()
    (tmp_path / "suite.yaml").write_text("classes: {c: {texts: c.jsonl, template: t.jinja}}")
    (tmp_path / "t.jinja").write_text("{% break %}")
    with pytest.raises(BadRequest, match=r"/t\.jinja: t\.jinja template: can't be compiled"):
        tokenise(read_suite(tmp_path), vocab, 10_000)


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
)
PLAINLY = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


@pytest.mark.parametrize(
    "source", [PLAINLY, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")]
)
@pytest.mark.parametrize("said", ["\ufdd0USER\ufdd1", "\ufdd1\ufdd0", "Qx0qzX-7kWv", "\ufdd0", "x<|end|>"])
def test_words_cannot_be_marks(said: str, source: str) -> None:
    talk = Conversation("", ({"role": "user", "content": said}, {"role": "assistant", "content": "ANSWER"}))
    found = Renderer(Template("t", source), {}, ("<|end|>",)).render(talk)
    assert said in found.text
    assert [found.text[slice(*span)].removesuffix("<|end|>") for span in found.spans] == ["ANSWER"]


def test_a_conversion_computes_nothing_of_a_template(tmp_path: Path) -> None:
    for source in (
        "{{ 5 ** 5 ** 12 }}",
        "{% autoescape 'x'|center(99999999999) %}{% endautoescape %}",
        LOOPS,
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        found = read_chat_templates(TokenizerFiles(tmp_path, {}))
        assert (found.default, found.notes) == (source, ())
