"""Jobs for tests; they do next to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gguf_tools.errors import BadWeights

hung = threading.Event()
"""Set to let those go on that hang."""


@dataclass(frozen=True)
class Doubling:
    """Doubles numbers, and writes down what was opened and closed.

    log     a file with a line for each event
    fails   a number at which it fails; `told`: with an error of the toolkit
    hangs   a number at which whoever is first hangs
    """

    log: Path
    fails: int | None = None
    told: bool = False
    hangs: int | None = None

    @contextmanager
    def open(self) -> Iterator[Doubling]:
        self.write("open")
        yield self
        self.write("close")

    def run(self, item: int) -> int:
        if item == self.fails:
            raise BadWeights(f"row {item} is bad") if self.told else ValueError(f"no {item}\nof them")
        if item == self.hangs and self.lines().count("hang") == 0:
            self.write("hang")
            hung.wait(60)
        time.sleep(0.001)
        return 2 * item

    def settle(self) -> None:
        self.write("settle")

    def write(self, line: str) -> None:
        # A job of a test that is over is closed when the next one comes, and its folder may be gone.
        with suppress(FileNotFoundError), self.log.open("a") as file:
            file.write(line + "\n")

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()
