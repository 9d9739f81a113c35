"""Addresses of schedulers: that of one that runs, or local:N for N processes on this machine."""

from __future__ import annotations

import re
from typing import Annotated

from gguf_tools.argument_types import NumberType
from gguf_tools.errors import BadArgument
from gguf_tools.text import quoted

_LOCAL = "local:"
_WORKERS = NumberType(1, 4096)
_ADDRESS = re.compile(r"(\w+://)?([^\s/:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):[0-9]{1,5}/?")


class AddressType:
    """Texts that are an address; made for an option of a command and for an annotation, as NumberType."""

    def __str__(self) -> str:
        return f"an address with a port (tcp://10.0.0.1:8786), or local:N, N {_WORKERS}"

    def holds(self, text: str) -> bool:
        """Whether a text is an address."""
        return n_local_workers(text) > 0 if text.startswith(_LOCAL) else bool(_ADDRESS.fullmatch(text))

    def parse(self, text: str) -> str:
        """Return the address; raises BadArgument for another text."""
        if not self.holds(text):
            raise BadArgument(f"{quoted(text)} is not {self}")
        return text


def n_local_workers(address: str) -> int:
    """Return N of local:N, 0 for anything else."""
    number = address.removeprefix(_LOCAL)
    try:
        return 0 if number == address else int(_WORKERS.parse(number))
    except BadArgument:
        return 0


ADDRESS = AddressType()
Address = Annotated[str, ADDRESS]
