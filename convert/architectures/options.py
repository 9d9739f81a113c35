"""How a family declares what the user may choose, and how the choices reach it.

A family's options are a frozen dataclass:

    @dataclass(frozen=True)
    class MTPOptions:
        mtp: Annotated[bool | None, "keep the multi-token-prediction layers, or leave them out"] = None

The command line makes a flag of each field, --mtp, and describes it in --help with the field's annotation. A
choice that the family of the checkpoint has not declared is refused. --help imports this module and no
family's, so the dataclasses are here: DECLARED.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from gguf_tools.errors import BadRequest
from quantize.roles import LAYOUTS, MLALayout


@dataclass(frozen=True)
class NoOptions:
    """Nothing to choose."""


@dataclass(frozen=True)
class MTPOptions:
    """Choices about a model with layers for multi-token prediction.

    mtp  keep these layers; None: if the checkpoint has them
    """

    mtp: Annotated[bool | None, "keep the multi-token-prediction layers, or leave them out"] = None


_MTP_HELP = (
    "keep the multi-token-prediction layers; without a word, as convert_hf_to_gguf.py: kept for GLM and for"
    " DeepSeek V3.2 (its own --mtp writes these layers alone, to a file of their own)"
)


@dataclass(frozen=True)
class LatentOptions:
    """Choices about a model with DeepSeek's latent attention.

    mla  "split"  attn_k_b and attn_v_b, a matrix per head: what llama.cpp wants
         "both"   attn_kv_b as well, all three as one matrix: what ik_llama.cpp wants
         "none"   only attn_kv_b: plain attention, with its large cache
    mtp  keep the multi-token-prediction layers; None: as llama.cpp's converter does for the model
    """

    mla: Annotated[MLALayout, "layout of attention (default: split)"] = "split"
    mtp: Annotated[bool | None, _MTP_HELP] = None

    def __post_init__(self) -> None:
        if self.mla not in LAYOUTS:
            raise BadRequest(f"MLA layout {self.mla!r}, expected {', '.join(LAYOUTS)}")


@dataclass(frozen=True)
class EmbeddingOptions:
    """Choices about a model for embeddings.

    sentence_transformers_dense_modules  keep the matrices of Dense modules
    """

    sentence_transformers_dense_modules: Annotated[
        bool, "keep the matrices that modules.json has behind the pooling, 2_Dense and 3_Dense"
    ] = False


DENSE_MODULES = "sentence_transformers_dense_modules"

DECLARED: tuple[type[Any], ...] = (LatentOptions, NoOptions, MTPOptions, EmbeddingOptions)
"""The options of all families. Where several declare one, the first describes it."""


def make_options(declared: type[Any], choices: Mapping[str, object], model: str) -> Any:
    """Return a family's options with what the user chose; the rest keeps its defaults.

    declared  the family's dataclass
    choices   option -> value
    model     what config.json calls the architecture, for the message
    raises    BadRequest for an option that the family has not declared
    """
    known = {each.name for each in fields(declared)}
    for name in choices:
        if name not in known:
            raise BadRequest(f"{flag(name)}: {model} has no such option")
    return declared(**choices)


def flag(name: str) -> str:
    """Return the flag of an option: "keep_mtp" is --keep-mtp."""
    return "--" + name.replace("_", "-")


def declared(families: Iterable[type[Any]]) -> dict[str, tuple[Any, str]]:
    """Return type and description of every option; the first family that declares one describes it."""
    options: dict[str, tuple[Any, str]] = {}
    for declared in families:
        for name, annotation in get_type_hints(declared, include_extras=True).items():
            options.setdefault(name, get_args(annotation))
    return options
