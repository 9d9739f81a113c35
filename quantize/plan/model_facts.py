"""Facts about a model that the choice of types depends on, read from its GGUF metadata."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.hparams import architecture_of, known_hparams
from gguf_tools.format.values import Kind, Metadata, Value

WITHOUT_HPARAMS = frozenset({"clip"})
"""Architectures whose hyper-parameters llama-quantize does not read (llama_model_base::load_hparams). `clip`
is the one of mmproj files, which hold the vision or audio part of a model."""

LAYERS_OF_70B = {"llama": 80, "qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
"""Layers of the models that llama.cpp takes for one of 70 billion weights, by architecture
(llama_model_<architecture>::load_arch_hparams: LLM_TYPE_70B)."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts that the choice of types depends on, besides the tensors themselves.

    Where layers differ, the numbers of heads are those of the first.

    architecture  `general.architecture`
    n_layers      `block_count`, which includes layers for multi-token prediction; 0 for an mmproj file and
                  an image model
    n_experts     routed experts per layer; 0 for a dense model
    n_heads       attention heads, None when the metadata does not say
    n_kv_heads    heads of keys and values; 1 when the file has the compressed MLA layout
    n_mtp_layers  layers for multi-token prediction
    n_vocab       tokens, 0 when the metadata does not say
    width         elements of an embedding, 0 when the metadata does not say
    """

    architecture: str
    n_layers: int
    n_experts: int = 0
    n_heads: int | None = None
    n_kv_heads: int | None = None
    n_mtp_layers: int = 0
    n_vocab: int = 0
    width: int = 0

    @classmethod
    def from_metadata(
        cls, metadata: Metadata, overrides: Iterable[tuple[str, Value]] = (), *, has_layers: bool = True
    ) -> ModelFacts:
        """Return the facts of a model file.

        overrides   metadata that a user puts in the place of the file's
        has_layers  whether it has tensors of layers, `blk.N.`; image models have not, nor a number of layers
        raises      BadRequest naming the option that helps if `general.architecture` or, with layers, their
                    number is missing
        """
        metadata = {**metadata, **dict(_taken(overrides, metadata))}
        architecture = architecture_of(metadata)
        if architecture is None:
            raise BadRequest(
                f"{keys.ARCHITECTURE}: {_found(metadata, keys.ARCHITECTURE)}, expected a model file;"
                f" --override-kv {keys.ARCHITECTURE}=str:NAME sets it"
            )
        if architecture in WITHOUT_HPARAMS:
            return cls(architecture, n_layers=0)
        hparams = known_hparams(metadata, architecture)
        n_layers = hparams.first("block_count")
        if n_layers is None and has_layers:
            key = hparams.key("block_count")
            raise BadRequest(
                f"{key}: {_found(metadata, key)}, expected the number of layers; --override-kv {key}=int:N"
                " sets it"
            )
        n_heads, n_kv_heads = hparams.first("head_count"), hparams.first("head_count_kv")
        return cls(
            architecture=architecture,
            n_layers=n_layers or 0,
            n_experts=hparams.first("expert_count") or 0,
            n_heads=n_heads,
            n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
            n_mtp_layers=hparams.first("nextn_predict_layers") or 0,
            n_vocab=hparams.first("vocab_size") or _n_tokens(metadata),
            width=hparams.first("embedding_length") or 0,
        )

    @property
    def n_gqa(self) -> int:
        """Number of query heads that share one head of keys and values; 0 when unknown.

        raises  BadRequest for a file without layers, where llama-quantize stops as well
        """
        if not self.n_layers:
            raise BadRequest(
                f"this file type depends on how many heads share a key, which {self.architecture} files do"
                " not say (llama-quantize stops here too); --pure does not need this"
            )
        if not self.n_heads or not self.n_kv_heads:
            return 0
        return self.n_heads // self.n_kv_heads

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp takes this for a model of 70 billion weights, whose attn_v it gives more bits.

        A `llama` of 80 layers with as many heads of keys as of queries is the older one of 65 billion.
        """
        if self.n_layers - self.n_mtp_layers != LAYERS_OF_70B.get(self.architecture):
            return False
        return self.architecture != "llama" or self.n_heads != self.n_kv_heads


_NUMBERS_OR_ARRAYS = (keys.HEAD_COUNT.format(arch=""), keys.HEAD_COUNT_KV.format(arch=""))


def _taken(overrides: Iterable[tuple[str, Value]], metadata: Metadata) -> Iterator[tuple[str, Value]]:
    """Yield the overrides that llama-quantize plans with.

    One of a key that may differ by layer counts only where the file has a number for all layers
    (llama_model_loader::get_key_or_arr).
    """
    for key, value in overrides:
        is_number = key in metadata and metadata[key].kind is not Kind.ARRAY
        if is_number or not key.endswith(_NUMBERS_OR_ARRAYS):
            yield key, value


def _found(metadata: Metadata, key: str) -> str:
    value = metadata.get(key)
    return "missing from the metadata" if value is None else f"is {value.type_name}"


def _n_tokens(metadata: Metadata) -> int:
    tokens = metadata.get(keys.TOKENIZER_TOKENS)
    return len(tokens.data) if tokens is not None and isinstance(tokens.data, tuple) else 0
