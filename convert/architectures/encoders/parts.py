"""Parts that encoders share: sizes, the names of classes, and what stays in F32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from convert.architectures.base import Key
from convert.architectures.config_reader import MAX_LAYERS, ConfigReader
from convert.architectures.options import NoOptions
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


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes that every encoder has, and the names of its classes; () for none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    labels: tuple[str, ...]

    tie_word_embeddings = True

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @property
    def qkv_rows(self) -> int:
        """Rows of a matrix of queries, of keys and of values."""
        return 3 * self.hidden_size


def encoder_fields(read: ConfigReader, *, rotates: bool) -> dict[str, Any]:
    """Return the sizes of EncoderConfig from config.json.

    rotates  whether columns of heads are rotated in pairs
    raises   BadConfig naming file and key for a missing or impossible value
    """
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    if rotates and (hidden % heads or hidden // heads % 2):
        raise read.bad("num_attention_heads", f"heads of an even number of columns, {hidden} together")
    if hidden % heads:
        raise read.bad("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    return {
        "vocab_size": read.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.size("intermediate_size"),
        "num_hidden_layers": read.size("num_hidden_layers", most=MAX_LAYERS),
        "num_attention_heads": heads,
    }


def every_layer(config: EncoderConfig, options: NoOptions) -> Iterable[int]:
    return range(config.num_hidden_layers)
