"""Contents of a card: facts of each file, where the model comes from, and the measured quality.

The origin is the model's name on the Hub, and what its own card says. The quality is what `evaluate --json`
has written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from convert.general_metadata import read_model_card
from gguf_tools.errors import BadRequest
from gguf_tools.files.documents import count_at, number_at, read_document
from gguf_tools.findings import Finding, Level, Tell, log
from gguf_tools.format import keys
from gguf_tools.format.hparams import architecture_of
from gguf_tools.format.shards import GGUFSet, open_gguf
from gguf_tools.format.shown import value_text
from gguf_tools.hub.names import PUBLIC_HOSTS, cached_repo, is_repo
from gguf_tools.look.listing import kv_cache, type_totals
from gguf_tools.text import MAX_CHARS, shown
from quantize.importances.text_sketch import SHA256_KEY
from quantize.options import METHOD_KEY
from quantize.padding.counterparts import count_weights, padded_sizes
from quantize.prepare import TYPES_CHOSEN_KEY

_MAX_TEXT = 4096
"""Characters of a text that a card takes from a file."""

_STATED = (keys.NAME, keys.TYPE, keys.LICENSE, keys.LICENSE_NAME, keys.LICENSE_LINK, keys.QUANTIZED_BY)


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
class CalibrationFacts:
    """How a file was calibrated, as the file tells it.

    text    name of the text, None where it is not known
    chunks  chunks of it, 0 where it is not known
    method  in a few words, None where it is not known
    """

    sha256: str
    text: str | None
    chunks: int
    method: str | None


@dataclass(frozen=True)
class FileFacts:
    """A GGUF file or a split set.

    paths            of all its parts
    n_weights        elements of all tensors, without those that are padding
    padded           sizes that are padded: key -> (without padding, as it is)
    types            type -> number of tensors, the type with most bytes first
    model            what it says of its model: keys general.*
    cache_bytes      of a 16-bit cache for each token; None where it is not known
    context_length   tokens that the model was trained with at most; 0 where it is not known
    calibration      None: the file was not calibrated
    is_chosen        types were chosen for a size
    """

    paths: tuple[Path, ...]
    n_bytes: int
    n_weights: int
    bits_per_weight: float
    padded: Mapping[str, tuple[str, str]]
    types: Mapping[str, int]
    matrix: Matrix | None
    model: Mapping[str, str]
    tags: tuple[str, ...]
    languages: tuple[str, ...]
    cache_bytes: int | None = None
    context_length: int = 0
    calibration: CalibrationFacts | None = None
    is_chosen: bool = False

    @property
    def name(self) -> str:
        return self.paths[0].name


def read_facts(path: Path, tell: Tell = log) -> FileFacts:
    """Return the facts of a GGUF file, or of the split set that it belongs to; raises GGUFError.

    tell  is told of keys whose values are of another type, and so left out
    """
    with open_gguf(path) as file:
        said = _Said(file, tell)
        infos = list(file.tensors.values())
        n_weights = count_weights(file.metadata, infos)
        tensor_bytes = sum(info.n_bytes for info in infos)
        return FileFacts(
            paths=tuple(file.paths),
            n_bytes=sum(part.stat().st_size for part in file.paths),
            n_weights=n_weights,
            bits_per_weight=8 * tensor_bytes / n_weights if n_weights else 0.0,
            padded=padded_sizes(file.metadata),
            types={entry["type"]: entry["tensors"] for entry in type_totals(infos)},
            matrix=_matrix(said),
            model={key: value for key in _STATED if (value := said.text(key)) is not None},
            tags=said.texts(keys.TAGS),
            languages=said.texts(keys.LANGUAGES),
            cache_bytes=_cache_bytes(file),
            context_length=said.count(keys.CONTEXT_LENGTH.format(arch=architecture_of(file.metadata) or "")),
            calibration=_calibration(said),
            is_chosen=TYPES_CHOSEN_KEY in file.metadata,
        )


def read_all(paths: Iterable[Path], tell: Tell = log) -> tuple[FileFacts, ...]:
    """Return the facts of several files, the smallest first; the parts of a split set are one.

    raises  BadRequest for files in several folders
    """
    facts: dict[Path, FileFacts] = {}
    for path in paths:
        each = read_facts(path, tell)
        facts[each.paths[0].absolute()] = each
    # A pattern such as *.gguf takes matrices and towers along.
    models = {
        path: each for path, each in facts.items() if each.model.get(keys.TYPE) not in ("imatrix", "mmproj")
    }
    facts = models or facts
    folders = {path.parent for path in facts}
    if len(folders) > 1:
        raise BadRequest(
            f"the files of a card lie in one folder, found {', '.join(map(str, sorted(folders)))}"
        )
    return tuple(sorted(facts.values(), key=lambda each: (each.n_bytes, each.name)))


class _Said:
    """Statements of a file about itself, by type; it is a stranger's, so any key may hold anything."""

    def __init__(self, file: GGUFSet, tell: Tell) -> None:
        self._file, self._tell = file, tell

    def text(self, key: str) -> str | None:
        value = self._file.get(key)
        if isinstance(value, str) and len(value) <= _MAX_TEXT:
            return value
        self._leave_out(key, f"a text of at most {_MAX_TEXT:,} characters")
        return None

    def count(self, key: str) -> int:
        """Return a whole number from 0; 0 where there is none."""
        value = self._file.get(key)
        if type(value) is int and value >= 0:
            return value
        self._leave_out(key, "a whole number from 0")
        return 0

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._file.get(key)
        is_list = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
        if is_list and sum(map(len, value)) <= _MAX_TEXT:
            return tuple(value)
        self._leave_out(key, f"texts of at most {_MAX_TEXT:,} characters in all")
        return ()

    def _leave_out(self, key: str, expected: str) -> None:
        if key in self._file.metadata:
            found = value_text(self._file.metadata[key], width=MAX_CHARS)
            text = f"{self._file.path}: {key} is {found}, expected {expected}; the card leaves it out"
            self._tell(Finding("card", text, Level.NOTE, (key,)))


def _matrix(said: _Said) -> Matrix | None:
    entries = said.count(keys.QUANTIZE_IMATRIX_ENTRIES_COUNT)
    if not entries or said.text(SHA256_KEY) is not None:  # a calibration brings its own
        return None
    return Matrix(
        said.text(keys.QUANTIZE_IMATRIX_FILE),
        said.text(keys.QUANTIZE_IMATRIX_DATASET),
        entries,
        said.count(keys.QUANTIZE_IMATRIX_CHUNKS_COUNT),
    )


def _cache_bytes(file: GGUFSet) -> int | None:
    cache = kv_cache(file)
    return cache.plain if cache.mla is None else cache.mla


def _calibration(said: _Said) -> CalibrationFacts | None:
    sha256 = said.text(SHA256_KEY)
    if sha256 is None:
        return None
    return CalibrationFacts(
        sha256,
        said.text(keys.QUANTIZE_IMATRIX_DATASET),
        said.count(keys.QUANTIZE_IMATRIX_CHUNKS_COUNT),
        said.text(METHOD_KEY),
    )


NOT_OF_A_QUANT = frozenset(
    {"safetensors", "transformers", "pytorch", "custom_code", "gguf", "fp8", "8-bit", "4-bit"}
)
"""Tags of a model that are not true of its quantized files; `gguf` is set anyway."""

_TEXT_GENERATION = "text-generation"


@dataclass(frozen=True)
class Origin:
    """The model that files were made of.

    repo          OWNER/NAME, None where it is not known
    license       entries of the front matter: license, license_name, license_link
    languages     codes
    """

    repo: str | None
    license: Mapping[str, str]
    languages: tuple[str, ...]
    tags: tuple[str, ...]
    pipeline_tag: str

    @property
    def address(self) -> str | None:
        return None if self.repo is None else f"https://{PUBLIC_HOSTS[0]}/{self.repo}"


def origin_of(files: Sequence[FileFacts], *, source: Path | None, repo: str | None) -> Origin:
    """Return the origin of files.

    source  folder or file that they were made of; its README.md is believed before the files
    repo    OWNER/NAME, where the caller knows it; a folder of the Hub's cache knows it too
    """
    folder = source if source is None or source.is_dir() else source.parent
    card: Mapping[str, Any] = {} if folder is None else read_model_card(folder / "README.md")[0]
    if source is not None and not source.is_dir() and card.get("base_model_relation") == "quantized":
        # The card beside a GGUF file is of that file: what it was made of is what this one is made of.
        base = card.get("base_model")
        repo = repo or (base if isinstance(base, str) and is_repo(base) else None)
    repo = repo or (None if folder is None else cached_repo(folder))
    license_ = {name: value for name in _LICENSE if isinstance(value := card.get(name), str)}
    for each in files if not license_ else ():
        license_ = {name: each.model[key] for name, key in _LICENSE.items() if key in each.model} or license_
    link = license_.get("license_link")
    if link is not None and not _IS_ADDRESS.match(link):
        if repo is None or urlsplit(link).scheme:  # no file of the model
            del license_["license_link"]
        else:
            license_["license_link"] = f"https://{PUBLIC_HOSTS[0]}/{repo}/blob/main/{quote(link)}"
    pipeline = card.get("pipeline_tag")
    return Origin(
        repo=repo,
        license=license_,
        languages=_listed(card.get("language")) or next((each.languages for each in files), ()),
        tags=tuple(tag for tag in _listed(card.get("tags")) if tag not in NOT_OF_A_QUANT),
        pipeline_tag=pipeline if isinstance(pipeline, str) else _TEXT_GENERATION,
    )


_IS_ADDRESS = re.compile("https?://", re.IGNORECASE)
_LICENSE = {"license": keys.LICENSE, "license_name": keys.LICENSE_NAME, "license_link": keys.LICENSE_LINK}


def _listed(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


@dataclass(frozen=True)
class Measures:
    """How far a file is from its base: on one text, or over all classes of a suite.

    kld, kld_error  mean Kullback-Leibler divergence in nats a token, and its standard error
    kld_p99         its 99th percentile
    same_top        share of tokens whose most likely successor is the base's
    ppl             perplexity
    """

    name: str
    n_bytes: int
    kld: float
    kld_error: float
    kld_p99: float
    same_top: float
    ppl: float


@dataclass(frozen=True)
class ReportText:
    """A text that files were measured on.

    name  of the class of a suite; of a text alone None
    file  name of the file of a text alone, None where the base was a file of logits
    """

    name: str | None
    file: str | None
    sha256: str | None
    n_chunks: int
    chunk_size: int
    n_tokens: int
    base_ppl: float

    @classmethod
    def of(cls, about: Any, base: Any, *, is_class: bool) -> Self:
        """Read it, and the perplexity of its base; both are JSON data.

        raises  ValueError, KeyError or TypeError for data that are something else
        """
        key = "base_ppl" if is_class else "ppl"
        if (ppl := number_at(base, key)) <= 0:
            raise ValueError(f"{key} is {ppl}, expected more than 0")
        return cls(
            name=shown(str(about["name"])) if is_class else None,
            file=None if is_class or about["path"] is None else Path(about["path"]).name,
            sha256=about["sha256"] and shown(str(about["sha256"])),
            n_chunks=count_at(about, "n_chunks"),
            chunk_size=count_at(about, "chunk_size"),
            n_tokens=count_at(about, "n_tokens_measured"),
            base_ppl=ppl,
        )


@dataclass(frozen=True)
class Report:
    """An evaluation of files, as its JSON tells it.

    suite  name of the suite; None for a text alone
    texts  the text alone, or the classes of the suite
    """

    path: Path
    suite: str | None
    texts: tuple[ReportText, ...]
    files: tuple[Measures, ...]

    @property
    def by_name(self) -> Mapping[str, Measures]:
        """The files by name."""
        return {each.name: each for each in self.files}


def read_report(path: Path) -> Report:
    """Read what an evaluation, on a text or a suite, has written with --json.

    raises  BadRequest for a file that is something else, or can't be read
    """
    other = "not a report of `evaluate --json`"
    content = read_document(path, unless=other)
    made = content.get("format") if isinstance(content, dict) else None
    if made is not None:
        raise BadRequest(f"{path}: {other}, but {made}")
    try:
        suite = content.get("suite")
        files = tuple(_measures(model, of_suite=suite is not None) for model in content["models"])
        if suite is None:
            name, texts = None, [ReportText.of(content["text"], content["base"], is_class=False)]
        else:
            name = shown(str(suite["name"]))
            texts = [ReportText.of(each, each, is_class=True) for each in suite["classes"]]
            if not texts:
                raise ValueError("the suite has no class")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        missing = " is missing" if isinstance(error, KeyError) else ""
        raise BadRequest(f"{path}: {other} ({shown(str(error))}{missing})") from error
    return Report(path, name, tuple(texts), files)


def _measures(model: Any, *, of_suite: bool) -> Measures:
    found = model["all"] if of_suite else model
    if "recall_at_10" in found:
        raise ValueError("it measures a model for embeddings, and this takes divergences of predictions")
    kld = found if of_suite else model["kld"]
    mean, error, p99 = ("kld", "kld_error", "kld_p99") if of_suite else ("mean", "error", "p99")
    return Measures(
        name=Path(model["path"]).name,
        n_bytes=count_at(model, "n_bytes"),
        kld=number_at(kld, mean),
        kld_error=number_at(kld, error, may_be_unknown=True),
        kld_p99=number_at(kld, p99),
        same_top=number_at(found, "same_top"),
        ppl=number_at(found, "ppl"),
    )
