"""The texts of the package are what their manifests say, and may be shipped; models of all kinds read the
default suite.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from imatrix.texts.suite import read_suite
from imatrix.texts.tokenise import tokenise
from scripts.record import text_manifests
from scripts.record.text_manifests import CALIBRATION, SUITE, read_manifest
from tests.imatrix.evaluate.suite.chats import TEMPLATES, vocabulary

ROOT = Path(__file__).parents[4]
CLASSES = ("prose", "docs", "code", "chat", "tools", "maths", "scripts", "long")


@pytest.mark.slow
def test_the_manifests_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Digests, sizes, tokens, licences, notices, and that each file has an entry."""
    assert text_manifests.main(["--check"]) == 0, capsys.readouterr().err


def test_a_wrong_manifest_is_found_out() -> None:
    _, manifest = read_manifest(SUITE)
    first, second, third, fourth, *_ = manifest["texts"]
    first["licence"] = "GPL-3.0"
    second["author"] = ""
    third["file"] = "prose/nothing.txt"
    fourth["source"] = "https://example.com"
    wrong = list(text_manifests.wrong_entries(SUITE, manifest))
    assert wrong[0].startswith(f"{first['file']}: licence GPL-3.0, expected one of Apache-2.0")
    assert wrong[1] == f"{second['file']}: author missing"
    assert wrong[2] == f"{fourth['file']}: LICENCES.md has no notice of https://example.com"
    assert wrong[-1] == "prose/nothing.txt: is not there"


def test_sizes_and_classes() -> None:
    _, manifest = read_manifest(SUITE)
    totals = manifest["totals"]
    assert totals["bytes"] < 1_500_000
    assert totals["tokens"]["all"] == 249289
    assert tuple(totals["tokens"])[:-1] == CLASSES
    assert all(n_tokens > 25_000 for n_tokens in totals["tokens"].values())
    assert len({text["sha256"] for text in manifest["texts"]}) == len(manifest["texts"])


def test_the_package_has_the_texts() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    home = ROOT / "imatrix" / "texts"
    patterns = settings["tool"]["setuptools"]["package-data"]["imatrix.texts"]
    packed = {path for pattern in patterns for path in home.glob(pattern) if path.is_file()}
    folders = (SUITE, CALIBRATION)
    assert packed == {path for folder in folders for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("template", ["qwen-3", "gemma-2", "mistral-nemo", "deepseek-v3.1", None])
def test_every_class_has_chunks(template: str | None) -> None:
    vocab = vocabulary(None if template is None else TEMPLATES[template], add_bos=True)
    chosen = tokenise(read_suite("default", quick=True), vocab, 10_000)
    assert tuple(each.name for each in chosen) == CLASSES
    sizes = Counter({each.name: each.chunks.n_scored for each in chosen})
    assert min(sizes.values()) > 500, sizes
    assert {each.name: each.chunks.longest for each in chosen if each.name in ("prose", "long")} == {
        "prose": 512, "long": 4096,
    }  # fmt: skip


def test_a_template_takes_nearly_all_conversations() -> None:
    classes = tokenise(read_suite("default"), vocabulary(TEMPLATES["qwen-3"]), 10_000)
    chosen = {each.name: each for each in classes}
    assert chosen["chat"].notes == chosen["tools"].notes == ()
    assert chosen["chat"].chunks.n_chunks >= 60
