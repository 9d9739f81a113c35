"""Write quantize/type_names.pyi, the stub that lists the names of all types for type checkers.

python -m scripts.record.type_names
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import get_args

from quantize import type_names

STUB = Path(type_names.__file__).with_suffix(".pyi")


def stub_text() -> str:
    """Return the stub as the tables have the names."""
    lines = ['"""Names of types; `python -m scripts.record.type_names` writes this file."""', ""]
    lines += ["from typing import Literal"]
    for name in ("FileType", "TypeName", "OutType"):
        words = ", ".join(f'"{word}"' for word in get_args(getattr(type_names, name)))
        lines += ["", f"{name} = Literal["]
        lines += [
            *textwrap.wrap(words, 106, initial_indent="    ", subsequent_indent="    "),
            "]  # fmt: skip",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub_text(), encoding="utf-8")
