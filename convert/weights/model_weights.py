"""All weights of a checkpoint, each read by the loader of its format.

Every stored tensor ends up in one of four places, decided once, from names and headers:

    a module that a loader knows   its main tensor becomes a weight, the others are consumed with it
    dropped                        statistics of activations and scratch of kernels, never part of a weight
    plain                          floats: the weight itself, under its own name
    none of these                  an error that names the first one

So a model can mix formats. Modules that were not quantized are recognised one by one, because they are
stored as floats. The configuration's lists of them (ignore, modules_to_not_convert ...) are not needed, and
every producer matches them in another way.

A rotation of a module's inputs, a scale that is multiplied into them at run time, or zeros that are left
out belong to the weights as much as codes and scales do. Reading without them would give a file that looks
good and computes nonsense, so `refuse` and `refuse_rotations` stop at them, whatever the format.

Programs that rotate multiply the weights of a module with an orthogonal matrix, often Hadamard's, and its
inputs with the inverse when the model runs. What they write about it has had many names: hadamard_config,
rotation_config and transform_config in auto-round and in compressed-tensors, rotation in GPTQModel, rotate
in ModelOpt, hadamard_group_size in FP-Quant, quarot and spinquant elsewhere. So every key with one of these
words counts, however deep it stands, unless it says nothing, or that it is off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from convert.checkpoint.checkpoint import ADAPTER_TENSORS, Checkpoint
from convert.weights.base import TYPES, Module, PlainWeight, Weight, WeightsLoader, rows_and_cols
from convert.weights.settings import Settings, unread_keys
from gguf_tools.errors import CheckpointError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.system.files import Closing
from gguf_tools.text import bytes_text, quoted, table

_CONSTANT = "a constant of the model's code"
_MASKS = ("attn.bias", "attention.bias")
"""Endings of the names of causal masks, which old classes keep as booleans."""

DROPPED: Mapping[str, str] = MappingProxyType({
    **dict.fromkeys(
        (".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".output_scale",
         ".act_scale", ".qscale_act"),
        "scales activations, not weights",
    ),
    **dict.fromkeys((".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"), "scales the cache"),
    ".workspace": "scratch of a kernel",
    **dict.fromkeys((".position_ids", ".masked_bias", ".cos_cached", ".sin_cached"), _CONSTANT),
    **dict.fromkeys((".gptq_bits", ".gptq_groupsize", ".gptq_sym"), "settings, which the shapes show too"),
})  # fmt: skip
"""Suffix of stored tensors that are dropped, unless a loader consumes them -> why."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A module, the loader that reads it, and the names of all tensors that are stored for it."""

    loader: WeightsLoader
    module: Module
    tensors: tuple[str, ...]


class ModelWeights(Closing):
    """The logical weights of an open checkpoint, which is closed with them, or at the end of a with-block.

    checkpoint, settings   where the weights come from
    dropped                stored tensors that are part of no weight and not needed -> why
    notes                  what the user should know about how they are stored
    raises   UnsupportedCheckpoint for a stored tensor that is part of no weight
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings, loaders: Sequence[WeightsLoader]) -> None:
        self.checkpoint = checkpoint
        self.settings = settings
        claims = {claim.tensors[0]: claim for claim in _claims(checkpoint, settings, loaders)}
        consumed = {name for claim in claims.values() for name in claim.tensors}
        loose = [name for name in checkpoint.names() if name not in consumed]
        self.dropped: Mapping[str, str] = MappingProxyType(dict(_drops(checkpoint, loose)))
        plain = {name for name in loose if name not in self.dropped}
        _check_plain(checkpoint, settings, loaders, plain)
        self._claims: dict[str, _Claim] = {}
        self._names: dict[str, None] = {}
        self.notes = tuple(unread_keys(settings)) if claims else ()
        for stored in checkpoint.names():
            claim = claims.get(stored)
            if claim is None and stored not in plain:
                continue
            name = stored if claim is None else claim.module.name
            if name in self._names:
                raise CheckpointError(f"{checkpoint.raw(stored).path}: {stored}: {name} is stored twice")
            self._names[name] = None
            if claim is not None:
                self._claims[name] = claim

    def close(self) -> None:
        self.checkpoint.close()

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is decoded while it is read."""
        return any(claim.loader.decodes for claim in self._claims.values())

    def names(self) -> tuple[str, ...]:
        """Return the logical names, each where its main stored tensor stands in the checkpoint."""
        return tuple(self._names)

    @property
    def last(self) -> frozenset[str]:
        """Those of the names that llama.cpp's converter comes to when it is through with all others."""
        return frozenset(name for name, claim in self._claims.items() if claim.loader.last)

    def weight(self, name: str) -> Weight:
        """Return the weight with the logical `name`, unread.

        raises  MissingTensor, CheckpointError, UnsupportedCheckpoint: see `base.Weights`
        """
        claim = self._claims.get(name)
        if claim is not None:
            return claim.loader.load(claim.module)
        if name not in self._names:
            raise MissingTensor(f"{self.checkpoint.folder}: no weight {name}")
        return PlainWeight(self.checkpoint.raw(name))

    def read(self, name: str) -> np.ndarray:
        """Return the whole weight `name` in its shape, float32."""
        shape = self.weight(name).shape
        return self.read_rows(name, 0, rows_and_cols(shape)[0]).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop` of the weight `name`, (stop - start, n_cols), float32.

        Rows are counted over all the axes before the last one; a vector is one row.
        """
        return self.weight(name).read_rows(start, stop).astype(np.float32, copy=False)

    def stored_bytes(self, name: str) -> int:
        """Return how many bytes the checkpoint spends on the weight `name`, scales and all."""
        claim = self._claims.get(name)
        stored = (name,) if claim is None else claim.tensors
        return sum(self.checkpoint.raw(tensor).n_bytes for tensor in stored)


def _claims(checkpoint: Checkpoint, settings: Settings, loaders: Sequence[WeightsLoader]) -> Iterator[_Claim]:
    """Yield every module that a loader knows; the first loader that fits has it."""
    for name in checkpoint.names():
        for loader in loaders:
            if not name.endswith(loader.main):
                continue
            stem = name.removesuffix(loader.main)
            module = Module(stem, stem + loader.logical, checkpoint, settings)
            if loader.fits(module):
                sides = (stem + suffix for suffix in loader.sides)
                yield _Claim(loader, module, (name, *(side for side in sides if side in checkpoint)))
                break


def _drops(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        reason = DROPPED.get("." + name.rpartition(".")[2])
        if name.endswith(_MASKS) and checkpoint.raw(name).dtype in ("BOOL", "U8"):
            reason = _CONSTANT
        if reason is not None:
            yield name, reason


def _check_plain(
    checkpoint: Checkpoint, settings: Settings, loaders: Sequence[WeightsLoader], plain: set[str]
) -> None:
    """Raise UnsupportedCheckpoint for the first tensor that would be a weight and isn't stored as floats."""
    for name in checkpoint.names():
        raw = checkpoint.raw(name)
        if name in plain and raw.dtype not in TYPES:
            formats = ", ".join(dict.fromkeys(loader.format for loader in loaders))
            raise UnsupportedCheckpoint(
                f"{raw.path}: {name}: stored as {raw.dtype} {raw.shape}, part of no weight in a format that"
                f" is read ({settings.described}; tried {formats})"
            )


TENSORS: Mapping[str, str] = MappingProxyType({
    ".pre_quant_scale": "a scale of the module's inputs",
    ".act.scales": "a scale of the module's inputs",
    ".bitmask": "a sparse matrix",
    ".trellis": "EXL3",
})  # fmt: skip
"""Suffix of stored tensors -> what makes a checkpoint unreadable that has them."""

FINISHED = ("compressed", "frozen")
"""Values of quantization_status of a checkpoint that is ready to be used."""


def refuse(checkpoint: Checkpoint, settings: Settings) -> None:
    """Raise UnsupportedCheckpoint for the first thing that would make the weights mean something else."""
    sparsity = settings.get("sparsity_config")
    kind = sparsity.get("format") if isinstance(sparsity, dict) else None
    if kind not in (None, "dense"):
        raise UnsupportedCheckpoint(
            f"{settings.where('sparsity_config')}: format {quoted(kind)} is not read;"
            f" {first_quantized(checkpoint)}"
        )
    status = settings.get("quantization_status")
    if status is not None and status not in FINISHED:
        raise UnsupportedCheckpoint(
            f"{settings.where('quantization_status')} is {quoted(status)}, expected"
            f" {' or '.join(FINISHED)}: the"
            f" checkpoint was saved half-way; {first_quantized(checkpoint)}"
        )
    for name in checkpoint.names():
        if any(part in name for part in ADAPTER_TENSORS):
            raise UnsupportedCheckpoint(
                f"{checkpoint.raw(name).path}: {name}: part of an adapter; merge it into the model first"
                " (PEFT: merge_and_unload), then convert"
            )
        for suffix, meaning in TENSORS.items():
            if name.endswith(suffix):
                path = checkpoint.raw(name).path
                raise UnsupportedCheckpoint(
                    f"{path}: {name}: {meaning}, which is not read ({settings.described})"
                )


def stores_floats(checkpoint: Checkpoint) -> bool:
    """Whether every stored tensor is of floats that are a weight as they are."""
    return all(checkpoint.raw(name).dtype in TYPES for name in checkpoint.names())


def first_quantized(checkpoint: Checkpoint) -> str:
    """Return words that name the first stored tensor that is not plain, for an error."""
    for name in checkpoint.names():
        if checkpoint.raw(name).dtype not in TYPES:
            return f"first such tensor: {name} ({checkpoint.raw(name).dtype})"
    return "no tensor shows it"


def describe(model: ModelWeights) -> dict[str, Any]:
    """Return the weights as plain data (name, shape, stored_as, bits_per_weight), and what was dropped.

    raises  CheckpointError for the first weight whose stored tensors don't fit each other
    """
    tensors, n_weights, n_bytes = [], 0, 0
    for name in model.names():
        weight, stored = model.weight(name), model.stored_bytes(name)
        tensors.append({
            "name": name,
            "shape": list(weight.shape),
            "stored_as": weight.stored_as,
            "bits_per_weight": _bits_per_weight(stored, prod(weight.shape)),
        })  # fmt: skip
        n_weights += prod(weight.shape)
        n_bytes += stored
    return {
        "folder": str(model.checkpoint.folder),
        "quant_method": model.settings.method,
        "weights": n_weights,
        "bytes": n_bytes,
        "bits_per_weight": _bits_per_weight(n_bytes, n_weights),
        "tensors": tensors,
        "dropped": dict(model.dropped),
    }


def checkpoint_text(model: ModelWeights) -> list[str]:
    """Return `describe` as lines: one per weight, then totals and what was dropped."""
    listing = describe(model)
    rows = [
        (
            tensor["name"],
            " x ".join(map(str, tensor["shape"])),
            f"{tensor['bits_per_weight']:.2f}",
            tensor["stored_as"],
        )
        for tensor in listing["tensors"]
    ]
    lines = table([("name", "shape", "bits", "stored as"), *rows], right=(1, 2))
    lines.append("")
    lines.append(
        f"{len(rows)} tensors, {listing['weights']:,} weights, {bytes_text(listing['bytes'])},"
        f" {listing['bits_per_weight']:.2f} bits per weight"
    )
    reasons = Counter(listing["dropped"].values())
    lines += [f"{count} more dropped: {reason}" for reason, count in reasons.items()]
    return lines


def _bits_per_weight(n_bytes: int, n_weights: int) -> float:
    return round(8 * n_bytes / n_weights, 4) if n_weights else 0.0


_METHOD = r"hadamard|spin_?quant|quarot|flat_?quant|duquant|butterfly"
_KEY = re.compile(rf"{_METHOD}|incoheren|rotat|transform(?!er)|(^|_)(had|rot)(_|$)", re.IGNORECASE)
_MODEL_KEY = re.compile(rf"{_METHOD}|^(online_|use_|activation_)?rotation", re.IGNORECASE)
"""The same in config.json itself, where much else is rotated."""

_MODEL_TYPE = re.compile(_METHOD, re.IGNORECASE)
_VALUE = re.compile(rf"(random_|random-)?({_METHOD}|rotation)(_?transform|_?modifier)?", re.IGNORECASE)
_TENSOR = re.compile(
    rf"{_METHOD}|(^|[._])(had([._]|$)|had_[kK]\b|rotations?([._]|$)|rotation_matrix)"
    r"|[._](input|output|weight|online|activation)_transform",
    re.IGNORECASE,
)
_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
_SECTIONS = ("quantization_config", "compression_config", "quantization")
_OFF = ("enable", "enabled")


def refuse_rotations(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedCheckpoint for the first key or tensor that says that modules' inputs are rotated."""
    for place in _stated(checkpoint):
        raise UnsupportedCheckpoint(
            f"{place}: the model rotates the inputs of its modules (a Hadamard matrix, or another), which is"
            " not read; convert the model that was quantized, or an export without a rotation"
        )


def _stated(checkpoint: Checkpoint) -> Iterator[str]:
    config, path = checkpoint.config, checkpoint.config_path
    text = config.get("text_config")
    for prefix, holder in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        for key in _SECTIONS:
            yield from (f"{path}: {found}" for found in _keys(holder.get(key), f"{prefix}{key}"))
        for key, value in holder.items():
            if _MODEL_KEY.search(key) and _says_something(value):
                yield f"{path}: {prefix}{key}"
            if key == "model_type" and isinstance(value, str) and _MODEL_TYPE.search(value):
                yield f"{path}: {prefix}{key} is {value}"
    for name in _FILES:
        yield from (f"{checkpoint.folder / name}: {found}" for found in _keys(checkpoint.read_json(name), ""))
    for name in checkpoint.names():
        if _TENSOR.search(name):
            yield f"{checkpoint.raw(name).path}: {name}"


def _keys(value: Any, place: str) -> Iterator[str]:
    """Yield where in settings a rotation is stated."""
    if isinstance(value, str):
        if _VALUE.fullmatch(value):
            yield place
        return
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        inside = f"{place}.{key}" if place else str(key)
        if isinstance(key, str) and _KEY.search(key):
            if _says_something(inner):
                yield inside
        else:
            yield from _keys(inner, inside)


def _says_something(value: Any) -> bool:
    """Return whether a value is more than nothing, false, zero or a holder of these alone."""
    if isinstance(value, Mapping):
        if any(value.get(key) is False for key in _OFF):
            return False
        return any(map(_says_something, value.values()))
    if isinstance(value, list):
        return any(map(_says_something, value))
    if isinstance(value, str):
        return value.lower() not in ("", "none", "null", "false", "no", "off", "identity", "default")
    return bool(value)
