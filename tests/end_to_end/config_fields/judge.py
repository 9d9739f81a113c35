"""What a changed field does, in transformers, in our file by llama.cpp, and in what is said of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert import ToolkitError, convert
from tests.end_to_end.config_fields.llama import Llama, LlamaError
from tests.end_to_end.config_fields.meanings import tells_of
from tests.end_to_end.config_fields.models import (
    TOKENS,
    Base,
    config_of,
    logits_of,
    model_of,
    persistent_buffers,
    write_config,
    write_weights,
)
from tests.end_to_end.config_fields.mutations import MADE_UP, Mutation, recorded

EXACT = 1e-4
EFFECT = 1e-3
"""Relative differences of logits: of the same ones, and of those that a field changes."""

TIES = 2
"""Tokens that may differ: where two experts are equally good, rounding chooses."""

SILENT = "SILENT"


@dataclass(frozen=True)
class Outcome:
    """What came of a mutation.

    kind        equal, noted, refused, no effect, over-strict, invalid, or SILENT
    told        the note or the refusal, or what is wrong
    effect      relative difference of transformers' logits; None where weights have other shapes
    difference  relative difference of llama.cpp's logits from transformers'; None where there are none
    """

    kind: str
    told: str = ""
    effect: float | None = None
    difference: float | None = None
    has_effect: bool = False


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def without_ties(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the relative difference without the tokens that differ most."""
    kept = np.argsort(np.linalg.norm(found - expected, axis=1))[:-TIES]
    return relative(found[kept], expected[kept])


def names_and_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    weights = (*model.named_parameters(), *persistent_buffers(model))
    return {name: tuple(tensor.shape) for name, tensor in weights}


class Judge:
    """Judges mutations of one base, in a folder that it may fill."""

    def __init__(self, base: Base, folder: Path, llama: Llama) -> None:
        self._base, self._folder, self._llama = base, folder, llama
        self.raw = config_of(base)
        self._own = folder / "base"
        self._own.mkdir()
        write_config(self._own, self.raw)
        model = model_of(base.architecture, self._own)
        write_weights(self._own, model)
        self._weights, self._expected = names_and_shapes(model), logits_of(model)
        self._notes = self._convert(self._own)
        rounding = without_ties(self._computed(), self._expected)
        self.exact = max(EXACT, 4 * rounding)
        self.effect = max(EFFECT, 4 * self.exact)
        """Differences that count for this base: llama.cpp rounds GELU, and transformers not alike."""
        if rounding > 1e-3:
            raise ValueError(f"the base itself differs by {rounding:.1e}")

    def _convert(self, folder: Path) -> tuple[str, ...]:
        target = self._folder / "file.gguf"
        target.unlink(missing_ok=True)
        result = convert(folder, target, outtype="f32")
        return tuple(result.preparation.plan.notes)

    def _computed(self) -> np.ndarray:
        return self._llama.logits(self._folder / "file.gguf", TOKENS)

    def outcome(self, mutation: Mutation) -> Outcome:
        """Try a mutation."""
        folder = self._folder / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_config(folder, mutation.apply(self.raw))
        try:
            model = model_of(self._base.architecture, folder)
            expected = logits_of(model)
            if not np.isfinite(expected).all():
                raise ValueError("logits are not finite")
        except Exception as error:
            return self._invalid(folder, f"{type(error).__name__}: {error}")
        effect = None
        if names_and_shapes(model) == self._weights:
            self._link_weights(folder)
            effect = relative(expected, self._expected)
        else:
            write_weights(folder, model)
        matters = effect is None or effect >= self.effect
        kind, told, difference = self._ours(folder, mutation, expected)
        if not matters:
            kind = {"equal": "no effect", "noted": "no effect", "refused": "over-strict"}.get(kind, kind)
        return Outcome(kind, told, effect, difference, matters)

    def _link_weights(self, folder: Path) -> None:
        for path in self._own.glob("*.safetensors*"):
            os.link(path, folder / path.name)

    def _invalid(self, folder: Path, why: str) -> Outcome:
        """Return the outcome of what transformers doesn't take: ours has to end without a crash."""
        self._link_weights(folder)
        try:
            self._convert(folder)
        except ToolkitError:
            pass
        except Exception as error:
            return Outcome(SILENT, f"crash: {type(error).__name__}: {error}")
        return Outcome("invalid", why.replace("\n", " ")[:200])

    def _ours(self, folder: Path, mutation: Mutation, expected: np.ndarray) -> tuple[str, str, float | None]:
        names = self._names(mutation)
        try:
            notes = self._convert(folder)
        except ToolkitError as error:
            text = str(error)
            if "\n" in text:
                return SILENT, f"refusal of {text.count(chr(10)) + 1} lines: {text}", None
            if tells_of(text.partition("config.json: ")[2] or text, names):
                return "refused", text, None
            return SILENT, f"vague refusal: {text}", None
        except Exception as error:
            return SILENT, f"crash: {type(error).__name__}: {error}", None
        new = [note for note in notes if note not in self._notes]
        telling = [note for note in new if tells_of(note, names)]
        if mutation.field.endswith(MADE_UP):
            return ("noted", telling[0], None) if telling else (SILENT, "unknown field not listed", None)
        difference, wrong = None, ""
        try:
            found = self._computed()[:, : expected.shape[1]]
            difference = relative(found, expected)
            if difference < self.exact or without_ties(found, expected) < self.exact:
                return "equal", "; ".join(telling), difference
            wrong = f"differs by {difference:.1e}"
        except LlamaError as error:
            wrong = f"llama.cpp: {error}"
        if telling:
            return "noted", telling[0], difference
        return SILENT, wrong + "".join(f"; vague note: {note}" for note in new), difference

    def _names(self, mutation: Mutation) -> tuple[str, ...]:
        """Return the names by which a note or a refusal may tell of what is changed."""
        import transformers

        paths = [part for path in mutation.changes for part in path if part != "text_config"]
        names = dict.fromkeys((*paths, *mutation.also))
        kind = getattr(transformers, self._base.architecture).config_class
        aliases: Mapping[str, str] = kind.attribute_map
        other = [alias for alias, name in aliases.items() if name in names]
        other += [name for alias, name in aliases.items() if alias in names]
        return (*names, *other)


def families() -> list[str]:
    """Return the architectures that have a class in transformers."""
    return sorted(recorded()["families"])
