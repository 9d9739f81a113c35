"""The metadata keys general.*, which say where a model comes from.

The first of these sources that states a fact is believed:

1. --model-name, for the name alone
2. the --metadata file: a JSON object of metadata keys; base models and datasets as lists of objects
   under general.base_models and general.datasets
3. the model card, README.md; for sampling settings generation_config.json
4. config.json's _name_or_path, taken apart
5. the folder's name, taken apart
6. the tensors: their number gives the size label
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from convert.checkpoint.checkpoint import read_json_object
from convert.model_names import ModelName, default_file_name, parse_model_name, title
from gguf_tools.errors import BadConfig
from gguf_tools.files.named_files import read_input
from gguf_tools.format import keys
from gguf_tools.format.values import Kind, Value
from gguf_tools.hub.names import folder_name
from gguf_tools.look.listing import ParameterCounts
from gguf_tools.text import quoted

MAX_BYTES = 8 << 20
MAX_ENTRY_BYTES = 1 << 17
"""Maximum size of the YAML part, for which its reader takes a second."""

_NULLS = frozenset(("", "~", "null", "Null", "NULL"))


def read_model_card(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the card's entries, and a note when there is a card that can't be read.

    Values are texts, lists or objects of texts: nothing is guessed to be a number, a date or a truth
    value, so the language code `no` stays `no`. Entries without a value are left out.
    """
    if not path.is_file():
        return {}, None
    try:
        lines = read_input(path, MAX_BYTES, BadConfig).decode("utf-8-sig").splitlines()
        if not lines or lines[0] != "---" or "---" not in lines[1:]:
            return {}, None
        # Some cards contain tabs, which YAML forbids.
        front_matter = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
        if len(front_matter) > MAX_ENTRY_BYTES:
            return {}, f"{path.name}: the model card is ignored: entries of more than {MAX_ENTRY_BYTES} bytes"
        entries = yaml.load(front_matter, Loader=yaml.BaseLoader)  # builds texts, lists and dicts only
    except (BadConfig, RecursionError, ValueError, OverflowError, yaml.YAMLError) as cause:
        # Text that is not UTF-8, or escapes of characters that don't exist.
        return {}, f"{path.name}: the model card is ignored: {' '.join(str(cause).split())}"
    if entries is None:
        return {}, None
    if not isinstance(entries, dict):
        return {}, f"{path.name}: the model card is ignored: it holds no entries `key: value`"
    return {key: value for key, value in entries.items() if not _is_null(value)}, None


def _is_null(value: object) -> bool:
    return isinstance(value, str) and value in _NULLS


# The order in which llama.cpp's converter writes them.
_SCALARS = {
    keys.SAMPLING_SEQUENCE: Kind.STRING,
    keys.SAMPLING_TOP_K: Kind.INT32,
    keys.SAMPLING_TOP_P: Kind.FLOAT32,
    keys.SAMPLING_MIN_P: Kind.FLOAT32,
    keys.SAMPLING_XTC_PROBABILITY: Kind.FLOAT32,
    keys.SAMPLING_XTC_THRESHOLD: Kind.FLOAT32,
    keys.SAMPLING_TEMP: Kind.FLOAT32,
    keys.SAMPLING_PENALTY_LAST_N: Kind.INT32,
    keys.SAMPLING_PENALTY_REPEAT: Kind.FLOAT32,
    keys.SAMPLING_MIROSTAT: Kind.INT32,
    keys.SAMPLING_MIROSTAT_TAU: Kind.FLOAT32,
    keys.SAMPLING_MIROSTAT_ETA: Kind.FLOAT32,
    keys.NAME: Kind.STRING,
    keys.AUTHOR: Kind.STRING,
    keys.VERSION: Kind.STRING,
    keys.ORGANIZATION: Kind.STRING,
    keys.FINETUNE: Kind.STRING,
    keys.BASENAME: Kind.STRING,
    keys.DESCRIPTION: Kind.STRING,
    keys.QUANTIZED_BY: Kind.STRING,
    keys.SIZE_LABEL: Kind.STRING,
    keys.LICENSE: Kind.STRING,
    keys.LICENSE_NAME: Kind.STRING,
    keys.LICENSE_LINK: Kind.STRING,
    keys.URL: Kind.STRING,
    keys.DOI: Kind.STRING,
    keys.UUID: Kind.STRING,
    keys.REPO_URL: Kind.STRING,
    keys.SOURCE_URL: Kind.STRING,
    keys.SOURCE_DOI: Kind.STRING,
    keys.SOURCE_UUID: Kind.STRING,
    keys.SOURCE_REPO_URL: Kind.STRING,
}
_LISTS = (keys.TAGS, keys.LANGUAGES)

# Models and data that this one was made from: a count, and keys like general.base_model.0.name. In the
# --metadata file each is one list of objects, under the name at the left.
BASE_MODELS, DATASETS = "general.base_models", "general.datasets"
_SOURCES = {BASE_MODELS: "general.base_model", DATASETS: "general.dataset"}
_SOURCE_PARTS = ("name", "author", "version", "organization", "description", "url", "doi", "uuid", "repo_url")

# Sampling settings that generation_config.json calls otherwise than GGUF does.
_GENERATION_NAMES = {
    keys.SAMPLING_TEMP: ("temperature",),
    keys.SAMPLING_PENALTY_REPEAT: ("penalty_repeat", "repetition_penalty"),
}

# Settings of GenerationConfig (transformers 5) that have no key, and the values with which they do nothing.
_WITHOUT_KEY: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (), "penalty_alpha": (0.0,),
    "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "guidance_scale": (1.0,),
    "bad_words_ids": ([],), "sequence_bias": ({},), "begin_suppress_tokens": ([],), "stop_strings": ([],),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (),
    "min_length": (0,), "min_new_tokens": (0,), "num_beams": (1,),
}  # fmt: skip

# Names in a model card: plain, with model_ before them, and a few habits of card writers.
_CARD_NAMES = {
    keys.NAME: ("name", "model_name"),
    keys.AUTHOR: ("author", "model_author", "model_creator"),
    keys.VERSION: ("version", "model_version"),
    keys.ORGANIZATION: ("organization", "model_organization"),
    keys.DESCRIPTION: ("description", "model_description"),
    keys.FINETUNE: ("finetune", "model_finetune"),
    keys.BASENAME: ("basename", "model_basename", "model_type"),
    keys.SIZE_LABEL: ("size_label", "model_size_label"),
    keys.SOURCE_URL: ("url", "model_url"),
    keys.SOURCE_DOI: ("doi", "model_doi"),
    keys.SOURCE_UUID: ("uuid", "model_uuid"),
    keys.SOURCE_REPO_URL: ("repo_url", "model_repo_url"),
    keys.LICENSE: ("license",),
    keys.LICENSE_NAME: ("license_name",),
    keys.LICENSE_LINK: ("license_link",),
}
_CARD_LISTS = {keys.TAGS: ("tags", "pipeline_tag"), keys.LANGUAGES: ("languages", "language")}
_CARD_SOURCES = {
    BASE_MODELS: ("base_model", "base_models", "base_model_sources"),
    DATASETS: ("datasets", "dataset", "dataset_sources"),
}

_MAKERS: Mapping[Kind, Callable[[Any], Value]] = {
    Kind.STRING: Value.string,
    Kind.INT32: Value.i32,
    Kind.FLOAT32: Value.f32,
}
_CLEARED: tuple[object, ...] = (None, "", [])  # a null in the --metadata file leaves a key out
MAX_NAME_PART = 40
"""Maximum length of each of the five parts of an output's name."""

_LARGEST_FLOAT32 = 3.4028234e38

_HUB_URL = re.compile(r"https?://huggingface\.co/([^/]+/[^/]+)")


@dataclass(frozen=True)
class GeneralMetadata:
    """Known facts about a model, by metadata key; under BASE_MODELS and DATASETS lists of objects.

    type  general.type: "model", or "mmproj" for a vision tower
    """

    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    type: str = "model"

    def metadata(self) -> dict[str, Value]:
        """Return general.type and the rest, in the order in which llama.cpp's converter writes them."""
        return {keys.TYPE: Value.string(self.type), **dict(self._entries())}

    def default_outfile(self, file_type: str, *, vocab_only: bool = False) -> str:
        """Return the file name to use where only a folder is given; file_type is "BF16", "Q8_0" ..."""
        is_tower = self.type == "mmproj"
        name = default_file_name(
            name=_for_a_file(self.facts.get(keys.NAME)),
            basename=_for_a_file(self.facts.get(keys.BASENAME)),
            finetune=_for_a_file(self.facts.get(keys.FINETUNE)),
            version=_for_a_file(self.facts.get(keys.VERSION)),
            size_label=None if is_tower else _for_a_file(self.facts.get(keys.SIZE_LABEL)),
            file_type=file_type,
            vocab_only=vocab_only,
        )
        return f"mmproj-{name}" if is_tower else name

    def _entries(self) -> Iterator[tuple[str, Value]]:
        for key, kind in _SCALARS.items():
            if key in self.facts:
                yield key, _MAKERS[kind](self.facts[key])
        for name, key in _SOURCES.items():
            if name not in self.facts:
                continue
            yield f"{key}.count", Value.u32(len(self.facts[name]))
            for i, source in enumerate(self.facts[name]):
                for part in _SOURCE_PARTS:
                    if source.get(part):
                        yield f"{key}.{i}.{part}", Value.string(source[part])
        for key in _LISTS:
            if key in self.facts:
                yield key, Value.strings(self.facts[key])


def _for_a_file(part: str | None) -> str | None:
    """Return `part` fit for a file name: printable, and no longer than MAX_NAME_PART."""
    if part is None:
        return None
    return "".join(char if char.isprintable() else "-" for char in part[:MAX_NAME_PART])


def general_metadata(
    folder: Path,
    config: Mapping[str, Any],
    *,
    model_name: str | None = None,
    metadata_file: Path | None = None,
    counts: ParameterCounts | None = None,
    type_: str = "model",
) -> GeneralMetadata:
    """Collect what a checkpoint's files and the name of its folder say about the model.

    config         config.json
    model_name     --model-name
    metadata_file  --metadata
    counts         of the output's tensors; None or zeros when no tensor is written
    type_          general.type
    raises         BadConfig when the --metadata file is missing, is no JSON object, or has a wrong value
    """
    counts = counts or ParameterCounts()
    card, card_note = read_model_card(folder / "README.md")
    generation, generation_note = _read_generation_config(folder / "generation_config.json")
    override, override_notes = _read_override(metadata_file)

    names = [folder_name(folder)]
    path_name = config.get("_name_or_path")
    if isinstance(path_name, str) and path_name and path_name.count("/") <= 1:  # more is a path on some disk
        names.insert(0, path_name)
    sources: list[Mapping[str, Any]] = [
        {keys.NAME: model_name} if model_name else {},
        override,
        _facts_of_card(card, counts.total),
        generation,
        *(_facts_of_name(parse_model_name(name, counts.total)) for name in names),
        {keys.SIZE_LABEL: counts.size_label} if counts.total else {},
    ]
    facts: dict[str, Any] = {}
    for source in sources:
        facts = {**source, **facts}
    notes = [note for note in (card_note, generation_note, *override_notes) if note]
    facts = {key: value for key, value in facts.items() if value not in _CLEARED}
    return GeneralMetadata({keys.NAME: names[-1], **facts}, tuple(notes), type_)


# --- the sources ---------------------------------------------------------------------------------------


def _facts_of_name(name: ModelName) -> dict[str, Any]:
    facts = {
        keys.NAME: title(name.name),
        keys.ORGANIZATION: title(name.organization or ""),
        keys.BASENAME: name.basename,
        keys.FINETUNE: name.finetune,
        keys.VERSION: name.version,
        keys.SIZE_LABEL: name.size_label,
    }
    return {key: value for key, value in facts.items() if value}


def _facts_of_card(card: Mapping[str, Any], n_params: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for key, names in _CARD_NAMES.items():
        value = next((card[name] for name in names if name in card), None)
        if isinstance(value, list):
            value = ",".join(item for item in value if isinstance(item, str))
        if isinstance(value, str) and value:
            facts[key] = value
    for key, names in _CARD_LISTS.items():
        items = [item for name in names for item in _as_list(card.get(name)) if isinstance(item, str)]
        if items:
            facts[key] = items
    for key, names in _CARD_SOURCES.items():
        if (value := next((card[name] for name in names if name in card), None)) is not None:
            facts[key] = [_source(item, n_params) for item in _as_list(value)]
    return facts


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _source(entry: object, n_params: int) -> dict[str, str]:
    """Describe a base model or dataset, given as an object, an address or a name on the hub."""
    if isinstance(entry, Mapping):
        return {part: entry[part] for part in _SOURCE_PARTS if isinstance(entry.get(part), str)}
    if not isinstance(entry, str):
        return {}
    is_address = entry.startswith(("http://", "https://", "ssh://"))
    if is_address:
        match = _HUB_URL.fullmatch(entry)
        if match is None:
            return {"repo_url": entry}
    name = parse_model_name(match[1] if is_address and match else entry, n_params)
    facts = {
        "name": title(name.name),
        "organization": title(name.organization or ""),
        "version": name.version or "",
        "repo_url": "",
    }
    if is_address:
        facts["repo_url"] = entry
    elif name.organization:
        facts["repo_url"] = f"https://huggingface.co/{name.organization}/{name.name}"
    return {part: value for part, value in facts.items() if value}


def _read_generation_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the sampling settings by key, and a note on those that have none."""
    if not path.is_file():
        return {}, None
    try:
        entries = read_json_object(path)
    except BadConfig as error:
        return {}, f"sampling settings are left out: {error}"
    facts: dict[str, Any] = {}
    for key, kind in _SCALARS.items():
        if not key.startswith("general.sampling."):
            continue
        names = _GENERATION_NAMES.get(key, (key.rpartition(".")[2],))
        value = next((entries[name] for name in names if entries.get(name) is not None), None)
        if _suits(value, kind):
            facts[key] = value
    lost = [name for name, idle in _WITHOUT_KEY.items() if entries.get(name) not in (None, *idle)]
    return facts, f"{path.name}: {', '.join(lost)}: left out, a GGUF file has no key" if lost else None


def _read_override(path: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Return the facts of a --metadata file by key (None: leave it out), and notes on unknown keys."""
    if path is None:
        return {}, []
    facts: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in read_json_object(path).items():
        expected = _expected(key, value)
        if expected is None:
            notes.append(f"--metadata: {key} is not one of the keys that can be set: ignored")
        elif value is not None and expected:
            raise BadConfig(f"{path}: {key} is {quoted(value)}, expected {expected}")
        else:
            facts[key] = [_source(item, 0) for item in value] if value and key in _SOURCES else value
    return facts, notes


def _expected(key: str, value: object) -> str | None:
    """Return the form that `key` wants for `value`: "" when it is fine, None when the key is unknown."""
    if key in _SCALARS:
        return "" if _suits(value, _SCALARS[key]) else _IN_WORDS[_SCALARS[key]]
    if key in _LISTS:
        return "" if _is_list_of(str, value) else "a list of texts"
    if key in _SOURCES:
        return "" if _is_list_of(dict, value) else "a list of objects"
    return None


_IN_WORDS = {Kind.STRING: "a text", Kind.INT32: "a whole number of 32 bits", Kind.FLOAT32: "a number"}


def _suits(value: object, kind: Kind) -> bool:
    if kind is Kind.STRING:
        return isinstance(value, str)
    if kind is Kind.INT32:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST_FLOAT32


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
