"""Definition of a model family, and the one function that turns its checkpoints into tensors and metadata.

A family is two tables, a configuration reader and the options that it declares:

    rules     which weights become which tensors (convert.architectures.rules)
    metadata  the keys of the family's name: how each follows from the configuration
    options   what the user may choose (convert.architectures.options)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from convert.architectures.config_reader import Fields, merged, unread_notes, with_known_class
from convert.architectures.dense_modules import read_dense_modules
from convert.architectures.options import DENSE_MODULES, NoOptions, make_options
from convert.architectures.reranker import is_reranker, label_ids, with_classifier
from convert.architectures.rules import Drop, OutputTensor, Rule, match
from convert.architectures.stored_names import (
    Renaming,
    StoredNames,
    has_moved,
    stored_names,
    with_whole_norms,
)
from convert.tokenizer.files import NO_QUIRKS, Quirks
from convert.weights.adapted import AdaptedWeights
from convert.weights.base import Weights
from gguf_tools.format.ggml_types import GGMLType
from gguf_tools.format.values import Metadata, Value

_NONE: Mapping[str, object] = MappingProxyType({})
"""No choices: every option keeps its default."""


@dataclass(frozen=True)
class Key:
    """One metadata key of a family.

    name   a template of gguf_tools.format.keys: "{arch}.attention.head_count"
    kind   Value.u32, Value.f32 ...
    value  (config, options) -> the value, None to leave the key out
    """

    name: str
    kind: Callable[[Any], Value]
    value: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Architecture:
    """A model family.

    hf_names         what config.json calls it in `architectures`
    gguf_name        what general.architecture calls it
    read_config      config.json and its path -> the family's configuration
    options          the frozen dataclass of its options
    n_experts        configuration -> how many weights a source with {expert} stands for
    with_stored      (config, weights) -> the configuration with what it has of numbers in the checkpoint
    drops            (config, options) -> what a checkpoint may hold that the file doesn't need
    notes            (config, options) -> what the user should know about running the result
    check            (config, options) -> nothing; raises BadRequest for options that don't fit the model
    resolve_options  (config, options, names of weights) -> options with the defaults that depend on the
                     model. The names are None where no weights are looked at
    canonical_name   another spelling of a weight's name -> name that the rules know it by; spellings that all
                     families have in common are those of convert.architectures.stored_names
    quirks           what the family's tokenizers have in common beyond what their files say
    kept             types of a checkpoint's own codes that stay as they are under every --outtype
    forced_type      (tensor, type asked for) -> the type that it has all the same, None where the one asked
                     for counts
    tells_unread     whether a field of config.json that the family doesn't read is told
    ranks            whether rerankers are known by their names, and llama.cpp reads a classifier of them
    reader           (the family, keys, tensor name -> shape, path) -> the configuration of a file, as
                     llama.cpp takes it: the inverse of `metadata`. None where the forward pass computes no
                     such model

    An ordinary decoder (`convert.architectures.decoder`) has besides what its files don't show, and both
    the reader and the forward pass ask for:

    rotation      columns that are rotated together: neighbours, or those half of the rotated ones apart
    unset_gating  the router's scoring function where no key names one
    says_norm     whether the weights of experts are normalised where a key says so; else they always are
    windows       how layers with a window rotate: "stretched" as the others, with a theta of their own;
                  "unstretched"; "plain", with the theta of the others, too; "alike", as others would;
                  "own", with a theta and columns that the family's reader tells; "own unstretched", the
                  same, and a factor that a file names stays. "" where none has a window
    window_theta  theta of those layers where no key says it; None for that of the others
    norms_rotated whether queries and keys are normed after they are rotated
    encodes       whether tokens see later ones, too: an encoder, which predicts none
    gelu          how dense blocks compute GELU: "tanh", approximated; "" where they have none
    gated         whether dense blocks have a gate
    clamped       whether blocks and experts have gpt-oss's gate
    tiled         how heads of delta nets share keys: tiled, or grouped
    """

    hf_names: tuple[str, ...]
    gguf_name: str
    read_config: Callable[[Mapping[str, Any], Path], Any]
    rules: tuple[Rule, ...]
    metadata: tuple[Key, ...]
    options: type[Any] = NoOptions
    n_experts: Callable[[Any], int] = lambda config: 0
    with_stored: Callable[[Any, Renaming], Any] = lambda config, weights: config
    drops: Callable[[Any, Any], tuple[Drop, ...]] = lambda config, options: ()
    notes: Callable[[Any, Any], tuple[str, ...]] = lambda config, options: ()
    check: Callable[[Any, Any], None] = lambda config, options: None
    resolve_options: Callable[[Any, Any, Container[str] | None], Any] = lambda config, options, names: options
    canonical_name: Callable[[str], str] | None = None
    quirks: Quirks = NO_QUIRKS
    kept: frozenset[GGMLType] = frozenset()
    forced_type: Callable[[OutputTensor, GGMLType], GGMLType | None] = lambda tensor, wanted: None
    tells_unread: bool = True
    ranks: bool = False
    reader: Callable[[Any, Metadata, Mapping[str, tuple[int, ...]], str | Path], Any] | None = None
    rotation: Literal["pairs", "halves"] = "halves"
    unset_gating: str = "softmax"
    says_norm: bool = False
    windows: Literal["", "stretched", "unstretched", "plain", "alike", "own", "own unstretched"] = ""
    window_theta: float | None = None
    norms_rotated: bool = False
    encodes: bool = False
    gelu: Literal["", "tanh"] = ""
    gated: bool = True
    clamped: bool = False
    tiled: bool = False

    def read_file(self, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path) -> Any:
        """Return the configuration in the keys and tensors of a GGUF file of the family.

        shapes  tensor name -> shape, rows first
        path    the file, for messages
        raises  FormatError, MissingTensor, UnsupportedCheckpoint, naming the file and the key
        """
        assert self.reader is not None
        return self.reader(self, metadata, shapes, path)

    def makes(self, name: str) -> bool:
        """Return whether files of the family may have a tensor: "blk.{layer}.attn_sinks.weight"."""
        return any(output.name == name for rule in self.rules for output in rule.outputs)

    @property
    def stored_names(self) -> StoredNames:
        """Name of a weight in any checkpoint -> name that the rules know it by."""
        return stored_names(self.rules, self.canonical_name)


@dataclass(frozen=True)
class Conversion:
    """Everything about a file to be written except its tokenizer and its general keys.

    tensors   in file order, unread
    metadata  the family's own keys ("deepseek2.block_count" ...), in llama.cpp's order
    notes     lines for the report: what was left out and what to know before running the file
    dropped   weight or stored tensor -> why it is not in the file
    """

    architecture: Architecture
    config: Any
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, Value]
    notes: tuple[str, ...]
    dropped: Mapping[str, str]


def build(
    architecture: Architecture,
    model: Weights,
    choices: Mapping[str, object] = _NONE,
    adapted: Callable[..., Weights] = AdaptedWeights,
) -> Conversion:
    """Match the checkpoint behind `model` to tensors and keys; reads headers and config.json, no weight.

    choices  option of the family -> value; an option that isn't there keeps the family's default
    adapted  what an adapter makes of the weights; takes what AdaptedWeights takes
    raises   BadConfig, UnsupportedCheckpoint, MissingTensor, UnexpectedTensors, CheckpointError for wrong
             shapes, BadRequest for an option that the family hasn't declared or that doesn't fit the model
    """
    checkpoint, names = model.checkpoint, architecture.stored_names
    rules = with_whole_norms(architecture.rules) if has_moved(model) else architecture.rules
    ranks = architecture.ranks and is_reranker(checkpoint.folder, checkpoint.config)
    if ranks:
        rules = with_classifier(rules, label_ids(checkpoint.folder, checkpoint.config))
    stored = Renaming(model, names)
    is_base_class = names.prefix and (
        checkpoint.config["architectures"][0] not in architecture.hf_names or names.lacks_prefix(stored)
    )
    adapter = checkpoint.adapter
    model = stored if adapter is None else adapted(stored, adapter, names, names.embeddings)
    path, fields = checkpoint.config_path, Fields(with_known_class(checkpoint.config, architecture.hf_names))
    config = architecture.read_config(fields, path)
    tied: tuple[str, ...] = ()
    if is_base_class and "lm_head.weight" not in model.names() and not config.tie_word_embeddings:
        config = architecture.read_config(merged(fields, {"tie_word_embeddings": True}), path)
        tied = (_TIED_NOTE,)
    config = architecture.with_stored(config, stored)
    options = make_options(architecture.options, choices, checkpoint.config["architectures"][0])
    architecture.check(config, options)
    options = architecture.resolve_options(config, options, frozenset(model.names()))
    tensors, dropped = match(
        model,
        rules,
        architecture.drops(config, options),
        config,
        options,
        architecture.n_experts(config),
    )
    dropped.update(model.dropped)
    if ranks and not config.tie_word_embeddings:
        config, tied = replace(config, tie_word_embeddings=True), (_RANKS_NOTE,)
    metadata = metadata_of(architecture, config, options)
    if getattr(options, DENSE_MODULES, False):
        dense, sizes = read_dense_modules(checkpoint, architecture.gguf_name, config.hidden_size)
        tensors, metadata = (*dense, *tensors), {**metadata, **sizes}
    return Conversion(
        architecture,
        config,
        tensors,
        metadata,
        (
            *checkpoint.notes,
            *model.notes,
            *architecture.notes(config, options),
            *tied,
            *(unread_notes(fields) if architecture.tells_unread else ()),
            *_drop_notes(dropped),
        ),
        MappingProxyType(dropped),
    )


_TIED_NOTE = (
    "no lm_head.weight: the model has no output matrix, like embedding models; llama.cpp uses the token"
    " embeddings instead"
)

_RANKS_NOTE = (
    "a reranker: of its output matrix, the file has the rows of yes and no, which judge a document; for the"
    " next token llama.cpp uses the token embeddings instead"
)


def metadata_of(architecture: Architecture, config: Any, options: Any) -> Mapping[str, Value]:
    """Return the family's own keys for a model."""
    values = ((key, key.value(config, options)) for key in architecture.metadata)
    return MappingProxyType({
        key.name.format(arch=architecture.gguf_name): key.kind(value)
        for key, value in values
        if value is not None
    })  # fmt: skip


def _drop_notes(dropped: Mapping[str, str]) -> list[str]:
    """Return one line per reason, with how many weights it hit and the first of them."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in dropped.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"left out {len(names)} tensor{'s' * (len(names) > 1)} ({names[0]}{' ...' * (len(names) > 1)}):"
        f" {reason}"
        for reason, names in by_reason.items()
    ]
