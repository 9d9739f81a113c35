"""docs/suite-texts.md says what happens, and its table what the manifest does."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from imatrix.texts.suite import read_suite
from scripts.record.text_manifests import CALIBRATION, SUITE, read_manifest
from tests.support.trained_model import calibration_text

pytest.importorskip("torch")

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "suite-texts.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """Return the page's only block of code of a kind."""
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_example_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mine" / "mails").mkdir(parents=True)
    (tmp_path / "mine" / "suite.yaml").write_text(block("yaml"))
    (tmp_path / "mine" / "support.jsonl").write_text(block("json"))
    (tmp_path / "mine" / "mails" / "first.txt").write_bytes(calibration_text()[:1200])
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTestParser().get_doctest(block("pycon"), {}, "page", None, None)
    shown: list[str] = []
    assert doctest.DocTestRunner().run(test, out=shown.append).failed == 0, "".join(shown)


def test_the_table_is_the_manifests() -> None:
    _, manifest = read_manifest(SUITE)
    rows = re.findall(r"^\| (\w+) \| .*? \| (\d+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    classes = {each.name: each for each in read_suite("default").classes}
    contexts = {name: each.context for name, each in classes.items()}
    assert {name: int(context) for name, context, _ in rows} == contexts
    tokens = {name: int(n_tokens.replace(",", "")) for name, _, n_tokens in rows}
    assert {**tokens, "all": sum(tokens.values())} == manifest["totals"]["tokens"]
    assert f"{sum(tokens.values()):,} tokens" in PAGE
    n_talks = [len(classes[name].conversations) for name in ("chat", "tools")]
    assert [int(number) for number in re.findall(r"(\d+) conversations", PAGE)] == n_talks


def test_the_table_of_calibration_texts_is_the_manifests() -> None:
    _, manifest = read_manifest(CALIBRATION)
    table = PAGE.partition("## The texts to calibrate with")[2]
    tokens = dict(re.findall(r"^\| (\w+) \| .* \| ([\d,]+) \|$", table, re.MULTILINE))
    totals = manifest["totals"]
    shown = {kind: int(n_tokens.replace(",", "")) for kind, n_tokens in tokens.items()}
    assert {**shown, "all": sum(shown.values())} == totals["tokens"]
    assert f"{totals['tokens']['all']:,} tokens of the same tokenizer in {totals['bytes'] / 1e6:.2f}" in table
    n_talks = {each.name: len(each.conversations) for each in read_suite(CALIBRATION).classes}
    for kind, what in {"chats": "chats", "summaries": "texts", "tools": "chats with calls"}.items():
        assert f"| {kind} | {n_talks[kind]} {what}" in table
