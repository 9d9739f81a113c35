"""What a card says of each file, and what files say of their model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.shards import open_gguf
from gguf_tools.look.listing import type_totals

_STATED = (keys.NAME, keys.LICENSE, keys.LICENSE_NAME, keys.LICENSE_LINK, keys.QUANTIZED_BY)


@dataclass(frozen=True)
class Matrix:
    """The importance matrix that a file was made with, as the file tells it.

    file     name of the matrix' file, None for importances that came with a calibration
    dataset  name of its text, None where it is not known
    chunks   chunks of text, 0 where it is not known
    """

    file: str | None
    dataset: str | None
    entries: int
    chunks: int


@dataclass(frozen=True)
class FileFacts:
    """A GGUF file or a split set.

    paths            of all its parts
    n_weights        elements of all tensors
    types            type -> number of tensors, the type with most bytes first
    model            what it says of its model: keys general.*
    """

    paths: tuple[Path, ...]
    n_bytes: int
    n_weights: int
    bits_per_weight: float
    types: Mapping[str, int]
    matrix: Matrix | None
    model: Mapping[str, str]
    tags: tuple[str, ...]
    languages: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.paths[0].name


def read_facts(path: Path) -> FileFacts:
    """Return the facts of a GGUF file, or of the split set that it belongs to; raises GGUFError."""
    with open_gguf(path) as file:
        infos = list(file.tensors.values())
        n_weights = sum(info.n_elems for info in infos)
        tensor_bytes = sum(info.n_bytes for info in infos)
        return FileFacts(
            paths=tuple(file.paths),
            n_bytes=sum(part.stat().st_size for part in file.paths),
            n_weights=n_weights,
            bits_per_weight=8 * tensor_bytes / n_weights if n_weights else 0.0,
            types={entry["type"]: entry["tensors"] for entry in type_totals(infos)},
            matrix=_matrix(file),
            model={key: value for key in _STATED if isinstance(value := file.get(key), str)},
            tags=_texts(file.get(keys.TAGS)),
            languages=_texts(file.get(keys.LANGUAGES)),
        )


def read_all(paths: Iterable[Path]) -> tuple[FileFacts, ...]:
    """Return the facts of several files, the smallest first; the parts of a split set are one.

    raises  BadRequest for files in several folders
    """
    facts: dict[Path, FileFacts] = {}
    for path in paths:
        each = read_facts(path)
        facts[each.paths[0].absolute()] = each
    folders = {path.parent for path in facts}
    if len(folders) > 1:
        raise BadRequest(
            f"the files of a card lie in one folder, found {', '.join(map(str, sorted(folders)))}"
        )
    return tuple(sorted(facts.values(), key=lambda each: (each.n_bytes, each.name)))


def _matrix(file: Any) -> Matrix | None:
    entries = file.get(keys.QUANTIZE_IMATRIX_ENTRIES_COUNT)
    if not entries:
        return None
    return Matrix(
        file.get(keys.QUANTIZE_IMATRIX_FILE),
        file.get(keys.QUANTIZE_IMATRIX_DATASET),
        int(entries),
        int(file.get(keys.QUANTIZE_IMATRIX_CHUNKS_COUNT) or 0),
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list | tuple) else ()
