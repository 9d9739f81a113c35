"""The DeepSeek family: what to know before running a converted model, and all of its parts together."""

from __future__ import annotations

from convert.architectures.base import Architecture
from convert.architectures.deepseek2.config import GLM_LITE, V2, V3, YOUTU, DeepseekConfig
from convert.architectures.deepseek2.layer_ranges import resolve_options
from convert.architectures.deepseek2.metadata import GGUF_NAME, METADATA
from convert.architectures.deepseek2.rules import RULES, drops
from convert.architectures.options import LatentOptions
from convert.tokenizer.family_quirks import Quirks
from gguf_tools.errors import BadRequest


def notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    """Return a note for each way in which llama.cpp won't load this model or computes something else."""
    lite = _lite_note(config)
    return (*((lite,) if lite else ()), *common_notes(config, options))


def common_notes(config: DeepseekConfig, options: LatentOptions) -> tuple[str, ...]:
    """Return the notes that later families share, whose depth says nothing of their queries."""
    return tuple(note for note in (
        _group_note(config), _norm_note(config), _yarn_note(config), _beta_note(config), _eps_note(config),
        _gating_note(config),
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


def _beta_note(config: DeepseekConfig) -> str | None:
    # The loader reads the two keys for a few other architectures only (llama-model.cpp, load_hparams).
    yarn = config.yarn
    if yarn is None or (yarn.beta_fast, yarn.beta_slow) == (32.0, 1.0):
        return None
    fast = f" --yarn-beta-fast {yarn.beta_fast:g}" if yarn.beta_fast != 32.0 else ""
    slow = f" --yarn-beta-slow {yarn.beta_slow:g}" if yarn.beta_slow != 1.0 else ""
    return (
        f"YaRN with beta_fast {yarn.beta_fast:g} and beta_slow {yarn.beta_slow:g}: llama.cpp takes them for"
        f" 32 and 1 whatever the file says, which gives other logits; run it with{fast}{slow}"
    )


def _eps_note(config: DeepseekConfig) -> str | None:
    if config.rms_norm_eps == 1e-6:
        return None
    return (
        f"rms_norm_eps is {config.rms_norm_eps:g}: the original norms its compressed queries and keys with"
        " 1e-06, llama.cpp with this one"
    )


def _gating_note(config: DeepseekConfig) -> str | None:
    if config.architecture != GLM_LITE:
        return None
    return (
        f"expert_gating_func is written ({config.scoring_func}), which llama.cpp's converter leaves out: its"
        " files are read as softmax unless they have the size of GLM-4.7-Flash"
    )


def check(config: DeepseekConfig, options: LatentOptions) -> None:
    """Raise BadRequest when the options ask for what the model doesn't have."""
    if options.mtp and not config.num_nextn_predict_layers:
        raise BadRequest(
            "--mtp: config.json has no num_nextn_predict_layers, so there is no MTP layer to keep"
        )


ARCHITECTURE = Architecture(
    hf_names=(V2, V3, YOUTU),
    gguf_name=GGUF_NAME,
    options=LatentOptions,
    read_config=DeepseekConfig.from_dict,
    n_experts=lambda config: config.n_routed_experts,
    rules=RULES,
    drops=drops,
    metadata=METADATA,
    notes=notes,
    check=check,
    resolve_options=resolve_options,
    # GigaChat3 alone of these cuts text as GPT-2 does; Kimi K2 and Moonlight have tiktoken.model.
    quirks=Quirks(pre_tokenizers={"gpt-2": "gigachat"}, tiktoken=True),
)
