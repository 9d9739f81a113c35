"""Attestations: what files were made of, as in-toto statements with SLSA provenance; written and followed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools import __version__
from gguf_tools.errors import BadRequest, UnreadableInput
from gguf_tools.files.named_files import sha256_of
from gguf_tools.findings import Finding, Level
from gguf_tools.format import keys
from gguf_tools.format.shards import open_gguf
from gguf_tools.hub.names import SCHEME, cached_repo
from gguf_tools.text import first_of
from quantize.options import METHOD_KEY

ATTESTATION_NAME = "attestation.json"

_STATED = (
    keys.FILE_TYPE, keys.QUANTIZE_IMATRIX_FILE, keys.QUANTIZE_IMATRIX_DATASET,
    keys.QUANTIZE_IMATRIX_ENTRIES_COUNT, keys.QUANTIZE_IMATRIX_CHUNKS_COUNT, METHOD_KEY,
)  # fmt: skip

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".dat")
"""Endings of files without which nothing is made."""

_HUB = "pkg:huggingface/"
"""Start of a package URL of a model on the Hub; OWNER/NAME@COMMIT follows."""


def statement(
    files: Iterable[Path],
    made_of: Iterable[Path],
    command: Sequence[str] = (),
    digest: Callable[[Path], str] = sha256_of,
) -> dict[str, Any]:
    """Make a statement.

    made_of  files and folders; a folder of the Hub's cache is named with its commit
    command  that made the files, as typed, if it is known
    digest   computes the SHA-256 of a file
    raises   GGUFError or UnreadableInput for a file that can't be read, and BadRequest for two files of one
             name, which a statement can't have
    """
    subjects: dict[str, Path] = {}
    stated: dict[str, dict[str, Any]] = {}
    for path in files:
        with open_gguf(path) as file:
            for part in map(Path, file.paths):
                if subjects.setdefault(part.name, part) != part:
                    raise BadRequest(f"{part}: another file has this name; make a statement for each")
            stated[path.name] = {key: file.metadata[key].data for key in _STATED if key in file.metadata}

    def digested(path: Path) -> dict[str, Any]:
        with UnreadableInput.from_os(f"{path}: can't be read"):
            return {"name": path.name, "digest": {"sha256": digest(path)}}

    def material(given: Path) -> Iterator[dict[str, Any]]:
        repo = cached_repo(given)
        origin = {} if repo is None else {"uri": f"{_HUB}{repo}@{given.absolute().name}"}
        yield from (origin | digested(path) for path in _files_of(given))

    parameters = {"files": stated} | ({"command": list(command)} if command else {})
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [digested(path) for path in subjects.values()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "pkg:pypi/gguf-tools#quantize",
                "externalParameters": parameters,
                "resolvedDependencies": [each for given in made_of for each in material(given)],
            },
            "runDetails": {"builder": {"id": f"pkg:pypi/gguf-tools@{__version__}"}},
        },
    }


def _files_of(path: Path) -> list[Path]:
    """List the files of a folder, or all parts of a file."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
    if path.suffix != ".gguf":
        return [path]
    with open_gguf(path) as file:
        return list(map(Path, file.paths))


@dataclass(frozen=True)
class Attestation:
    """Files, inputs and model that a statement names.

    subjects   name -> SHA-256 of the files that were made
    materials  the same of what they were made of
    model      hf://OWNER/NAME@COMMIT of the model on the Hub; None where it names none
    """

    subjects: Mapping[str, str]
    materials: Mapping[str, str]
    model: str | None

    @classmethod
    def read(cls, path: Path) -> Attestation:
        """Read a statement; raises UnreadableInput, and BadRequest for what is none."""
        with UnreadableInput.from_os(f"{path}: can't be read"):
            data = path.read_bytes()
        try:
            said = json.loads(data)
            materials = said["predicate"]["buildDefinition"]["resolvedDependencies"]
            uris = (str(each.get("uri", "")) for each in materials)
            of_hub = (uri for uri in uris if uri.startswith(_HUB))
            model = next((f"{SCHEME}{uri.removeprefix(_HUB)}" for uri in of_hub), None)  # never a path
            return cls(_digests(said["subject"]), _digests(materials), model)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadRequest(f"{path}: is no in-toto statement with SLSA provenance") from error

    def findings(self, file: Path, made_of: Iterable[Path]) -> Iterator[Finding]:
        """Yield which files are others than those that the statement is about.

        made_of  the source, and importances or a text if there are some
        """
        with open_gguf(file) as opened:
            pairs = [("file", Path(part), self.subjects) for part in opened.paths]
        for given in made_of:
            files = _files_of(given)
            if given.is_dir():  # whatever else is there decides nothing
                files = [path for path in files if path.name in self.materials]
            pairs += [("material", path, self.materials) for path in files]
        given_digests = set()
        for kind, path, known in pairs:
            found, expected = sha256_of(path), known.get(path.name, "")
            given_digests.add(found)
            if found not in known.values():
                text = f"{path}: is another one than the attestation names: digest {found}"
                text += f", expected {expected}" if expected else ""
                yield Finding(f"attested-{kind}", text, Level.BAD)
        weights = (name for name in self.materials if name.endswith(_WEIGHTS))
        rest = tuple(name for name in weights if self.materials[name] not in given_digests)
        if rest:
            text = f"the attestation names files that were not compared: {first_of(rest, 3)}"
            yield Finding("not-compared", text, Level.NOTE, rest)


def _digests(entries: Any) -> dict[str, str]:
    return {str(each["name"]): str(each["digest"]["sha256"]) for each in entries}
