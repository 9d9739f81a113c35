"""What the tokenizers of a model family have in common beyond what their files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Quirks:
    """Quirks of a family's tokenizers.

    pre_tokenizers   name of a cutting in KNOWN -> the name by which llama.cpp's files of this family call it
    special_tokens   kind ("bos", "eot" ...) -> text of the added token that is of this kind, where no file
                     names one
    adds_bos         whether text begins with the bos token, whatever the files say
    tiktoken         whether the family's tiktoken.model is read; see vocab_tiktoken
    tekken           whether the family's tekken.json is read; see vocab_tekken
    sentencepiece    whether a tokenizer.model counts before tokenizer.json, and a tokenizer.json with the
                     tokens of a SentencePiece model is enough
    states_prefix    whether add_prefix_space of tokenizer_config.json is written
    of_size          number of tokens -> kind -> id: special tokens of vocabularies known by their size
    no_bos_sizes     numbers of tokens of vocabularies whose texts begin without the bos token
    """

    pre_tokenizers: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    tiktoken: bool = False
    tekken: bool = False
    sentencepiece: bool = False
    states_prefix: bool = False
    of_size: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    no_bos_sizes: tuple[int, ...] = ()


NO_QUIRKS = Quirks()

LLAMA = Quirks(
    sentencepiece=True,
    states_prefix=True,
    of_size={32016: {"prefix": 32007, "suffix": 32008, "middle": 32009, "eot": 32010}},
    no_bos_sizes=(49152,),
)
"""Llama and its like. 32016 tokens are CodeLlama's, 49152 those of Granite's small models."""

GLM = Quirks(
    pre_tokenizers={"llama-bpe": "glm4"},
    special_tokens={
        "bos": "[gMASK]",
        "eot": "<|user|>",
        "unk": "<|endoftext|>",
        "eom": "<|observation|>",
    },
)
"""GLM-4 and its successors. Text ends by `<|user|>`; with `<|endoftext|>` there it would never end."""
