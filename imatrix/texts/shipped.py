"""The calibration texts that are in the package, and folders of them.

They are of nine kinds, each a folder of `imatrix/texts/calibration`; manifest.yaml tells where each text is
from and under which licence, and LICENCES.md has the notices. The version of the package decides their bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from gguf_tools.argument_types import checked
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.documents import read_document
from gguf_tools.files.early_checks import refuse_to_replace
from gguf_tools.files.named_files import (
    AnyPath,
    output_folder,
    output_of_small_partial,
    read_input,
    write_whole,
)
from gguf_tools.files.owned_folder import files_of
from imatrix.texts.mixture import mixture_sha256

_MANIFEST = "manifest.yaml"
_BESIDE = ("LICENCES.md", _MANIFEST)


@dataclass(frozen=True)
class ShippedText:
    """An entry of the manifest.

    file     its kind, which is a folder, and its name
    title    of the text or the work that it is from, by its author
    source   repository, or package, that it is from
    version  of the source
    path     in the source
    cut      which part of that file it is
    licence  SPDX identifier, or public-domain
    bytes    size of the file
    tokens   about how many: those of DeepSeek V3's tokenizer
    """

    file: str
    title: str
    source: str
    version: str
    path: str
    author: str
    licence: str
    cut: str
    sha256: str
    bytes: int
    tokens: int

    @property
    def kind(self) -> str:
        return self.file.partition("/")[0]


@dataclass(frozen=True)
class ShippedTexts:
    """All texts that come with the package.

    texts   in the manifest's order
    sha256  of a folder of them, as a file that was calibrated on it has it; see mixture.py
    """

    texts: tuple[ShippedText, ...]
    sha256: str


def shipped_texts() -> ShippedTexts:
    """Tell which texts there are."""
    with _home() as home:
        entries = read_document(home / _MANIFEST)["texts"]
        return ShippedTexts(tuple(ShippedText(**entry) for entry in entries), mixture_sha256(home))


@checked
def write_texts(folder: AnyPath, *, force: bool = False) -> ShippedTexts:
    """Write the texts to a folder that `imatrix` and calibration take as classes in equal shares.

        gguf_tools.write_texts("texts")
        gguf_tools.calibrate("lite-bf16.gguf", "lite-Q4_K_M.gguf", "Q4_K_M", text="texts")

    What is there already with the same bytes stays.

    folder  made if it is not there
    force   replace texts with other bytes, such as those of another version
    raises  BadRequest if the folder holds anything else, which would be used as a text; OutputError for a
            text with other bytes, and for what can't be written
    """
    shipped, folder = shipped_texts(), output_folder(folder)
    names = (*(text.file for text in shipped.texts), *_BESIDE)
    _refuse_others(folder, frozenset(names))
    with _home() as home:
        missing = {
            folder / name: data
            for name in names
            if (data := (home / name).read_bytes()) != _bytes_at(folder / name)
        }
    refuse_to_replace(missing, force=force)
    for path, data in missing.items():
        with OutputError.from_os(f"{path.parent}: can't be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    return shipped


def _home() -> AbstractContextManager[Path]:
    """Give the folder of the package."""
    return resources.as_file(resources.files("imatrix.texts") / "calibration")


def _bytes_at(path: Path) -> bytes | None:
    """Read a file; None where there is none."""
    return read_input(path) if path.exists() else None


def _refuse_others(folder: Path, names: frozenset[str]) -> None:
    """Raise BadRequest if a folder holds a file that is not ours; a text of somebody else would be used."""
    kinds = sorted({name.partition("/")[0] for name in names if "/" in name})
    for place in filter(Path.is_dir, (folder, *(folder / kind for kind in kinds))):
        for path in files_of(place):
            whole = path.with_name(output_of_small_partial(path.name) or path.name)  # a killed run's
            is_ours = whole.relative_to(folder).as_posix() in names
            if path.is_symlink() or not (is_ours or (place == folder and path.name in kinds)):
                raise BadRequest(
                    f"{folder}: holds {path.relative_to(folder).as_posix()!r}, which is not one of these"
                    " texts, expected an empty folder or none; move it away, or name another one"
                )
