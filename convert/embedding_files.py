"""Reads the files with which sentence-transformers makes embeddings of a language model.

    modules.json                       what a text goes through, in order: [{"type", "path"}]
    1_Pooling/config.json              how the vectors of a text's tokens become one
    2_Dense, 3_Dense                   matrices that this vector is multiplied by, see dense_modules
    sentence_bert_config.json          the length at which texts are cut
    config_sentence_transformers.json  prompts that are put before a text

A GGUF file has a place for the pooling ({arch}.pooling_type); what else changes an embedding is noted. The
names are those of sentence-transformers 5.2 (sentence_transformer/modules/pooling.py) and of versions before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.architectures.reranker import is_reranker, rank_keys
from convert.checkpoint.checkpoint import read_json_object_if_there
from convert.checkpoint.modules import DENSE, MODULES_NAME, read_modules
from gguf_tools.errors import BadConfig
from gguf_tools.findings import listed
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata, Value
from gguf_tools.text import shown

_NUMBERS: Mapping[str, int] = {"mean": 1, "cls": 2, "lasttoken": 3}
"""Modes that llama.cpp knows, by their numbers (enum llama_pooling_type in include/llama.h), in the order in
which its converter asks for them (conversion/base.py)."""

_OLD_NAMES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_NOT_RANKED = (
    "a reranker: the file is its language model, which ranks by the next token, yes or no; llama.cpp's"
    " /rerank needs a classifier, which its loader does not read for this family"
)
_KEEPS = "--sentence-transformers-dense-modules"
_WITHOUT_EFFECT = ("Transformer", "Normalize", "Dropout")
"""Modules that need nothing: the model itself, the length of vectors, which programs see to, and training."""


def read_embedding_files(
    folder: Path,
    architecture: str,
    family: Metadata,
    *,
    config: Mapping[str, Any] = MappingProxyType({}),
    ranks: bool = False,
    dense: bool | None = None,
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Return the keys for a checkpoint folder's files, and a note for each thing that is not carried over.

    Without a modules.json there are no embeddings.
    architecture  general.architecture of the file
    family        the keys of the model's family, for the length of its context
    config        config.json, where a reranker may have its name
    ranks         whether the family has rerankers
    dense         whether the file has the matrices of Dense modules; None where it has no place for them
    raises  BadConfig for a file that can't be read, or has another form than sentence-transformers writes
    """
    path = folder / MODULES_NAME
    is_known = is_reranker(folder, config)
    rank = rank_keys(architecture) if is_known and ranks else {}
    reranker = (_NOT_RANKED,) if is_known and not ranks else ()
    if not path.exists():
        unused = (
            f"{place.name}/config.json is not used: there is no {path.name}, which would name it"
            for place in sorted(folder.glob("*_Pooling"))
        )
        return rank, (*reranker, *unused)
    pooling_type: int | None = None
    notes = list(reranker)
    for kind, place in read_modules(path):
        if kind == "Pooling":
            pooling_type, more = _pooling(folder / place / "config.json")
            notes += more
        elif kind not in _WITHOUT_EFFECT and not (kind == DENSE and dense):
            where = f" ({shown(place)})" if place else ""
            kept = f"; {_KEEPS} keeps it" if kind == DENSE and dense is False else ""
            notes.append(
                f"{path.name}: {shown(kind)}{where} is left out: embeddings are those without it{kept}"
            )
    context = family.get(keys.CONTEXT_LENGTH.format(arch=architecture))
    notes += _length_notes(folder / "sentence_bert_config.json", context.data if context else None)
    notes += _prompt_notes(folder / "config_sentence_transformers.json")
    if pooling_type is None:  # they name no pooling that llama.cpp knows
        return rank, tuple(notes)
    pooling = {keys.POOLING_TYPE.format(arch=architecture): Value.u32(pooling_type)}
    return {**pooling, **rank}, tuple(notes)


def _pooling(path: Path) -> tuple[int | None, list[str]]:
    """Return the number of a pooling, and notes on what it does that llama.cpp doesn't."""
    name = f"{path.parent.name}/{path.name}"
    if not path.exists():
        return None, [f"{name} is missing: the pooling is left out"]
    config = read_json_object_if_there(path)
    notes: list[str] = []
    modes = _modes(path, config)
    number = next((number for mode, number in _NUMBERS.items() if mode in modes), None)
    if number is None:
        notes.append(f"{name}: llama.cpp has no pooling {listed(modes)}: left out, each token has its vector")
    elif len(modes) > 1:
        used = next(mode for mode in _NUMBERS if mode in modes)
        notes.append(f"{name}: pooling {listed(modes)} are put together; llama.cpp does only {used}")
    if config.get("include_prompt") is False:
        notes.append(f"{name}: include_prompt is false; llama.cpp pools the tokens of a prompt, too")
    return number, notes


def _modes(path: Path, config: Mapping[str, Any]) -> list[str]:
    stated = config.get("pooling_mode")
    if stated is None:
        return [mode for name, mode in _OLD_NAMES.items() if config.get(name)] or ["mean"]
    modes = [stated] if isinstance(stated, str) else stated
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise BadConfig(f"{path}: pooling_mode is {shown(repr(stated))}, expected the names of modes")
    return [mode.lower() for mode in modes]


def _length_notes(path: Path, context: int | None) -> Iterator[str]:
    config = read_json_object_if_there(path)
    length = config.get("max_seq_length")
    if type(length) is int and (context is None or length < context):
        yield f"{path.name}: max_seq_length is {length}; llama.cpp doesn't cut a text there"
    if config.get("do_lower_case") is True:
        yield f"{path.name}: do_lower_case is true; llama.cpp takes text as it is"


def _prompt_notes(path: Path) -> Iterator[str]:
    prompts = read_json_object_if_there(path).get("prompts")
    named = [name for name, prompt in prompts.items() if prompt] if isinstance(prompts, Mapping) else []
    if named:
        names = listed(named)
        yield f"{path.name}: the prompts {names} are not in the file: put them before a text"
