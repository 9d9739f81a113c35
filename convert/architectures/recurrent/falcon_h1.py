"""Falcon-H1: attention and a Mamba 2 side by side in every layer, which see the same and are added together.

The model multiplies what parts see and make by numbers, which the file has in their matrices. Multiplying
goes as in llama.cpp's converter, one number after the other in float32.

Facts of transformers' modeling_falcon_h1.py and llama.cpp's converter (FalconH1Model).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.config import decoder_fields, with_defaults
from convert.architectures.decoder.family import decoder
from convert.architectures.decoder.metadata import (
    COMMON,
    VOCAB_SIZE,
    read_decoder,
)
from convert.architectures.decoder.rules import attention, dense_blocks, ends, in_layer, layers
from convert.architectures.delta_net.family import float32_kernels
from convert.architectures.recurrent.mamba2 import (
    MambaConfig,
    mamba_keys,
    mamba_rules,
    read_mamba_sizes,
    refuse_limits,
)
from convert.architectures.rules import Arrange, OutputTensor, Renamed, Rule
from convert.weights.base import Weight
from gguf_tools.errors import UnsupportedCheckpoint
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.values import Metadata
from gguf_tools.text import quoted


@dataclass(frozen=True)
class FalconH1Config(MambaConfig):
    """Configuration of a model.

    factors       part of the model -> numbers that its matrix is multiplied by, one after the other; a file
                  has none
    normed_mamba  whether the output of a Mamba 2 has a norm
    """

    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    normed_mamba: bool = False

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of a Mamba 2's in_proj: gate, heads, B, C, and a step for each head."""
        of_groups = self.mamba_n_groups * self.mamba_d_state
        return self.mamba_rows, self.mamba_rows, of_groups, of_groups, self.mamba_n_heads


def _read(raw: Mapping[str, Any], path: str | Path) -> FalconH1Config:
    """Return the configuration of a Falcon-H1."""
    read = with_defaults(raw, path)
    why = "llama.cpp's falcon-h1 has no other"
    for key, value in (
        ("attention_bias", False), ("mlp_bias", False), ("mamba_proj_bias", False),
        ("projectors_bias", False), ("mamba_conv_bias", True), ("tie_word_embeddings", False),
    ):  # fmt: skip
        read.fixed(key, value, why)
    refuse_limits(read)
    fields = decoder_fields(read)
    if fields["rope"].kind not in ("default", "none"):
        raise UnsupportedCheckpoint(
            f"{path}: RoPE of type {quoted(fields['rope'].kind)}, expected 'default': llama.cpp's converter"
            " writes no other for Falcon-H1"
        )
    is_normed = read.flag("mamba_rms_norm", False)
    if read.flag("mamba_norm_before_gate", True) and is_normed:
        raise UnsupportedCheckpoint(
            f"{path}: mamba_rms_norm and mamba_norm_before_gate are true, expected one of them: llama.cpp's"
            " Mamba 2 has the norm behind the gate"
        )
    n_heads, expand = read.size("mamba_n_heads", 128), read.size("mamba_expand", 2)
    inner = read.size_or_null("mamba_d_ssm", 1024) or expand * fields["hidden_size"]
    if inner % n_heads or read.raw.get("mamba_d_head", "auto") not in ("auto", inner // n_heads):
        raise read.bad("mamba_d_head", f"mamba_d_ssm ({inner}) divided by mamba_n_heads ({n_heads})")
    n_groups = read.size("mamba_n_groups", 1)
    if n_heads % n_groups:
        raise read.bad("mamba_n_groups", f"a divisor of mamba_n_heads ({n_heads})")
    return FalconH1Config(
        **fields | {"stated_head_dim": fields["head_dim"], "rotated_cols": fields["head_dim"]},
        factors=_factors(read),
        normed_mamba=is_normed,
        beside_attention=True,
        mamba_layers=tuple(range(fields["num_hidden_layers"])),
        mamba_n_heads=n_heads,
        mamba_n_groups=n_groups,
        mamba_d_head=inner // n_heads,
        mamba_d_state=read.size("mamba_d_state", 256),
        mamba_d_conv=read.size("mamba_d_conv", 4),
    )


def _factors(read: ConfigReader) -> dict[str, tuple[float, ...]]:
    into = read.number("attention_in_multiplier", 1.0)
    gate, down = _numbers(read, "mlp_multipliers", 2)
    return {
        "embeddings": (read.number("embedding_multiplier", 1.0),),
        "output": (read.number("lm_head_multiplier", 1.0),),
        "q": (into,),
        "k": (read.number("key_multiplier", 1.0), into),
        "v": (into,),
        "o": (read.number("attention_out_multiplier", 1.0),),
        "gate": (gate,),
        "down": (down,),
        "ssm_in": (read.number("ssm_in_multiplier", 1.0),),
        "ssm_sections": _numbers(read, "ssm_multipliers", 5),
        "ssm_out": (read.number("ssm_out_multiplier", 1.0),),
    }


def _numbers(read: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    stated = read.raw.get(key)
    values = [1.0] * count if stated is None else stated
    if not isinstance(values, list) or len(values) != count:
        raise read.bad(key, f"{count} numbers")
    return tuple(ConfigReader({key: value}, read.path, read.prefix).number(key) for value in values)


@dataclass(frozen=True, eq=False)
class _Scaled(Renamed):
    """A matrix whose rows are multiplied by numbers, float32.

    factors  of each row, one after the other: float32 (n_rows,) each
    """

    factors: tuple[npt.NDArray[np.float32], ...]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = super().read_rows(start, stop)
        for factor in self.factors:
            rows = rows * factor[start:stop, None]
        return rows


def _scaled(numbers: Callable[[FalconH1Config, int], Sequence[npt.NDArray[np.float32]]]) -> Arrange:
    def arrange(name: str, weights: Sequence[Weight], config: FalconH1Config) -> OutputTensor:
        (weight,) = weights
        return _Scaled(name, weight.shape, F32, weight, tuple(numbers(config, weight.shape[0])))

    return arrange


def _by(part: str) -> Arrange:
    """Return the arrangement of a matrix whose rows are all multiplied by the factors of `part`."""

    def numbers(config: FalconH1Config, n_rows: int) -> list[npt.NDArray[np.float32]]:
        return [np.full(n_rows, factor, np.float32) for factor in config.factors[part]]

    return _scaled(numbers)


def _into_mamba(config: FalconH1Config, n_rows: int) -> list[npt.NDArray[np.float32]]:
    sections = np.repeat(np.array(config.factors["ssm_sections"], np.float32), config.sections)
    return [np.full(n_rows, config.factors["ssm_in"][0], np.float32), sections]


_SCALED: Mapping[str, Arrange] = {
    "token_embd.weight": _by("embeddings"),
    "output.weight": _by("output"),
    "blk.{layer}.attn_q.weight": _by("q"),
    "blk.{layer}.attn_k.weight": _by("k"),
    "blk.{layer}.attn_v.weight": _by("v"),
    "blk.{layer}.attn_output.weight": _by("o"),
    "blk.{layer}.ffn_gate.weight": _by("gate"),
    "blk.{layer}.ffn_down.weight": _by("down"),
    "blk.{layer}.ssm_in.weight": _scaled(_into_mamba),
    "blk.{layer}.ssm_out.weight": _by("ssm_out"),
}


def _with_factors(rule: Rule) -> Rule:
    (output,) = rule.outputs
    arranged = replace(output, arrange=_SCALED.get(output.name, output.arrange))
    is_norm = output.name == "blk.{layer}.ssm_norm.weight"
    where = (lambda config, options: config.mamba_layers * config.normed_mamba) if is_norm else rule.where
    return replace(rule, outputs=(arranged,), where=where)


_NAMES = (
    (re.compile(r"(^|model\.)final_layernorm\."), r"\1norm."),
    (re.compile(r"\.pre_ff_layernorm\."), ".post_attention_layernorm."),
    (re.compile(r"\.feed_forward\."), ".mlp."),
)
"""Names of Falcon-H1 -> those that most families have."""


def _usual_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = pattern.sub(replacement, name)
    return name


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> FalconH1Config:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    plain = read_decoder(family, metadata, shapes, path)
    return FalconH1Config(
        **vars(plain),
        **read_mamba_sizes(read_hparams(metadata, family.gguf_name, path)),
        mamba_layers=tuple(range(plain.num_hidden_layers)),
        beside_attention=True,
    )


_MAMBA = mamba_rules("model.layers.{layer}.mamba.")
_BY_NAME: Mapping[str, Key] = {key.name: key for key in (*COMMON, *mamba_keys(lambda c: True), VOCAB_SIZE)}
_IN_ORDER = (
    keys.CONTEXT_LENGTH, keys.EMBEDDING_LENGTH, keys.FEED_FORWARD_LENGTH, keys.HEAD_COUNT, keys.BLOCK_COUNT,
    keys.SSM_CONV_KERNEL, keys.SSM_INNER_SIZE, keys.SSM_STATE_SIZE, keys.SSM_TIME_STEP_RANK,
    keys.SSM_GROUP_COUNT, keys.LAYERNORM_RMS_EPS, keys.VOCAB_SIZE, keys.HEAD_COUNT_KV, keys.KEY_LENGTH,
    keys.VALUE_LENGTH, keys.ROPE_FREQ_BASE,
)  # fmt: skip
"""Keys in the order of llama.cpp's converter."""

_FALCON_H1 = decoder(
    "FalconH1ForCausalLM",
    gguf_name="falcon-h1",
    read_config=_read,
    rules=(
        *map(_with_factors, (*ends(), *attention(), *dense_blocks(), *_MAMBA)),
        # llama.cpp's name for this norm has no ending.
        in_layer(layers, "ffn_norm", "post_attention_layernorm.weight", "hidden_size"),
    ),
    metadata=tuple(_BY_NAME[name] for name in _IN_ORDER),
    canonical_name=_usual_name,
    forced_type=float32_kernels,
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_FALCON_H1,)
