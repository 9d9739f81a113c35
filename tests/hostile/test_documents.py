"""Suites, recipes, losses, reports and chats of strangers: one line, with the place, whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.card.facts import read_report
from gguf_tools.errors import BadRequest, FormatError, ToolkitError
from gguf_tools.files.documents import MAX_VALUES, line_of, parse_json, parse_yaml
from gguf_tools.text import quoted
from imatrix.texts.suite import read_suite
from quantize.plan.recipe_files import read_recipe_file
from quantize.plan.sensitivities import read_sensitivities

BOMB = "b0: &b0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"b{n}: &b{n} [{','.join([f'*b{n - 1}'] * 9)}]\n" for n in range(1, 10)
)

BAD_YAML = {
    "a date that is none": ("a: 2024-13-45", "line 1: '2024-13-45' is a date"),
    "a date": ("b: 1\na: 2024-01-05", "line 2: '2024-01-05' is a date"),
    "no float": ("a: !!float abc", "line 1: 'abc' is no finite number"),
    "no truth value": ("a: !!bool maybe", "line 1: 'maybe' is no truth value"),
    "no whole number": ("a: !!int ''", "line 1: '' is no whole number"),
    "digits": ("a: " + "9" * 5000, "line 1: '999"),
    "hexadecimal digits": ("a: 0x" + "f" * 5000, "line 1: '0xfff"),
    "infinity": ("a: .inf", "line 1: '.inf' is no finite number"),
    "not a number": ("a: [.nan]", "line 1: '.nan' is no finite number"),
    "a set": ("a: !!set {x, y}", "line 1: could not determine"),
    "bytes": ("a: !!binary aGk=", "line 1: could not determine"),
    "pairs": ("a: !!omap [x: y]", "line 1: could not determine"),
    "half of a character": ('\na: "\\ud800"', "line 2: half of a character"),
    "aliases of aliases": (BOMB, f"line 6: more than {MAX_VALUES:,} values"),
    "a list that holds itself": ("a: &x [*x]", "line 1: '\\*x' is inside of what it stands for"),
    "an alias of nothing": ("a: *x", "line 1: nothing before is called '&x'"),
    "a merge of a text": ("<<: x", "line 1: << is 'x', expected keys"),
    "a key that is a list": ("? [x]\n: y", r"line 1: a key is \['x'\], expected a text"),
    "a key twice": ("a: 1\nb: 1\na: 2", "line 3: key 'a' is given twice"),
    "two documents": ("a: 1\n---\nb: 2", "line 3: another document"),
    "a million levels": ("[" * 20_000, "line 1: lists and objects are nested deeper than 100"),
    "megabytes": ("a: " + "x" * 600_000, "600,003 characters of YAML"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    text, message = BAD_YAML[case]
    (tmp_path / "suite.yaml").write_text(text)
    (tmp_path / "recipe.yaml").write_text(text)
    for read in (
        lambda: read_suite(tmp_path),
        lambda: read_recipe_file(tmp_path / "recipe.yaml"),
    ):
        with pytest.raises(ToolkitError, match=rf"(suite|recipe)\.yaml: {message}") as caught:
            read()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < len(str(tmp_path)) + 250


def test_merge_keys_add_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a")
    text = "classes:\n  a: &a\n    texts: t.txt\n    context: 64\n  b:\n    <<: [*a]\n    context: 32\n"
    (tmp_path / "suite.yaml").write_text(text)
    assert [each.context for each in read_suite(tmp_path).classes] == [64, 32]
    value = parse_yaml("f", text)
    assert [line_of(value, ("classes", "b", key)) for key in ("texts", "context")] == [3, 7]
    (tmp_path / "suite.yaml").write_text(text.replace("t.txt", "no.txt"))
    with pytest.raises(BadRequest, match=r"suite\.yaml: line 3: classes\.a\.texts: .*no such file"):
        read_suite(tmp_path)


def test_lines_of_many_classes_come_from_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.txt").write_text("a")
    said = "".join(f"  c{n}: {{title: C {n}, texts: t.txt, read: plain, scored: all}}\n" for n in range(300))
    (tmp_path / "suite.yaml").write_text(f"classes:\n{said}")
    read: list[str] = []

    def counted(path: object, text: str, *rest: object) -> object:
        read.append(text)
        return parse_yaml(path, text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("gguf_tools.files.documents.parse_yaml", counted)
    assert len(read_suite(tmp_path).classes) == 300
    assert len(read) == 1


BAD_JSON = {
    "digits": ('{\n"a": ' + "9" * 5000 + "}", "line 2, column 6: '999"),
    "infinity": ('{"a": 1e400}', "line 1, column 7: '1e400' is no finite number"),
    "not a number": ('{"a": NaN}', "line 1, column 7: 'NaN' is no finite number"),
    "half of a character": ('{"a":\n"x\\udc00"}', "line 2, column 3: half of a character"),
    "a key twice": ('{"a": 1, "a": 2}', "key 'a' is given twice"),
    "levels": ("[" * 100_000, "lists and objects are nested deeper than 100"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    text, message = BAD_JSON[case]
    path = tmp_path / "x.json"
    path.write_text(text)
    for read in (read_recipe_file, read_sensitivities, read_report):
        with pytest.raises(ToolkitError, match=rf"x\.json: (not .*: )?{message}") as caught:
            read(path)
        assert len(str(caught.value)) < len(str(tmp_path)) + 200


def test_whole_characters_are_read() -> None:
    assert parse_json(b'["\\ud83d\\ude00", "\\\\ud800", 1.5, 12]', strict=True) == ["😀", "\\ud800", 1.5, 12]


REPORT = {
    "text": {"path": "t", "sha256": "0", "n_chunks": 2, "chunk_size": 64, "n_tokens_measured": 62},
    "base": {"ppl": 9.0},
    "models": [{
        "path": "q.gguf", "n_bytes": 5, "same_top": 0.5, "ppl": 9.5,
        "kld": {"mean": 0.1, "error": 0.1, "p99": 0.5},
    }],
}  # fmt: skip


@pytest.mark.parametrize(
    ("place", "bad"),
    [
        (("models", 0, "n_bytes"), value)
        for value in (0, -5, 10**250, "9" * 5000, 1.5, True, "nan", None, [], {"a": 1})
    ]
    + [(("models", 0, "kld", "mean"), value) for value in ("nan", "inf", None, "0.1", False)]
    + [(("text", "chunk_size"), 0), (("base", "ppl"), "nan"), (("base",), []), (("models",), 7)],
)
def test_numbers_of_a_report_are_numbers(place: tuple[str | int, ...], bad: object, tmp_path: Path) -> None:
    report = json.loads(json.dumps(REPORT))
    entry = report
    for key in place[:-1]:
        entry = entry[key]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(report))
    assert read_report(path).path == path
    entry[place[-1]] = bad
    path.write_text(json.dumps(report))
    with pytest.raises(BadRequest, match=r"r\.json: not a report of `evaluate --json`") as caught:
        read_report(path)
    assert len(str(caught.value)) < len(str(tmp_path)) + 300


def test_losses_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "losses.json"
    for shape in ([2] * 5, [2**63, 32], [[1]] * 10_000):
        entry = {"shape": shape, "damage": {"Q4_0": 1.0}}
        path.write_text(json.dumps({"format": "gguf-tools losses", "version": 1, "tensors": {"t": entry}}))
        with pytest.raises(
            FormatError, match=r"losses\.json: t: shape is .*, expected a list of sizes"
        ) as caught:
            read_sensitivities(path)
        assert len(str(caught.value)) < len(str(tmp_path)) + 200


@pytest.mark.parametrize(
    "said", ["../out.txt", "OUT", "link.txt", "folder", "link.*", "x" * 5000, '"a\\0b"', "~/x"]
)
def test_texts_of_a_suite_are_in_its_folder(said: str, tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("a secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "b.txt").write_text("a secret")
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "link.txt").symlink_to(tmp_path / "out.txt")
    (folder / "folder").symlink_to(tmp_path / "outside")
    said = said.replace("OUT", str(tmp_path / "out.txt"))
    for manifest in (
        f"classes: {{a: {{texts: {said}}}}}",
        f"classes: {{a: {{texts: c.jsonl, template: {said}}}}}",
    ):
        (folder / "c.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}')
        (folder / "suite.yaml").write_text(manifest)
        with pytest.raises(BadRequest, match=r"suite\.yaml: line 1: classes\.a\.t") as caught:
            read_suite(folder)
        assert len(str(caught.value)) < 2 * len(str(tmp_path)) + 300


def test_a_text_of_many_classes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imatrix.texts.suite.MAX_CORPUS", 1000)
    (tmp_path / "prose.txt").write_text("Some words. " * 30)
    (tmp_path / "suite.yaml").write_text("classes:\n  a: {texts: prose.txt}\n  b: {texts: prose.txt}\n")
    assert len(read_suite(tmp_path).classes) == 2
    with (tmp_path / "suite.yaml").open("a") as file:
        file.write("  c: {texts: prose.txt}\n")
    with pytest.raises(BadRequest, match=r"suite\.yaml: line 4: .* 1,080 characters with the classes before"):
        read_suite(tmp_path)


def test_what_is_quoted_is_short_and_cheap() -> None:
    endless: list[object] = []
    endless += [endless] * 9
    for value in ("x\n\x1b[0m\u202e" * 100, endless, {"a": endless}, 10**9000, ["é"] * 10**6, b"\x00" * 500):
        text = quoted(value)
        assert text.isprintable()
        assert len(text) < 400
    assert quoted([None, True, 1.5, "a", (2,)]) == "[null, true, 1.5, 'a', (2,)]"


@pytest.mark.parametrize("repo", ["datasets--us--texts", "models--us--texts"])
@pytest.mark.parametrize("inner", ["", "suites"])
def test_a_suite_in_the_cache_of_the_hub_is_links(repo: str, inner: str, tmp_path: Path) -> None:
    contents = tmp_path / repo / "blobs"
    suite = tmp_path / repo / "snapshots" / ("0" * 40) / inner
    contents.mkdir(parents=True)
    suite.mkdir(parents=True)
    for name, text in {"suite.yaml": "classes: {a: {texts: a.txt}}", "a.txt": "a text"}.items():
        (contents / f"of-{name}").write_text(text)
        (suite / name).symlink_to(Path("../../../blobs" if inner else "../../blobs", f"of-{name}"))
    assert [each.text for each in read_suite(suite).classes[0].texts] == ["a text"]
    (suite / "suite.yaml").unlink()
    (tmp_path / "secret").write_text("secret")
    (contents / "to").symlink_to(tmp_path / "secret")
    (suite / "other").symlink_to(contents / "to")
    (suite / "folder").symlink_to(tmp_path)
    own = str(contents / "of-a.txt")
    for path in ("other", "folder/secret", "../../blobs/of-a.txt", own, "../../../secret"):
        (suite / "suite.yaml").write_text(f"classes: {{a: {{texts: {path}}}}}")
        with pytest.raises(BadRequest, match="leads out of the folder"):
            read_suite(suite)


def test_contents_of_a_cache_that_lie_elsewhere_are_refused(tmp_path: Path) -> None:
    suite = tmp_path / "models--us--texts" / "snapshots" / ("0" * 40)
    suite.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_text("secret")
    (tmp_path / "models--us--texts" / "blobs").symlink_to(tmp_path / "elsewhere")
    (suite / "a.txt").symlink_to("../../blobs/a")
    with pytest.raises(BadRequest, match="leads out of the folder"):
        read_suite(suite)
