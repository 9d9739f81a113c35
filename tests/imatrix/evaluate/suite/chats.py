"""Templates as published, conversations, and a small tokenizer that has the templates' special tokens."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from convert.tokenizer.pretokenizers import KNOWN
from convert.tokenizer.vocab import TokenType
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value

GOLDEN = Path(__file__).parents[3] / "golden" / "chat"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(GOLDEN.glob("*.jinja"))}

BOS, EOS = "<s>", "</s>"
_SPELLED = re.compile(r"<[|｜][^<>|｜\s{}']{1,40}[|｜]>")
_OTHERS = (
    "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<|turn>",
    "<turn|>",
)  # fmt: skip
_PRE = "qwen2"

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "tide_times",
            "description": "Look up <high> & low water.",
            "parameters": {
                "type": "object",
                "properties": {"harbour": {"type": "string", "description": "Name of the harbour."}},
                "required": ["harbour"],
            },
        },
    },
)
SYSTEM = {"role": "system", "content": "Answer briefly, naïve as it seems."}
ASKED = {"role": "user", "content": "When is it high water at Vlieland?\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function",
         "function": {"name": "tide_times", "arguments": {"harbour": "Vlieland", "until": None}}},
    ],
}  # fmt: skip
TOOL = {"role": "tool", "name": "tide_times", "tool_call_id": "abcdefghi", "content": '{"high": "14:05"}'}
SAYS = {"role": "assistant", "content": "  At five past two. "}
THANKS = {"role": "user", "content": "Thanks, 谢谢!"}
WELCOME = {"role": "assistant", "content": "You're welcome."}
THINKS = {"role": "assistant", "content": "<think>\nTides.\n</think>\n\nAt two."}
REASONED = {"role": "assistant", "content": "At two.", "reasoning_content": "Tides repeat."}

CONVERSATIONS: dict[str, tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...] | None]] = {
    "one turn": ((ASKED, SAYS), None),
    "two turns": ((ASKED, SAYS, THANKS, WELCOME), None),
    "system": ((SYSTEM, ASKED, SAYS, THANKS, WELCOME), None),
    "thoughts": ((ASKED, THINKS, THANKS, WELCOME), None),
    "last thoughts": ((ASKED, THINKS), None),
    "reasoning": ((ASKED, REASONED, THANKS, REASONED), None),
    "tools": ((SYSTEM, ASKED, CALL, TOOL, SAYS), TOOLS),
    "tools, and on": ((ASKED, CALL, TOOL, SAYS, THANKS, WELCOME), TOOLS),
}


@cache
def library() -> Tokenizer:
    """Train a byte-level BPE on the templates; tokens of control come after the others."""
    known = next(known for known in KNOWN if known.name == _PRE)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = known.build()
    tokenizer.decoder = ByteLevelDecoder()
    letters = [chr(code) for code in range(0x21, 0x144) if code not in (0x7F, *range(0x80, 0xA1), 0xAD)]
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(TEMPLATES.values(), trainer)
    spelled = {token for source in TEMPLATES.values() for token in _SPELLED.findall(source)}
    control = (BOS, EOS, *sorted(spelled), *_OTHERS)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def vocabulary(template: str | None = None, *, add_bos: bool = False, **named: str) -> Metadata:
    """Return the keys tokenizer.* of the small tokenizer; `named` are further templates."""
    templates = {} if template is None else {keys.TOKENIZER_CHAT_TEMPLATE: template}
    templates |= {keys.TOKENIZER_CHAT_TEMPLATE_NAMED.format(name=name): text for name, text in named.items()}
    return {
        **_vocabulary(),
        keys.TOKENIZER_ADD_BOS: Value.bool_(add_bos),
        **{key: Value.string(text) for key, text in templates.items()},
    }


@cache
def _vocabulary() -> Metadata:
    tokenizer = library()
    tokens = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    control = tokenizer.get_added_tokens_decoder()
    kinds = [TokenType.CONTROL if number in control else TokenType.NORMAL for number in range(len(tokens))]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        keys.TOKENIZER_MODEL: Value.string("gpt2"),
        keys.TOKENIZER_PRE: Value.string(_PRE),
        keys.TOKENIZER_TOKENS: Value.strings(tokens),
        keys.TOKENIZER_TOKEN_TYPE: Value.i32s(map(int, kinds)),
        keys.TOKENIZER_MERGES: Value.strings(" ".join(pair) for pair in merges),
        keys.TOKENIZER_BOS_ID: Value.u32(tokens.index(BOS)),
        keys.TOKENIZER_EOS_ID: Value.u32(tokens.index(EOS)),
    }
