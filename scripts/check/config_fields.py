"""Change every field of config.json in a small model of each family, and say which changes go unheard.

    python scripts/check/config_fields.py [--family NAME] [--field NAME] [--sample N --seed S] [--json OUT]

A change that has an effect in transformers has to have it in llama.cpp's logits of our F32 file, or there has
to be a note or a refusal that tells of it. Exit status 1 when a change is silent. Needs torch, transformers
and xllamacpp.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.end_to_end.config_fields.judge import SILENT, Judge
from tests.end_to_end.config_fields.llama import Llama
from tests.end_to_end.config_fields.models import BASES, as_in_llama_cpp
from tests.end_to_end.config_fields.mutations import mutations

Row = dict[str, Any]


def prepare_torch() -> None:
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def sweep(name: str, field: str, sample: int, seed: int) -> list[Row]:
    """Return a row for each mutation of a base."""
    base, llama = BASES[name], Llama()
    try:
        with as_in_llama_cpp(), tempfile.TemporaryDirectory(prefix="config-fields-") as folder:
            try:
                judge = Judge(base, Path(folder), llama)
            except Exception as error:
                said = f"base: {type(error).__name__}: {error}"
                return [{"base": name, "family": base.architecture, "field": "", "value": "", "kind": SILENT,
                         "told": said, "has_effect": False, "effect": None, "difference": None}]  # fmt: skip
            every = [found for found in mutations(base, judge.raw) if field in found.field]
            if sample and sample < len(every):
                every = random.Random(seed).sample(every, sample)
            return [
                {"base": name, "family": base.architecture, "field": one.field, "value": one.value,
                 **asdict(judge.outcome(one))}
                for one in every
            ]  # fmt: skip
    finally:
        llama.close()


def results(names: Sequence[str], jobs: int, *how: Any) -> Iterator[list[Row]]:
    """Yield the rows of each base as they come; a process sees one base after the other."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare_torch) as pool:
        for done in as_completed([pool.submit(sweep, name, *how) for name in names]):
            yield done.result()


def line_of(row: Row) -> str:
    effect = "shapes" if row["effect"] is None else f"{row['effect']:.0e}"
    return f"{row['base']:18s} {row['field']} = {row['value']} [effect {effect}]: {row['told'][:300]}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    kinds = ("equal", "noted", "refused", "no effect", "over-strict", "invalid", SILENT)
    yield f"{'':20s}" + "".join(f"{kind:>12s}" for kind in kinds) + f"{'with effect':>14s}"
    for name in (*dict.fromkeys(row["base"] for row in rows), "all"):
        own = [row for row in rows if name in (row["base"], "all")]
        counts = Counter(row["kind"] for row in own)
        with_effect = sum(row["has_effect"] for row in own)
        yield f"{name:20s}" + "".join(f"{counts[kind]:12d}" for kind in kinds) + f"{with_effect:14d}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", default="", help="a regular expression of bases or classes")
    parser.add_argument("--field", default="", help="fields with this in their names")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="mutations of each base, 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="OUT", help="where all rows go, as they come")
    parser.add_argument("--silent", type=Path, metavar="OUT", help="where the lines of silent ones go")
    args = parser.parse_args()
    names = [name for name, base in BASES.items() if re.search(args.family, f"{name} {base.architecture}")]
    rows: list[Row] = []
    began = time.monotonic()
    for found in results(names, args.jobs, args.field, args.sample, args.seed):
        rows += found
        silent = [line_of(row) for row in rows if row["kind"] == SILENT]
        print(f"{found[0]['base'] if found else '-'}: {len(found)} mutations", file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
        if args.silent:
            args.silent.write_text("\n".join(sorted(silent)) + "\n")
    print("\n".join(table(rows)))
    silent = sorted(line_of(row) for row in rows if row["kind"] == SILENT)
    print("\n".join(silent))
    seconds = time.monotonic() - began
    print(f"{len(rows)} mutations of {len(names)} models in {seconds:.0f} s: {len(silent)} silent")
    return bool(silent)


if __name__ == "__main__":
    sys.exit(main())
