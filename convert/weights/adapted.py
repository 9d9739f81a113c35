"""The weights of a checkpoint as an adapter changes them: which of its tensors belong to which weight.

Names of an adapter are those of a model's modules. They are brought to the names of a family's rules in the
same way as those of a checkpoint. transformers 5 makes stacks of experts that checkpoints store one by one;
what an adapter has for such a stack (target_parameters) is taken apart again. Its tensors don't name the
stack, only its module, so their sizes tell it.

In a square stack, sizes don't tell which of its axes are the inputs. That is the same in all stacks of a
model, so another stack that the adapter changes tells it, or the base's other stack in the same module: of
gate and up together, and of down, the larger axis is that of the outputs where the other one is square.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from convert.checkpoint.adapted_folder import CONFIG_NAME
from convert.checkpoint.adapter import HEAD, MERGE, Adapter
from convert.checkpoint.checkpoint import Checkpoint
from convert.checkpoint.safetensors_file import RawTensor
from convert.weights.base import PlainWeight, Weight, Weights, rows_and_cols
from convert.weights.merged import Factors, Merged, Shifted, WithRows
from gguf_tools.errors import CheckpointError, UnsupportedCheckpoint
from gguf_tools.hub.names import folder_name
from gguf_tools.text import first_of, shown

_A, _B, _EMBEDDED_A, _EMBEDDED_B = "lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B"
_MAGNITUDE, _BIAS, _TOKENS = "lora_magnitude_vector", "lora_B.bias", "token_adapter.trainable_tokens_delta"
_PART = re.compile(
    rf"(?P<stem>.+)\.(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|{_MAGNITUDE}(?=$|\.weight$)"
    rf"|{_TOKENS})(?:(?<={_MAGNITUDE})\.weight)?"
)
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.|$)|\.modules_to_save(?=\.)")
_LISTED = 4

_APART: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stack of experts in transformers 5 -> names of the matrices of one expert, one below the other."""


@dataclass(frozen=True)
class _Stack:
    """A stack of matrices, of the weights in which a checkpoint stores it.

    name   that the model has for it
    shape  (n_mats, n_rows, n_cols)
    parts  each weight, the matrix that it begins with, and the row of that
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int, int], ...]

    @property
    def is_square(self) -> bool:
        return self.shape[1] == self.shape[2]

    def fits(self, a: RawTensor, b: RawTensor) -> bool:
        """Whether two factors are of its sizes, whichever axis the inputs are."""
        n_mats, *sizes = self.shape
        if len(a.shape) != 2 or len(b.shape) != 2:
            return False
        return (
            sorted(sizes) == sorted((a.n_cols, b.n_rows)) and a.n_rows == b.n_cols and a.n_rows % n_mats == 0
        )


_Adapted = tuple[_Stack, RawTensor, RawTensor]
"""A stack with its two factors."""


class AdaptedWeights:
    """The weights of a checkpoint with an adapter merged into them; see `convert.weights.base.Weights`.

    model       weights of the base, by the names of the family's rules
    canonical   name of a weight in a model -> name that the rules know it by
    embeddings  the rules' name of the matrix of embeddings
    raises      CheckpointError naming the tensors of the adapter that fit no weight of the base
    """

    def __init__(
        self, model: Weights, adapter: Adapter, canonical: Callable[[str], str], embeddings: str
    ) -> None:
        self._model, self.adapter, self._canonical, self.embeddings = model, adapter, canonical, embeddings
        self._names = dict.fromkeys(model.names())
        self._changed: dict[str, Weight] = {}
        self._dropped: dict[str, str] = {}
        modules: dict[str, dict[str, RawTensor]] = {}
        unknown: list[str] = []
        for key, raw in adapter.file.tensors.items():
            match = _PART.fullmatch(key)
            if match is not None:
                modules.setdefault(match["stem"], {})[match["part"]] = raw
            elif not self._replace(key, raw):
                unknown.append(key)
        stacks: list[_Adapted] = []
        for stem, parts in modules.items():
            module = _WRAPPED.sub("", stem)
            if not (self._merge_module(module, parts) or self._found_stack(module, parts, stacks)):
                unknown += [raw.name for raw in parts.values()]
        if unknown:
            raise CheckpointError(
                f"{adapter.file.path}: {first_of(unknown, _LISTED)}: no weight of {self.checkpoint.folder}"
                f" takes what is stored there, expected an adapter of this model{self._of}"
            )
        self._merge_stacks(stacks)

    @property
    def checkpoint(self) -> Checkpoint:
        return self._model.checkpoint

    @property
    def last(self) -> Collection[str]:
        return self._model.last

    @property
    def dropped(self) -> Mapping[str, str]:
        return {**self._model.dropped, **self._dropped}

    @property
    def changed(self) -> Mapping[str, Weight]:
        """The weights that the adapter changes, by name."""
        return self._changed

    @property
    def notes(self) -> tuple[str, ...]:
        adapter = self.adapter
        notes = [
            f"merged with the adapter {adapter.identity}: {len(self._changed)} weights",
            *self.base_notes,
        ]
        n_anew = sum(isinstance(weight, PlainWeight) for weight in self._changed.values())
        if n_anew and adapter.scale != 1:
            notes.append(
                f"{n_anew} weights are stored in the adapter as they are to be, whatever --lora-scale"
            )
        return (*self._model.notes, *notes)

    @property
    def base_notes(self) -> tuple[str, ...]:
        """A remark if the adapter names another base."""
        base, folder = self.adapter.base, folder_name(self.checkpoint.folder)
        if not base or Path(base).name.lower() == folder.lower():
            return ()
        return (f"{CONFIG_NAME} names {shown(base)} as the adapter's base; this is {folder}",)

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def weight(self, name: str) -> Weight:
        return self._changed.get(name) or self._model.weight(name)

    @property
    def _of(self) -> str:
        return f" (it is one of {shown(self.adapter.base)})" if self.adapter.base else ""

    def _wrong(self, raw: RawTensor, expected: object, name: str) -> CheckpointError:
        return CheckpointError(
            f"{raw.path}: {raw.name}: shape {raw.shape}, expected {expected} for {name}: the adapter belongs"
            f" to another base{self._of}"
        )

    def _current(self, name: str) -> Weight | None:
        """Return a weight as it is by now, None if there is none.

        An output matrix that the base ties to its embeddings begins as these, and is a weight from then on.
        """
        if name == HEAD and name not in self._names and self.embeddings in self._names:
            self._names[name] = None
            self._changed[name] = self._model.weight(self.embeddings)
        return self.weight(name) if name in self._names else None

    def _replace(self, key: str, raw: RawTensor) -> bool:
        """Take a weight that is stored anew; False if the base has none of the name."""
        name = self._canonical(_WRAPPED.sub("", key))
        if name == HEAD and name not in self._names and self.adapter.repeats_embeddings:
            self._dropped[key] = "the embeddings once more, which are the output matrix"
            return True
        weight = self._current(name)
        if weight is None:
            return False
        # There may be more tokens than in the base, or fewer.
        n_free = 1 if name in (HEAD, self.embeddings) else 0
        if raw.shape[n_free:] != weight.shape[n_free:]:
            raise self._wrong(raw, weight.shape, name)
        self._changed[name] = PlainWeight(raw)
        return True

    def _merge_module(self, module: str, parts: Mapping[str, RawTensor]) -> bool:
        """Merge what is stored for a module with a matrix; False if it has none."""
        name = self._canonical(f"{module}.weight")
        weight = self._current(name)
        if weight is None or len(weight.shape) != 2:
            return False
        if parts.keys() == {_TOKENS}:
            rows = parts[_TOKENS]
            numbers = self.adapter.tokens(module, weight.shape[0])
            if rows.shape != (len(numbers), weight.shape[1]):
                raise self._wrong(rows, (len(numbers), weight.shape[1]), name)
            self._changed[name] = WithRows(weight, numbers, rows)
            return True
        is_embedding = _EMBEDDED_A in parts
        a, b = self._pair(module, parts, *((_EMBEDDED_A, _EMBEDDED_B) if is_embedding else (_A, _B)))
        sizes = (b.n_rows, a.n_cols)
        is_turned = is_embedding or (
            bool(self.adapter.config.get("fan_in_fan_out")) if sizes[0] == sizes[1] else sizes != weight.shape
        )
        n_outputs, n_inputs = reversed(weight.shape) if is_turned else weight.shape
        rank, magnitude, bias = a.n_rows, parts.get(_MAGNITUDE), parts.get(_BIAS)
        for raw, expected in ((a, (rank, n_inputs)), (b, (n_outputs, rank)), (magnitude, (n_outputs,))):
            if raw is not None and raw.shape != expected:
                raise self._wrong(raw, expected, name)
        factors = Factors(self.adapter, a, b, 1, self.adapter.factor(module, rank, a.name), is_turned)
        self._changed[name] = Merged(weight, factors, magnitude=magnitude)
        return bias is None or self._shift(self._canonical(f"{module}.bias"), bias, factors.scale)

    def _pair(
        self, module: str, parts: Mapping[str, RawTensor], a: str, b: str
    ) -> tuple[RawTensor, RawTensor]:
        """Return the two factors of a module; raises CheckpointError where its parts are not whole."""
        expected = {a, b, *((_MAGNITUDE,) if self.adapter.config.get("use_dora") else ())}
        if parts.keys() - {_BIAS} != expected:
            raise CheckpointError(
                f"{self.adapter.file.path}: {module}: has {', '.join(sorted(parts))}, expected"
                f" {', '.join(sorted(expected))} from {CONFIG_NAME} (use_dora)"
            )
        return parts[a], parts[b]

    def _shift(self, name: str, bias: RawTensor, scale: float) -> bool:
        """Add to a bias; False if the base has none."""
        weight = self._current(name)
        if weight is None:
            return False
        if bias.shape != weight.shape:
            raise self._wrong(bias, weight.shape, name)
        self._changed[name] = Shifted(weight, bias, scale)
        return True

    def _found_stack(self, module: str, parts: Mapping[str, RawTensor], found: list[_Adapted]) -> bool:
        """Find the one stack of a module that two factors fit, and add it to those found."""
        if parts.keys() != {_A, _B}:
            return False
        a, b = parts[_A], parts[_B]
        stacks = map(self._stack, self.adapter.parameters(module))
        fitting = [stack for stack in stacks if stack is not None and stack.fits(a, b)]
        if len(fitting) == 1:
            found.append((fitting[0], a, b))
        return len(fitting) == 1

    def _stack(self, name: str) -> _Stack | None:
        """Return the stack that a model has under a name, None if the base has none."""
        canonical = self._canonical(name)
        if canonical in self._names:
            shape = self.weight(canonical).shape
            return _Stack(name, shape, ((canonical, 0, 0),)) if len(shape) == 3 else None
        prefix, _, last = canonical.rpartition(".")
        for spelled in _APART.get(last, ()):
            n_mats = 0
            while f"{prefix}.{n_mats}.{spelled[0]}.weight" in self._names:
                n_mats += 1
            if n_mats:
                sizes = [rows_and_cols(self.weight(f"{prefix}.0.{part}.weight").shape) for part in spelled]
                firsts = [sum(rows for rows, _ in sizes[:place]) for place in range(len(sizes))]
                parts = tuple(
                    (f"{prefix}.{matrix}.{part}.weight", matrix, first)
                    for matrix in range(n_mats)
                    for part, first in zip(spelled, firsts, strict=True)
                )
                return _Stack(name, (n_mats, sum(rows for rows, _ in sizes), sizes[0][1]), parts)
        return None

    def _merge_stacks(self, adapted: Sequence[_Adapted]) -> None:
        told = next((a.n_cols == stack.shape[1] for stack, a, _ in adapted if not stack.is_square), None)
        for stack, a, b in adapted:
            rank = a.n_rows // stack.shape[0]
            scale = self.adapter.factor(stack.name, rank, a.name)
            is_turned = a.n_cols == stack.shape[1]
            if stack.is_square:
                is_turned = self._is_turned(stack) if told is None else told
            factors = Factors(self.adapter, a, b, stack.shape[0], scale, is_turned)
            for name, matrix, first in stack.parts:
                self._changed[name] = Merged(self.weight(name), factors, matrix, first)

    def _is_turned(self, stack: _Stack) -> bool:
        """Return whether rows of a square stack are its inputs, by the other stack of its module."""
        prefix, _, last = stack.name.rpartition(".")
        other = next(
            (each for name in _APART if name != last and (each := self._stack(f"{prefix}.{name}"))), None
        )
        if other is None or other.is_square:
            raise UnsupportedCheckpoint(
                f"{self.adapter.file.path}: {stack.name}: a square stack, and nothing tells whether its rows"
                f" are inputs or outputs; {MERGE}"
            )
        # Codes of MXFP4 are stored by outputs, and the model has them turned.
        is_packed = self.weight(stack.parts[0][0]).stored_as == "MXFP4"
        return other.shape[1] < other.shape[2] or (self.adapter.is_before_swap and not is_packed)
