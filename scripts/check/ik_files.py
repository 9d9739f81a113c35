"""Compare types and sizes of `quantize` with those of ik_llama.cpp's llama-quantize, and decode its files.

Its bytes depend on its compiler, so they are not compared. What our decoders make of its tensors must be as
near to the weights as what they make of ours.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import imatrix
import quantize
from gguf_tools import GGUFFile, ToolkitError
from gguf_tools.errors import GGUFError
from gguf_tools.format.ggml_types import BF16, F64, I32, by_name
from gguf_tools.format.tensors import TensorInfo
from quantize.formats.codecs import CODECS
from quantize.importances.entries import Importance, ImportanceFile
from quantize.plan.ik_recipes import IK_RECIPES
from scripts.check.outcomes import Outcome, why
from tests.quantize.whole_files import Case, draw_case
from tests.support.samples import IMPORTANCES

FARTHER = (2.0, 0.05)
"""How far from the weights its tensors may be: so many times as far as ours, and so much more."""

UNKNOWN_TO_IT = re.compile("unknown model architecture|key not found in model")
"""What it prints of a model for which it then plans without rules."""

DELIBERATE = {
    "a type that we can't encode is refused": "we refuse: .*can't be encoded yet",
    "small projections stay as they are": "tensor per_layer_model_proj",
    "embeddings per layer are planned as embeddings": "tensor per_layer_token_embd",
    "its own rules for Falcon are left out": "tensor .*falcon",
}
"""Reason -> the difference that is meant to be."""


def draw_ik_case(seed: int) -> Case:
    """Draw a case of a file type of ik_llama.cpp, and what its llama-quantize can be asked for.

    It stops at rows that are no multiple of 32, and at many kinds of weights and importances.
    """
    case, random = draw_case(seed), np.random.default_rng(seed)
    tensors = tuple(_in_blocks_of_32(info) for info in case.model.tensors)
    kinds = {info.name: "normal" for info in tensors}
    types = quantize.PlanOptions(
        overrides=_of_its_types(random) if case.types.overrides else (),
        pure=case.types.pure and not case.types.overrides,  # its --pure ignores them
        leave_output=case.types.leave_output,
        allow_requantize=True,
    )
    return replace(
        case,
        model=replace(case.model, tensors=tensors, n_parts=1, kinds=kinds),
        file_type=str(random.choice(list(IK_RECIPES))),
        types=types,
        importances=ImportanceFile(_importances(tensors, random)) if case.importances else None,
        keep_split=False,
        kv_overrides=(),
    )


def _in_blocks_of_32(info: TensorInfo) -> TensorInfo:
    type_ = BF16 if info.type in (F64, I32) else info.type
    return TensorInfo(info.name, (*info.shape[:-1], max(32, info.n_cols // 32 * 32)), type_)


def _importances(tensors: Iterable[TensorInfo], random: np.random.Generator) -> dict[str, Importance]:
    return {
        info.name: Importance(
            np.ascontiguousarray(IMPORTANCES["random"](random, (info.n_mats, info.n_cols)), np.float32),
            np.ones(info.n_mats, np.float32),
        )
        for info in tensors
        if len(info.shape) > 1
    }


def _of_its_types(random: np.random.Generator) -> tuple[quantize.Override, ...]:
    names = [name for name in CODECS if by_name(name).id > 96 and name != "Q8_KV"]  # it can't read that one
    patterns = ("ffn_down", "attn_.*weight")
    return quantize.parse_overrides(f"{pattern}={random.choice(names)}" for pattern in patterns)


def compare_with_ik(case: Case, program: Path, folder: Path) -> Outcome:
    """Let both quantize the case."""
    source = case.model.write(folder / "in.gguf")
    status, log = _run(case, program, source, folder / "theirs.gguf")
    if UNKNOWN_TO_IT.search(log):
        return Outcome("unknown to ik_llama.cpp")
    try:
        (ours,) = case.make(source, folder / "ours.gguf")
    except ToolkitError as error:
        text = f"we refuse: {error}"
        return Outcome("both refuse", f"{text}\n    {why(log)}") if status else _outcome([text])
    if status:
        return Outcome("ik_llama.cpp refuses", why(log))
    try:
        theirs = GGUFFile(folder / "theirs.gguf")
    except GGUFError as error:
        return Outcome("ik_llama.cpp writes a damaged file", str(error))
    with GGUFFile(source) as weights, GGUFFile(ours) as a, theirs as b:
        return _outcome(f"{found} of {case.model.name}" for found in _differences(weights, a, b))


def _outcome(differences: Iterable[str]) -> Outcome:
    """Judge a case by the differences that are found."""
    reasons: dict[str, None] = {}
    for found in differences:
        reason = next((text for text, shows_as in DELIBERATE.items() if re.match(shows_as, found)), None)
        if reason is None:
            return Outcome("different", found)
        reasons[reason] = None
    return Outcome("deliberate", "; ".join(reasons)) if reasons else Outcome("equal")


def _run(case: Case, program: Path, source: Path, output: Path) -> tuple[int, str]:
    """Run its llama-quantize; return its exit status and what it prints."""
    words = [program, *["--pure"] * case.types.pure, *["--leave-output-tensor"] * case.types.leave_output]
    words += ["--allow-requantize"] * case.types.allow_requantize
    if case.types.overrides:
        words += ["--custom-q", ",".join(rule.text.lower() for rule in case.types.overrides)]
    if case.importances is not None:
        matrix = output.with_suffix(".dat")
        imatrix.save(matrix, case.importances)
        words += ["--imatrix", matrix]
    run = subprocess.run([*words, source, output, case.file_type, "1"], capture_output=True)
    return run.returncode, (run.stdout + run.stderr).decode(errors="replace").strip()


def _differences(source: GGUFFile, ours: GGUFFile, theirs: GGUFFile) -> Iterator[str]:
    if set(ours.tensors) != set(theirs.tensors):
        yield f"tensors: {sorted(set(ours.tensors) ^ set(theirs.tensors))[:3]}"
        return
    for name, info in ours.tensors.items():
        other = theirs.tensors[name]
        if (info.type, info.n_bytes) != (other.type, other.n_bytes):
            yield f"tensor {name} {info.shape}: ours {info.type}, theirs {other.type}"
        elif info.type.is_quantized:
            errors = [_error(source, file, name) for file in (ours, theirs)]
            if not errors[1] <= FARTHER[0] * errors[0] + FARTHER[1]:
                yield f"tensor {name} {info.shape} {info.type}: errors {errors[0]:.3%} and {errors[1]:.3%}"


def _error(source: GGUFFile, file: GGUFFile, name: str) -> float:
    """Return the distance of the decoded weights relative to the weights; 0 for weights of zero."""
    weights = quantize.read_values(source, name).astype(np.float64).reshape(-1)
    decoded, size = quantize.read_values(file, name).reshape(-1), np.linalg.norm(weights)
    return float(np.linalg.norm(decoded - weights) / size) if size else 0.0
