"""Names of output files."""

from __future__ import annotations

import re

from gguf_tools.errors import BadArgument


def default_file_name(
    name: str | None,
    basename: str | None,
    finetune: str | None,
    version: str | None,
    size_label: str | None,
    file_type: str,
    *,
    vocab_only: bool = False,
) -> str:
    """Return BASENAME-SIZE-FINETUNE-VERSION-TYPE.gguf, the naming convention of GGUF files.

    file_type   "BF16", "Q8_0" ...
    vocab_only  a vocabulary has neither size nor type, and says -vocab
    """
    stem = (basename or name or "ggml-model").strip().replace(" ", "-").replace("/", "-")
    if vocab_only:
        parts = [stem, finetune, version, "vocab"]
    else:
        parts = [stem, size_label, finetune, version, file_type.upper()]
    return "-".join(part.strip().replace(" ", "-").replace("/", "-") for part in parts if part) + ".gguf"


def fill_outfile_template(file_name: str, file_type: str) -> str:
    """Return `file_name` with {ftype} or {outtype} replaced by the file type; {FTYPE} gives it in capitals.

    raises  BadRequest for another placeholder
    """
    values = {
        "": file_type.lower(),
        "ftype": file_type.lower(),
        "outtype": file_type.lower(),
        "FTYPE": file_type.upper(),
        "OUTTYPE": file_type.upper(),
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise BadArgument(f"--outfile {file_name}: unknown placeholder {match[0]}; known is {{ftype}}")
        return values[match[1]]

    return re.sub(r"\{([^{}]*)\}", value, file_name)
