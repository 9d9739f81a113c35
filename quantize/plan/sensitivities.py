"""Sensitivities: what each tensor costs at each type it could have, as measured once for a model and a text.

A sensitivity is the mean divergence per token, in nats, that rounding one tensor to one type adds. To first
order the sensitivities of a file's tensors add up to its divergence. Measuring takes a pass through the
model. Choosing types under a budget takes the numbers alone, so they are kept in a small JSON file:

    {"format": "gguf-tools losses", "version": 1,
     "model": {...}, "text": {...},                          where the numbers come from, for people
     "tensors": {"blk.0.ffn_down.weight": {"shape": [256, 512],
                                           "damage": {"Q2_K": 0.0061, "Q4_K": 0.0004},
                                           "ratio": 0.41}}}

`shape` has rows first, as everywhere. It is that of the model: of a padded file, the one without padding.
`damage` is for stock encoding. `padded`, which few tensors have, is the same at types that the rows fit when
zeros make them a multiple of 256. `ratio` is the share of it that calibrated encoding leaves; it hardly
depends on the type. A tensor without it has 1.

The sum D of the sensitivities of a file's tensors is of the second order, as if no token went to another
expert. Whether one does is decided by a threshold. So the share of tokens that do is proportional to the
errors, which is to the square root of D, and each costs something however small the errors are: the
divergence of a model with routed experts grows as

    D + c sqrt(D)

With c, 13 stock files of the sample model from IQ1_M to Q6_K are told apart to 8 % on the text where c was
chosen, instead of 16 % (docs/budget.md, scripts/measure/predicted_divergence.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest, FormatError
from gguf_tools.files.documents import read_document
from gguf_tools.files.named_files import write_whole
from gguf_tools.format.ggml_types import by_name
from gguf_tools.format.header import MAX_DIMS
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.text import quoted
from quantize.roles import Role, tensor_role

_FORMAT, _VERSION = "gguf-tools losses", 1


@dataclass(frozen=True)
class TensorSensitivity:
    """Cost of one tensor.

    shape   rows first
    by_type  type name -> nats per token that stock encoding adds
    ratio   share of the sensitivity that calibrated encoding leaves, 0 to 1
    padded  the same as by_type for types that fit the rows only when they are padded
    """

    shape: tuple[int, ...]
    by_type: Mapping[str, float]
    ratio: float = 1.0
    padded: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, shape: tuple[int, ...], by_type: Mapping[str, float], ratio: float = 1.0
    ) -> TensorSensitivity:
        """Tell the types that fit rows of `shape` from those that fit padded ones."""
        fit = {name: value for name, value in by_type.items() if shape[-1] % by_name(name).block_elems == 0}
        padded = {name: value for name, value in by_type.items() if name not in fit}
        return cls(shape, fit, ratio, padded)

    def to_json(self) -> dict[str, Any]:
        padded = {"padded": dict(self.padded)} if self.padded else {}
        return {"shape": list(self.shape), "damage": dict(self.by_type), **padded, "ratio": self.ratio}

    def in_shape(self, shape: tuple[int, ...]) -> TensorSensitivity:
        """These for the tensor in the shape that a file has, which may be padded."""
        if shape[-1] == self.shape[-1]:
            return replace(self, shape=shape)
        return TensorSensitivity(shape, {**self.by_type, **self.padded}, self.ratio)


@dataclass(frozen=True)
class Sensitivities:
    """The sensitivities of a model.

    tensors  by name in the GGUF file; those that stay F32 are left out
    model    where the numbers come from: the model
    text     ... and the text that it computed
    """

    tensors: Mapping[str, TensorSensitivity]
    model: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the sensitivities as plain data, the contents of a losses file."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "model": dict(self.model),
            "text": dict(self.text),
            "tensors": {name: each.to_json() for name, each in self.tensors.items()},
        }

    def predict(self, types: Mapping[str, str], *, calibrated: bool = False) -> float:
        """Return the predicted mean divergence, in nats per token, of a file whose tensors have these types.

        types       tensor name -> type name; F32, F16, BF16 and tensors that were not measured add nothing
        calibrated  the file is encoded with calibration
        raises      BadRequest for a type that was not measured for its tensor
        """
        total = 0.0
        for name, type_ in types.items():
            each = self.tensors.get(name)
            if each is None or type_ in ("F32", "F16", "BF16"):
                continue
            known = {**each.by_type, **each.padded}
            if type_ not in known:
                raise BadRequest(
                    f"{name}: the losses have no {type_}, only {', '.join(known)}; measure them again"
                )
            total += known[type_] * (each.ratio if calibrated else 1.0)
        return total

    def fitted_to(self, tensors: Iterable[TensorInfo]) -> Sensitivities:
        """Return these for a model whose latent attention may be laid out differently.

        Heads may be matrices of a stack or lie one below the other. Where the model has attn_kv_b instead of
        attn_k_b and attn_v_b, it has the sum of both. Where it has all three, attn_kv_b has no sensitivities.

        raises  BadRequest unless every measured tensor is in the model, with rows as long and as many
        """
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        fitted: dict[str, TensorSensitivity] = {}
        for name, each in self._joined(shapes).items():
            if name not in shapes:
                raise BadRequest(
                    f"{name}: has losses, but the model lacks this tensor; are they of another model?"
                )
            shape = shapes[name]
            if (math.prod(shape), shape[-1]) != (math.prod(each.shape), each.shape[-1]):
                raise BadRequest(
                    f"{name}: shape {_shown(shape)}, and the losses have {_shown(each.shape)};"
                    " losses of another model?"
                )
            fitted[name] = replace(each, shape=shape)
        return replace(self, tensors=fitted)

    def _joined(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorSensitivity]:
        """Return these, with attn_k_b and attn_v_b added up where the model has attn_kv_b instead."""
        joined = dict(self.tensors)
        for name in shapes:
            halves = [name.replace("attn_kv_b", half) for half in ("attn_k_b", "attn_v_b")]
            if halves[0] == name or any(half in shapes or half not in joined for half in halves):
                continue
            k, v = (joined.pop(half) for half in halves)
            by_type = {
                type_: value + v.by_type[type_] for type_, value in k.by_type.items() if type_ in v.by_type
            }
            joined[name] = TensorSensitivity(shapes[name], by_type, max(k.ratio, v.ratio))
        return joined


def write_sensitivities(sensitivities: Sensitivities, path: str | os.PathLike[str]) -> None:
    """Write a losses file; raises OutputError when it can't be written."""
    write_whole(Path(path), (json.dumps(sensitivities.to_json(), indent=1) + "\n").encode())


def read_sensitivities(path: str | os.PathLike[str]) -> Sensitivities:
    """Return the contents of a losses file.

    raises  FormatError naming the file and the key that is wrong; BadRequest when it can't be read
    """
    path = Path(path)
    data = read_document(path, FormatError, unless="not a losses file")
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise FormatError(f"{path}: not a losses file, expected a JSON object with format {_FORMAT!r}")
    if data.get("version") != _VERSION:
        found = quoted(data.get("version"))
        raise FormatError(f"{path}: version {found} of losses files, expected {_VERSION}")
    tensors = data.get("tensors")
    if not isinstance(tensors, dict) or not tensors:
        raise FormatError(f"{path}: tensors: expected losses of at least one tensor")
    read = {name: _read_tensor(f"{path}: {name}", entry) for name, entry in tensors.items()}
    return Sensitivities(read, _read_mapping(data.get("model")), _read_mapping(data.get("text")))


def _read_tensor(where: str, entry: Any) -> TensorSensitivity:
    if not isinstance(entry, dict):
        raise FormatError(f"{where}: expected an object with shape and damage")
    shape, by_type = entry.get("shape"), entry.get("damage")
    if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMS or not all(map(_is_size, shape)):
        raise FormatError(f"{where}: shape is {quoted(shape)}, expected a list of sizes, rows first")
    if not isinstance(by_type, dict) or not (by_type or entry.get("padded")):
        raise FormatError(f"{where}: damage is {quoted(by_type)}, expected a number for at least one type")
    padded = entry.get("padded", {})
    if not isinstance(padded, dict):
        raise FormatError(f"{where}: padded is {quoted(padded)}, expected a number for each type")
    for type_, value in (*by_type.items(), *padded.items()):
        _check_number(f"{where}: damage of {type_}", value)
        if (shape[-1] % by_name(type_).block_elems != 0) != (type_ in padded):
            raise FormatError(f"{where}: damage of {type_}, whose blocks do not divide rows of {shape[-1]}")
    ratio = entry.get("ratio", 1.0)
    _check_number(f"{where}: ratio", ratio)
    fit, more = ({type_: float(value) for type_, value in each.items()} for each in (by_type, padded))
    return TensorSensitivity(tuple(shape), fit, float(ratio), more)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _check_number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise FormatError(f"{where} is {quoted(value)}, expected a number from 0")


def _read_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


# ---- the divergence to expect


ROUTING = 0.015
"""The c of models with routed experts, square roots of nats: the same for all their files."""

FACTOR = 1.41
"""Real divergence over D + c sqrt(D), the geometric mean of the 13 files."""

DENSE_FACTOR = 0.84
"""The same over D, of 13 files of a small model of Llama's kind without experts."""

DEVIATION = 0.16
"""Standard deviation of the logarithm of that, with room for texts and models of other kinds."""

N_FILES = 13

_WIDTH = 2.18
"""The 97.5 % quantile of Student's t with 12 degrees of freedom, because 13 files say how wide it is."""


@dataclass(frozen=True)
class Expected:
    """A divergence in nats per token, and the range that has it in 19 of 20 cases."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.5f} ({self.low:.5f} to {self.high:.5f})"


def is_routed(sensitivities: Sensitivities) -> bool:
    """Whether a model has routed experts."""
    experts = Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN
    return any(
        len(each.shape) > 2 and tensor_role(name, each.shape).role in experts
        for name, each in sensitivities.tensors.items()
    )


def level_of(sensitivity: float, *, routed: bool) -> float:
    """Return D + c sqrt(D), which grows as the divergence does.

    routed  the model has routed experts; without them there is no c
    """
    return sensitivity + (ROUTING * math.sqrt(sensitivity) if routed else 0.0)


def expected_divergence(sensitivity: float, *, routed: bool) -> Expected:
    """Predict the divergence where sensitivities add up to this; `routed` as above.

    >>> str(expected_divergence(0.004, routed=True))
    '0.00698 (0.00486 to 0.01002)'
    """
    middle = (FACTOR if routed else DENSE_FACTOR) * level_of(sensitivity, routed=routed)
    spread = math.exp(_WIDTH * DEVIATION * math.sqrt(1 + 1 / N_FILES))
    return Expected(middle / spread, middle, middle * spread)
