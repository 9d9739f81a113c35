"""Where the model is that a command line names: a path of this machine, or a name on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_tools.errors import BadRequest, HubError
from gguf_tools.hub.client import is_unknown
from gguf_tools.hub.names import SCHEME, HubName, parse_hub_name

if TYPE_CHECKING:
    from convert.checkpoint.streamed import StreamedFolder


def hub_name(text: str) -> HubName | None:
    """Return the model on the Hub that `text` names; None for a path.

    What exists on this machine is meant, whatever it looks like. OWNER/NAME is a name on the Hub unless
    there is a folder OWNER here: then it is a path, rightly or wrongly typed.

    raises  BadRequest for an address that names no model
    """
    if os.path.exists(text):
        return None
    name = parse_hub_name(text)
    return None if _is_plain(text) and Path(text).parent.is_dir() else name


def model_path(text: str, *, quiet: bool = False) -> Path:
    """Return the folder or file that `text` names; one on the Hub is fetched into its cache first.

    raises  BadRequest for an address that names no model, HubError, CheckpointError
    """
    name = hub_name(text)
    if name is None:
        return Path(text)
    from convert.checkpoint.hub import fetch

    with _here_neither(text):
        return fetch(name, quiet=quiet)


def source_folder(
    text: str,
    *,
    stream: bool = False,
    dry_run: bool = False,
    weights: bool = True,
    allow_pickle: bool = False,
    quiet: bool = False,
) -> Path | StreamedFolder:
    """Return the same for a conversion, which may do without fetching a model's weights.

    stream        read them from the Hub as they are used
    dry_run       their headers are enough
    weights       False: config.json and the tokenizer are enough
    allow_pickle  .bin and .pt files may be fetched
    raises        as `model_path`; BadRequest for `stream` with a model that is here
    """
    name = hub_name(text)
    if name is None:
        if stream:
            raise BadRequest(f"--stream reads a model of the Hub, and {text} is a path; leave it out")
        return Path(text)
    from convert.checkpoint import hub

    with _here_neither(text):
        if weights and (stream or (dry_run and not allow_pickle and not hub.is_offline())):
            return hub.stream(name, quiet=quiet)
        return hub.fetch(name, hub.Wanted(weights, allow_pickle), quiet=quiet)


@contextmanager
def _here_neither(text: str) -> Iterator[None]:
    """Let an error of the Hub say that `text`, which may be a mistyped path, is no path either."""
    try:
        yield
    except HubError as error:
        if _is_plain(text) and is_unknown(error):
            error.add_note(f"nor is there a file or folder {text} on this machine")
        raise


def _is_plain(text: str) -> bool:
    return not text.startswith((SCHEME, "http://", "https://"))
