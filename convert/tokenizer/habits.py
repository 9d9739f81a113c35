"""What the tokenizers of a model family have in common beyond what their files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Habits:
    """Habits of a family's tokenizers.

    pre_tokenizers   name of a cutting in KNOWN -> the name by which llama.cpp's files of this family call it
    special_tokens   kind ("bos", "eot" ...) -> text of the added token that is of this kind, where no file
                     names one
    adds_bos         whether text begins with the bos token, whatever the files say
    tiktoken         whether the family's tiktoken.model is read; see vocab_tiktoken
    tekken           whether the family's tekken.json is read; see vocab_tekken
    """

    pre_tokenizers: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    tiktoken: bool = False
    tekken: bool = False


NO_HABITS = Habits()

GLM = Habits(
    pre_tokenizers={"llama-bpe": "glm4"},
    special_tokens={
        "bos": "[gMASK]",
        "eot": "<|user|>",
        "unk": "<|endoftext|>",
        "eom": "<|observation|>",
    },
)
"""GLM-4 and its successors. Text ends by `<|user|>`; with `<|endoftext|>` there it would never end."""
