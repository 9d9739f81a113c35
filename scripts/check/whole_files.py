"""Compare whole files of `quantize` with those of llama.cpp's own llama_model_quantize, byte for byte.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    python scripts/check/whole_files.py --llama package [--ik wheel] [--count 200] [--seed 0] [--record]

Each number from --seed on stands for a small model and for what is asked of it, which
tests/quantize/whole_files.py draws. Both programs quantize it, and either the files are equal, or both
refuse. What differs on purpose is told with its reason (`DELIBERATE`) and counted apart. Exits with 1 where
anything else differs.

--ik compares with ik_llama.cpp's llama-quantize what is comparable, see ik_files.py.

--record writes tests/golden/whole_files.json instead: the digests of 24 cases in which the files are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import quantize  # noqa: E402
from gguf_tools import GGUFFile, ToolkitError  # noqa: E402
from gguf_tools.choices import filled  # noqa: E402
from gguf_tools.errors import GGUFError  # noqa: E402
from gguf_tools.format import keys  # noqa: E402
from gguf_tools.format.values import Kind, Value  # noqa: E402
from quantize.importances.entries import ImportanceEntry  # noqa: E402
from quantize.pipeline import plan_run  # noqa: E402
from quantize.plan.decide import Decider  # noqa: E402
from quantize.plan.recipes import RECIPES  # noqa: E402
from scripts.check.ik_files import compare_with_ik, draw_ik_case  # noqa: E402
from scripts.check.llama_quantize import BOOL, FLOAT, INT, N_TYPES, STRING, Request  # noqa: E402
from scripts.check.outcomes import Outcome, why  # noqa: E402
from tests.quantize.whole_files import Case, digests, draw_case  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "whole_files.json"
N_RECORDED = 24
CHILD = Path(__file__).with_name("llama_quantize.py")


@dataclass(frozen=True)
class Made:
    """What a program made of a case: files, or what it said instead."""

    paths: tuple[Path, ...]
    said: str = ""


@dataclass(frozen=True)
class Deviation:
    """A difference that is meant to be.

    reason   what docs/compatibility.md says of it
    shows_as the difference, as `differences` tells it
    holds    whether the case, with its input, is one of those
    """

    reason: str
    shows_as: str
    holds: Callable[[Case, Path], bool] = lambda case, source: True


def _gives_way(case: Case, source: Path) -> bool:
    """Whether a type that was asked for by an option does not fit its rows."""
    options = filled(quantize.QuantizeOptions, case)
    with plan_run(source, source.with_name("plan.gguf"), case.file_type, options, allow_problems=True) as run:
        tensors = run.preparation.plan.tensors
    return any(each.decider is Decider.OPTION and each.fell_from is not None for each in tensors)


DELIBERATE = (
    Deviation(
        "an architecture that llama.cpp does not know is quantized",
        "llama.cpp refuses: .*unknown model architecture",
    ),
    Deviation(
        "a type of --output-tensor-type or --token-embedding-type that does not fit the rows gives way",
        "llama.cpp refuses: .*(GGML_ASSERT|data validation failed)",
        _gives_way,
    ),
    Deviation(
        "pruning takes what the metadata say of a layer out with it",
        r"key (?!\w+\.block_count: )",
        lambda case, source: bool(case.types.prune_layers),
    ),
    Deviation(
        "one row of importances serves all matrices of a tensor",
        r"llama.cpp refuses: .*imatrix size \d+ is different from tensor size",
    ),
    Deviation("pruning that leaves no model to load is refused", "we refuse: can't prune "),
    Deviation(
        "pruning leaves one part of a split set: a file without a number",
        "files: ours .'out.gguf'., theirs .'out-00001-of-00001.gguf'.",
        lambda case, source: case.keep_split,
    ),
    Deviation(
        "the data lie as general.alignment says; llama.cpp keeps the key and lays them out for 32",
        "tensor |damaged: |.*: padding|key general.alignment: ",
        lambda case, source: keys.ALIGNMENT in case.model.metadata,
    ),
)


def compare(case: Case, library: Path, folder: Path) -> Outcome:
    """Let both programs quantize the case's model."""
    source = case.model.write(folder / "in.gguf")
    ours, theirs = (
        _ours(case, source, folder / "ours"),
        made_by_llama(case, source, library, folder / "theirs"),
    )
    if not ours.paths and not theirs.paths:
        return Outcome("both refuse", f"ours: {ours.said}\n    theirs: {theirs.said}")
    found = list(differences(ours, theirs))
    if not found:
        return Outcome("equal")
    reasons = [_reason(difference, case, source) for difference in found]
    unexplained = [difference for difference, reason in zip(found, reasons, strict=True) if not reason]
    if unexplained:
        return Outcome("different", unexplained[0])
    return Outcome("deliberate", "; ".join(dict.fromkeys(reasons)))


def _reason(difference: str, case: Case, source: Path) -> str:
    fitting = (each for each in DELIBERATE if re.match(each.shows_as, difference))
    return next((each.reason for each in fitting if each.holds(case, source)), "")


def _ours(case: Case, source: Path, folder: Path) -> Made:
    folder.mkdir()
    try:
        return Made(case.make(source, folder / "out.gguf"))
    except ToolkitError as error:
        return Made((), str(error))


def made_by_llama(case: Case, source: Path, library: Path, folder: Path) -> Made:
    folder.mkdir()
    request = folder / "request.json"
    request.write_text(json.dumps(_request(case, source, folder)))
    # Without the variable, an assertion that fails calls a debugger, which takes seconds.
    run = subprocess.run(
        [sys.executable, CHILD, library, request],
        capture_output=True,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    if run.returncode:
        return Made((), why(run.stderr) or f"exit status {run.returncode}")
    return Made(tuple(sorted(folder.glob("*.gguf"))))


def _request(case: Case, source: Path, folder: Path) -> Request:
    """Say what llama-quantize's command line would make of the case (tools/quantize/quantize.cpp)."""
    types, recipe = case.types, RECIPES[case.file_type]
    overrides = [(key, *_tagged(value)) for key, value in case.kv_overrides]
    imatrix = None
    if case.importances is not None and case.importances.entries:
        path, place, entries = folder / "imatrix.f32", 0, []
        weights = {name: _weights(entry) for name, entry in case.importances.entries.items()}
        for name, values in weights.items():
            entries.append((name, place, values.size))
            place += values.size
        path.write_bytes(b"".join(values.tobytes() for values in weights.values()))
        imatrix = (str(path), entries)
        overrides.append(("quantize.imatrix.file", STRING, str(case.importances.path)))
        for dataset in case.importances.datasets[:1]:
            overrides.append(("quantize.imatrix.dataset", STRING, Path(dataset).name))
        overrides.append(("quantize.imatrix.entries_count", INT, len(entries)))
        if case.importances.chunk_count > 0:
            overrides.append(("quantize.imatrix.chunks_count", INT, case.importances.chunk_count))
    output, embedding = types.output_type, types.embedding_type
    return Request(
        source=str(source),
        output=str(folder / ("out" if case.keep_split else "out.gguf")),
        params={
            "nthread": case.n_threads,
            "ftype": recipe.file_type or 0,
            "only_copy": recipe.default is None,
            "output_tensor_type": N_TYPES if output is None else output.id,
            "token_embedding_type": N_TYPES if embedding is None else embedding.id,
            "allow_requantize": types.allow_requantize,
            "quantize_output_tensor": not types.leave_output,
            "pure": types.pure,
            "keep_split": case.keep_split,
        },
        kv_overrides=overrides,
        rules=[(rule.text.rpartition("=")[0].lower(), rule.type.id) for rule in types.overrides],
        prune_layers=list(types.prune_layers),
        imatrix=imatrix,
    )


def _tagged(value: Value) -> tuple[int, int | float | bool | str]:
    tags = {Kind.UINT32: INT, Kind.FLOAT32: FLOAT, Kind.BOOL: BOOL, Kind.STRING: STRING}
    return tags[value.kind], value.data


def _weights(entry: ImportanceEntry) -> np.ndarray:
    """Return the mean of an entry, float32 (n_mats, n_cols); 1 where there is none."""
    sums, counts = entry.read(), entry.counts[:, np.newaxis]
    with np.errstate(all="ignore"):
        return np.where(counts > 0, sums / counts, np.float32(1)).astype(np.float32)


def differences(ours: Made, theirs: Made) -> Iterator[str]:
    """Yield the differences between the files of both, or who refuses."""
    if not ours.paths or not theirs.paths:
        yield f"we refuse: {ours.said}" if not ours.paths else f"llama.cpp refuses: {theirs.said}"
        return
    names = [[path.name for path in made.paths] for made in (ours, theirs)]
    if names[0] != names[1]:
        yield f"files: ours {names[0]}, theirs {names[1]}"
    for pair in zip(ours.paths, theirs.paths, strict=False):
        if pair[0].read_bytes() != pair[1].read_bytes():
            yield from _differences_of_files(*pair)


def _differences_of_files(ours: Path, theirs: Path) -> list[str]:
    try:
        with GGUFFile(ours) as a, GGUFFile(theirs) as b:
            return list(_differences(a, b)) or [f"{ours.name}: padding, or what follows the data"]
    except GGUFError as error:
        return [f"damaged: {error}"]


def _differences(ours: GGUFFile, theirs: GGUFFile) -> Iterator[str]:
    orders = list(ours.metadata), list(theirs.metadata)
    for key in dict.fromkeys((*orders[0], *orders[1])):
        values = ours.metadata.get(key), theirs.metadata.get(key)
        if values[0] != values[1]:
            yield f"key {key}: ours {values[0]!r:.80}, theirs {values[1]!r:.80}"
    if sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]:
        yield f"order of keys: {next(pair for pair in zip(*orders, strict=True) if pair[0] != pair[1])}"
    if list(ours.tensors) != list(theirs.tensors):
        pairs = zip(ours.tensors, theirs.tensors, strict=False)
        yield f"tensors: {next((pair for pair in pairs if pair[0] != pair[1]), 'one has more')}"
        return
    for info, other in zip(ours.tensors.values(), theirs.tensors.values(), strict=True):
        if info != other:
            yield f"tensor {info.name}: ours {info.type} {info.shape}, theirs {other.type} {other.shape}"
            continue
        unequal = np.flatnonzero(ours.raw(info.name).reshape(-1) != theirs.raw(info.name).reshape(-1))
        if unequal.size:
            yield f"tensor {info.name}, {info.type} {info.shape}: {unequal.size} bytes, first {unequal[0]}"


def record(library: Path, seeds: Iterator[int]) -> None:
    """Write the digests of cases in which both programs write the same file."""
    cases = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            case = draw_case(seed)
            if compare(case, library, Path(name)).kind == "equal":
                inputs = sorted(Path(name).glob("*.gguf"))
                outputs = sorted(Path(name, "theirs").glob("*.gguf"))
                cases[str(seed)] = {"input": digests(inputs), "output": digests(outputs)}
        if len(cases) == N_RECORDED:
            break
    source = "llama_model_quantize of npm package @node-llama-cpp/linux-x64 3.22.1 (llama.cpp v0.5.0)"
    GOLDEN.write_text(json.dumps({"recorded_from": source, "cases": cases}, indent=1) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--llama", type=Path, metavar="DIR", help="the unpacked npm package")
    parser.add_argument("--ik", type=Path, metavar="DIR", help="the unpacked wheel ik-llama-cpp-python 0.1.5")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="number of cases (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    parser.add_argument("--record", action="store_true", help="write the golden file")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args(words)
    if args.record:
        record(find_library(args.llama), count(args.seed))
        return 0
    n_different = 0
    if args.llama is not None:
        n_different += _run("llama.cpp", args, draw_case, partial(compare, library=find_library(args.llama)))
    if args.ik is not None:
        program = args.ik / "ik_llama_cpp" / "bin" / "llama-quantize"
        n_different += _run("ik_llama.cpp", args, draw_ik_case, partial(compare_with_ik, program=program))
    return int(n_different > 0)


def find_library(package: Path) -> Path:
    return next(package.glob("bins/*/libllama.*so*"))


def _run(
    other: str,
    args: argparse.Namespace,
    draw: Callable[[int], Case],
    compare_: Callable[..., Outcome],
) -> int:
    """Compare the cases with another program and print the outcomes; return how many differ."""
    outcomes: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.count):
        with tempfile.TemporaryDirectory() as name:
            case = draw(seed)
            outcome = compare_(case, folder=Path(name))
        outcomes[outcome.kind] += 1
        if args.verbose or outcome.kind == "different":
            print(f"{outcome.kind}: {case}\n    {outcome.text}", flush=True)
    print(f"{other}: " + ", ".join(f"{kind} {number}" for kind, number in sorted(outcomes.items())))
    return outcomes["different"]


if __name__ == "__main__":
    raise SystemExit(main())
