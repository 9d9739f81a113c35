"""Which chat template a conversation is rendered through, and what templates are told of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.tokenizer.vocab import TokenType
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata

_TOOL_USE = "tool_use"
"""Name of the template that transformers takes for a conversation with tools, where a model has it."""


@dataclass(frozen=True)
class Template:
    """A chat template.

    name   for people
    place  the file, or the key of a model, that has it, for messages
    """

    name: str
    source: str = field(repr=False)
    place: str = ""


PLAIN = Template(
    "plain",
    """\
{%- if tools %}Tools: {{ tools | tojson }}

{% endif %}
{%- for message in messages %}
{{- message.role | capitalize }}:
{%- if message.role == "assistant" %}
{%- generation %}
{%- if message.content %} {{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %} {{ call.function | tojson }}{% endfor %}


{% endgeneration %}
{%- else %} {{ message.content }}

{% endif %}
{%- endfor %}""",
)
"""Roles and words, without any token of a model: for those that have no template."""


def own_template(vocab: Metadata, with_tools: bool) -> Template | None:
    """Choose among the templates of a model as transformers does; None: it has none.

    vocab  the keys tokenizer.*
    """
    named = (keys.TOKENIZER_CHAT_TEMPLATE_NAMED.format(name=_TOOL_USE), f"the model's {_TOOL_USE}")
    main = (keys.TOKENIZER_CHAT_TEMPLATE, "the model's")
    for key, name in (named, main) if with_tools else (main,):
        value = vocab.get(key)
        if value is not None and isinstance(value.data, str) and value.data.strip():
            path = getattr(vocab, "path", None)
            return Template(name, value.data, f"the model's {key}" if path is None else f"{path}: {key}")
    return None


_SPECIAL = {
    "bos_token": keys.TOKENIZER_BOS_ID,
    "eos_token": keys.TOKENIZER_EOS_ID,
    "unk_token": keys.TOKENIZER_UNK_ID,
    "sep_token": keys.TOKENIZER_SEP_ID,
    "pad_token": keys.TOKENIZER_PAD_ID,
    "mask_token": keys.TOKENIZER_MASK_ID,
}


def special_tokens(vocab: Metadata) -> Mapping[str, str]:
    """Spell the tokens that templates know by name: bos_token, eos_token and so on."""
    tokens = _items(vocab, keys.TOKENIZER_TOKENS)
    numbers = {name: vocab[key].data for name, key in _SPECIAL.items() if key in vocab}
    return {name: tokens[number] for name, number in numbers.items() if 0 <= number < len(tokens)}


def control_tokens(vocab: Metadata) -> tuple[str, ...]:
    """List the spellings of control tokens, the longest first."""
    tokens, kinds = _items(vocab, keys.TOKENIZER_TOKENS), _items(vocab, keys.TOKENIZER_TOKEN_TYPE)
    control = (text for text, kind in zip(tokens, kinds, strict=False) if kind == TokenType.CONTROL and text)
    return tuple(sorted(control, key=len, reverse=True))


def _items(vocab: Metadata, key: str) -> tuple[Any, ...]:
    value = vocab.get(key)
    return () if value is None else tuple(value.data)
