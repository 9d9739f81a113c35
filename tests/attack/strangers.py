"""Hostile files of strangers, given to what reads them: YAML, JSON, chat templates, expressions, texts."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.attack import places, streams
from tests.attack.children import Disturbance
from tests.attack.commands import find
from tests.attack.places import Failure
from tests.attack.trials import DONE, LINE, Bench, Result, Trial

MEMORY_BYTES = 4 << 30
"""Address space that a command may take for a hostile file, beyond what it begins with."""

_LONGEST_LINE = 4200
_LONG = 100_000

# ---- what is hostile

_JSON_VALUES = (
    "null", "true", "-1", "0.5", "1e400", "-1e-400", "NaN", "-Infinity", "7" * 5000, "-0", '""', "[]", "{}",
    '"\\ud800"', '"\\u0000"', '"\\u001b[31m\\u202e\\n"', f'"{"x" * _LONG}"', "18446744073709551616",
    "[" * _LONG + "]" * _LONG, '{"a": 1, "a": 2}', '"<script>alert(1)</script>"', "[[[1]]]", "9" * 400 + ".5",
)  # fmt: skip
_YAML_VALUES = (
    *_JSON_VALUES, "2001-99-99", "2026-02-30T25:61:61Z", ".inf", ".nan", "1_" * 3000 + "0", "0x" + "f" * 5000,
    "190:59:59.9", "0o9", "!!python/object/apply:os.system [id]", "!!timestamp x", "!!float x", "!!int x",
    "!!binary '*'", "!!set {a, b}", "!<tag:x> y", "&a [*a]", "*nobody", "{<<: {a: 1}}", "{<<: [1, 2]}",
    "'open",
    "@x", "`x`", "{[a, b]: c}", "{? {a: b} : c}", "=", "~", "\x1b[31m", "\x85", "- -",
)  # fmt: skip
_FILES: dict[str, bytes] = {
    "nothing": b"",
    "zero bytes": bytes(3000),
    "random": random.Random(0).randbytes(3000),
    "UTF-16": "a: 1\n".encode("utf-16"),
    "Latin-1": "title: caf\xe9\n".encode("latin-1"),
    "a mark of byte order": b"\xef\xbb\xbf{}",
    "only a mark": b"\xef\xbb\xbf",
    "surrogates": b'{"a": "\xed\xa0\x80"}',
    "brackets": b"[" * _LONG,
    "braces": b'{"a":' * _LONG,
    "a list": b"[1, 2, 3]",
    "a number": b"7" * 5000,
    "a word": b"word " * 20_000,
}
_YAML_FILES: dict[str, bytes] = _FILES | {
    "aliases": b"a0: &a0 [x, x]\n"
    + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)),
    "aliases as keys": b"&k name: x\n*k : y\n",
    "itself": b"&a {classes: *a, a: *a}\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "a tab": b"classes:\n\tprose: x\n",
    "many classes": b"classes:\n" + b"".join(b"  c%d: {texts: prose.txt}\n" % n for n in range(3000)),
    "a class twice": b"classes:\n  a: {texts: prose.txt}\n  a: {texts: prose.txt}\n",
    "outside": b"classes:\n  a: {texts: ../../../../etc/passwd}\n  b: {texts: /etc/hostname}\n",
    "merge": b"x: &x {texts: prose.txt}\nclasses:\n  a:\n    <<: *x\n    context: 64\n",
    "indented": b"".join(b" " * n + b"a:\n" for n in range(2000)),
    "a directive": b"%YAML 9.9\n---\na: 1\n",
    "control": b"a: \x07\n",
    "long key": b"x" * _LONG + b": 1\n",
    "complex key": b"? [a, b]\n: c\n",
}  # fmt: skip
TEMPLATES = (
    "{% for a in range(10 ** 9) %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 10 ** 10 %}", "{{ 'x'.center(10 ** 10) }}", "{{ '%0999999999d' % 1 }}",
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{{ 5 ** 5 ** 12 }}", "{{ 9 ** 9 ** 9 }}", "{{ range(10 ** 9)|list|length }}", "{% if %}", "{{ ",
    "{% for %}", "{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ raise_exception('\x1b[31m' ~ 'x' * 100000) }}", "{{ messages[0].content * 10 ** 9 }}",
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }}", "{{ nobody.x.y }}", "", "{{ '\\ud800' }}",
    "{% for a in messages %}" * 40 + "{% endfor %}" * 40, "{{ x" + "|upper" * 10000 + " }}",
    "{{ lipsum(n=10 ** 6) }}", "{{ strftime_now('%Y' * 10 ** 7) }}", "{% set x = 1 %}" * 20000,
    "{{ messages|tojson(indent=10 ** 9) }}", "{{ 1 / 0 }}", "{{ 'a' ~ messages[99].content }}",
    "{%- set none = 1 -%}{{ none }}", "{{ self }}", "{{ (10 ** 5000)|string }}", "{{ '\x00' }}",
)  # fmt: skip
EXPRESSIONS = (
    r"(.+)+!", r"([a-z0-9_.]+)+!", r"(.*.*.*.*.*.*.*.*)*!", r"((((((((.+)+)+)+)+)+)+)+)+!",
    r"(?:(?:.?){999}){999}!", r"(\w+\.?)+\d!", r"(?:a|aa|.)+!", "(", "[", "*", "(?P<n>", r"(?<=a+)b", "\\",
    "(?i", "a{99999999999}", r"\p{Foo}", "(?R)", "x" * _LONG, "\x1b[31m(", "(?:" * 2000 + ")" * 2000,
    r"(.)\9", "[z-a]", "(?#", "", r"(?P<a>.)(?P<a>.)", "\u202e(",
)  # fmt: skip


# ---- what reads it


Plant = Callable[[Path, random.Random], tuple[str, Sequence[str]]]
"""Writes what is hostile into a folder; returns what it is, and the words to type, if others."""


@dataclass(frozen=True)
class Reader:
    """Something that reads a stranger's file or expression.

    command  a command of the campaign
    """

    name: str
    command: str
    plant: Plant


def _json(name: str, *words: str) -> Plant:
    return lambda folder, rng: (_spoil(folder / name, rng, _FILES, _JSON_VALUES), words)


def _yaml(name: str, *words: str) -> Plant:
    return lambda folder, rng: (_spoil(folder / name, rng, _YAML_FILES, _YAML_VALUES), words)


def _spoil(path: Path, rng: random.Random, files: dict[str, bytes], values: Sequence[str]) -> str:
    """Write a hostile file, or the good one with an odd value somewhere; return which."""
    if rng.random() < 0.4:
        name = rng.choice(sorted(files))
        path.write_bytes(files[name])
        return name
    text = path.read_text(encoding="utf-8") if path.exists() else "{}"
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    is_lines = path.suffix == ".jsonl"
    good = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(lines[at] if is_lines else text)
    odd = rng.choice(values)
    where = _put(good, rng)
    spoilt = json.dumps(good).replace(f'"{_HERE}"', odd)
    if is_lines:
        spoilt = "\n".join([*lines[:at], spoilt, *lines[at + 1 :]])
    path.write_bytes(spoilt.encode("utf-8", "surrogatepass"))
    return f"{odd[:40]} at {where}"


_HERE = "here-goes-what-is-odd"


def _put(good: Any, rng: random.Random) -> str:
    """Put a mark in the place of a value, or under a name that nobody knows; return where."""
    where = []
    while True:
        keys = list(good) if isinstance(good, dict) else list(range(min(len(good), 50)))
        if not keys or rng.random() < 0.05:
            keys = ["new"] if isinstance(good, dict) else []
        if not keys:
            good.append(_HERE)
            return ".".join([*where, "end"])
        key = rng.choice(keys)
        where.append(str(key)[:30])
        below = good.get(key) if isinstance(good, dict) else good[key]
        if not isinstance(below, dict | list) or rng.random() < 0.2:
            good[key] = _HERE
            return ".".join(where)
        good = below


def _template_of_suite(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    template = rng.choice(TEMPLATES)
    next(folder.glob("*/plain.jinja")).write_text(template)
    return template[:60], ()


def _template_of_model(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    """Give the model a template, and have the conversations rendered by it."""
    template = rng.choice(TEMPLATES)
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    for manifest in folder.glob("*/suite.yaml"):
        manifest.write_text(manifest.read_text().replace("    template: plain.jinja\n", ""))
    return template[:60], ()


def _front_matter(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    path = folder / "README.md"
    (folder / "m.yaml").write_text("license: mit\nbase_model: a/b\ntags: [gguf]\n")
    what = _spoil(folder / "m.yaml", rng, _YAML_FILES, _YAML_VALUES)
    path.write_bytes(b"---\n" + (folder / "m.yaml").read_bytes() + b"\n---\n# Mine\n")
    (folder / "m.yaml").unlink()
    path.replace(folder / "model" / "README.md")
    return what, ()


_WITH_EXPRESSION = (
    "quantize --tensor-type {}=Q8_0 in.gguf o.gguf Q6_K 1",
    "quantize --custom-q {}=q8_0 in.gguf o.gguf Q6_K 1",
    "quantize --fallback {}=Q8_0 in.gguf o.gguf Q6_K 1",
    "quantize --tensor-type-file rules in.gguf o.gguf Q6_K 1",
    "quantize in.gguf o.gguf own.yaml 1",
    "quantize lint --tensor-type {}=Q8_0 in.gguf Q6_K",
    "quantize --at-least {}=Q8_0 --size 6bpw --losses losses.json --imatrix m.imatrix.gguf in.gguf o.gguf 1",
    "quantize --repack q4.gguf o.gguf --repack-pattern {}",
    "gguf-tools rename q4.gguf --regex {}=x -o o.gguf",
    "gguf-tools rename q4.gguf --key --regex {}=x -o o.gguf",
)


def _expression(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    expression = rng.choice(EXPRESSIONS)
    line = rng.choice(_WITH_EXPRESSION)
    (folder / "rules").write_text(f"{expression}=Q8_0\n")
    (folder / "own.yaml").write_text(json.dumps({"file_type": "Q6_K", "tensor-type": [f"{expression}=Q8_0"]}))
    return f"{expression[:40]} in {line}", [word.replace("{}", expression) for word in line.split()]


def _pre_tokenizer(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    path = folder / "model" / "tokenizer.json"
    data = json.loads(path.read_text())
    expression = rng.choice(EXPRESSIONS)
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = split
    path.write_text(json.dumps(data))
    return expression[:60], ()


_ODD_TEXTS = (
    "900 MB of zeros", "/proc/self/environ", "/proc/self/mem", "/dev/zero", "a pipe", "a folder",
)  # fmt: skip


def _text(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    path = folder / "text.txt"
    what = rng.choice((*_ODD_TEXTS, *_FILES))
    path.unlink()
    if what == "900 MB of zeros":
        path.touch()
        os.truncate(path, 900 << 20)
    elif what.startswith("/"):
        path.symlink_to(what)
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path.write_bytes(_FILES[what])
    return what, ()


def _metadata(folder: Path, rng: random.Random) -> tuple[str, Sequence[str]]:
    (folder / "m.json").write_text('{"general.name": "x", "general.tags": ["a"], "general.license": "mit"}')
    words = "convert-hf-to-gguf model --outfile o.gguf --outtype bf16 --threads 1 --metadata m.json"
    return _spoil(folder / "m.json", rng, _FILES, _JSON_VALUES), words.split()


READERS = (
    Reader("suite", "evaluate-suite", _yaml("suite/suite.yaml")),
    Reader("classes", "imatrix-classes", _yaml("texts/suite.yaml")),
    Reader("chats of a suite", "evaluate-suite", _json("suite/chats.jsonl")),
    Reader("chats", "imatrix-classes", _json("texts/chats.jsonl")),
    Reader("template of a suite", "evaluate-suite", _template_of_suite),
    Reader("template of classes", "imatrix-classes", _template_of_suite),
    Reader("template of a model", "imatrix-model-classes", _template_of_model),
    Reader("template of an audit", "audit-suite", _template_of_model),
    Reader("template converted", "convert", _template_of_model),
    Reader("recipe", "quantize-recipe", _yaml("recipe.yaml")),
    Reader("losses", "quantize-losses", _json("losses.json")),
    Reader("losses of a page", "evaluate-pages", _json("losses.json")),
    Reader("earlier report", "evaluate-pages", _json("report.json")),
    Reader("report of a card", "card", _json("report.json")),
    Reader("front matter", "card-of-model", _front_matter),
    Reader("metadata", "convert", _metadata),
    Reader("config", "convert", _json("model/config.json")),
    Reader("tokenizer", "convert", _json("model/tokenizer.json")),
    Reader("tokenizer's config", "convert", _json("model/tokenizer_config.json")),
    Reader("config of a base", "audit-suite", _json("model/config.json")),
    Reader("expression", "quantize-losses", _expression),
    Reader("expression of an edit", "set-copy", _expression),
    Reader("pre-tokenizer", "imatrix", _pre_tokenizer),
    Reader("text", "imatrix", _text),
    Reader("text of a calibration", "quantize-calibrate", _text),
    Reader("text of an evaluation", "evaluate-json", _text),
    Reader("text of a refinement", "refine", _text),
)


def hostile(bench: Bench, wanted: range, seed: int) -> Iterator[Result]:
    """Give each reader in turn something hostile: one line, or it is taken for what it is, without harm."""
    for number in wanted:
        reader = READERS[number % len(READERS)]
        rng = random.Random(f"{seed} hostile {number}")
        command = find(reader.command)
        with bench.folder(command) as folder:
            for name in ("in.gguf", "q4.gguf"):  # of other lines
                if reader.plant is _expression and not (folder / name).exists():
                    (folder / name).symlink_to(bench.material / name)
            what, words = reader.plant(folder, rng)
            if words:
                command = replace(command, typed=tuple(words), finds=command.finds or "lint" in words)
            reference = places.Reference(places.tree(folder), places.tree(folder), 0.0)
            trial = Trial(bench, command, folder, reference, rng, n_hits=1)
            step = f"{reader.name}: {what}"
            yield trial.judged("hostile", number, seed, lambda trial, step=step: _judge(trial, step))


def _judge(trial: Trial, step: str) -> str:
    ended = trial.run(Disturbance(memory=MEMORY_BYTES), step)
    streams.check_harmless(ended)
    now = trial.tree()
    places.check_unharmed(trial.command, trial.reference.before, now, trial.reference)
    if any("pwned" in name for name in now):
        raise Failure("ran what it had read")
    if not ended.code:
        return DONE
    places.check_told(trial.command, ended)
    if (longest := max(map(len, ended.said.splitlines()), default=0)) > _LONGEST_LINE:
        raise Failure(f"a line of {longest:,} characters")
    return LINE
