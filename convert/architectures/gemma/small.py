"""Small Gemmas: each layer adds an embedding of its own, and the last ones attend to keys of others.

The last layers have no keys and values. They attend to those of the last layer before them of their kind,
with a window or without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.architectures.base import Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import DecoderConfig
from convert.architectures.decoder.rules import in_layer, layers, layers_if, once, one
from convert.architectures.rules import Arrange, Rule, Sizes, Where, renamed
from gguf_tools.format import keys
from gguf_tools.format.values import Value


@dataclass(frozen=True)
class SmallGemmaConfig(DecoderConfig):
    """Configuration of a model; names as in config.json.

    num_kv_shared_layers  last layers that attend to keys and values of the last one before them of their kind
    hidden_size_per_layer_input  columns of the embedding that each layer adds; 0 for none
    """

    num_kv_shared_layers: int = 0
    hidden_size_per_layer_input: int = 0

    @property
    def all_layers_input(self) -> int:
        """Columns of the embeddings that all layers add, side by side."""
        return self.num_hidden_layers * self.hidden_size_per_layer_input

    @property
    def n_own_keys(self) -> int:
        """Number of layers that have keys of their own, the first ones."""
        return self.num_hidden_layers - self.num_kv_shared_layers


SHARED_LAYERS = Key(keys.SHARED_KV_LAYERS, Value.u32, lambda c, o: c.num_kv_shared_layers)
EMBEDDING_PER_LAYER = Key(
    keys.EMBEDDING_LENGTH_PER_LAYER_INPUT, Value.u32, lambda c, o: c.hidden_size_per_layer_input
)


def read_shared_layers(read: ConfigReader, windows: Collection[int], n_layers: int, name: str) -> int:
    """Return num_kv_shared_layers.

    windows  the layers that have a window
    name     what llama.cpp calls the architecture
    raises   BadConfig where llama.cpp would take the keys of other layers
    """
    n_shared = read.size("num_kv_shared_layers", 0, least=0, most=n_layers - 1)
    if n_shared and not _shares_last_keys(windows, n_layers, n_layers - n_shared):
        expected = "as many as leave a full layer last, and one with a window before it"
        raise read.bad("num_kv_shared_layers", f"{expected}: llama.cpp's {name} takes their keys")
    return n_shared


def _shares_last_keys(windows: Collection[int], n_layers: int, n_own: int) -> bool:
    """Return whether the last layers of each kind with keys of their own are the last two of all such."""
    return n_own - 1 not in windows and (n_own - 2 in windows or not {*range(n_own, n_layers)} & {*windows})


def own_keys(config: SmallGemmaConfig, options: Any) -> range:
    """Return the layers that have keys and values of their own."""
    return range(config.n_own_keys)


def no_keys(config: SmallGemmaConfig, options: Any) -> range:
    """Return the layers that attend to keys and values of others."""
    return range(config.n_own_keys, config.num_hidden_layers)


def norms(sources: Mapping[str, str], where: Where = layers) -> Iterator[Rule]:
    """Yield the rules of norms of hidden states, by their names in the file."""
    for name, source in sources.items():
        yield in_layer(where, f"{name}.weight", f"{source}.weight", "hidden_size")


def layer_embeddings(
    table: Sizes = "vocab_size all_layers_input", arrange: Arrange = renamed
) -> tuple[Rule, ...]:
    """Return the rules of the embeddings that layers add; `table` has the shape of those of tokens."""
    added = layers_if("hidden_size_per_layer_input")
    once_added = layers_if("hidden_size_per_layer_input", once)
    return (
        one(once_added, "per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight", table, arrange),
        one(once_added, "per_layer_model_proj.weight", "model.per_layer_model_projection.weight",
            "all_layers_input hidden_size"),
        one(once_added, "per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight",
            "hidden_size_per_layer_input"),
        in_layer(added, "inp_gate.weight", "per_layer_input_gate.weight",
                 "hidden_size_per_layer_input hidden_size"),
        in_layer(added, "proj.weight", "per_layer_projection.weight",
                 "hidden_size hidden_size_per_layer_input"),
        in_layer(added, "post_norm.weight", "post_per_layer_input_norm.weight", "hidden_size"),
    )  # fmt: skip
