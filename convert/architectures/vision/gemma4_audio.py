"""The audio tower of the small Gemma 4: a conformer behind two convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.config_reader import ConfigReader
from convert.architectures.decoder.rules import layers_if, once, one
from convert.architectures.delta_net.arrange import squeezed
from convert.architectures.rules import Mapped, OutputTensor, Rule
from convert.architectures.vision.config import AudioConfig, audio_fields
from convert.architectures.vision.tower import clipped
from convert.weights.base import Weight
from gguf_tools.format.ggml_types import F32

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "conv_kernel_size": 5,
    "subsampling_conv_channels": [128, 32], "output_proj_dims": 1536,
}  # fmt: skip

_CHANNELS = range(4, 2**20)


@dataclass(frozen=True)
class Gemma4AudioConfig(AudioConfig):
    """Configuration of the audio tower of a Gemma 4.

    outer, inner      channels that the first and the second convolution make
    output_dim        columns of what the tower gives to the projection
    conv_kernel_size  positions that a convolution inside a layer sees
    """

    outer: int
    inner: int
    output_dim: int
    conv_kernel_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> int:
        """Rows of values and gates side by side."""
        return 2 * self.hidden_size

    @property
    def convolved(self) -> int:
        """Columns of what the convolutions make: each halves the bands, which are as many as `outer`."""
        return self.outer // 4 * self.inner

    @property
    def one(self) -> int:
        return 1

    @property
    def kernel(self) -> int:
        """Rows and columns of a kernel of the convolutions before the layers."""
        return 3


def read_audio_config(
    raw: Mapping[str, Any], path: str | Path, projection_dim: int
) -> Gemma4AudioConfig | None:
    """Read the configuration of the audio tower; None for a model without."""
    stated = raw.get("audio_config")
    if not stated:
        return None
    if not isinstance(stated, dict):
        raise ConfigReader(raw, path).bad("audio_config", "an object, or null for a model without")
    read = ConfigReader({**_DEFAULTS, **stated}, path, "audio_config.")
    channels = read.raw["subsampling_conv_channels"]
    if not isinstance(channels, list) or len(channels) != 2 or not all(n in _CHANNELS for n in channels):
        raise read.bad("subsampling_conv_channels", "two whole numbers of 4 and more")
    fields = audio_fields(read, projection_dim)
    return Gemma4AudioConfig(
        **fields,
        intermediate_size=4 * fields["hidden_size"],
        outer=channels[0],
        inner=channels[1],
        output_dim=read.size("output_proj_dims"),
        conv_kernel_size=read.size("conv_kernel_size"),
    )


_once = layers_if("audio", once)


def _layers(config: Any, options: Any) -> Iterable[int]:
    return range(config.audio.num_hidden_layers) if config.audio else ()


def _softplus(numbers: np.ndarray) -> np.ndarray:
    """Compute ln(1 + e^x), rounded once; beyond 20 it is x, as torch has it."""
    exact = numbers.astype(np.float64)
    return np.where(exact > 20, exact, np.log1p(np.exp(np.minimum(exact, 20)))).astype(np.float32)


def _scale(name: str, weights: Sequence[Weight], config: Any) -> OutputTensor:
    """Make the factors of a head's columns of their logarithmic form."""
    (weight,) = weights
    return Mapped(name, weight.shape, F32, weight, _softplus)


_BLOCK, _FROM_BLOCK = "a.blk.{layer}", "audio_tower.layers.{layer}"
_SQUARE = "audio.hidden_size audio.hidden_size"
_MATRICES = (
    ("ffn_up", "feed_forward1.ffw_layer_1", "audio.intermediate_size audio.hidden_size"),
    ("ffn_down", "feed_forward1.ffw_layer_2", "audio.hidden_size audio.intermediate_size"),
    ("attn_q", "self_attn.q_proj", _SQUARE),
    ("attn_k", "self_attn.k_proj", _SQUARE),
    ("attn_v", "self_attn.v_proj", _SQUARE),
    ("attn_out", "self_attn.post", _SQUARE),
    ("conv_pw1", "lconv1d.linear_start", "audio.gated audio.hidden_size"),
    ("conv_pw2", "lconv1d.linear_end", _SQUARE),
    ("ffn_up_1", "feed_forward2.ffw_layer_1", "audio.intermediate_size audio.hidden_size"),
    ("ffn_down_1", "feed_forward2.ffw_layer_2", "audio.hidden_size audio.intermediate_size"),
)
_NORMS = (
    ("ffn_norm", "feed_forward1.pre_layer_norm"),
    ("ffn_post_norm", "feed_forward1.post_layer_norm"),
    ("attn_pre_norm", "norm_pre_attn"),
    ("attn_post_norm", "norm_post_attn"),
    ("conv_norm", "lconv1d.pre_layer_norm"),
    ("norm_conv", "lconv1d.conv_norm"),
    ("ffn_norm_1", "feed_forward2.pre_layer_norm"),
    ("ffn_post_norm_1", "feed_forward2.post_layer_norm"),
    ("ln2", "norm_out"),
)


def _layer_rules() -> Iterator[Rule]:
    for name, source, sizes in _MATRICES:
        yield from clipped(_layers, f"{_BLOCK}.{name}", f"{_FROM_BLOCK}.{source}", sizes)
    for name, source in _NORMS:
        yield one(_layers, f"{_BLOCK}.{name}.weight", f"{_FROM_BLOCK}.{source}.weight", "audio.hidden_size")
    yield one(_layers, f"{_BLOCK}.attn_k_rel.weight", f"{_FROM_BLOCK}.self_attn.relative_k_proj.weight",
              _SQUARE)  # fmt: skip
    yield one(_layers, f"{_BLOCK}.per_dim_scale.weight", f"{_FROM_BLOCK}.self_attn.per_dim_scale",
              "audio.head_dim", _scale)  # fmt: skip
    yield one(_layers, f"{_BLOCK}.conv_dw.weight", f"{_FROM_BLOCK}.lconv1d.depthwise_conv1d.weight",
              "audio.hidden_size audio.one audio.conv_kernel_size", squeezed)  # fmt: skip


_SUBSAMPLE = "audio_tower.subsample_conv_projection"

AUDIO_RULES: tuple[Rule, ...] = (
    one(_once, "a.conv1d.0.weight", f"{_SUBSAMPLE}.layer0.conv.weight",
        "audio.outer audio.one audio.kernel audio.kernel"),
    one(_once, "a.conv1d.0.norm.weight", f"{_SUBSAMPLE}.layer0.norm.weight", "audio.outer"),
    one(_once, "a.conv1d.1.weight", f"{_SUBSAMPLE}.layer1.conv.weight",
        "audio.inner audio.outer audio.kernel audio.kernel"),
    one(_once, "a.conv1d.1.norm.weight", f"{_SUBSAMPLE}.layer1.norm.weight", "audio.inner"),
    one(_once, "a.input_projection.weight", f"{_SUBSAMPLE}.input_proj_linear.weight",
        "audio.hidden_size audio.convolved"),
    *_layer_rules(),
    one(_once, "a.pre_encode.out.weight", "audio_tower.output_proj.weight",
        "audio.output_dim audio.hidden_size"),
    one(_once, "a.pre_encode.out.bias", "audio_tower.output_proj.bias", "audio.output_dim"),
    one(_once, "mm.a.input_projection.weight", "embed_audio.embedding_projection.weight",
        "audio.projection_dim audio.output_dim"),
)  # fmt: skip
