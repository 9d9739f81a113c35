"""Gemma 3n: four streams of hidden states, of which a layer computes with one and corrects all (AltUp).

Beside attention there is a low-rank matrix (LAuReL). Blocks of the first layers let through only
the largest products of their gate. Many sizes are constants in llama.cpp, and no key states them.

Facts of transformers' modeling_gemma3n.py, llama.cpp's converter (Gemma3NModel) and src/models/gemma3n.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from convert.architectures.base import Architecture, Key
from convert.architectures.config_reader import ConfigReader, merged
from convert.architectures.decoder.config import (
    decoder_fields,
    layers_of_kind,
    refuse_factor,
    refuse_no_window,
    rotations_by_kind,
    with_defaults,
)
from convert.architectures.decoder.family import WINDOWS, decoder, decoder_notes
from convert.architectures.decoder.metadata import (
    COMMON,
    SLIDING_PATTERN,
    SLIDING_THETA,
    SLIDING_WINDOW,
    changed,
    inserted,
    read_decoder,
    read_theta,
    read_window,
    refuse_sizes_in_windows,
    sliding_layers,
)
from convert.architectures.decoder.rules import dense_blocks, ends, in_layer, layers, once
from convert.architectures.gemma.gemma3 import QUIRKS, vision_drops
from convert.architectures.gemma.small import (
    EMBEDDING_PER_LAYER,
    SHARED_LAYERS,
    SmallGemmaConfig,
    layer_embeddings,
    no_keys,
    norms,
    own_keys,
    read_shared_layers,
)
from convert.architectures.rules import Computed, Output, Renamed, Rule, stacked
from convert.weights.base import Weight, rows_and_cols
from gguf_tools.format import keys
from gguf_tools.format.ggml_types import F32
from gguf_tools.format.hparams import read_hparams
from gguf_tools.format.loaders import WINDOW_PERIODS
from gguf_tools.format.values import Metadata, Value
from quantize.fill.sources import FLOAT_DTYPES

STREAMS, RANK, EMBEDDING, OWN_KEYS, SPARSE, CAP = 4, 64, 256, 20, 10, 30.0
"""Constants of llama.cpp: streams, rank of LAuReL, columns of a layer's embedding, layers that have keys of
their own, layers with sparse blocks, and the bound of logits."""
DEVIATIONS = 1.6448533535003662
"""Standard deviations above the mean from which a sparse gate lets numbers through, the largest 5 %."""
_WRITTEN = 1.6448535919189453
"""The same as the converter's torch computes it, for a key that llama.cpp doesn't read."""
_SHARE = 0.95
_WHY = "llama.cpp's gemma3n has no other"


@dataclass(frozen=True)
class Gemma3nConfig(SmallGemmaConfig):
    """Configuration of a model; names as in config.json.

    vocab_size_per_layer_input  rows of the table of layers' embeddings; further tokens have zeros there
    """

    vocab_size_per_layer_input: int = 0

    @property
    def streams(self) -> int:
        """Streams of hidden states."""
        return STREAMS

    @property
    def added_streams(self) -> int:
        """Streams that are made of the first."""
        return STREAMS - 1

    @property
    def stream_pairs(self) -> int:
        """Coefficients by which a layer predicts each stream by all."""
        return STREAMS**2

    @property
    def laurel_rank(self) -> int:
        """Rank of LAuReL."""
        return RANK


def read_config(raw: Mapping[str, Any], path: str | Path) -> Gemma3nConfig:
    """Return the configuration of a Gemma 3n."""
    local = ConfigReader(raw, path).number("rope_local_base_freq", 10000.0)
    theta, raw = rotations_by_kind(raw, path, 1e6, local)
    read = with_defaults(raw, path, states_sizes=False)
    for key, value in (
        ("attention_bias", False), ("hidden_activation", "gelu_pytorch_tanh"), ("altup_active_idx", 0),
        ("altup_num_inputs", STREAMS), ("altup_correct_scale", True), ("laurel_rank", RANK),
        ("hidden_size_per_layer_input", EMBEDDING), ("final_logit_softcapping", CAP),
    ):  # fmt: skip
        read.fixed(key, value, _WHY)
    n_layers = read.size("num_hidden_layers")
    fields = decoder_fields(_with_one_width(read, n_layers))
    refuse_factor(fields["rope"], path, "gemma3n")
    windows = layers_of_kind(read, n_layers, lambda layer: (layer + 1) % 5 > 0)
    refuse_no_window(read, windows)
    n_shared = read_shared_layers(read, windows, n_layers, "gemma3n")
    why = f"llama.cpp's gemma3n gives {OWN_KEYS} layers keys"
    read.fixed("num_kv_shared_layers", max(0, n_layers - OWN_KEYS), why)
    _check_sparsity(read, n_layers)
    return Gemma3nConfig(
        **fields,
        qk_norm=True,
        sliding_window=read.size("sliding_window"),
        sliding_layers=windows,
        sliding_theta=theta,
        attention_scale=1.0,
        final_logit_softcapping=CAP,
        num_kv_shared_layers=n_shared,
        hidden_size_per_layer_input=EMBEDDING,
        vocab_size_per_layer_input=read.size("vocab_size_per_layer_input", most=fields["vocab_size"]),
    )


def _with_one_width(read: ConfigReader, n_layers: int) -> ConfigReader:
    """Return a reader in which intermediate_size is a number; it may be a list of equal ones."""
    widths = read.raw.get("intermediate_size")
    if not isinstance(widths, list):
        return read
    if not widths or widths != widths[:1] * n_layers:
        raise read.bad("intermediate_size", f"one number for all {n_layers} layers, as llama.cpp has it")
    return with_defaults(merged(read.raw, {"intermediate_size": widths[0]}), read.path, states_sizes=False)


def _check_sparsity(read: ConfigReader, n_layers: int) -> None:
    """Raise UnsupportedCheckpoint unless the blocks of the first layers are sparse, those of others dense."""
    key, why = "activation_sparsity_pattern", f"llama.cpp's gemma3n has {SPARSE} sparse layers"
    expected = [_SHARE] * min(SPARSE, n_layers) + [0.0] * (n_layers - SPARSE)
    read.fixed(key, expected, why)
    if read.raw.get(key) is None and n_layers <= SPARSE:
        raise read.bad(key, f"{_SHARE} for each of the {n_layers} layers: {why}")


@dataclass(frozen=True)
class _Padded(Renamed):
    """A weight with rows of zeros behind its own."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        n_rows, n_cols = rows_and_cols(self.weight.shape)
        own = super().read_rows(min(start, n_rows), min(stop, n_rows))
        zeros = np.zeros((stop - start - len(own), n_cols), own.dtype)
        return np.concatenate((own, zeros))


def _padded(name: str, weights: Sequence[Weight], config: Gemma3nConfig) -> _Padded:
    """Return a table of tokens' rows with a row for each token, also for those of images and sound."""
    (weight,) = weights
    type_ = weight.type if weight.type in FLOAT_DTYPES else F32
    return _Padded(name, (config.vocab_size, weight.shape[1]), type_, weight)


def _zeros(shape: str) -> Any:
    def arrange(name: str, weights: Sequence[Weight], config: Gemma3nConfig) -> Computed:
        """Return zeros, which take no memory as long as nobody writes them."""
        sizes = [getattr(config, size) for size in shape.split()]
        return Computed(name, np.zeros(sizes, np.float32))

    return arrange


def _attention() -> Iterator[Rule]:
    """Yield the rules of attention. llama.cpp asks for keys and values where it doesn't use them, too.

    transformers saves none there: those are zeros.
    """
    yield in_layer(layers, "attn_q.weight", "self_attn.q_proj.weight", "q_rows hidden_size")
    for name, source, shape in (
        ("attn_k", "k_proj", "kv_rows hidden_size"),
        ("attn_v", "v_proj", "kv_rows hidden_size"),
        ("attn_k_norm", "k_norm", "head_dim"),
    ):
        rule = in_layer(own_keys, f"{name}.weight", f"self_attn.{source}.weight", shape)
        yield rule
        yield replace(rule, where=no_keys, optional=True)
        (output,) = rule.outputs
        zeros = replace(output, source="", sizes="", arrange=_zeros(shape))
        yield Rule(no_keys, (zeros,), unless=(output.source,))
    yield in_layer(layers, "attn_output.weight", "self_attn.o_proj.weight", "hidden_size q_rows")
    yield in_layer(layers, "attn_q_norm.weight", "self_attn.q_norm.weight", "head_dim")


_LAUREL = (
    in_layer(layers, "laurel_l.weight", "laurel.linear_left.weight", "laurel_rank hidden_size"),
    in_layer(layers, "laurel_r.weight", "laurel.linear_right.weight", "hidden_size laurel_rank"),
)

_ALTUP = (
    *(
        Rule(once, (Output(f"{name}.weight", f"model.{source}.{{part}}.weight", "hidden_size hidden_size",
                           stacked, "added_streams"),))
        for name, source in (
            ("altup_proj", "altup_projections"), ("altup_unembd_proj", "altup_unembed_projections"),
        )
    ),
    in_layer(layers, "altup_correct_coef.weight", "altup.correction_coefs.weight", "streams streams"),
    in_layer(layers, "altup_correct_scale.weight", "altup.correct_output_scale", "hidden_size"),
    in_layer(layers, "altup_predict_coef.weight", "altup.prediction_coefs.weight", "stream_pairs streams"),
    in_layer(layers, "altup_router.weight", "altup.modality_router.weight", "streams hidden_size"),
)  # fmt: skip


def _read_file(
    family: Architecture, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], path: str | Path
) -> Gemma3nConfig:
    """Read the configuration out of the keys and tensors of a GGUF file; see `read_decoder`."""
    plain = read_decoder(family, metadata, shapes, path)
    hparams = read_hparams(metadata, family.gguf_name, path)
    refuse_sizes_in_windows(hparams)
    n_layers = plain.num_hidden_layers
    fields = vars(plain) | {
        "sliding_window": read_window(hparams, 0),
        "sliding_layers": sliding_layers(hparams, n_layers, WINDOW_PERIODS[family.gguf_name]),
        "sliding_theta": read_theta(hparams, "rope_freq_base_swa", 10000.0),
        "attention_scale": 1.0, "final_logit_softcapping": CAP,
    }  # fmt: skip
    return Gemma3nConfig(
        **fields,
        num_kv_shared_layers=max(0, n_layers - OWN_KEYS),
        hidden_size_per_layer_input=EMBEDDING,
        vocab_size_per_layer_input=plain.vocab_size,
    )


def _notes(config: Gemma3nConfig, options: Any) -> tuple[str, ...]:
    n_rows, n_tokens = config.vocab_size_per_layer_input, config.vocab_size
    shared = decoder_notes(config, frozenset({WINDOWS}))
    if n_rows == n_tokens:
        return shared
    return (
        *shared,
        f"vocab_size_per_layer_input is {n_rows}: the other {n_tokens - n_rows} tokens, of images and sound,"
        " have zeros in the file; the original gives them the row of token 0",
    )


_GEMMA3N = decoder(
    "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration",
    gguf_name="gemma3n",
    read_config=read_config,
    rules=(
        *ends(),
        *_attention(),
        *norms({
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "altup_router_norm": "altup.router_norm",
            "laurel_post_norm": "laurel.post_laurel_norm",
        }),
        *dense_blocks(),
        *_LAUREL,
        *_ALTUP,
        *layer_embeddings("vocab_size_per_layer_input all_layers_input", _padded),
    ),
    metadata=(
        *changed(
            inserted(COMMON, SLIDING_THETA, after=keys.ROPE_FREQ_BASE),
            Key(keys.FEED_FORWARD_LENGTH, Value.i32s, lambda c, o: [c.intermediate_size] * len(layers(c, o))),
        ),
        Key(keys.FINAL_LOGIT_SOFTCAPPING, Value.f32, lambda c, o: c.final_logit_softcapping),
        SLIDING_WINDOW,
        Key(keys.ALTUP_ACTIVE_IDX, Value.u32, lambda c, o: 0),
        Key(keys.ALTUP_NUM_INPUTS, Value.u32, lambda c, o: c.streams),
        EMBEDDING_PER_LAYER,
        SHARED_LAYERS,
        Key(keys.ACTIVATION_SPARSITY_SCALE, Value.f32s, lambda c, o: [
            _WRITTEN if layer < SPARSE else -np.inf for layer in layers(c, o)
        ]),
        SLIDING_PATTERN,
    ),
    drops=vision_drops,
    notes=_notes,
    quirks=QUIRKS,
    reader=_read_file,
)  # fmt: skip

FAMILIES = (_GEMMA3N,)
