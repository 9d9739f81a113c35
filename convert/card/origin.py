"""Where quantized files come from: the model's name on the Hub, and what its own card says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from convert.card.files import FileFacts
from convert.metadata.model_card import read_model_card
from gguf_tools.format import keys
from gguf_tools.hub.names import PUBLIC_HOSTS, cached_repo

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
        repo = repo or (base if isinstance(base, str) else None)
    repo = repo or (None if folder is None else cached_repo(folder))
    license_ = {name: value for name in _LICENSE if isinstance(value := card.get(name), str)}
    for each in files if not license_ else ():
        license_ = {name: each.model[key] for name, key in _LICENSE.items() if key in each.model} or license_
    link = license_.get("license_link")
    if link is not None and repo is not None and "://" not in link:
        license_["license_link"] = f"https://{PUBLIC_HOSTS[0]}/{repo}/blob/main/{quote(link)}"
    pipeline = card.get("pipeline_tag")
    return Origin(
        repo=repo,
        license=license_,
        languages=_listed(card.get("language")) or next((each.languages for each in files), ()),
        tags=tuple(tag for tag in _listed(card.get("tags")) if tag not in NOT_OF_A_QUANT),
        pipeline_tag=pipeline if isinstance(pipeline, str) else _TEXT_GENERATION,
    )


_LICENSE = {"license": keys.LICENSE, "license_name": keys.LICENSE_NAME, "license_link": keys.LICENSE_LINK}


def _listed(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()
