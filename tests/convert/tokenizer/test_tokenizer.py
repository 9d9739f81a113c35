"""Tokenizers: golden metadata, the ids that llama.cpp makes of them, and bad files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from convert.tokenizer.pretokenizers import KNOWN
from gguf_tools.format.values import Kind
from tests.convert.tokenizer.small_tokenizers import TEXT, read, write_vocab_file
from tests.support import oracle
from tests.support.tokenizer_files import (
    GOLDEN,
    NAMES,
    VOCAB_SIZES,
    copy_tokenizer,
    tokenizer_config,
    tokenizer_json,
)

needs_llama_cpp = pytest.mark.skipif(not oracle.available(), reason="the xllamacpp wheel is not installed")
CONVERTED = Path(__file__).parents[2] / "golden" / "convert"


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name and folder of a real tokenizer."""
    return request.param, copy_tokenizer(request.param, tmp_path_factory.mktemp(request.param))


# --- golden metadata -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-deepseek-v2", "tiny-deepseek-v3"])
def test_metadata_is_what_llama_cpps_converter_writes(model: str, tmp_path: Path) -> None:
    """Keys, values and their order."""
    golden = json.loads((CONVERTED / f"{model}.f32.json").read_text(encoding="utf-8"))["metadata"]
    expected = {key: value for key, value in golden.items() if key.startswith("tokenizer.")}
    tokenizer = read(
        copy_tokenizer("tiny", tmp_path), 4096, bos_token_id=0, eos_token_id=1, pad_token_id=None
    )
    found = {key: summary(value.data) for key, value in tokenizer.metadata().items()}
    assert list(found.items()) == list(expected.items())
    assert tokenizer.notes == ()


def summary(data: Any) -> Any:
    """A value as the golden files have it: arrays as length, hash and first items."""
    if not isinstance(data, tuple):
        return data
    as_json = json.dumps(data, ensure_ascii=False)
    return {
        "array_length": len(data),
        "sha256_of_json": hashlib.sha256(as_json.encode()).hexdigest(),
        "first": list(data[:5]),
    }


def test_a_fine_tune_with_an_added_token(tmp_path: Path) -> None:
    content = tokenizer_json("tiny")
    content["added_tokens"].append({**content["added_tokens"][0], "id": 4096, "content": "<|mine|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = read(tmp_path, 4100)
    assert tokenizer.pre == "deepseek-v3"
    assert tokenizer.vocab.tokens[4096:] == ("<|mine|>", "[PAD4097]", "[PAD4098]", "[PAD4099]")


def test_kinds_of_values(tmp_path: Path) -> None:
    metadata = read(copy_tokenizer("tiny", tmp_path)).metadata()
    kinds = {key.removeprefix("tokenizer.ggml."): (value.kind, value.item) for key, value in metadata.items()}
    assert kinds["tokens"] == kinds["merges"] == (Kind.ARRAY, Kind.STRING)
    assert kinds["token_type"] == (Kind.ARRAY, Kind.INT32)
    assert kinds["bos_token_id"] == (Kind.UINT32, None)
    assert kinds["add_bos_token"] == (Kind.BOOL, None)


# --- the same ids as the Hugging Face tokenizer -----------------------------------------------------------


@pytest.fixture(scope="module")
def both(
    real: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, oracle.Model]]:
    """Name; the tokenizer in the tokenizers library; the same converted and in llama.cpp."""
    from tokenizers import Tokenizer as LibraryTokenizer

    name, folder = real
    path = tmp_path_factory.mktemp("gguf") / "vocab.gguf"
    write_vocab_file(path, read(folder, VOCAB_SIZES[name]))
    with oracle.Model(path, vocab_only=True) as model:
        yield name, LibraryTokenizer.from_file(str(folder / "tokenizer.json")), model


def library_ids(library: Any, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


@needs_llama_cpp
def test_ids_of_recorded_texts(both: tuple[str, Any, oracle.Model]) -> None:
    """deepseek-llm's ids are recorded; the others have to agree with the library on the same texts."""
    name, library, model = both
    for vector in json.loads((GOLDEN / "deepseek-llm.vectors.json").read_text(encoding="utf-8")):
        expected = vector["ids"] if name == "deepseek-llm" else library_ids(library, vector["text"])
        assert model.tokenize(vector["text"]) == expected, vector["text"]


@needs_llama_cpp
def test_ids_of_a_mixed_text(both: tuple[str, Any, oracle.Model]) -> None:
    _, library, model = both
    for text in (TEXT, *TEXT.splitlines(keepends=True), TEXT.replace(" ", "  "), TEXT.replace("\n", "\n\n")):
        assert model.tokenize(text) == library_ids(library, text)


@needs_llama_cpp
def test_special_tokens_are_parsed(both: tuple[str, Any, oracle.Model]) -> None:
    name, library, model = both
    text = "<｜begin▁of▁sentence｜>Hello<｜end▁of▁sentence｜> <｜User｜>世界<think>x</think> ø"
    assert model.tokenize(text, parse_special=True) == library_ids(library, text)
    begins = tokenizer_config(name)["add_bos_token"]
    bos = library.token_to_id("<｜begin▁of▁sentence｜>")
    assert model.tokenize("Hello", add_special=True) == [
        *([bos] if begins else []),
        *library_ids(library, "Hello"),
    ]


# llama.cpp makes one control character of every white space outside of ASCII before it matches a regex
# (unicode_regex_split), so its \s finds them. A class that lists one of them then doesn't: deepseek-llm's
# punctuation and CJK classes hold U+3000, the CJK class U+2000-U+200A, U+2028, U+2029, U+202F and U+205F.
DEVIATIONS = {
    "x  \u3000": ([87, 207, 207, 88946], [87, 243, 88946]),
    "、  \u3000。": ([537, 207, 207, 88946, 398], [537, 243, 88946, 398]),
}


@needs_llama_cpp
@pytest.mark.parametrize("real", ["deepseek-llm"], indirect=True)
def test_where_llama_cpp_itself_deviates(both: tuple[str, Any, oracle.Model]) -> None:
    """Not ours to mend: a file only names the pre-tokenizer. When this fails, llama.cpp has mended it."""
    _, library, model = both
    for text, (of_library, of_llama_cpp) in DEVIATIONS.items():
        assert library_ids(library, text) == of_library
        assert model.tokenize(text) == of_llama_cpp


@needs_llama_cpp
@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_ids_of_every_known_pre_tokenizer(known: Any, tmp_path: Path) -> None:
    """llama.cpp's built-in pipeline of that name does what KNOWN says, on one vocabulary for all."""
    from tokenizers import Tokenizer as LibraryTokenizer

    content = tokenizer_json("tiny")
    content["pre_tokenizer"] = json.loads(known.build().__getstate__())
    content["model"]["ignore_merges"] = known.ignore_merges
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = read(tmp_path)
    assert tokenizer.pre == known.name
    library = LibraryTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with oracle.Model(write_vocab_file(tmp_path / "vocab.gguf", tokenizer), vocab_only=True) as model:
        for text in (TEXT, *TEXT.splitlines(keepends=True)):
            if known.name == "deepseek-llm":
                # llama.cpp leaves runs of digits whole there. The model's own vocabulary has no token of two
                # digits, so it doesn't show; this one has.
                text = "".join("n" if char.isnumeric() else char for char in text)
            if known.name in ("kimi-k2", "youtu"):
                # llama.cpp doesn't cut before a capital letter inside of a word.
                text = text.lower()
            assert model.tokenize(text) == library_ids(library, text)
