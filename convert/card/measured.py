"""The measured quality of files, as `evaluate --json` has written it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf_tools.errors import BadRequest
from gguf_tools.files.named_files import read_input


@dataclass(frozen=True)
class Measures:
    """How far a file is from its base.

    kld, kld_error  mean Kullback-Leibler divergence in nats a token, and its standard error
    kld_p99         its 99th percentile
    same_top        share of tokens whose most likely successor is the base's
    ppl             perplexity
    """

    n_bytes: int
    kld: float
    kld_error: float
    kld_p99: float
    same_top: float
    ppl: float


@dataclass(frozen=True)
class Report:
    """An evaluation of files.

    text      name of the text's file, None where the base was a file of logits
    files     by name
    """

    path: Path
    text: str | None
    chunk_size: int
    n_tokens: int
    base_ppl: float
    files: Mapping[str, Measures]


def read_report(path: Path) -> Report:
    """Read what an evaluation has written with --json.

    raises  BadRequest for a file that is something else, or can't be read
    """
    try:
        content = json.loads(read_input(path))
        text = content["text"]
        return Report(
            path=path,
            text=None if text["path"] is None else Path(text["path"]).name,
            chunk_size=int(text["chunk_size"]),
            n_tokens=int(text["n_tokens_measured"]),
            base_ppl=float(content["base"]["ppl"]),
            files={Path(model["path"]).name: _measures(model) for model in content["models"]},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadRequest(
            f"{path}: not a report of `evaluate --json` ({type(error).__name__}: {error})"
        ) from error


def _measures(model: Mapping[str, Any]) -> Measures:
    return Measures(
        n_bytes=int(model["n_bytes"]),
        kld=float(model["kld"]["mean"]),
        kld_error=float(model["kld"]["error"]),
        kld_p99=float(model["kld"]["p99"]),
        same_top=float(model["same_top"]),
        ppl=float(model["ppl"]),
    )
