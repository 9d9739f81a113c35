"""Texts in another encoding than UTF-8: the message says which it looks like, and how to convert it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

import gguf_tools.commands.evaluate
from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import read_input_text

ENGLISH = "The quick brown fox jumps over the lazy dog. " * 40
GERMAN = "Größe, Übermut und Fähigkeiten: für alle schönen Füße. " * 40
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастна по-своему. " * 40
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 40
CHINESE = "道可道，非常道。名可名，非常名。无名天地之始，有名万物之母。" * 40
KOREAN = "나랏말싸미 듕귁에 달아 문자와로 서르 사맛디 아니할쎄 " * 40

CASES = [
    (ENGLISH, "utf-16", "UTF-16"), (ENGLISH, "utf-16-le", "UTF-16LE"), (ENGLISH, "utf-16-be", "UTF-16BE"),
    (ENGLISH, "utf-32", "UTF-32"), (ENGLISH, "utf-32-be", "UTF-32BE"), (JAPANESE, "utf-16", "UTF-16"),
    (GERMAN, "latin-1", "ISO-8859-1"), (GERMAN + "„so“ – 5 €", "cp1252", "WINDOWS-1252"),
    (RUSSIAN, "cp1251", "WINDOWS-1251"), (RUSSIAN, "koi8-r", "KOI8-R"), (JAPANESE, "shift_jis", "SHIFT_JIS"),
    (JAPANESE, "euc_jp", "EUC-JP"), (CHINESE, "gb18030", "GB18030"), (KOREAN, "euc_kr", "EUC-KR"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "encoding", "name"), CASES, ids=[f"{each[1]}" for each in CASES])
def test_an_encoding_is_recognised_and_can_be_converted(
    text: str, encoding: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "a text's.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(BadRequest, match=f"it looks like {name}: iconv -f {name} -t UTF-8 ") as caught:
        read_input_text(path)
    command = str(caught.value).partition(f"looks like {name}: ")[2]
    subprocess.run(["bash", "-c", command], check=True)
    assert read_input_text(shlex.split(command)[-1]) == text


@pytest.mark.parametrize("data", [bytes(range(256)) * 40, b"\x89PNG\r\n\x1a\n\0\0\xff" * 50, b"\xff"])
def test_what_is_no_text_is_not_called_one(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(BadRequest, match="not UTF-8 at byte") as caught:
        read_input_text(path)
    assert "iconv" not in str(caught.value) or data == b"\xff"


def test_utf8_with_a_zero_or_foreign_scripts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in (f"{ENGLISH}\0", JAPANESE, GERMAN, "", "\0"):
        path.write_text(text, "utf-8")
        assert read_input_text(path) == text


def test_a_command_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_bytes(GERMAN.encode("latin-1"))
    assert gguf_tools.commands.evaluate.main(["b.gguf", "q.gguf", "-f", str(text)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"iconv -f ISO-8859-1 -t UTF-8 {text} > {text}.utf8" in err
