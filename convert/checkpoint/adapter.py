"""An adapter of PEFT, which is merged into the weights of a folder while they are read.

An adapter is a folder with two files. adapter_model.safetensors has what is added to a model's weights, and
adapter_config.json says what it means. Every field of the latter is in one of the tables below. A field that
is in none of them is refused where it says something, because it may change the result.

    read         ranks, factors, and what the tensors' names and shapes leave open
    shown        by the tensors: which modules have an adapter, which are stored anew, which have biases
    of training  no weight depends on it
    refused      what is learned is more than a product that is added to a matrix

`convert.weights.merged` has the formulas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint.adapted_folder import CONFIG_NAME
from convert.checkpoint.safetensors_file import RawTensor, SafetensorsFile
from convert.checkpoint.streamed import Kept
from gguf_tools.errors import BadConfig, CheckpointError, UnsupportedCheckpoint
from gguf_tools.expressions import Expression, parse_expression
from gguf_tools.files.inputs import InputFile, InputWatch
from gguf_tools.hub.names import folder_name
from gguf_tools.text import quoted, shown

READ = """
    peft_type peft_version base_model_name_or_path r lora_alpha rank_pattern alpha_pattern use_rslora use_dora
    init_lora_weights fan_in_fan_out target_parameters trainable_token_indices
"""
SHOWN_BY_TENSORS = """
    target_modules exclude_modules modules_to_save layers_to_transform layers_pattern bias lora_bias
"""
OF_TRAINING = """
    task_type inference_mode auto_mapping revision lora_dropout megatron_config megatron_core loftq_config
    eva_config corda_config lora_ga_config runtime_config qalora_group_size
"""
KNOWN = frozenset(" ".join((READ, SHOWN_BY_TENSORS, OF_TRAINING)).split())
REFUSED = """
    alora_invocation_tokens arrow_config ensure_weight_tying kasa_config layer_replication monteclora_config
    use_bdlora use_qalora velora_config
"""
"""The fields of LoraConfig in PEFT 0.21."""

_LEAVES_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights with which training begins at the base as it is."""

MERGE = "merge it into the base with PEFT (merge_and_unload), and convert the result"

HEAD = "lm_head.weight"
_HEAD = ".lm_head."
_EMBEDDINGS, _HEADS = (
    tuple(f".{module}.{inner}weight" for inner in ("", "base_layer.", "modules_to_save."))
    for module in ("embed_tokens", "lm_head")
)
"""Ends of the names of matrices that are stored anew."""

_KEPT_BYTES = 128 << 20
"""Bytes of factors that stay in memory, decoded; a larger one is kept alone."""

_STRIP_BYTES = 1 << 22


@dataclass(frozen=True)
class _Input(InputFile):
    """The weights of an adapter, which are recognised by what the adapter is as well.

    identity  of the adapter
    """

    identity: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.name} of {self.identity}"


@dataclass(frozen=True)
class Adapter:
    """An open adapter.

    folder  where it is
    config  adapter_config.json
    file    its weights
    scale   factor of all that is added to weights
    raises  BadConfig, UnsupportedCheckpoint naming the field, for what is not LoRA or is not known
    """

    folder: Path
    config: Mapping[str, Any]
    file: SafetensorsFile
    scale: float
    _kept: Kept = field(default_factory=lambda: Kept(_KEPT_BYTES), repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = self.config.get("peft_type")
        if kind != "LORA":
            raise UnsupportedCheckpoint(f"{self._where('peft_type')}, expected 'LORA'; {MERGE}")
        for key, value in self.config.items():
            if key not in KNOWN and value not in (None, False, "", [], {}):
                why = "is not read" if key in REFUSED.split() else "is not known, and may change the result"
                raise UnsupportedCheckpoint(f"{self._where(key)}, which {why}; {MERGE}")
        if self.config.get("init_lora_weights") not in _LEAVES_THE_BASE:
            raise UnsupportedCheckpoint(
                f"{self._where('init_lora_weights')}: training has changed the base, too; save the adapter"
                " with path_initial_model_for_weight_conversion, which makes an ordinary one of it"
            )
        for raw in self.file.tensors.values():
            if raw.dtype not in ("F32", "F16", "BF16", "F64"):
                raise UnsupportedCheckpoint(
                    f"{raw.path}: {shown(raw.name)}: stored as {raw.dtype}, expected F32, F16 or BF16; save"
                    " the adapter in a float type"
                )

    def _where(self, key: str) -> str:
        return f"{self.folder / CONFIG_NAME}: {shown(key)} is {quoted(self.config.get(key))}"

    @property
    def base(self) -> str:
        """Name of the base that the adapter was trained on, "" where it names none."""
        base = self.config.get("base_model_name_or_path")
        return base.rstrip("/") if isinstance(base, str) else ""

    @property
    def alpha(self) -> float:
        """The factor for modules for which no pattern has another one."""
        return self._checked("lora_alpha", self.config.get("lora_alpha"))

    @property
    def is_before_swap(self) -> bool:
        """Whether a PEFT before 0.19 has saved it, for which rows of a stack are inputs in every model."""
        numbers = str(self.config.get("peft_version") or "0").split(".")
        return [int(number) if number.isdecimal() else 0 for number in numbers[:2]] < [0, 19]

    def factor(self, module: str, rank: int, key: str) -> float:
        """Return the factor of B A for a module: alpha over its rank, or over the root of that.

        key     of the tensor that shows `rank`, for messages
        raises  CheckpointError for another rank than the configuration has for the module
        """
        expected = self._number("r", "rank_pattern", module)
        alpha = self._number("lora_alpha", "alpha_pattern", module)
        if rank != expected:
            raise CheckpointError(
                f"{self.file.path}: {key}: rank {rank}, expected {expected:g} from {CONFIG_NAME} (r,"
                " rank_pattern)"
            )
        return self.scale * alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _number(self, key: str, patterns: str, module: str) -> float:
        """Return a number of the configuration for a module, for which a pattern may have another one."""
        table = self.config.get(patterns) or {}
        if not isinstance(table, dict):
            raise BadConfig(f"{self._where(patterns)}, expected an object")
        value = self.config.get(key)
        for pattern, own in table.items():
            if _pattern(pattern, f"{self.folder / CONFIG_NAME}: {patterns}: ").matches(module):
                key, value = f"{patterns}.{pattern}", own
                break
        return self._checked(key, value)

    def _checked(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadConfig(
                f"{self.folder / CONFIG_NAME}: {key} is {quoted(value)}, expected a number above 0"
            )
        return value

    def parameters(self, module: str) -> list[str]:
        """Return the names of the parameters of a module that the configuration names, with the module's."""
        targets = self.config.get("target_parameters") or []
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise BadConfig(f"{self._where('target_parameters')}, expected a list of names")
        split = (target.rpartition(".") for target in targets)
        return [
            f"{module}.{name}" for head, _, name in split if f".{module}".endswith(f".{head}" if head else "")
        ]

    def tokens(self, module: str, n_tokens: int) -> tuple[int, ...]:
        """Return the tokens whose rows of a module's matrix of `n_tokens` rows the adapter has."""
        stated = self.config.get("trainable_token_indices")
        if isinstance(stated, dict):
            stated = next((own for name, own in stated.items() if f".{module}".endswith(f".{name}")), None)
        if not isinstance(stated, list) or not all(type(n) is int and 0 <= n < n_tokens for n in stated):
            raise BadConfig(
                f"{self._where('trainable_token_indices')}, expected numbers below {n_tokens} for {module}"
            )
        return tuple(stated)

    def array(self, raw: RawTensor) -> np.ndarray:
        """Return a factor as float32, in its shape; it stays in memory for a while."""
        return self._kept.get(raw.offset, lambda: np.ascontiguousarray(raw.read(), np.float32))

    @property
    def input(self) -> InputFile:
        """The file of its weights, as an input of a run."""
        return _Input(self.file.path, self.file.places(), self.file.fileno(), self.identity)

    @cached_property
    def identity(self) -> str:
        """Name, digest and scale in one line."""
        weights = InputFile(self.file.path, self.file.places(), self.file.fileno())
        ((_, digest),) = InputWatch([weights]).recognised_by()
        config = json.dumps(self.config, sort_keys=True)
        both = blake2b(f"{config} {digest}".encode(), digest_size=8).hexdigest()
        return f"{folder_name(self.folder)} ({both}), scale {self.scale:g}"

    @cached_property
    def repeats_embeddings(self) -> bool:
        """Whether the output matrix that it stores is the embeddings once more, as a tied model has it."""
        head, embeddings = self._ending(_HEADS), self._ending(_EMBEDDINGS)
        if head is None or embeddings is None:
            return False
        if (head.dtype, head.shape) != (embeddings.dtype, embeddings.shape):
            return False
        step = max(1, _STRIP_BYTES // max(1, head.n_cols))
        starts = range(0, head.n_rows, step)
        ends = (min(start + step, head.n_rows) for start in starts)
        return all(
            head.read_rows(start, end).tobytes() == embeddings.read_rows(start, end).tobytes()
            for start, end in zip(starts, ends, strict=True)
        )

    def changed(self, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return config.json for the merged model: how many tokens it has, and whether it ties its output.

        names  of the tensors of the base
        """
        embeddings = self._ending(_EMBEDDINGS)
        changed = {} if embeddings is None else {"vocab_size": embeddings.shape[0]}
        has_own = any(_HEAD in f".{name}" for name in self.file.tensors)
        is_stored = any(name.endswith(HEAD) for name in names)
        if has_own and (is_stored or not self.repeats_embeddings):
            changed["tie_word_embeddings"] = False
        return {**config, **changed}

    def _ending(self, endings: tuple[str, ...]) -> RawTensor | None:
        """Return the stored tensor whose name has one of the endings, None if there is none."""
        return next((raw for name, raw in self.file.tensors.items() if f".{name}".endswith(endings)), None)


@cache
def _pattern(text: str, place: str) -> Expression:
    """Read a key of rank_pattern or alpha_pattern: the end of a module's name, after a dot or all of it."""
    return parse_expression(rf"^(.*\.)?({text})$", place=place, error=BadConfig)
