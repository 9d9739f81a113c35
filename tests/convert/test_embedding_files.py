"""sentence-transformers' files beside a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import convert
from convert.embedding_files import read_embedding_files
from gguf_tools import open_gguf
from gguf_tools.errors import BadConfig
from gguf_tools.format.values import Value
from tests.support.decoder_models import decoder_model

OLD = tuple(f"pooling_mode_{name}" for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken"))


def write(folder: Path, pooling: dict[str, Any] | None = None, *others: str, **files: Any) -> Path:
    """Write modules.json with the model, a pooling and other modules, and more files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["Transformer", *(["Pooling"] if pooling is not None else []), *others]
    modules = [
        {"idx": i, "name": str(i), "type": f"sentence_transformers.models.{name}",
         "path": f"{i}_{name}" if i else ""}
        for i, name in enumerate(names)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def old(*names: str) -> dict[str, Any]:
    """Settings as versions before 5.2 write them."""
    return {"word_embedding_dimension": 64, **{name: name in names for name in OLD}, "include_prompt": True}


POOLINGS: dict[str, tuple[dict[str, Any], int | None]] = {
    "mean, old": (old("pooling_mode_mean_tokens"), 1),
    "cls, old": (old("pooling_mode_cls_token"), 2),
    "last, old": (old("pooling_mode_lasttoken"), 3),
    "last, alone": ({"pooling_mode_lasttoken": True}, 3),
    "mean": ({"embedding_dimension": 64, "pooling_mode": "mean"}, 1),
    "cls": ({"pooling_mode": "cls"}, 2),
    "last": ({"pooling_mode": "LastToken"}, 3),
    "a list of one": ({"pooling_mode": ["lasttoken"]}, 3),
    "nothing said": ({}, 1),
}


@pytest.mark.parametrize(("pooling", "number"), POOLINGS.values(), ids=POOLINGS.keys())
def test_a_pooling_has_a_number(pooling: dict[str, Any], number: int, tmp_path: Path) -> None:
    found = read_embedding_files(write(tmp_path, pooling, "Normalize"), "qwen3", {})
    assert found == ({"qwen3.pooling_type": Value.u32(number)}, ())


OTHERS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "max": ({"pooling_mode": "max"}, None, "llama.cpp has no pooling 'max': left out"),
    "max, old": (old("pooling_mode_max_tokens"), None, "llama.cpp has no pooling 'max': left out"),
    "two": (
        old("pooling_mode_cls_token", "pooling_mode_mean_tokens"), 1,
        "pooling 'cls', 'mean' are put together; llama.cpp does only mean",
    ),
    "a known and an unknown": ({"pooling_mode": ["max", "cls"]}, 2, "llama.cpp does only cls"),
    "without the prompt": ({"pooling_mode": "mean", "include_prompt": False}, 1, "include_prompt is false"),
}  # fmt: skip


@pytest.mark.parametrize(("pooling", "number", "says"), OTHERS.values(), ids=OTHERS.keys())
def test_a_pooling_that_llama_cpp_can_not_do(
    pooling: dict[str, Any], number: int | None, says: str, tmp_path: Path
) -> None:
    metadata, (note,) = read_embedding_files(write(tmp_path, pooling), "llama", {})
    assert metadata == ({} if number is None else {"llama.pooling_type": Value.u32(number)})
    assert note.startswith("1_Pooling/config.json: ")
    assert says in note


def test_what_else_makes_an_embedding(tmp_path: Path) -> None:
    write(
        tmp_path,
        None,
        "Dense",
        "Normalize",
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Find: ", "document": ""}},
    )
    assert read_embedding_files(tmp_path, "x", {"x.context_length": Value.u32(512)})[1] == (
        "modules.json: Dense (1_Dense) is left out: embeddings are those without it",
        "sentence_bert_config.json: max_seq_length is 256; llama.cpp doesn't cut a text there",
        "sentence_bert_config.json: do_lower_case is true; llama.cpp takes text as it is",
        "config_sentence_transformers.json: the prompts 'query' are not in the file: put them before a text",
    )


def test_a_pooling_of_layers_is_no_pooling_of_tokens(tmp_path: Path) -> None:
    assert read_embedding_files(write(tmp_path, None, "WeightedLayerPooling"), "x", {}) == (
        {}, ("modules.json: WeightedLayerPooling (1_WeightedLayerPooling) is left out: embeddings are those"
             " without it",),
    )  # fmt: skip


def test_what_makes_no_difference(tmp_path: Path) -> None:
    write(
        tmp_path,
        None,
        "Normalize",
        sentence_bert_config={"max_seq_length": 512, "do_lower_case": False},
        config_sentence_transformers={"prompts": {}, "default_prompt_name": None},
    )
    assert read_embedding_files(tmp_path, "x", {"x.context_length": Value.u32(512)})[1] == ()


def test_a_pooling_that_nothing_names(tmp_path: Path) -> None:
    write(tmp_path, {"pooling_mode": "lasttoken"})
    (tmp_path / "modules.json").unlink()
    metadata, notes = read_embedding_files(tmp_path, "x", {})
    assert metadata == {}
    assert notes == ("1_Pooling/config.json is not used: there is no modules.json, which would name it",)


@pytest.mark.parametrize(
    ("name", "card", "expected"),
    [("Qwen3-Reranker-0.6B", None, 1), ("mine", "# Qwen3-Reranker-4B", 1), ("mine", "of Qwen3-Reranker", 0)],
)
def test_a_reranker(name: str, card: str | None, expected: int, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if card is not None:
        (folder / "README.md").write_text(card)
    _, notes = read_embedding_files(folder, "llama", {})
    assert len([note for note in notes if "/rerank needs a classifier" in note]) == expected
    ranked, notes = read_embedding_files(folder, "qwen3", {}, ranks=True)
    assert (ranked.get("qwen3.pooling_type"), notes) == (Value.u32(4) if expected else None, ())


def test_a_missing_pooling(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert read_embedding_files(tmp_path, "x", {}) == (
        {}, ("1_Pooling/config.json is missing: the pooling is left out",),
    )  # fmt: skip


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": ("[", "modules.json: is no list of modules"),
    "an object": ({"type": "Pooling"}, "is no list of modules"),
    "a number": (7, "is no list of modules"),
    "a path that is a number": ([{"type": "x.Pooling", "path": 3}], "is no list of modules"),
    "a path outside": ([{"type": "x.Pooling", "path": "../1_Pooling"}], "expected a folder beside the file"),
    "an absolute path": ([{"type": "x.Pooling", "path": "/etc"}], "expected a folder beside the file"),
}


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD.keys())
def test_a_broken_list_is_refused(content: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(BadConfig, match=says):
        read_embedding_files(tmp_path, "x", {})


@pytest.mark.parametrize("stated", [3, [], [1], {"mean": True}])
def test_a_mode_that_is_no_name_is_refused(stated: Any, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="expected the names of modes"):
        read_embedding_files(write(tmp_path, {"pooling_mode": stated}), "x", {})


@pytest.mark.parametrize("vocab_only", [False, True])
@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3", "qwen3"), ("mistral", "llama"), ("qwen2-tied", "qwen2")]
)
def test_the_key_stands_behind_those_of_the_family(
    name: str, architecture: str, vocab_only: bool, tmp_path: Path
) -> None:
    decoder_model(name, tmp_path / "m")
    plain = convert.convert(tmp_path / "m", tmp_path / "plain.gguf", vocab_only=vocab_only)
    write(tmp_path / "m", {"pooling_mode": "lasttoken"}, "Dense")
    result = convert.convert(tmp_path / "m", tmp_path / "m.gguf", vocab_only=vocab_only)
    with open_gguf(tmp_path / "plain.gguf") as one, open_gguf(tmp_path / "m.gguf") as other:
        before, after = list(one.metadata), list(other.metadata)
        assert other.metadata[f"{architecture}.pooling_type"] == Value.u32(3)
    place = after.index(f"{architecture}.pooling_type")
    assert after[place + 1] == "general.quantization_version"
    assert after[:place] + after[place + 1 :] == before
    new = set(result.preparation.plan.notes) - set(plain.preparation.plan.notes)
    assert new == {"modules.json: Dense (2_Dense) is left out: embeddings are those without it"}
