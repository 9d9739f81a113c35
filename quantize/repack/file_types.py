"""What general.file_type says of a file with interleaved rows, and what provenance is called in it.

A file that is taken apart again gets the number back that it had: several file types share an interleaved
one.
Provenance says which bytes a tensor has, and other bytes have another. It waits under another name for the
rows to be taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from quantize.fill.provenance import PROVENANCE_KEY

FILE_TYPE_BEFORE = "gguf_tools.repack.file_type"
PROVENANCE_BEFORE = "gguf_tools.repack.provenance"

_INTERLEAVED: Mapping[int, int] = {
    2: 202, 7: 207, 8: 208, 10: 210, 11: 211, 12: 211, 13: 211, 14: 214, 15: 214, 16: 216, 17: 216, 18: 218,
    19: 219, 20: 220, 23: 223, 24: 224, 25: 225, 26: 226, 29: 229, 30: 230, 31: 231, 32: 232, 135: 335,
    138: 338, 139: 339, 140: 340, 141: 341, 145: 345, 149: 398, 150: 350,
}  # fmt: skip
"""Number of a file type -> that of the same interleaved (llama-quantize.cpp: repacked_ftype)."""

_APART = {new: old for old, new in sorted(_INTERLEAVED.items(), reverse=True)}
"""The inverse; of several the lowest, which is the file type that is least of a mixture."""


def regrouped_metadata(metadata: Metadata, *, undo: bool) -> dict[str, Value]:
    """Return the metadata of a file whose rows are regrouped, in their order."""
    return _apart(metadata) if undo else _interleaved(metadata)


def _interleaved(metadata: Metadata) -> dict[str, Value]:
    number = metadata.get(keys.FILE_TYPE)
    new = None if number is None else _INTERLEAVED.get(number.data)
    if number is None or new is None:
        return {_provenance(key, undo=False): value for key, value in metadata.items()}
    changed = {keys.FILE_TYPE: Value.u32(new), FILE_TYPE_BEFORE: number}
    renamed = {_provenance(key, undo=False): value for key, value in metadata.items()}
    return {**renamed, **changed}


def _apart(metadata: Metadata) -> dict[str, Value]:
    number, before = metadata.get(keys.FILE_TYPE), metadata.get(FILE_TYPE_BEFORE)
    if before is None and number is not None and number.data in _APART:
        before = Value.u32(_APART[number.data])
    kept = {_provenance(key, undo=True): value for key, value in metadata.items() if key != FILE_TYPE_BEFORE}
    return kept if before is None else {**kept, keys.FILE_TYPE: before}


def _provenance(key: str, *, undo: bool) -> str:
    """Return the name that a key has from now on; provenance of the wrong rows has none that is read."""
    if undo:
        return PROVENANCE_KEY if key == PROVENANCE_BEFORE else key
    return PROVENANCE_BEFORE if key == PROVENANCE_KEY else key
