"""Texts and tables that are no ordinary files, or that no tokenizer could cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gguf_tools.errors import BadRequest
from gguf_tools.files.documents import read_document
from gguf_tools.files.early_checks import refuse_early
from gguf_tools.files.named_files import MAX_CORPUS, read_corpus, read_input, read_input_text
from imatrix.texts.mixture import read_text
from imatrix.texts.suite import read_suite
from imatrix.texts.tokens import Cut, Vocabulary


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="no /proc")
@pytest.mark.parametrize(
    "name", ["cpuinfo", "self/pagemap", "self/mem", "self/environ", "kmsg", "self/status"]
)
def test_files_of_the_system_are_refused(name: str) -> None:
    path = Path("/proc") / name
    for read in (read_input, read_input_text, read_corpus, read_document):
        with pytest.raises(BadRequest, match=rf"^{path}: (is of the system|can't be read)"):
            read(path)


def test_a_file_with_nothing_to_give_yet_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/kmsg, once all is read: a read that would wait returns None."""

    class Never:
        def __enter__(self) -> Never:
            return self

        def __exit__(self, *_: object) -> None: ...
        def fileno(self) -> int:
            return os.open(tmp_path / "empty", os.O_RDONLY)

        def read(self, _: int) -> None:
            return None

    (tmp_path / "empty").touch()
    monkeypatch.setattr("builtins.open", lambda *_, **__: Never())
    assert read_input(tmp_path / "empty") == b""


@pytest.mark.parametrize(
    "text",
    [
        "\0" * 1_100_000,
        "x" * 1_100_000,
        "a b\n" + " " * 1_700_000 + "c",
        "w " * 9 + "\n" * 1_100_000,
        "あ" * 1_100_000,
    ],
)
def test_a_text_without_a_break_is_no_text(text: str, tmp_path: Path) -> None:
    """Before a tokenizer sees it, and before a model is opened."""
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    vocab = Vocabulary({}, tmp_path)
    for read in (
        lambda: read_text(tmp_path / "a.txt", vocab, 10, Cut()),
        lambda: refuse_early(texts=[tmp_path / "a.txt"]),
        lambda: read_suite(tmp_path),
    ):
        with pytest.raises(BadRequest, match=r"/a\.txt: 524,288 characters without a space"):
            read()


def test_zeros_of_a_gigabyte_are_not_even_read(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(900_000_000)  # a hole takes no room
    with pytest.raises(BadRequest, match=f"900000000 bytes, expected at most {MAX_CORPUS}"):
        read_corpus(tmp_path / "a.txt")


def test_long_lines_of_words_are_a_text(tmp_path: Path) -> None:
    text = "words " * 400_000 + "y" * 300_000
    (tmp_path / "a.txt").write_text(text)
    assert read_corpus(tmp_path / "a.txt") == text
