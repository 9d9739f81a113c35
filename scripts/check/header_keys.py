"""Compare our logits with llama.cpp's for files whose header is changed key by key, and tensor by tensor.

    python scripts/check/header_keys.py [BASE ...] [--folder FOLDER] [--verbose]

A base is a small model of an architecture that the forward pass computes; by default all of BASES in
tests/end_to_end/header_keys.py. A case sets one key, or the keys of a rotation, or removes one; or it adds a
tensor. Either both programs compute the same (the norm of the difference is below 1e-4 of the logits'), or
one of them refuses in a line. The outcomes are counted. Other numbers without a word, or an exception of
another kind, are told, and the exit status is 1.

Needs torch, transformers and xllamacpp. All bases are about 10,000 cases, and take half an hour of a core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.end_to_end.header_keys import (
    BASES,
    Case,
    Outcome,
    cases_of,
    judge,
    like_llama_s_gelu,
    make_base,
    theirs,
    write_case,
)

_WRONG = (Outcome.DIFFERENT, Outcome.CRASH)
_TOLD = (*_WRONG, Outcome.WE_REFUSE, Outcome.THEY_REFUSE)


def check(name: str, folder: Path, *, verbose: bool) -> Counter[Outcome]:
    """Try the cases of a base, and print what came of them."""
    base = make_base(name, folder)
    plain = theirs(write_case(base, Case("as it is"), folder / "case.gguf"))
    if isinstance(plain, str):
        raise SystemExit(f"{name}: llama.cpp refuses the base: {plain}")
    outcomes: Counter[Outcome] = Counter()
    for case in cases_of(base):
        outcome, text = judge(base, case, folder, plain)
        outcomes[outcome] += 1
        if outcome in (_TOLD if verbose else _WRONG):
            print(f"{name}: {case.name}: {outcome.value}: {text}", flush=True)
    print(f"{name}: {_shown(outcomes)}", flush=True)
    return outcomes


def _shown(outcomes: Counter[Outcome]) -> str:
    return ", ".join(f"{outcomes[each]} {each.value}" for each in Outcome if outcomes[each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bases", nargs="*", metavar="BASE", choices=[*BASES, []])
    parser.add_argument("--folder", type=Path, help="where bases are made, and found again")
    parser.add_argument("--verbose", action="store_true", help="tell refusals of one program alone, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[Outcome] = Counter()
    with tempfile.TemporaryDirectory() as temporary, like_llama_s_gelu():
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.bases or BASES:
            outcomes += check(name, folder, verbose=args.verbose)
    print(f"{sum(outcomes.values())} cases: {_shown(outcomes)}")
    if any(outcomes[each] for each in _WRONG):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
