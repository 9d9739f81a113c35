"""Names of the work folders of runs and of the files in them, and of jobs, which lie beside outputs.

Nothing is computed here, so who only looks for what runs have left needs no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from gguf_tools.files.owned_folder import RECORD, FolderKind
from gguf_tools.files.run_lock import LOCK

WORK_SUFFIX = ".work"
JOB_SUFFIX = ".job"

JOB_START = b"GGUFJOB\0"
"""How the file of a job begins: another file under its name is somebody else's."""

OF_LAYERS = re.compile(
    r"(hidden|student)\.\d+|(student\.)?middle|middle\.gradients|embedding\.npz|sums\.\d{5}\.npz"
    r"|layer\.\d{5}\.[0-9a-f]{8}\.(before|middle|first|outer)|strips\.[0-9a-f]{8}\.\d+"
    r"|(layers|strips)\.job(\.partial)?"
)
"""Names of files that hold what has been computed."""

WORK = FolderKind(
    "work", "run.json", re.compile(rf"{LOCK}|run\.json|{RECORD}|records\.jsonl|{OF_LAYERS.pattern}")
)

PART = re.compile(r"(base|model-\d+|forward|backward|draft|original|codes|descent)\.work")
"""Names of work folders in that of a run which has several."""


def work_path(output: Path) -> Path:
    """Return where the work folder of an output is."""
    return output.with_name(output.name + WORK_SUFFIX)
