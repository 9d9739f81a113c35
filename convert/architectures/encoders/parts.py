"""Parts that encoders share: the names of classes, and what stays in F32."""

from __future__ import annotations

from collections.abc import Mapping

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.rules import OutputTensor
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32, GGMLType
from gguf_tools.format.values import Value

CLASSIFIER = "ForSequenceClassification"
"""End of the names of models with a classifier, in `architectures` of config.json."""

LABELS = Key(keys.CLASSIFIER_OUTPUT_LABELS, Value.strings, lambda c, o: c.labels or None)

_UNNAMED = {"0": "LABEL_0", "1": "LABEL_1"}


def read_labels(read: ConfigReader, *, is_classifier: bool) -> tuple[str, ...]:
    """Return the names of the classes by their numbers. transformers has two where nothing is said."""
    labels = read.raw.get("id2label") or _UNNAMED
    if not isinstance(labels, Mapping):
        raise read.bad("id2label", "an object with a name for each number from 0 on")
    if not is_classifier and labels == _UNNAMED:
        return ()
    numbers = [str(number) for number in range(len(labels))]
    if {*labels} != {*numbers} or not all(isinstance(label, str) for label in labels.values()):
        raise read.bad("id2label", "an object with a name for each number from 0 on")
    return tuple(labels[number] for number in numbers)


def in_full(tensor: OutputTensor, wanted: GGMLType) -> GGMLType | None:
    """Return F32 for what is added to embeddings."""
    return F32 if tensor.name in ("position_embd.weight", "token_types.weight") else None
