"""The DeepSeek family: all of its parts together, what to know before running a model, and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from convert.architectures.base import Architecture
from convert.architectures.decoder.family import yarn_notes
from convert.architectures.decoder.rules import check_mtp
from convert.architectures.deepseek2.config import DEFAULTS, V2, V3, DeepseekConfig, Defaults
from convert.architectures.deepseek2.metadata import GGUF_NAME, METADATA, read_deepseek_file
from convert.architectures.deepseek2.rules import RULES, drops
from convert.architectures.options import LatentOptions
from convert.architectures.rules import Drop
from convert.tokenizer.files import Quirks


def notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    """Return a note for each way in which llama.cpp won't load this model or computes something else."""
    lite = _lite_note(config)
    return (*((lite,) if lite else ()), *common_notes(config, options))


def common_notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    """Return the notes that later families share, whose depth says nothing of their queries."""
    ramp = () if config.yarn is None else yarn_notes(config.yarn)
    return tuple(note for note in (
        _group_note(config), _norm_note(config), _yarn_note(config), *ramp, _eps_note(config),
    ) if note)  # fmt: skip


def _lite_note(config: DeepseekConfig) -> str | None:
    # llama.cpp knows "lite" models by their depth (load_arch_hparams of deepseek2), whatever the file says.
    n_layers = config.num_hidden_layers
    lite = n_layers in (26, 27) or (n_layers == 48 and config.vocab_size == 128256)
    if config.q_lora_rank is None and not lite:
        return (
            "llama.cpp loads a model without q_lora_rank only when it has 26 or 27 layers; this one has"
            f" {n_layers}"
        )
    if config.q_lora_rank is not None and lite:
        return (
            f"llama.cpp takes a model of {n_layers} layers for one without q_lora_rank and will not load this"
            " one, which has it"
        )
    return None


def _group_note(config: DeepseekConfig) -> str | None:
    if config.topk_method != "group_limited_greedy" or config.expert_groups in (None, (1, 1)):
        return None
    return (
        f"{config.n_group} groups of experts: llama.cpp scores a group by its two best experts, this model by"
        " the best one, so llama.cpp may choose other experts"
    )


def _norm_note(config: DeepseekConfig) -> str | None:
    if config.norm_requested == config.norm_topk_prob:
        return None
    return f"norm_topk_prob is true but {config.architecture} does not normalise expert weights; not written"


def _yarn_note(config: DeepseekConfig) -> str | None:
    # The deepseek2 graph scales the softmax by mscale_all_dim and rotated parts by 1, which fits mscale ==
    # mscale_all_dim and no explicit attention_factor.
    yarn = config.yarn
    if yarn is None or (yarn.mscale_all_dim and abs(yarn.rotary_factor - 1.0) < 1e-6):
        return None
    return (
        f"YaRN with mscale {yarn.mscale}, mscale_all_dim {yarn.mscale_all_dim}, attention_factor"
        f" {yarn.attention_factor}: llama.cpp takes mscale for equal to mscale_all_dim and will compute other"
        " attention scores"
    )


def _eps_note(config: DeepseekConfig) -> str | None:
    if config.rms_norm_eps == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: the original norms its compressed queries and keys with"
        " 1e-06, llama.cpp with this one"
    )


def resolve_options(
    config: DeepseekConfig, options: LatentOptions, names: Container[str] | None, *, keeps_mtp: bool = False
) -> LatentOptions:
    """Return `options` with mtp decided: by the user, else by family, if the checkpoint has the layer.

    names      of the checkpoint's weights; None where they aren't known, which counts as having them
    keeps_mtp  whether llama.cpp's converter keeps the layer
    """
    if options.mtp is not None or not config.num_nextn_predict_layers:
        return options
    norm = f"model.layers.{config.num_hidden_layers}.input_layernorm.weight"
    there = names is None or norm in names
    return replace(options, mtp=there and keeps_mtp)


ARCHITECTURE = Architecture(
    hf_names=(V2, V3),
    gguf_name=GGUF_NAME,
    options=LatentOptions,
    read_config=DeepseekConfig.from_dict,
    n_experts=lambda config: config.num_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=notes,
    check=check_mtp,
    resolve_options=resolve_options,
    # GigaChat3 alone of these cuts text as GPT-2 does; Kimi K2 and Moonlight have tiktoken.model.
    quirks=Quirks(pre_tokenizers={"gpt-2": "gigachat"}, tiktoken=True),
    reader=read_deepseek_file,
    says_norm=True,
)
FAMILIES = (ARCHITECTURE,)


def relative(
    *hf_names: str,
    defaults: Defaults | None = None,
    read: Callable[..., DeepseekConfig] = DeepseekConfig.from_dict,
    keeps_mtp: bool = False,
    is_vision: Callable[[str], bool] | None = None,
    **differences: Any,
) -> Architecture:
    """Return a family that is DeepSeek's but for what is named here.

    defaults     what holds where its config.json says nothing; None: as for V3
    read         reads config.json, as DeepseekConfig.from_dict does
    keeps_mtp    whether llama.cpp's converter keeps its MTP layers
    is_vision    name of a weight -> whether it is of a part that a file of the text part does not have
    differences  other fields of Architecture
    """
    defaults_of = dict.fromkeys(hf_names, defaults or DEFAULTS[V3])

    def read_config(raw: Mapping[str, Any], path: Path) -> DeepseekConfig:
        return read(raw, path, defaults_of)

    def drops_with_vision(config: DeepseekConfig, options: LatentOptions) -> tuple[Drop, ...]:
        assert is_vision is not None
        return (*drops(config, options), Drop(is_vision, "vision part; the file holds the text part"))

    return replace(
        ARCHITECTURE,
        hf_names=hf_names,
        read_config=read_config,
        resolve_options=partial(resolve_options, keeps_mtp=keeps_mtp),
        drops=drops if is_vision is None else drops_with_vision,
        **differences,
    )
