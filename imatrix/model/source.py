"""Where the forward pass gets its weights: a Hugging Face folder, or a GGUF file of any MLA layout.

Both are seen the same way: a configuration, and tensors under their GGUF names, unread.

    attention   a folder is taken as a conversion with plain attention, which has attn_kv_b. A GGUF file may
                have attn_kv_b, or attn_k_b and attn_v_b, as stacks of heads or as one matrix
    config      a GGUF file says less than config.json; what it leaves open is filled in as llama.cpp does,
                and a selection bias among the tensors means noaux_tc
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from convert.architectures.deepseek2.config import V2, V3, DeepseekConfig, Yarn
from convert.tokenizer.tokenizer import read_tokenizer
from gguf_tools import keys
from gguf_tools.errors import BadRequest, CheckpointError, FormatError, MissingTensor, UnsupportedCheckpoint
from gguf_tools.shards import open_gguf
from gguf_tools.values import Metadata
from quantize.fill.sources import GGUFTensor, SourceTensor

SOFTMAX, SIGMOID = 1, 2


@dataclass(frozen=True)
class ModelSource:
    """An open model: a context manager that closes its files.

    config   sizes and habits
    tensors  GGUF name -> tensor, unread
    vocab    gives the keys tokenizer.*, read when they are wanted
    paths    the files that hold weights, in reading order
    """

    path: Path
    config: DeepseekConfig
    tensors: Mapping[str, SourceTensor]
    vocab: Callable[[], Metadata]
    paths: tuple[Path, ...]
    opened: Closeable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.opened.close()

    def tensor(self, name: str) -> SourceTensor:
        """Return the tensor called `name`; MissingTensor if there is none."""
        try:
            return self.tensors[name]
        except KeyError:
            raise MissingTensor(f"{self.path}: no tensor {name}") from None


class Closeable(Protocol):
    def close(self) -> None: ...


def open_model(path: str | os.PathLike[str]) -> ModelSource:
    """Open a Hugging Face folder, or a GGUF file or split set.

    raises  CheckpointError, GGUFError for what can't be read; UnsupportedCheckpoint for another family
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    return _open_gguf(path)


def _open_folder(folder: Path) -> ModelSource:
    from convert.architectures import find_architecture
    from convert.architectures.base import build
    from convert.checkpoint.checkpoint import Checkpoint
    from convert.weights import open_weights

    checkpoint = Checkpoint(folder)
    try:
        architecture = find_architecture(checkpoint.config, checkpoint.config_path)
        conversion = build(architecture, open_weights(checkpoint), mla="none")
        if not isinstance(conversion.config, DeepseekConfig):
            raise UnsupportedCheckpoint(f"{folder}: {architecture.gguf_name}, expected deepseek2")
        return ModelSource(
            path=folder,
            config=conversion.config,
            tensors={tensor.name: tensor for tensor in conversion.tensors},
            vocab=lambda: read_tokenizer(folder, checkpoint.config).metadata(),
            paths=tuple(sorted({checkpoint.raw(name).path for name in checkpoint.names()})),
            opened=checkpoint,
        )
    except BaseException:
        checkpoint.close()
        raise


def _open_gguf(path: Path) -> ModelSource:
    file = open_gguf(path)
    try:
        architecture = file.get(keys.ARCHITECTURE)
        if architecture != "deepseek2":
            raise UnsupportedCheckpoint(
                f"{path}: general.architecture is {architecture!r}, expected 'deepseek2'"
            )
        tensors = {name: GGUFTensor(file, name) for name in file.tensors}
        config = config_of(path, _Keys(path, file.metadata), tensors)
        vocab = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        return ModelSource(path, config, tensors, lambda: vocab, tuple(file.paths), file)
    except BaseException:
        file.close()
        raise


class _Keys:
    """Typed access to the keys deepseek2.*; every error names the file and the key."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self._path, self._metadata = path, metadata

    def value(self, template: str) -> Any:
        value = self._metadata.get(template.format(arch="deepseek2"))
        return None if value is None else value.data

    def size(self, template: str, default: int | None = None) -> int:
        found = self.value(template)
        if isinstance(found, tuple):  # one number per layer
            found = next((n for n in found if n), None)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 2**31:
            raise FormatError(
                f"{self._path}: {template.format(arch='deepseek2')} is {found!r:.60}, expected a whole number"
            )
        return found

    def number(self, template: str, default: float) -> float:
        found = self.value(template)
        if found is None:
            return default
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise FormatError(
                f"{self._path}: {template.format(arch='deepseek2')} is {found!r:.60}, expected a number"
            )
        return float(found)


def config_of(path: Path, read: _Keys, tensors: Mapping[str, SourceTensor]) -> DeepseekConfig:
    """Return what the keys and tensors of a GGUF file say about the model."""
    n_mtp = read.size(keys.NEXTN_PREDICT_LAYERS, 0)
    n_layers = read.size(keys.BLOCK_COUNT) - n_mtp
    heads = read.size(keys.HEAD_COUNT)
    rope = read.size(keys.ROPE_DIMENSION_COUNT)
    qk_head = read.size(keys.KEY_LENGTH_MLA, 0) or read.size(keys.KEY_LENGTH)
    value_head = read.size(keys.VALUE_LENGTH_MLA, 0) or read.size(keys.VALUE_LENGTH)
    if min(n_layers, heads, rope, value_head) < 1 or qk_head <= rope:
        raise FormatError(
            f"{path}: {n_layers} layers, {heads} heads, {rope} of {qk_head} key columns rotated,"
            f" {value_head} value columns: expected a deepseek2 model"
        )
    # The file says how many groups there are, but not how a group is scored: V2 takes its best expert.
    is_v3 = any(name.endswith("exp_probs_b.bias") for name in tensors)
    groups = read.size(keys.EXPERT_GROUP_COUNT, 1) or 1
    used_groups = read.size(keys.EXPERT_GROUP_USED_COUNT, groups) or groups
    experts = read.size(keys.EXPERT_COUNT, 0)
    if experts % groups or used_groups > groups:
        raise FormatError(f"{path}: {experts} experts in {groups} groups of which {used_groups} are used")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise MissingTensor(f"{path}: no tensor token_embd.weight")
    gating = read.size(keys.EXPERT_GATING_FUNC, SOFTMAX) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedCheckpoint(
            f"{path}: {keys.EXPERT_GATING_FUNC.format(arch='deepseek2')} is {gating},"
            f" expected {SOFTMAX} (softmax) or {SIGMOID} (sigmoid)"
        )
    has_q_lora = any(name.endswith("attn_q_a.weight") for name in tensors)
    return DeepseekConfig(
        architecture=V3 if is_v3 else V2,
        vocab_size=embedding.shape[0],
        hidden_size=read.size(keys.EMBEDDING_LENGTH),
        intermediate_size=read.size(keys.FEED_FORWARD_LENGTH, 0),
        moe_intermediate_size=read.size(keys.EXPERT_FEED_FORWARD_LENGTH, 0),
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        q_lora_rank=read.size(keys.Q_LORA_RANK) if has_q_lora else None,
        kv_lora_rank=read.size(keys.KV_LORA_RANK),
        qk_nope_head_dim=qk_head - rope,
        qk_rope_head_dim=rope,
        v_head_dim=value_head,
        n_routed_experts=experts,
        n_shared_experts=read.size(keys.EXPERT_SHARED_COUNT, 0),
        num_experts_per_tok=read.size(keys.EXPERT_USED_COUNT, 0),
        first_k_dense_replace=read.size(keys.LEADING_DENSE_BLOCK_COUNT, 0),
        n_group=groups,
        topk_group=used_groups,
        topk_method="noaux_tc" if is_v3 else "group_limited_greedy",
        scoring_func="sigmoid" if gating == SIGMOID else "softmax",
        norm_topk_prob=bool(read.value(keys.EXPERT_WEIGHTS_NORM)),
        norm_requested=bool(read.value(keys.EXPERT_WEIGHTS_NORM)),
        # llama.cpp takes 0 for "no scaling" too.
        routed_scaling_factor=read.number(keys.EXPERT_WEIGHTS_SCALE, 1.0) or 1.0,
        rms_norm_eps=read.number(keys.LAYERNORM_RMS_EPS, 1e-6),
        max_position_embeddings=read.size(keys.CONTEXT_LENGTH, 0),
        rope_theta=read.number(keys.ROPE_FREQ_BASE, 10000.0),
        yarn=_yarn(path, read),
        tie_word_embeddings="output.weight" not in tensors,
        num_nextn_predict_layers=n_mtp,
    )


def _yarn(path: Path, read: _Keys) -> Yarn | None:
    kind = read.value(keys.ROPE_SCALING_TYPE)
    if kind in (None, "none"):
        return None
    if kind != "yarn":
        raise UnsupportedCheckpoint(f"{path}: RoPE scaled by {kind!r:.40}, expected 'yarn' or none")
    # The key holds a tenth of mscale_all_dim, and mscale has none: it is taken for the same.
    tenth = read.value(keys.ROPE_SCALING_YARN_LOG_MUL)
    mscale = None if tenth is None else 10 * read.number(keys.ROPE_SCALING_YARN_LOG_MUL, 0)
    attention = read.value("{arch}.rope.scaling.yarn_attn_factor")
    context = read.size(keys.CONTEXT_LENGTH, 4096)
    yarn = Yarn(
        factor=read.number(keys.ROPE_SCALING_FACTOR, 1.0),
        original_context=read.size(keys.ROPE_SCALING_ORIG_CTX_LEN, context) or context,
        beta_fast=read.number(keys.ROPE_SCALING_YARN_BETA_FAST, 32.0),
        beta_slow=read.number(keys.ROPE_SCALING_YARN_BETA_SLOW, 1.0),
        mscale=mscale,
        mscale_all_dim=mscale,
        attention_factor=None if attention is None else float(attention),
    )
    if min(yarn.factor, yarn.original_context, yarn.beta_fast, yarn.beta_slow) <= 0:
        raise BadRequest(f"{path}: YaRN with a factor, context or beta that is not positive")
    return yarn
