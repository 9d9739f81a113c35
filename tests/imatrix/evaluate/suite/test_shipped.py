"""The calibration texts of the package: written as they are, read in equal shares, new to the suite."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gguf_tools
from gguf_tools.commands.main import main
from gguf_tools.errors import BadRequest, OutputError
from gguf_tools.files.named_files import small_partial
from imatrix.texts.mixture import mixture_sha256, read_text
from imatrix.texts.shipped import shipped_texts, write_texts
from imatrix.texts.suite import read_suite
from imatrix.texts.tokenise import tokenise
from imatrix.texts.tokens import Cut
from quantize.importances.text_sketch import TextSketch
from scripts.record.text_manifests import CALIBRATION, SUITE
from tests.imatrix.evaluate.suite.chats import TEMPLATES, vocabulary

KINDS = ("chats", "code", "docs", "json", "maths", "prose", "scripts", "summaries", "tools")
RUN = 12
"""Words in a row that no text may share with the suite."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
"""A word, or a letter of a script that is written without spaces or with long words."""


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def runs_of(path: Path) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(path.read_text(encoding="utf-8").lower())
    return zip(*(words[start:] for start in range(RUN)), strict=False)


def test_the_folder_is_the_packages_and_the_same_each_time(tmp_path: Path) -> None:
    shipped = gguf_tools.write_texts(tmp_path / "new" / "texts")
    written = bytes_of(tmp_path / "new" / "texts")
    assert written == bytes_of(CALIBRATION)
    assert sum(map(len, written.values())) <= 1_000_000
    assert {text.file for text in shipped.texts} | {"LICENCES.md", "manifest.yaml"} == set(written)
    assert shipped == shipped_texts()
    assert shipped.sha256 == mixture_sha256(tmp_path / "new" / "texts")


def test_nine_classes_share_64_and_256_chunks_equally(tmp_path: Path) -> None:
    write_texts(tmp_path)
    for n_chunks in (64, 256):
        text = read_text(tmp_path, vocabulary(TEMPLATES["qwen-3"]), 10_000, Cut(512, n_chunks=n_chunks))
        shares = Counter(text.classes)
        assert tuple(sorted(shares)) == KINDS
        assert max(shares.values()) - min(shares.values()) <= 1, shares
        assert text.notes == ()


def test_every_class_has_its_share_of_256_chunks() -> None:
    """In a large vocabulary, which makes the fewest tokens of a text."""
    tokens = Counter[str]()
    for text in shipped_texts().texts:
        tokens[text.kind] += text.tokens
    assert min(tokens.values()) > 29 * 512, tokens


def test_no_text_shares_twelve_words_with_the_suite() -> None:
    suite = {run for path in SUITE.glob("*/*") for run in runs_of(path)}
    assert len(suite) > 100_000
    shared = {path.name: run for path in CALIBRATION.glob("*/*") for run in runs_of(path) if run in suite}
    assert shared == {}


@pytest.mark.slow
def test_evaluate_finds_no_passage_of_the_suite_in_it() -> None:
    vocab = vocabulary()
    sketch = TextSketch.of(read_text(CALIBRATION, vocab, 10_000, Cut(512)).tokens.ravel(), "")
    for each in tokenise(read_suite("default"), vocab, 10_000):
        assert sketch.shared(each.chunks.tokens) == 0, each.name
    own = np.concatenate([each.chunks.tokens for each in tokenise(read_suite(CALIBRATION), vocab, 10_000)])
    assert sketch.shared(own) > 0.5


def test_texts_are_clean() -> None:
    for path in CALIBRATION.rglob("*.*"):
        text = path.read_bytes().decode("utf-8")
        addresses = re.findall(r"[\w.+-]+@[\w-]+\.[\w.]+", text)
        assert [each for each in addresses if not each.endswith("@example.com")] == [], path
        assert not set("\r\0\ufeff\ufffd") & set(text), path
        assert text.endswith("\n"), path


def test_json_is_json() -> None:
    for path in CALIBRATION.glob("json/*"):
        rest = path.read_text(encoding="utf-8").strip()
        while rest:
            _, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].lstrip()


def test_what_is_there_stays_and_what_is_missing_comes(tmp_path: Path) -> None:
    write_texts(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.txt")}
    (tmp_path / "manifest.yaml").unlink()
    killed = tmp_path / small_partial("manifest.yaml")
    killed.write_bytes(b"texts:")
    write_texts(tmp_path)
    assert bytes_of(tmp_path) == bytes_of(CALIBRATION)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_another_versions_text_is_replaced_by_force_alone(tmp_path: Path) -> None:
    write_texts(tmp_path)
    changed = tmp_path / "prose" / "carroll-alice.txt"
    changed.write_text("Another edition.\n")
    with pytest.raises(OutputError, match=r"carroll-alice\.txt: exists already"):
        write_texts(tmp_path)
    assert changed.read_text() == "Another edition.\n"
    write_texts(tmp_path, force=True)
    assert bytes_of(tmp_path) == bytes_of(CALIBRATION)


@pytest.mark.parametrize("name", ["mine.txt", "prose/mine.txt", "mine/a.txt", "prose/mine/a.txt"])
def test_a_strangers_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("A text of mine.\n")
    top = next(each for each in (path, *path.parents) if each.parent in (tmp_path, tmp_path / "prose"))
    holds = re.escape(top.relative_to(tmp_path).as_posix())
    with pytest.raises(BadRequest, match=f"holds '{holds}', which is not one of these texts, expected an"):
        write_texts(tmp_path, force=True)
    assert bytes_of(tmp_path) == {name: b"A text of mine.\n"}


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "prose").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRequest, match="holds 'prose'"):
        write_texts(tmp_path / "texts")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = shipped_texts()
    assert main(["text", "-o", str(tmp_path)]) == 0
    *kinds, wrote, folder = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in kinds] == list(dict.fromkeys(text.kind for text in shipped.texts))
    assert wrote.startswith(f"wrote {tmp_path}: {len(shipped.texts)} texts of 9 kinds, ")
    assert folder == f"SHA-256 of the folder: {shipped.sha256}"
    assert main(["text", "-o", str(tmp_path), "-q"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["text", "-o", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sha256"] == shipped.sha256
    assert [text["sha256"] for text in told["texts"]] == [text.sha256 for text in shipped.texts]
    assert set(told["texts"][0]) >= {"file", "source", "author", "licence", "sha256", "bytes"}


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["text"]) == 0
    shown = capsys.readouterr().out
    for text in shipped_texts().texts:
        assert re.search(rf"^{re.escape(text.file)} .* {text.licence} +{text.source}$", shown, re.MULTILINE)
    assert re.search(r"^tools +[\d.]+ KiB +[\d,]+ tokens$", shown, re.MULTILINE)


def test_force_without_a_folder_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["text", "--force"]) == 2
    assert "-o FOLDER is missing" in capsys.readouterr().err
