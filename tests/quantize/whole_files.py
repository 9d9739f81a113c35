"""Draws of everything that llama-quantize can be asked for, each from a seed, with a small model.

scripts/check/whole_files.py makes the same files with llama.cpp and compares them byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import quantize
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import GGMLType, by_name
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Value
from quantize.importances.entries import Importance, ImportanceFile
from quantize.plan.recipes import RECIPES
from quantize.roles import layer_of
from tests.quantize.whole_models import SmallModel, draw_model
from tests.support.samples import IMPORTANCES

TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
    "MXFP4", "NVFP4", "Q1_0", "Q2_0",
)  # fmt: skip
"""Types that --tensor-type and its like may name."""

_PATTERNS = (
    "ffn_down", "attn_v", "attn_.*weight", "exps", r"blk\.[02]\.", "token_embd", "output", "ffn_(up|gate)",
    "norm", r"\.1\..*q", "^token", "weight$", "k_b|v_b", "nothing_of_that_name",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run of llama-quantize: a model and what is asked for.

    n_threads  those of llama.cpp; ours has one
    """

    seed: int
    model: SmallModel
    file_type: str
    types: quantize.PlanOptions
    keep_split: bool
    kv_overrides: tuple[tuple[str, Value], ...]
    importances: ImportanceFile | None
    n_threads: int

    def make(self, source: Path, output: Path) -> tuple[Path, ...]:
        """Quantize the model's file as we do it; raises what `quantize.quantize` does."""
        result = quantize.quantize(
            source,
            output,
            self.file_type,
            types=self.types,
            importances=self.importances,
            keep_split=self.keep_split,
            kv_overrides=self.kv_overrides,
            provenance=False,
            n_threads=1,
        )
        return result.paths

    def __str__(self) -> str:
        """The case in the words of llama-quantize's command line."""
        types = self.types
        words = ["--allow-requantize"] * types.allow_requantize + ["--pure"] * types.pure
        words += ["--leave-output-tensor"] * types.leave_output + ["--keep-split"] * self.keep_split
        words += [f"--output-tensor-type {types.output_type}"] * (types.output_type is not None)
        words += [f"--token-embedding-type {types.embedding_type}"] * (types.embedding_type is not None)
        words += [f"--tensor-type {rule.text}" for rule in types.overrides]
        words += [f"--prune-layers {','.join(map(str, types.prune_layers))}"] * bool(types.prune_layers)
        words += [f"--override-kv {key}={value!r}" for key, value in self.kv_overrides]
        if self.importances is not None:
            words.append(f"--imatrix ({len(self.importances.entries)} entries)")
        parts = f" in {self.model.n_parts} files" if self.model.n_parts > 1 else ""
        return f"seed {self.seed}: {' '.join(words)} {self.model.name}{parts} {self.file_type}"


def draw_case(seed: int) -> Case:
    """Draw a model and what becomes of it."""
    random = np.random.default_rng(seed)
    model = draw_model(random)
    file_type = str(random.choice(list(RECIPES)))
    importances = draw_importances(model, random) if random.random() < 0.6 else None
    if importances is None and file_type.startswith(("IQ1", "IQ2", "Q2_K_S")) and random.random() < 0.8:
        importances = draw_importances(model, random, share=1.0)
    is_quantized = any(info.type.is_quantized for info in model.tensors)
    return Case(
        seed=seed,
        model=model,
        file_type=file_type,
        types=quantize.PlanOptions(
            overrides=_draw_rules(random) if random.random() < 0.3 else (),
            pure=bool(random.random() < 0.1),
            leave_output=bool(random.random() < 0.1),
            output_type=_draw_type(random, 0.15),
            embedding_type=_draw_type(random, 0.15),
            prune_layers=_draw_layers(model.tensors, random) if random.random() < 0.15 else (),
            allow_requantize=bool(random.random() < (0.9 if is_quantized else 0.2)),
        ),
        keep_split=model.n_parts > 1 and bool(random.random() < 0.6),
        kv_overrides=_draw_overrides(model, random) if random.random() < 0.2 else (),
        importances=importances,
        n_threads=int(random.integers(1, 4)),
    )


def _draw_type(random: np.random.Generator, share: float) -> GGMLType | None:
    return by_name(str(random.choice(TYPES))) if random.random() < share else None


def _draw_rules(random: np.random.Generator) -> tuple[quantize.Override, ...]:
    pairs = (f"{random.choice(_PATTERNS)}={random.choice(TYPES)}" for _ in range(random.integers(1, 4)))
    return quantize.parse_overrides(pairs)


def _draw_layers(tensors: Sequence[TensorInfo], random: np.random.Generator) -> tuple[int, ...]:
    layers = sorted({layer for info in tensors if (layer := layer_of(info.name)) is not None})
    n_dropped = int(random.integers(1, 3))
    return tuple(sorted(int(layer) for layer in random.permutation(layers)[:n_dropped]))


def _draw_overrides(model: SmallModel, random: np.random.Generator) -> tuple[tuple[str, Value], ...]:
    prefix = model.metadata[keys.ARCHITECTURE].data
    values = {
        f"{prefix}.attention.head_count_kv": Value.u32(1),
        "general.name": Value.string("Other"), "general.file_type": Value.u32(7), "a.b": Value.u32(7),
        "a.c": Value.f32(0.1), "a.d": Value.bool_(False), "x.u8": Value.u32(1 << 31), "a.e": Value.string(""),
    }  # fmt: skip
    if f"{prefix}.expert_count" in model.metadata:
        values[f"{prefix}.expert_count"] = Value.u32(8)
    chosen = random.permutation(list(values))[: int(random.integers(1, 4))]
    return tuple((str(key), values[str(key)]) for key in chosen)


def draw_importances(
    model: SmallModel, random: np.random.Generator, share: float | None = None
) -> ImportanceFile:
    """Draw importances of a share of the tensors, per matrix where a tensor has several."""
    share = float(random.choice((1.0, 1.0, 0.9, 0.5))) if share is None else share
    entries = {}
    for info in model.tensors:
        if len(info.shape) > 1 and random.random() < share:
            entries[info.name] = _draw_entry(info, random)
    return ImportanceFile(
        entries,
        datasets=("texts/wiki.txt", "b.txt")[: int(random.integers(3))],
        chunk_count=int(random.choice((0, 17))),
        path=Path("a.imatrix.gguf"),
    )


def _draw_entry(info: TensorInfo, random: np.random.Generator) -> Importance:
    kind = "random" if random.random() < 0.9 else str(random.choice(list(IMPORTANCES)))
    shape = (1 if random.random() < 0.02 else info.n_mats, info.n_cols + (random.random() < 0.001))
    values = IMPORTANCES[kind](random, shape)
    values[0, 0] = np.nan if random.random() < 0.001 else values[0, 0]
    counts = np.full(1, 512.0) if shape[0] == 1 else random.integers(0, 9, shape[0])
    sums = np.ascontiguousarray(values * np.asarray(counts)[:, None], np.float32)
    return Importance(sums, np.ascontiguousarray(counts, np.float32))


def digests(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of whole files."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
