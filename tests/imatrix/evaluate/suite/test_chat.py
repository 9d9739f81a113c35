"""Conversations are rendered as by transformers, token for token, and the assistant's words are found."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers.utils.chat_template_utils as of_transformers
from transformers import PreTrainedTokenizerFast

from convert.tokenizer.vocab import TokenType
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from imatrix.texts.chat import DATE, Renderer, TemplateRefusal
from imatrix.texts.conversations import Conversation
from imatrix.texts.rendering import ChatRenderer
from imatrix.texts.suite import read_suite
from imatrix.texts.templates import PLAIN, Template, control_tokens, special_tokens
from imatrix.texts.tokenise import ClassChunks, tokenise
from imatrix.texts.tokens import Encoder, make_encoder
from tests.imatrix.evaluate.suite.chats import (
    ASKED,
    BOS,
    CALL,
    CONVERSATIONS,
    EOS,
    SAYS,
    TEMPLATES,
    THANKS,
    TOOL,
    TOOLS,
    WELCOME,
    library,
    vocabulary,
)  # fmt: skip

CASES = [(template, talk) for template in TEMPLATES for talk in CONVERSATIONS]


def conversation(name: str) -> Conversation:
    messages, tools = CONVERSATIONS[name]
    return Conversation(name, messages, tools)


@cache
def renderer(template: str) -> Renderer:
    vocab = vocabulary()
    return Renderer(Template(template, TEMPLATES[template]), special_tokens(vocab), control_tokens(vocab))


@cache
def encoder() -> Encoder:
    return make_encoder(vocabulary(), parse_special=True)


def chunks_of(folder: Path, talk: str | Conversation, vocab: Any, said: str = "") -> ClassChunks:
    """Tokenise a suite of one conversation."""
    messages, tools = CONVERSATIONS[talk] if isinstance(talk, str) else (talk.messages, talk.tools)
    (folder / "talk.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}), encoding="utf-8")
    (folder / "suite.yaml").write_text(f"context: 4096\nclasses: {{talk: {{{said}}}}}", encoding="utf-8")
    (found,) = tokenise(read_suite(folder), vocab, 10_000)
    return found


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    """The tokenizer in transformers, on the day that templates are told."""

    class FixedDay(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return DATE

    monkeypatch.setattr(of_transformers, "datetime", FixedDay)
    return PreTrainedTokenizerFast(tokenizer_object=library(), bos_token=BOS, eos_token=EOS)


@pytest.mark.parametrize(("template", "talk"), CASES)
def test_tokens_are_those_of_transformers(template: str, talk: str, oracle: PreTrainedTokenizerFast) -> None:
    messages, tools = CONVERSATIONS[talk]
    try:
        expected = oracle.apply_chat_template(
            list(messages), tools=tools and list(tools), chat_template=TEMPLATES[template], tokenize=True,
            return_dict=False,
        )  # fmt: skip
    except Exception as refusal:
        why = re.escape(" ".join(str(refusal).split())[:40])
        with pytest.raises(TemplateRefusal, match=why):
            renderer(template).render(conversation(talk))
    else:
        assert encoder().encode(renderer(template).render(conversation(talk)).text) == expected


def words(template: str, talk: str | Conversation) -> list[str]:
    rendered = renderer(template).render(conversation(talk) if isinstance(talk, str) else talk)
    return [rendered.text[begin:end] for begin, end in rendered.spans]


ENDS = {
    "chatml": "<|im_end|>", "qwen-2.5": "<|im_end|>", "qwen-3": "<|im_end|>", "smollm3": "<|im_end|>",
    "llama-2": " </s>", "llama-3.1": "<|eot_id|>", "llama-3.2": "<|eot_id|>", "mistral-nemo": "</s>",
    "mistral-v7": "</s>", "gemma-2": "<end_of_turn>", "phi-3.5": "<|end|>", "phi-4": "<|im_end|>",
    "deepseek-v2": "</s>", "deepseek-v3.1": "<｜end▁of▁sentence｜>", "command-r": "<|END_OF_TURN_TOKEN|>",
    "deepseek-r1-distill": "<｜end▁of▁sentence｜>", "granite-3.3": "<|end_of_text|>", "kimi-k2": "<|im_end|>",
}  # fmt: skip
TRIMS = ("gemma-2", "llama-3.1", "llama-3.2", "command-r")


@pytest.mark.parametrize(("template", "end"), ENDS.items())
def test_a_turn_is_its_content_and_the_token_that_ends_it(template: str, end: str) -> None:
    first = "At five past two." if template in TRIMS else "  At five past two. "
    assert words(template, "two turns") == [f"{first}{end}", f"You're welcome.{end}"]


def test_the_next_turn_may_be_what_ends_one() -> None:
    assert words("glm-4.6", "two turns") == ["At five past two.<|user|>", "You're welcome."]


def test_the_last_turn_may_end_in_another_way() -> None:
    assert words("gpt-oss", "two turns") == ["  At five past two. <|end|>", "You're welcome.<|return|>"]


CALLS = {
    "qwen-2.5": '<tool_call>\n{"name": "tide_times", "arguments": {"harbour": "Vlieland", "until": null}}'
                "\n</tool_call><|im_end|>",
    "llama-3.1": '{"name": "tide_times", "parameters": {"harbour": "Vlieland", "until": null}}<|eot_id|>',
    "mistral-nemo": '[TOOL_CALLS][{"name": "tide_times", "arguments": {"harbour": "Vlieland", "until": null}'
                    ', "id": "abcdefghi"}]</s>',
    "gpt-oss": " to=functions.tide_times<|channel|>commentary json<|message|>"
               '{"harbour": "Vlieland", "until": null}<|call|>',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tide_times<｜tool▁sep｜>"
                     '{"harbour": "Vlieland", "until": null}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
                     "<｜end▁of▁sentence｜>",
}  # fmt: skip


@pytest.mark.parametrize(("template", "expected"), CALLS.items())
@pytest.mark.parametrize("talk", ["tools", "tools, and on"])
def test_calls_of_tools_are_the_assistants_words(template: str, expected: str, talk: str) -> None:
    assert expected in words(template, talk)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("talk", CONVERSATIONS)
def test_no_word_of_another_is_scored(template: str, talk: str) -> None:
    try:
        found = "".join(words(template, talk))
    except TemplateRefusal:
        return
    for other in ("high water at", "Thanks", "14:05", "Answer briefly", "Name of the harbour"):
        assert other not in found


def test_marks_of_a_template_count(oracle: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    found = chunks_of(tmp_path, "system", vocabulary(TEMPLATES["lfm2.5"]))
    messages, _ = CONVERSATIONS["system"]
    expected = oracle.apply_chat_template(
        list(messages), chat_template=TEMPLATES["lfm2.5"], return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.chunks.scored.astype(int).tolist() == expected["assistant_masks"]


def test_thoughts_that_a_template_drops_are_no_words() -> None:
    assert words("qwen-3", "thoughts") == ["At two.<|im_end|>", "You're welcome.<|im_end|>"]
    assert words("deepseek-r1-distill", "thoughts")[0] == "\n\nAt two.<｜end▁of▁sentence｜>"


def test_a_turn_that_is_not_found_is_told_and_not_scored(tmp_path: Path) -> None:
    loud = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
    (tmp_path / "loud.jinja").write_text(loud)
    with pytest.raises(BadRequest, match=r"class 'talk': no chunk.*line 1: the words of message 2, 4"):
        chunks_of(tmp_path, "two turns", vocabulary(), "template: loud.jinja")
    assert chunks_of(tmp_path, "two turns", vocabulary(loud)).template == PLAIN.name
    mixed = "{% for m in messages %}{{ m.content | upper if loop.index == 2 else m.content }}\n{% endfor %}"
    found = chunks_of(tmp_path, "two turns", vocabulary(mixed))
    assert "the words of message 2 are not found" in found.notes[0]
    assert spell(found) == ["You're welcome."]


def spell(found: ClassChunks) -> list[str]:
    """Return the runs of scored tokens as texts."""
    tokens, scored = found.chunks.tokens, found.chunks.scored
    cuts = np.flatnonzero(np.diff(scored.astype(int))) + 1
    runs = zip(np.split(tokens, cuts), np.split(scored, cuts), strict=True)
    kept = [run.tolist() for run, is_scored in runs if is_scored[0]]
    return library().decode_batch(kept, skip_special_tokens=False)


@pytest.mark.parametrize("template", ["chatml", "llama-3.1", "phi-4"])
def test_scored_tokens_are_those_of_the_words(template: str, tmp_path: Path) -> None:
    found = chunks_of(tmp_path, "two turns", vocabulary(TEMPLATES[template]))
    assert spell(found) == words(template, "two turns")
    everything = chunks_of(tmp_path, "two turns", vocabulary(TEMPLATES[template]), "scored: all")
    assert everything.chunks.scored.tolist() == [False] + [True] * (everything.chunks.n_tokens - 1)


def test_a_token_counts_that_is_partly_the_assistants(tmp_path: Path) -> None:
    """The template's own space is in one token with those that the content begins with."""
    found = chunks_of(tmp_path, "two turns", vocabulary(TEMPLATES["mistral-v7"]))
    assert spell(found)[0] == "   At five past two. </s>"
    assert words("mistral-v7", "two turns")[0] == "  At five past two. </s>"


def test_spaces_that_sentencepiece_puts_in_front_are_nobodys(tmp_path: Path) -> None:
    """Each part of a text after a token of control gets one."""
    letters = ("\u2581", "\u2581Y", *"You're wlcom.")
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(pieces) - len(kinds))
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    vocab = {
        keys.TOKENIZER_MODEL: Value.string("llama"),
        keys.TOKENIZER_TOKENS: Value.strings(pieces),
        keys.TOKENIZER_SCORES: Value.f32s(-float(number) for number in range(len(pieces))),
        keys.TOKENIZER_TOKEN_TYPE: Value.i32s(map(int, kinds)),
        keys.TOKENIZER_BOS_ID: Value.u32(1),
        keys.TOKENIZER_EOS_ID: Value.u32(2),
        keys.TOKENIZER_CHAT_TEMPLATE: Value.string(source),
    }
    found = chunks_of(tmp_path, Conversation("", (THANKS, WELCOME)), vocab).chunks
    scored = [pieces[number] for number in found.tokens[found.scored]]
    assert scored[:2] == ["\u2581Y", "o"]
    assert scored[-2:] == [".", EOS]
    assert found.tokens.tolist()[0] == 1


@pytest.mark.parametrize("template", ["chatml", "llama-3.1"])
def test_bos_comes_once(template: str, tmp_path: Path) -> None:
    """The first template makes none, so it is added; the second one's own is kept."""
    vocab = vocabulary(TEMPLATES[template], add_bos=True)
    found = chunks_of(tmp_path, "two turns", vocab)
    bos = library().token_to_id(BOS)
    assert found.chunks.inputs.tolist().count(bos) == 1
    assert found.chunks.inputs[0] == bos
    assert spell(found) == words(template, "two turns")


def test_a_conversation_is_cut_at_the_context(tmp_path: Path) -> None:
    whole = chunks_of(tmp_path, "two turns", vocabulary(TEMPLATES["chatml"]))
    last = int(np.flatnonzero(whole.chunks.scored)[0])
    cut = chunks_of(tmp_path, "two turns", vocabulary(TEMPLATES["chatml"]), f"context: {last + 1}")
    assert cut.chunks.tokens.tolist() == whole.chunks.tokens[: last + 1].tolist()
    assert cut.chunks.n_scored == 1
    with pytest.raises(BadRequest, match=f"none of the first {last} tokens is the assistant's"):
        chunks_of(tmp_path, "two turns", vocabulary(TEMPLATES["chatml"]), f"context: {last}")


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    vocab = vocabulary(TEMPLATES["chatml"], tool_use=TEMPLATES["hermes-3-tool-use"])
    assert chunks_of(tmp_path, "tools", vocab).template == "the model's tool_use"
    assert chunks_of(tmp_path, "two turns", vocab).template == "the model's"


def test_without_a_template_conversations_are_plain(tmp_path: Path) -> None:
    found = chunks_of(tmp_path, Conversation("", (ASKED, SAYS, THANKS, WELCOME)), vocabulary())
    assert found.template == PLAIN.name
    text = library().decode(found.chunks.tokens.tolist())
    assert text == (
        "User: When is it high water at Vlieland?\n\n\nAssistant:   At five past two. \n\n"
        "User: Thanks, 谢谢!\n\nAssistant: You're welcome.\n\n"
    )
    assert spell(found) == ["   At five past two. \n\n", " You're welcome.\n\n"]


def test_a_model_whose_template_takes_no_tools_reads_them_plainly(tmp_path: Path) -> None:
    found = chunks_of(tmp_path, "tools", vocabulary(TEMPLATES["gemma-2"]))
    assert found.template == PLAIN.name
    assert "System role not supported" in found.notes[0]
    why = "the model's template takes 0 of 1 conversations"
    assert found.notes[1] == f"class 'talk' is rendered plainly: {why}"
    called = json.dumps(CALL["tool_calls"][0]["function"])
    assert spell(found) == [f" {called}\n\n", "   At five past two. \n\n"]


def test_a_suite_may_give_the_template(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    found = chunks_of(tmp_path, "one turn", vocabulary(TEMPLATES["chatml"]), "template: mine.jinja")
    assert found.template == "mine.jinja"
    assert library().decode(found.chunks.tokens.tolist()) == f"<{ASKED['content']}><{SAYS['content']}>"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% if %}", "the model's template, line 1: Expected an expression"),
        ("a\n{% for %}", "the model's template, line 2: "),
        ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "nested too deeply"),
        ("{{ raise_exception('not\\nso') }}", "talk.jsonl: line 1: the model's template: not so"),
        ("{{ messages.append(1) }}", "the model's template: access to attribute 'append'"),
        ("{{ messages.__class__.mro() }}", "the model's template: access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "the model's template: division by zero"),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "template: makes more than 4194304"),
    ],
)
def test_errors_of_templates_are_one_line(source: str, error: str, tmp_path: Path) -> None:
    talk = Conversation("talk.jsonl: line 1", CONVERSATIONS["one turn"][0])
    with pytest.raises(BadRequest) as raised:
        Renderer(Template("the model's", source), {}, ()).render(talk)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_jinja2_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with ChatRenderer({}, ()) as renderer:
        found = renderer.render([conversation("one turn")], [PLAIN])
        with pytest.raises(BadRequest, match=r"needs jinja2: pip install 'gguf-tools\[torch\]'"):
            next(found)


def test_conversations_are_given_as_copies() -> None:
    source = "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}"
    talk = Conversation("", (ASKED, CALL, TOOL, SAYS), TOOLS)
    rendered = Renderer(Template("t", source), {}, ()).render(talk)
    assert rendered.text.startswith("tide_times")
    assert rendered.missed == (1,)
