"""Faults put into finished files: rows in other places, tensors of wrong weights, wrong metadata.

Rows that only change places are moved as they are stored, so a calibrated file stays calibrated. Where
weights themselves are wrong, the tensor is encoded anew as the type that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert.audit.base import AuditBase, open_audit_base
from convert.audit.expected import as_encoded, read_rows
from gguf_tools.format import keys
from gguf_tools.format.shards import FileLayout, GGUFSet, open_gguf
from gguf_tools.format.values import Value
from quantize.fill.sources import FLOAT_DTYPES
from tests.support.checkpoints import quantize_fp8

Index = np.ndarray


@dataclass
class Patch:
    """What is changed in a file.

    data      name -> the tensor's new bytes
    metadata  key -> new value; None: the key is taken out
    dropped   tensors that are taken out
    """

    data: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, Value | None] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Model:
    """An open file and its base, to be damaged."""

    file: GGUFSet
    base: AuditBase
    patch: Patch

    @property
    def names(self) -> list[str]:
        return list(self.file.tensors)

    def name(self, *parts: str) -> str:
        """Return the last tensor whose name ends with the first of these parts that any name ends with."""
        for part in parts:
            found = [name for name in self.names if name.endswith(part)]
            if found:
                return found[-1]
        raise LookupError(parts)

    def rows(self, name: str) -> int:
        return self.file.tensor(name).n_rows

    def matrix_rows(self, name: str) -> int:
        return self.file.tensor(name).shape[-2]

    def raw(self, name: str) -> np.ndarray:
        info = self.file.tensor(name)
        return self.file.read_rows(name, 0, info.n_rows).reshape(info.n_rows, -1)

    def values(self, name: str) -> np.ndarray:
        return read_rows(self.base.find(name), np.arange(self.rows(name)))

    def move(self, name: str, rows: Index, origin: str = "") -> None:
        """Let the rows of a tensor be these rows of it, or of another one, as they are stored."""
        if origin and self.file.tensor(origin).type != self.file.tensor(name).type:
            self.encode(name, self.values(origin)[rows])
        else:
            self.patch.data[name] = self.raw(origin or name)[rows].tobytes()

    def encode(self, name: str, values: np.ndarray) -> None:
        """Let a tensor have these weights, encoded as its type."""
        info = self.file.tensor(name)
        values = np.ascontiguousarray(values, np.float32).reshape(info.n_rows, info.n_cols)
        dtype = FLOAT_DTYPES.get(info.type)
        data = values.astype(dtype) if dtype is not None else as_encoded(info.type, values)[0]
        self.patch.data[name] = data.tobytes()


def damage(file: Path, base: Path, output: Path, fault: Fault) -> None:
    """Write `file` with a fault; raises LookupError if the model has nothing that can have it."""
    with open_gguf(file) as opened, open_audit_base(base, opened) as of:
        patch = Patch()
        fault.put(Model(opened, of, patch))
        metadata = {**opened.metadata, **patch.metadata}
        infos = [info for info in opened.tensors.values() if info.name not in patch.dropped]
        metadata = {key: value for key, value in metadata.items() if value is not None}
        layout = FileLayout.of(metadata, infos)
        data = bytearray(layout.total_bytes)
        data[: len(layout.header)] = layout.header
        for info in infos:
            own = patch.data.get(info.name) or opened.read_bytes(info.name, 0, info.n_bytes).tobytes()
            assert len(own) == info.n_bytes, info.name
            data[layout.offset_of(info.name) :][: len(own)] = own
            start = layout.offset_of(info.name)
            data[start : start + len(own)] = own
        output.write_bytes(data)


@dataclass(frozen=True)
class Fault:
    """A fault.

    kinds  what an audit may call it
    put    puts it into a model
    """

    kinds: tuple[str, ...]
    put: Callable[[Model], object]


# ---- rows in other places


def swap(*suffixes: str) -> Callable[[Model], None]:
    def put(model: Model) -> None:
        a = model.name(suffixes[0])
        b = a.replace(suffixes[0], suffixes[1])
        every = np.arange(model.rows(a))
        if model.file.tensor(a).shape != model.file.tensor(b).shape:
            raise LookupError(suffixes)
        model.move(a, every, b)
        model.move(b, every, a)

    return put


def _head(model: Model) -> tuple[int, int, int]:
    """Return (rows of a head of queries, first rotated row, rotated rows)."""
    hparams, heads = model.base.hparams, model.base.heads
    if heads is not None:
        return heads.nope + heads.rope, heads.nope, heads.rope
    size = hparams.key_length or hparams.embedding_length // hparams.head_count
    return size, 0, hparams.rope_dimension_count or size


def permuted(direction: str, part: str) -> Callable[[Model], None]:
    def put(model: Model) -> None:
        name = model.name(f"{part}.weight", "attn_q_b.weight")
        size, first, count = _head(model)
        half = np.arange(count // 2)
        if direction == "interleaved":
            order = np.stack([half, half + count // 2], 1).reshape(-1)
        else:
            order = np.concatenate([half * 2, half * 2 + 1])
        rows = np.arange(model.rows(name)).reshape(-1, size)
        rows[:, first : first + count] = rows[:, first + order]
        model.move(name, rows.reshape(-1))

    return put


def permuted_as_queries(model: Model) -> None:
    """Permute keys as if there were as many heads as of queries."""
    name = model.name("attn_k.weight")
    n_heads, n_kv = model.base.hparams.head_count, model.base.hparams.head_count_kv
    if n_heads == n_kv:
        raise LookupError(name)
    size = model.rows(name) // n_heads
    half = np.arange(size // 2)
    order = np.stack([half, half + size // 2], 1).reshape(-1)
    model.move(name, np.arange(model.rows(name)).reshape(-1, size)[:, order].reshape(-1))


def kv_halves(model: Model) -> None:
    heads = model.base.heads
    if heads is None:
        raise LookupError("kv_b")
    names = [name for name in model.names if "attn_kv_b" in name]
    if names:
        rows = np.arange(model.rows(names[-1])).reshape(heads.n_heads, -1)
        turned = np.concatenate([rows[:, heads.nope :], rows[:, : heads.nope]], 1)
        model.move(names[-1], turned.reshape(-1))
        return
    whole = model.base.find(model.name("attn_k_b.weight").replace("k_b", "kv_b"))
    kv = read_rows(whole, np.arange(whole.shape[0])).reshape(heads.n_heads, heads.head_rows, -1)
    key, value = kv[:, : heads.nope], kv[:, heads.nope :]
    model.encode(model.name("attn_k_b.weight"), value.transpose(0, 2, 1))
    model.encode(model.name("attn_v_b.weight"), key)


def k_not_transposed(model: Model) -> None:
    name = model.name("attn_k_b.weight")
    heads = model.base.heads
    kv = model.values(name).reshape(heads.n_heads, heads.kv_lora, heads.nope)
    model.encode(name, kv.transpose(0, 2, 1))


def expert(how: str) -> Callable[[Model], None]:
    def put(model: Model) -> None:
        name = model.name("ffn_up_exps.weight")
        n_rows = model.matrix_rows(name)
        rows = np.arange(model.rows(name)).reshape(-1, n_rows)
        if how == "repeated":
            rows[2] = rows[4]
        elif how == "swapped":
            rows[[1, 3]] = rows[[3, 1]]
        elif how == "shifted":
            rows = np.roll(rows, 1, 0)
        elif how == "zero":
            data = model.raw(name).copy()
            model.encode(name, np.zeros_like(model.values(name)))
            zeros = np.frombuffer(model.patch.data[name], np.uint8).reshape(data.shape)
            data[rows[-1]] = zeros[rows[-1]]
            model.patch.data[name] = data.tobytes()
            return
        elif how == "truncated":
            data = model.raw(name).copy()
            model.encode(name, np.zeros_like(model.values(name)))
            zeros = np.frombuffer(model.patch.data[name], np.uint8).reshape(data.shape)
            half = rows[3, n_rows // 2 :]
            data[half] = zeros[half]
            model.patch.data[name] = data.tobytes()
            return
        model.move(name, rows.reshape(-1))

    return put


def other_layer(model: Model) -> None:
    name = model.name("attn_output.weight")
    other = next(each for each in model.names if each.endswith("attn_output.weight") and each != name)
    model.move(name, np.arange(model.rows(name)), other)


def shifted_rows(model: Model) -> None:
    name = model.name("ffn_down.weight", "ffn_down_shexp.weight")
    model.move(name, np.roll(np.arange(model.rows(name)), 1))


def shifted_tokens(model: Model) -> None:
    """Let the embeddings be one row late from some token on, as after a token was added in the middle."""
    n_rows = model.rows("token_embd.weight")
    rows = np.arange(n_rows)
    rows[300:] -= 1
    model.move("token_embd.weight", rows)


def router_rows(model: Model) -> None:
    name = model.name("ffn_gate_inp.weight")
    model.move(name, np.roll(np.arange(model.rows(name)), 2))


def zeros_behind(model: Model) -> None:
    name = model.name("attn_output.weight")
    data = model.raw(name).copy()
    model.encode(name, np.zeros_like(model.values(name)))
    half = len(data) // 2
    data[half:] = np.frombuffer(model.patch.data[name], np.uint8).reshape(data.shape)[half:]
    model.patch.data[name] = data.tobytes()


def garbage(model: Model) -> None:
    """Write other bytes over a run in the middle of a tensor, as a broken download leaves them."""
    name = model.name("attn_output.weight")
    data = model.raw(name).copy()
    other = model.raw("token_embd.weight").reshape(-1)
    start, length = len(data) // 3 * data.shape[1], 24 * data.shape[1]
    flat = data.reshape(-1)
    flat[start : start + length] = other[7 : 7 + length]
    model.patch.data[name] = data.tobytes()


# ---- other weights


def norm(amount: float) -> Callable[[Model], None]:
    def put(model: Model) -> None:
        for name in model.names:
            if name.endswith(("attn_norm.weight", "ffn_norm.weight")):
                model.encode(name, model.values(name) + amount)

    return put


def values(change: Callable[[np.ndarray], np.ndarray], *suffixes: str) -> Callable[[Model], None]:
    def put(model: Model) -> None:
        name = model.name(*suffixes)
        model.encode(name, change(model.values(name)))

    return put


def square_transposed(model: Model) -> None:
    square = [
        name for name in model.names
        if model.file.tensor(name).n_cols == model.file.tensor(name).n_rows
    ]  # fmt: skip
    name = square[-1] if square else model.name("attn_q_a.weight")
    if not square:
        raise LookupError("no square matrix")
    model.encode(name, model.values(name).T)


def without_scales(weight: np.ndarray) -> np.ndarray:
    """Divide by the scales that an encoder of FP8 would give each block."""
    _, scales = quantize_fp8(weight, (128, 128))
    whole = np.kron(scales, np.ones((128, 128), np.float32))
    return weight / whole[: weight.shape[0], : weight.shape[1]]


def revision(share: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(weight: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(3)
        noise = rng.normal(size=weight.shape) * np.abs(weight).mean(axis=0, keepdims=True)
        return weight + share * noise * np.linalg.norm(weight) / np.linalg.norm(noise)

    return change


def stranger(weight: np.ndarray) -> np.ndarray:
    return np.random.default_rng(5).permutation(weight.reshape(-1)).reshape(weight.shape)


def requantized(model: Model) -> None:
    """Encode a tensor from what Q2_K or, for lower types, what nothing has made of it."""
    from gguf_tools.format.ggml_types import by_name

    name = model.name("attn_output.weight")
    if model.file.tensor(name).type.name not in ("Q8_0", "Q6_K", "Q5_K", "Q4_K"):
        raise LookupError("the type is no better than the one before")
    model.encode(name, as_encoded(by_name("Q2_K"), model.values(name))[1])


def columns_moved(model: Model) -> None:
    name = model.name("attn_output.weight")
    weight = model.values(name)
    model.encode(name, weight[:, np.random.default_rng(1).permutation(weight.shape[1])])


# ---- metadata


def key(template: str, value: Callable[[Any], Value | None]) -> Callable[[Model], None]:
    def put(model: Model) -> None:
        name = template.format(arch=model.base.architecture)
        if name not in model.file.metadata:
            raise LookupError(name)
        model.patch.metadata[name] = value(model.file.metadata[name].data)

    return put


def _swapped_tokens(tokens: Any) -> Value:
    changed = list(tokens)
    changed[40], changed[41] = changed[41], changed[40]
    return Value.strings(changed)


def _normal_tokens(types: Any) -> Value:
    return Value.i32s([1 if kind == 3 else kind for kind in types])


def drop(model: Model) -> None:
    model.patch.dropped.add(model.name("ffn_norm.weight"))


FAULTS: Mapping[str, Fault] = {
    "gate and up swapped": Fault(("swapped-tensor",), swap("ffn_gate.weight", "ffn_up.weight")),
    "gate and up of experts swapped": Fault(
        ("swapped-tensor",), swap("ffn_gate_exps.weight", "ffn_up_exps.weight")
    ),
    "keys and values swapped": Fault(("swapped-tensor",), swap("attn_k.weight", "attn_v.weight")),
    "queries permuted": Fault(("rope-permuted",), permuted("interleaved", "attn_q")),
    "queries not permuted": Fault(("rope-not-permuted",), permuted("apart", "attn_q")),
    "keys permuted as queries": Fault(("rope-permuted",), permuted_as_queries),
    "kv_b halves mixed up": Fault(("kv-halves",), kv_halves),
    "k_b not transposed": Fault(("k-not-transposed",), k_not_transposed),
    "norm plus one twice": Fault(("norm-plus-one",), norm(1)),
    "norm without its one": Fault(("norm-minus-one",), norm(-1)),
    "expert repeated": Fault(("expert-repeated",), expert("repeated")),
    "experts swapped": Fault(("expert-misplaced",), expert("swapped")),
    "experts shifted": Fault(("expert-misplaced",), expert("shifted")),
    "expert of zeros": Fault(("zeros",), expert("zero")),
    "expert truncated": Fault(("zeros",), expert("truncated")),
    "another layer's": Fault(("other-layer",), other_layer),
    "rows shifted": Fault(("rows-moved",), shifted_rows),
    "tokens shifted": Fault(("rows-moved",), shifted_tokens),
    "router rows moved": Fault(("rows-moved",), router_rows),
    "zeros behind": Fault(("zeros",), zeros_behind),
    "garbage": Fault(("stranger", "damaged", "nonfinite"), garbage),
    "square transposed": Fault(("transposed",), square_transposed),
    "FP8 without scales": Fault(
        ("scales-missing",), values(without_scales, "ffn_down.weight", "ffn_down_shexp.weight")
    ),
    "scaled": Fault(("scaled",), values(lambda weight: 1.5 * weight, "attn_output.weight")),
    "sign turned": Fault(("sign",), values(np.negative, "attn_output.weight")),
    "another revision": Fault(("revision",), values(revision(0.6), "attn_output.weight")),
    "a stranger's": Fault(("stranger",), values(stranger, "attn_output.weight")),
    "columns moved": Fault(("columns-moved",), columns_moved),
    "encoded twice": Fault(("requantized",), requantized),
    "tensor missing": Fault(("tensors",), drop),
    "vocabulary": Fault(("metadata",), key(keys.TOKENIZER_TOKENS, _swapped_tokens)),
    "added tokens": Fault(("metadata",), key(keys.TOKENIZER_TOKEN_TYPE, _normal_tokens)),
    "special token": Fault(("metadata",), key(keys.TOKENIZER_EOS_ID, lambda id_: Value.u32(id_ + 1))),
    "pre-tokenizer": Fault(("metadata",), key(keys.TOKENIZER_PRE, lambda name: Value.string("default"))),
    "chat template": Fault(("metadata",), key(keys.TOKENIZER_CHAT_TEMPLATE, lambda text: None)),
    "rope base": Fault(("metadata",), key(keys.ROPE_FREQ_BASE, lambda base: Value.f32(base / 2))),
    "gating": Fault(("metadata",), key(keys.EXPERT_GATING_FUNC, lambda kind: Value.u32(1))),
}  # fmt: skip
"""Faults by name. A family that has nothing that could have one goes without it."""
