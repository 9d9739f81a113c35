"""All harnesses by name: what makes an input, what reads it, and what a reader may do with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import gguf


@dataclass(frozen=True)
class Target:
    """One reader.

    make       a random number generator -> an input that is nearly valid
    one_input  reads an input; may only return or raise a ToolkitError
    read       the same for a file or folder that is there already
    warm_up    imports and compiles what the first read would
    """

    make: Callable[[random.Random], bytes]
    one_input: Callable[[bytes], None]
    read: Callable[[Path], None]
    warm_up: Callable[[], None]


TARGETS: Mapping[str, Target] = {
    "gguf": Target(gguf.make, gguf.one_input, gguf.read, gguf.warm_up),
    "gguf header": Target(gguf.make, gguf.one_input, gguf.read_header, gguf.warm_up),
}
