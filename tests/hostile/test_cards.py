"""Cards of strangers' files: their words stay words, any key may be odd, and cards read what they wrote."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import gguf_tools
import gguf_tools.commands.main
import gguf_tools.commands.quantize
from convert.card.markdown import as_code, as_markdown
from convert.card.page import MARK
from convert.card.shell import command_line, read_command_line
from convert.card.write import CardRequest, write_card
from convert.general_metadata import read_model_card
from gguf_tools.errors import BadRequest
from gguf_tools.format import keys
from gguf_tools.format.values import Value
from quantize.importances.text_sketch import SHA256_KEY
from quantize.options import METHOD_KEY
from quantize.padding.padding import UNPADDED
from tests.gguf_tools.sample_files import METADATA, write_file
from tests.quantize.model_files import write_mixture_model

HOSTILE = [
    "![t](https://evil.example/t.png) [Verify your login](https://evil.example)",
    "<img src=https://evil.example/t.png>",
    "<script>alert(1)</script>", "<a href='https://evil.example'>x</a>", "<!-- x", "&lt;b&gt;",
    "https://evil.example/x", "www.evil.example", "me@evil.example", "<https://evil.example>",
    "a\n\n# Heading\n\n[x]: https://evil.example", "`code` ``` | cell | ~~gone~~", "*a* _b_ __c__ $x$",
    "\\](https://evil.example)", "\\\\[x](https://evil.example)", "[x][y]", MARK,
    f"{MARK}\n{MARK}\n", "---", "...",
]  # fmt: skip
LIVE = re.compile(r"(?<!\\)\]\(|(?<!\\)\]\[|<(?!!-- -->)|://evil|www\.|\w@|(?<!\\)[`|*~]|^#", re.MULTILINE)
"""What would be a link, an image, a tag, an address or a heading."""


@pytest.mark.parametrize("text", HOSTILE)
def test_words_stay_words(text: str) -> None:
    escaped = as_markdown(text).replace("https:<!-- -->//evil", "")
    assert not LIVE.search(escaped.replace("\\\\", "")), escaped
    assert "\n" not in escaped
    code = as_code(text)
    assert code in (f"`{text}`", as_markdown(text))


@pytest.mark.parametrize(
    "name", ["DeepSeek V2-Lite (16B)", "Größe 深度 🐳", "model-Q4_K_M.gguf", "a; c: 4.5"]
)
def test_plain_names_are_written_as_they_are(name: str) -> None:
    assert as_markdown(name) == name
    assert as_code(name) == f"`{name}`"


@pytest.mark.parametrize("name", [pytest.param(text, id=str(i)) for i, text in enumerate(HOSTILE)])
def test_no_link_comes_from_metadata(tmp_path: Path, name: str) -> None:
    texts = (
        keys.NAME, keys.QUANTIZED_BY, keys.LICENSE_LINK, keys.LICENSE, keys.QUANTIZE_IMATRIX_FILE,
        keys.QUANTIZE_IMATRIX_DATASET, METHOD_KEY, SHA256_KEY,
    )  # fmt: skip
    said = {key: Value.string(name) for key in texts} | {keys.TAGS: Value.strings([name])}
    write_file(tmp_path / "a.gguf", {**METADATA, **said})
    del said[SHA256_KEY]
    write_file(tmp_path / "b.gguf", {**METADATA, **said, keys.QUANTIZE_IMATRIX_ENTRIES_COUNT: Value.u32(3)})
    gguf_tools.card([tmp_path / "a.gguf", tmp_path / "b.gguf"])
    page = (tmp_path / "README.md").read_text()
    body = page.split(f"\n{MARK}\n")[1].split("## How to run them")[0] + page.split("## What they are")[1]
    for own in (MARK, "<details>", "</details>", "<summary>", "</summary>", "<!-- -->"):
        body = body.replace(own, "")
    assert "<" not in body
    links = re.findall(r"(?<!\\)\]\(([^)]*)\)", body)
    assert set(links) == {"a.gguf", "b.gguf"}
    assert len(re.findall(r"^# ", body, re.MULTILINE)) == 1
    assert page.split("\n").count(MARK) == 2


ODD_VALUES = [
    Value.string("many"), Value.u32(7), Value.i32(-1), Value.f32(float("nan")), Value.f32(float("inf")),
    Value.bool_(True), Value.strings(["a", "b"]), Value.u64(2**64 - 1), Value.string("x" * 100_000),
]  # fmt: skip
READ = [
    keys.NAME, keys.TYPE, keys.LICENSE, keys.LICENSE_NAME, keys.LICENSE_LINK, keys.QUANTIZED_BY, keys.TAGS,
    keys.LANGUAGES,
    keys.QUANTIZE_IMATRIX_FILE, keys.QUANTIZE_IMATRIX_DATASET, keys.QUANTIZE_IMATRIX_ENTRIES_COUNT,
    keys.QUANTIZE_IMATRIX_CHUNKS_COUNT, SHA256_KEY, METHOD_KEY, "general.architecture", "llama.block_count",
    f"{UNPADDED}llama.embedding_length", f"{UNPADDED}llama.feed_forward_length", "llama.embedding_length",
]  # fmt: skip


@pytest.mark.parametrize(
    "odd",
    [*(pytest.param([key], id=key, marks=pytest.mark.slow) for key in READ), pytest.param(READ, id="all")],
)
@pytest.mark.parametrize("has_sha", [False, True])
def test_keys_may_hold_anything(
    tmp_path: Path, odd: list[str], has_sha: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {
        keys.QUANTIZE_IMATRIX_ENTRIES_COUNT: Value.u32(3), "llama.block_count": Value.u32(1),
        "llama.feed_forward_length": Value.u32(256),
        **({SHA256_KEY: Value.string("0" * 64)} if has_sha else {}),
    }  # fmt: skip
    for number, value in enumerate(ODD_VALUES):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_file(folder / "a.gguf", {**METADATA, **known, **dict.fromkeys(odd, value)})
        code = gguf_tools.commands.main.main(["card", str(folder / "a.gguf")])
        error = capsys.readouterr().err
        assert code == error.count("error: ")
        assert error.count("\n") == error.count("note: ") + code


def test_what_is_left_out_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_file(tmp_path / "a.gguf", {**METADATA, keys.QUANTIZE_IMATRIX_ENTRIES_COUNT: Value.string("many")})
    assert gguf_tools.commands.main.main(["card", str(tmp_path / "a.gguf")]) == 0
    error = capsys.readouterr().err
    assert error.startswith("note: ")
    assert "quantize.imatrix.entries_count is 'many', expected a whole number" in error
    assert gguf_tools.commands.main.main(["card", str(tmp_path / "a.gguf"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


WORDS = [
    "it's\nme", "a b", "", "--option=x|y", "`x`", "---", "$HOME", "'", '"', "\\", "\\n", "#", "# x.gguf",
    "$'a'", "\t\r\x1b[31m", "\x85\u2028\u202e", "深度\n\U0001f433\U000e0001", "a\udcffb", "```",
    "\n```\n", "it's", "a=b\\'c", MARK,
]  # fmt: skip


def test_command_lines_are_read_as_they_were_written() -> None:
    for words in (WORDS, *([word] for word in WORDS), *itertools.permutations(WORDS[:4])):
        line = command_line(["quantize", *words])
        assert line.isprintable()
        assert read_command_line(line) == ["quantize", *words]
    plain = [word for word in WORDS if word.isprintable()]
    assert read_command_line(shlex.join(plain)) == plain


def test_a_shell_takes_the_same_words() -> None:
    line = f"LC_ALL=C.UTF-8; printf '%s\\0' {command_line(WORDS)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True)
    assert [word.decode("utf-8", "surrogateescape") for word in done.stdout.split(b"\0")[:-1]] == WORDS


@pytest.mark.parametrize("word", [pytest.param(word, id=str(i)) for i, word in enumerate(WORDS)])
def test_a_card_reads_what_a_card_wrote(tmp_path: Path, word: str) -> None:
    """Command lines, who made the files, names of files, and what somebody added below."""
    name = f"{word.replace('/', '-')}.gguf"
    command = ["quantize", "--override-kv", f"general.name=str:{word}"]
    maker = word.replace("\udcff", "") or "me"
    write_file(tmp_path / name)
    write_file(tmp_path / "other.gguf")
    request = CardRequest(repo="me/model", home="me/model-GGUF", quantized_by=maker)
    card = write_card([tmp_path / name], request, {name: command})
    with open(card, "a") as file:
        file.write("\n## Thanks\n\nto all\n")
    write_card([tmp_path / "other.gguf"], CardRequest(), {"other.gguf": ["quantize", "other"]})
    page = card.read_text()
    assert command_line(command) in page
    assert page.count("\n| [") == 2
    assert page.endswith("\n## Thanks\n\nto all\n")
    assert "hf download me/model-GGUF " in page
    entries, problem = read_model_card(card)
    assert problem is None
    assert (entries["base_model"], entries["quantized_by"]) == ("me/model", maker)
    write_card([tmp_path / "other.gguf"], CardRequest())
    assert card.read_text() == page


def test_a_line_that_a_person_broke_is_left_out(tmp_path: Path) -> None:
    write_file(tmp_path / "a.gguf")
    card = write_card([tmp_path / "a.gguf"], CardRequest(), {"a.gguf": ["quantize", "a b"]})
    card.write_text(card.read_text().replace("'a b'", "'a b"))
    write_card([tmp_path / "a.gguf"], CardRequest())
    assert "## How they were made" not in card.read_text()


def test_a_command_with_a_line_end(tmp_path: Path) -> None:
    write_mixture_model(tmp_path / "in.gguf")
    for number in range(2):
        words = ["-q", "--card", "--override-kv", "general.name=str:it's\nme"]
        output = tmp_path / "out" / f"{number}.gguf"
        output.parent.mkdir(exist_ok=True)
        assert gguf_tools.commands.quantize.main([*words, str(tmp_path / "in.gguf"), str(output), "F16"]) == 0
    assert (tmp_path / "out" / "README.md").read_text().count("general.name=str:it\\'s\\x0ame'") == 2


@pytest.mark.parametrize("base", ["x](https://evil.example)", "<b>/x", "../..", "a/b\nc"])
def test_a_base_that_is_no_name_is_not_believed(tmp_path: Path, base: str) -> None:
    """It is in the card of the file that these were made of, which a stranger wrote."""
    source = tmp_path / "source"
    source.mkdir()
    write_file(source / "base.gguf")
    (source / "README.md").write_text(f"---\nbase_model_relation: quantized\nbase_model: {base!r}\n---\n")
    write_file(tmp_path / "a.gguf")
    write_card([tmp_path / "a.gguf"], CardRequest(source / "base.gguf"))
    page = (tmp_path / "README.md").read_text()
    assert "base_model:" not in page
    with pytest.raises(BadRequest, match="expected OWNER/NAME"):
        CardRequest(repo=base)


@pytest.mark.parametrize("link", ["javascript:alert(1)", "data:text/html,x", "LICENSE"])
def test_a_license_is_an_address_or_a_file_of_the_model(tmp_path: Path, link: str) -> None:
    write_file(tmp_path / "a.gguf", {**METADATA, keys.LICENSE_LINK: Value.string(link)})
    entries = read_model_card(write_card([tmp_path / "a.gguf"], CardRequest(repo="me/model")))[0]
    expected = {"LICENSE": "https://huggingface.co/me/model/blob/main/LICENSE"}
    assert entries.get("license_link") == expected.get(link)


def test_front_matter_has_no_raw_marks(tmp_path: Path) -> None:
    odd = "mit\u202e\x1b[31m\u2066\u200f\xa0\U000e0041\x85\n\u2028"
    write_file(tmp_path / "a.gguf", {**METADATA, keys.LICENSE: Value.string(odd)})
    gguf_tools.card(tmp_path / "a.gguf")
    page = (tmp_path / "README.md").read_text()
    assert all(line.isprintable() for line in page.split("\n"))
    assert yaml.safe_load(page.split("\n---\n")[0])["license"] == odd
