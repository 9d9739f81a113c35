"""Where the model is that a command line names: a path of this machine, or a name on the Hub."""

from __future__ import annotations

import os
from pathlib import Path

from gguf_tools.hub.names import SCHEME, parse_hub_name


def model_path(text: str, *, quiet: bool = False, weights: bool = True, allow_pickle: bool = False) -> Path:
    """Return the folder or file that `text` names; one on the Hub is fetched into its cache first.

    What exists on this machine is meant, whatever it looks like. OWNER/NAME is a name on the Hub unless
    there is a folder OWNER here: then it is a path, rightly or wrongly typed.

    weights       False: config.json and the tokenizer are enough
    allow_pickle  .bin and .pt files may be fetched
    raises        BadRequest for an address that names no model, HubError, CheckpointError
    """
    path = Path(text)
    if os.path.exists(text):
        return path
    name = parse_hub_name(text)
    is_plain = not text.startswith((SCHEME, "http://", "https://"))
    if name is None or (is_plain and path.parent.is_dir()):
        return path
    from convert.checkpoint.hub import Wanted, fetch

    return fetch(name, Wanted(weights, allow_pickle), quiet=quiet)
