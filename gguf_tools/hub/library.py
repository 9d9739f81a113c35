"""All that is used of the Hub's client `huggingface_hub`: names that it exports, none of them its own affair.

To be imported inside of functions, when a name of the Hub is met: it takes a while.
"""

from gguf_tools.hub.names import own_host

own_host()  # an address that is none breaks the client's import

from huggingface_hub import (  # noqa: E402
    HfApi,
    constants,
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.utils import (  # noqa: E402
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    logging,
)

__all__ = [
    "HfApi", "are_progress_bars_disabled", "build_hf_headers", "constants", "disable_progress_bars",
    "enable_progress_bars", "errors", "get_hf_file_metadata", "get_session", "hf_hub_download", "hf_hub_url",
    "hf_raise_for_status", "logging", "snapshot_download",
]  # fmt: skip
