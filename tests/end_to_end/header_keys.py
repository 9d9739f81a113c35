"""Files whose keys and tensors are changed one by one: what llama.cpp makes of each, and what we make of it.

A small model of every architecture that the forward pass computes is the base. A case is the base with keys
that are set or removed, or with one more tensor. Both programs compute the logits of one text, or refuse.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import convert
from gguf_tools.errors import ToolkitError
from gguf_tools.files.partial_file import GGUFWriter
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.hparams import _FIELDS
from gguf_tools.format.loaders import LOADERS
from gguf_tools.format.shards import FileLayout, open_gguf
from gguf_tools.format.tensors import TensorInfo
from gguf_tools.format.values import Kind, Value
from tests.convert.f32_files import write_f32
from tests.end_to_end.arch_models import GOLDEN
from tests.imatrix.forward.deepseek4_models import LIKE_LLAMA, v4_model
from tests.imatrix.forward.small_models import run_all_layers
from tests.support import oracle
from tests.support.checkpoints import INDEXED_STYLES, micro_checkpoint, transformers_checkpoint
from tests.support.decoder_models import MODELS, SHALLOW_GEMMA3N, decoder_model
from tests.support.published_models import PUBLISHED, write

TOKENS = np.random.RandomState(0).randint(6, 300, 48).tolist()
LIMIT = 1e-4
"""Largest norm of the difference over that of the logits, where both compute."""
_LIMITS = {"gemma2": 2e-3, "gemma3": 2e-3, "gemma3n": 2e-3, "gemma4": 2e-3}
"""The same for architectures with GELU, which llama.cpp looks up in a table of F16; see like_llama_s_gelu."""


@dataclass(frozen=True)
class Base:
    """A file to be changed.

    tensors  name -> description and bytes
    """

    name: str
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, tuple[TensorInfo, bytes]]

    @property
    def architecture(self) -> str:
        return str(self.metadata[keys.ARCHITECTURE].data)


@dataclass(frozen=True)
class Case:
    """A change of a base.

    values   key -> its value; None: removed
    tensors  tensors besides, or in place of those of the file
    """

    name: str
    values: Mapping[str, Value | None] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)


class Outcome(Enum):
    """What came of a case."""

    EQUAL = "equal, and other than the base"
    NO_EFFECT = "without effect"
    BOTH_REFUSE = "refused by both"
    WE_REFUSE = "refused by us alone"
    THEY_REFUSE = "refused by llama.cpp alone"
    DIFFERENT = "different numbers"
    CRASH = "an exception of another kind"


BASES = (
    *(name for name in MODELS if name not in ("llama-linear", "mistral", "granite4", "qwen35-ungrouped")),
    "deepseek", "v2", "v3", "v3-uncompressed", "deepseek32", "glm-dsa", "deepseek4", "kimi-k3-bf16",
)  # fmt: skip


def make_base(name: str, folder: Path) -> Base:
    """Write a small model as a file; needs torch and transformers."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        _write_base(name, folder / name, path)
    with open_gguf(path) as file:
        metadata = dict(file.metadata)
        tensors = {
            info.name: (info, file.read_rows(info.name, 0, int(np.prod(info.shape[:-1]))).tobytes())
            for info in file.tensors.values()
        }
    if name == "glm-dsa":
        # With fewer positions than the text has, rounding decides which are chosen.
        metadata["glm-dsa.attention.indexer.top_k"] = Value.u32(2048)
    return Base(name, path, metadata, tensors)


def _write_base(name: str, folder: Path, path: Path) -> None:
    sizes = {"q_lora_rank": 56, "index_topk": 2048}
    if name in MODELS:
        decoder_model(name, folder, **(SHALLOW_GEMMA3N if name == "gemma3n" else {}))
        convert.convert(folder, path, outtype="f32")
    elif name == "deepseek":
        write_f32(GOLDEN / "models" / "deepseek-v1-moe", path)
    elif name in PUBLISHED:
        convert.convert(write(name, folder), path, outtype="f32")
    elif name == "deepseek4":
        convert.convert(v4_model(folder, **LIKE_LLAMA), path)
    elif name in ("deepseek32", "glm-dsa"):
        style = {"deepseek32": "v3.2", "glm-dsa": "glm-5"}[name]
        assert style in INDEXED_STYLES
        write_f32(transformers_checkpoint(folder, style, dtype="float32", **sizes), path)
    else:
        style, _, layout = name.partition("-")
        write_f32(micro_checkpoint(folder, style), path, mla="none" if layout else "split")


def write_case(base: Base, case: Case, path: Path) -> Path:
    """Write a base with its changes."""
    metadata = {key: value for key, value in base.metadata.items() if case.values.get(key, value) is not None}
    metadata |= {key: value for key, value in case.values.items() if value is not None}
    tensors = dict(base.tensors)
    for name, array in case.tensors.items():
        tensors[name] = TensorInfo(name, array.shape, F32), array.astype("<f4").tobytes()
    layout = FileLayout.of(metadata, [info for info, _ in tensors.values()])
    path.unlink(missing_ok=True)
    with GGUFWriter(path, layout) as writer:
        for name, (_, data) in tensors.items():
            writer.write(layout.offset_of(name), data)
        writer.publish()
    return path


# ---- cases


def cases_of(base: Base) -> Iterator[Case]:
    """Yield the cases of a base."""
    architecture, loader = base.architecture, LOADERS[base.architecture]
    for template in keys.hparam_templates():
        key = template.format(arch=architecture)
        reads = loader.reads(template)
        if not reads and template not in _UNDERSTOOD:
            continue
        if reads and key in base.metadata:
            yield Case(f"no {key}", {key: None})
        for value in _values(base, template, few=not reads):
            if value != base.metadata.get(key):
                yield Case(f"{key} {value.plain!r}", {key: value})
    yield from _rotations(base)
    yield from _more_tensors(base)


_UNDERSTOOD = {item.metadata["template"] for item in _FIELDS.values()}
"""Keys that some family computes with."""

_SAMPLES: Mapping[str, tuple[Value, ...]] = {
    keys.ROPE_SCALING_TYPE: tuple(map(Value.string, ("none", "linear", "yarn", "longrope", "dynamic"))),
    keys.SLIDING_WINDOW_PATTERN: (Value.u32(3), Value.u32(1), Value.bools([True, False])),
    keys.SLIDING_WINDOW: (Value.u32(0), Value.u32(7)),
    keys.ROPE_DIMENSION_SECTIONS: (
        Value.i32s([2, 2, 2, 0]), Value.i32s([2, 2, 2, 2]), Value.i32s([0, 0, 0, 0]), Value.i32s([1, 1]),
    ),
    keys.ATTENTION_SCALE: (Value.f32(0.3), Value.f32(0.0)),
    # llama.cpp's context has 256 positions at least, and its length chooses between tables of divisors.
    keys.ROPE_SCALING_ORIG_CTX_LEN: (Value.u32(0), Value.u32(32), Value.u32(1024)),
    keys.INDEXER_TOP_K: (Value.u32(4096),),
    keys.COMPRESS_RATIOS: (Value.i32s([0, 0, 0]),),
    keys.CLASSIFIER_OUTPUT_LABELS: (Value.strings(["a", "b"]),),
    keys.DEEPSTACK_MAPPING: (Value.i32s([-1, -1]), Value.i32s([0, 1])),
}  # fmt: skip


def _values(base: Base, template: str, *, few: bool) -> Iterator[Value]:
    """Yield values for a key, `few` of them where nothing should come of it."""
    key = template.format(arch=base.architecture)
    samples = _SAMPLES.get(template)
    if samples is None:
        samples = tuple(_usual(base, keys.expected_kinds(template, "")[0], base.metadata.get(key)))
    yield from samples[:1] if few else samples


def _usual(base: Base, kind: str, now: Value | None) -> Iterator[Value]:
    n_layers = int(base.metadata[f"{base.architecture}.block_count"].data)
    if kind == "bool":
        yield from (Value.bool_(False), Value.bool_(True))
    elif kind == "float32":
        number = 2.0 if now is None else float(now.data)
        yield from (Value.f32(number * 1.5), Value.f32(0.0), Value.f32(number * 0.25))
    elif kind == "uint32":
        if now is not None and now.kind is Kind.ARRAY:
            yield Value.u32(max(now.data))
            yield Value.u32(0)
            return
        number = 3 if now is None else int(now.data)
        yield from (Value.u32(number + 1), Value.u32(0), Value.u32(2 * number), Value.u32(number // 2))
        yield Value.i32s([number] * n_layers)
        yield Value.u32s([number + (layer % 2) for layer in range(n_layers)])
    elif kind == "string":
        yield Value.string("what")
    elif kind == "array of bool":
        yield Value.bools([layer % 2 == 1 for layer in range(n_layers)])
    elif kind == "array of float32":
        yield Value.f32s([1.0] * n_layers)
    elif kind == "array of int32":
        yield Value.i32s([1] * n_layers)
    elif kind == "array of string":
        yield Value.strings(["what"])


def _rotations(base: Base) -> Iterator[Case]:
    """Yield the cases of keys about RoPE that count together."""
    prefix = f"{base.architecture}.rope."
    for kind, factor, older, magnitude, beta in product(
        (None, "linear", "yarn", "longrope", "none"), (None, 4.0), (None, 2.0), (None, 1.3), (None, 8.0)
    ):
        values: dict[str, Value | None] = {
            f"{prefix}scaling.type": None if kind is None else Value.string(kind),
            f"{prefix}scaling.factor": None if factor is None else Value.f32(factor),
            f"{prefix}scale_linear": None if older is None else Value.f32(older),
            f"{prefix}scaling.attn_factor": None if magnitude is None else Value.f32(magnitude),
            f"{prefix}scaling.yarn_beta_fast": None if beta is None else Value.f32(beta),
            f"{prefix}scaling.original_context_length": Value.u32(32),
        }
        if beta is not None and (kind != "yarn" or older is not None):
            continue
        yield Case(f"rotation {kind} {factor} {older} {magnitude} {beta}", values)
    for kind, log in product(("linear", "yarn"), (0.05, 0.1, 1.0, 0.7)):
        yield Case(f"rotation {kind} log_multiplier {log}", {
            f"{prefix}scaling.type": Value.string(kind),
            f"{prefix}scaling.factor": Value.f32(4.0 if kind == "yarn" else 1.0),
            f"{prefix}scaling.original_context_length": Value.u32(32),
            f"{prefix}scaling.yarn_log_multiplier": Value.f32(log),
        })  # fmt: skip


def _more_tensors(base: Base) -> Iterator[Case]:
    """Yield cases with a tensor that the base does not have: biases, scales, divisors, and names of none."""
    rng = np.random.default_rng(1)
    for name, (info, _) in base.tensors.items():
        last = name.split(".")[1] if name.startswith("blk.") else "0"
        if not name.endswith(".weight") or len(info.shape) < 2 or last not in ("0", "1"):
            continue
        stem = name.removesuffix(".weight")
        n_mats = info.shape[:-2]
        bias = (0.3 * rng.standard_normal((*n_mats, info.shape[-2]))).astype(np.float32)
        scale = (1.5 + 0.1 * rng.standard_normal(n_mats or (1,))).astype(np.float32)
        for part, array in (("bias", bias), ("scale", scale), ("input_scale", scale)):
            if f"{stem}.{part}" not in base.tensors:
                yield Case(f"tensor {stem}.{part}", tensors={f"{stem}.{part}": array})
    n_rot = base.metadata.get(f"{base.architecture}.rope.dimension_count")
    pairs = (int(n_rot.data) if n_rot is not None and n_rot.data else 16) // 2
    divisors = np.linspace(1, 4, pairs).astype(np.float32)
    kind = f"{base.architecture}.rope.scaling.type"
    for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
        if name not in base.tensors:
            yield Case(f"tensor {name}", tensors={name: divisors})
            yield Case(f"tensor {name}, longrope", {kind: Value.string("longrope")}, {name: divisors})
    hidden = int(base.metadata[f"{base.architecture}.embedding_length"].data)
    for name in ("blk.0.mystery.weight", "blk.0.attn_norm_2.weight", "blk.9.attn_norm.weight", "mystery"):
        yield Case(f"tensor {name}", tensors={name: np.ones(hidden, np.float32)})


# ---- both programs

_PATIENCE = 6.0
"""Seconds that llama.cpp is given for a file: some values keep it busy for hours."""


def theirs(path: Path) -> np.ndarray | str:
    """Return llama.cpp's logits, or what it says in refusal. It may abort, so another process is asked."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.environ["GGML_NO_BACKTRACE"] = "1"  # or it calls a debugger, which takes seconds
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            try:
                with oracle.Model(path) as model:
                    answer: Any = model.logits(TOKENS, n_threads=1)
            except RuntimeError as refusal:
                answer = str(refusal)[-300:]
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], _PATIENCE)
        if not ready:
            os.kill(child, signal.SIGKILL)
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else "it aborts"


def ours(path: Path) -> np.ndarray | str | Exception:
    """Return our logits, or what we say in refusal; another exception as it is."""
    from imatrix.forward.open import open_model

    try:
        with open_model(path) as source:
            return run_all_layers(source, np.array([TOKENS]))[0][0]
    except ToolkitError as refusal:
        return str(refusal)
    except Exception as error:
        return error


@contextmanager
def like_llama_s_gelu() -> Iterator[None]:
    """Have our GELU round as a table of F16 does."""
    import torch

    from imatrix.forward.layers import activations, gemma4

    exact = torch.nn.functional.gelu

    def rounded(x: torch.Tensor, **how: Any) -> torch.Tensor:
        return exact(x.half().float(), **how).half().float()

    with patch.object(activations, "gelu", rounded), patch.object(gemma4, "gelu", rounded):
        yield


def judge(base: Base, case: Case, folder: Path, plain: np.ndarray) -> tuple[Outcome, str]:
    """Try a case; return what came of it, and what is to be told of it.

    plain  llama.cpp's logits of the base
    """
    path = write_case(base, case, folder / "case.gguf")
    expected, found = theirs(path), ours(path)
    if isinstance(found, Exception):
        return Outcome.CRASH, repr(found)[:300]
    if isinstance(found, str):
        refused = Outcome.BOTH_REFUSE if isinstance(expected, str) else Outcome.WE_REFUSE
        return (refused if "\n" not in found else Outcome.CRASH), found
    if isinstance(expected, str):
        return Outcome.THEY_REFUSE, expected.strip().replace("\n", " ")[-200:]
    error = _distance(found, expected)
    if not error < _LIMITS.get(base.architecture, LIMIT):
        return Outcome.DIFFERENT, f"{error:.2g}"
    same = _distance(expected, plain) < 1e-7
    return (Outcome.NO_EFFECT if same else Outcome.EQUAL), f"{error:.2g}"


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(expected).all():
        return 0.0 if not np.isfinite(found).all() else float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
