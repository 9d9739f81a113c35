"""Qwen 3 as a reranker: two rows of the output matrix, "yes" and "no", judge a document.

llama.cpp's converter knows such a model by its name, its folder's or its card's (Qwen3Model). It writes the
two rows as a classifier, in place of the output matrix where embeddings are not that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.rules import Output, OutputTensor, Renamed, Rule
from convert.checkpoint.checkpoint import MAX_BYTES
from convert.tokenizer.files import TokenizerFiles
from convert.weights.base import Weight
from gguf_tools.errors import BadConfig, BadTokenizer
from gguf_tools.files.named_files import read_input
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.values import Value
from gguf_tools.hub.names import folder_name
from quantize.fill.sources import FLOAT_DTYPES, joined, rows_dtype

LABELS = ("yes", "no")
"""Labels of the rows, in order; tokens of the model."""

CLASSIFIER = "cls.output.weight"
"""Name of these rows in a file."""

_NAMES = ("qwen3-reranker", "qwen3-vl-reranker")
_RANK = 4
"""LLAMA_POOLING_TYPE_RANK of include/llama.h."""

_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
    ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer the"
    " query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Text that the published rerankers were trained on; {query} and {document} are llama.cpp's placeholders."""


def is_reranker(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a model is a reranker, by the signs that llama.cpp's converter knows it by.

    config  config.json
    """
    card = folder / "README.md"
    try:
        text = read_input(card, MAX_BYTES, BadConfig).decode(errors="replace") if card.is_file() else ""
    except BadConfig:  # a card that can't be read is reported with the names that it has
        text = ""
    hints = f"{folder_name(folder)} {config.get('_name_or_path')}".lower()
    return any(name in hints or f"# {name}" in text.lower() for name in _NAMES)


def rank_keys(architecture: str) -> dict[str, Value]:
    """Return the keys of a reranker; `architecture` is the file's general.architecture."""
    return {
        keys.POOLING_TYPE.format(arch=architecture): Value.u32(_RANK),
        keys.CLASSIFIER_OUTPUT_LABELS.format(arch=architecture): Value.strings(LABELS),
        keys.TOKENIZER_CHAT_TEMPLATE_NAMED.format(name="rerank"): Value.string(_TEMPLATE),
        keys.TOKENIZER_CHAT_TEMPLATES: Value.strings(["rerank"]),
    }


def label_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that LABELS are; raises BadTokenizer for a vocabulary without them."""
    files = TokenizerFiles(folder, config)
    library = files.load()
    ids = [library.token_to_id(label) for label in LABELS]
    if None in ids or max(ids) >= (files.vocab_size or 0):
        raise BadTokenizer(
            f"{files.json_path}: no tokens {' and '.join(map(repr, LABELS))}, which a reranker answers with"
        )
    return tuple(ids)


def with_classifier(rules: Sequence[Rule], ids: Sequence[int]) -> tuple[Rule, ...]:
    """Return the rules of a family with a classifier: rows `ids` of what the output matrix is made of."""

    def classifier(output: Output) -> tuple[Output]:
        return (replace(output, name=CLASSIFIER, arrange=_picked(ids)),)

    embeddings = next(each for rule in rules for each in rule.outputs if each.name == "token_embd.weight")
    return (
        Rule(lambda config, options: (None,) * config.tie_word_embeddings, classifier(embeddings)),
        *(
            replace(rule, outputs=classifier(rule.outputs[0])) if _makes_output(rule) else rule
            for rule in rules
        ),
    )


def _makes_output(rule: Rule) -> bool:
    """Return whether a rule makes the output matrix of a model that has one besides the embeddings."""
    return rule.outputs[0].name == "output.weight" and not rule.optional


@dataclass(frozen=True)
class _PickedRows(Renamed):
    """Some rows of a matrix, by number."""

    rows: tuple[int, ...]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        read = [super(_PickedRows, self).read_rows(row, row + 1) for row in self.rows[start:stop]]
        return joined(read, (self.shape[-1],), rows_dtype(self.type))


def _picked(ids: Sequence[int]) -> Callable[[str, Sequence[Weight], Any], OutputTensor]:
    def arrange(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
        (weight,) = weights
        type_ = weight.type if weight.type in FLOAT_DTYPES else F32
        return _PickedRows(name, (len(ids), weight.shape[-1]), type_, weight, tuple(ids))

    return arrange
