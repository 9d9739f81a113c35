"""Request to cook: a model, texts, and the files that are wanted."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from convert.checkpoint.streamed import StreamedFolder
from gguf_tools.errors import BadRequest
from gguf_tools.hub.names import folder_name
from gguf_tools.progress import Shown
from gguf_tools.system.files import absolute
from imatrix.calibrate.calibration import BegunCalibration, Calibration
from imatrix.forward.options import ForwardOptions
from imatrix.texts.tokens import Cut
from quantize.plan.recipe_files import Mixture, find_mixture, is_recipe_file
from quantize.size.parse import Size, names_size, parse_size

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_FLOAT = re.compile(r"[-._](BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class WantedFile:
    """A file that is to be made: a mixture, or the best one of a size.

    label    what its name ends with
    decides  what says whether it is another one: the word as given; for a recipe file, its content's hash
    """

    label: str
    decides: str
    mixture: Mixture | None = None
    size: Size | None = None


@dataclass(frozen=True)
class CookRequest:
    """Request to cook: what is to be made, and how.

    source         Hugging Face folder or GGUF file
    text           UTF-8 text, or folder of classes of texts, for importances, losses and calibration
    wanted         in the order in which they were named
    folder         where everything goes; it is made if it isn't there
    name           what all names in it begin with
    held_out       text for the divergence, None: it isn't measured
    calibrate      encode under the activations of `text`, which also gives importances
    keep_grid      let tensors whose weights lie on a grid of 4 bits keep it, in every file
    cut            the part of `text` that is used
    held_out_cut   the part of `held_out` that is used
    force          replace files in the folder that were not cooked there, and use a text that is nonsense
    progress       see gguf_tools/progress.py
    typed          the command line, for the card
    repo           OWNER/NAME of the model on the Hub, None: what the source knows
    streamed       the same model with its weights on the Hub, for a plan; None: it is here
    """

    source: Path
    text: Path
    wanted: tuple[WantedFile, ...]
    folder: Path
    name: str
    held_out: Path | None = None
    calibrate: bool = False
    keep_grid: bool = False
    cut: Cut = field(default_factory=Cut)
    held_out_cut: Cut = field(default_factory=Cut)
    forward: ForwardOptions = field(default_factory=ForwardOptions)
    restart: bool = False
    force: bool = False
    progress: Shown = None
    typed: tuple[str, ...] = ()
    repo: str | None = None
    quantized_by: str | None = None
    streamed: StreamedFolder | None = None

    @property
    def has_sizes(self) -> bool:
        return any(each.size is not None for each in self.wanted)

    @property
    def about_text(self) -> Calibration:
        """Calibration that learns from the text."""
        return Calibration(self.text, cut=self.cut, forward=self.forward, any_text=self.force)

    @cached_property
    def calibration(self) -> BegunCalibration | None:
        """The calibration that encodes every file; it reads the text once for all of them."""
        return self.about_text.begin() if self.calibrate else None

    @property
    def matrix(self) -> Path | None:
        """Where importances go; None with a calibration, which collects its own."""
        return None if self.calibrate else self._path(".imatrix.gguf")

    @property
    def losses(self) -> Path:
        """Where losses go; there are some only if a size is wanted."""
        return self._path(".losses.json")

    @property
    def report(self) -> tuple[Path, Path, Path]:
        """Where the report goes: numbers, page, and the chart for the card."""
        numbers, page, chart = (self._path(f".evaluation.{ending}") for ending in ("json", "html", "svg"))
        return numbers, page, chart

    @property
    def inputs(self) -> dict[str, str]:
        """Inputs of the run, by their names in the record."""
        return {"model": str(absolute(self.source)), "text": str(absolute(self.text))}

    def output(self, wanted: WantedFile) -> Path:
        return self._path(f"-{wanted.label}.gguf")

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.name}{ending}"


def parse_wanted(text: str) -> tuple[WantedFile, ...]:
    """Read the files that `Q2_K,IQ3_XXS,3.2bpw,12GiB,mine.yaml` asks for.

    raises  BadRequest for what is neither a file type nor a size, and for two files of one name; what
            `find_mixture` raises for a recipe file
    """
    wanted = []
    for word in filter(None, map(str.strip, text.split(","))):
        if names_size(word):
            wanted.append(WantedFile(word, word, size=parse_size(word)))
        else:
            mixture = find_mixture(word)
            is_file = is_recipe_file(word)
            decides = hashlib.sha256(Path(word).read_bytes()).hexdigest()[:16] if is_file else mixture.name
            wanted.append(WantedFile(mixture.name, decides, mixture))
    labels = [each.label for each in wanted]
    if not labels:
        raise BadRequest(f"--types {text!r}: expected types or sizes, for instance Q2_K,Q4_K_M,3.2bpw")
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise BadRequest(f"--types {text}: {twice} is named twice")
    return tuple(wanted)


def model_name(source: Path) -> str:
    """Find the name that a model's files begin with, in its folder's or file's name.

    >>> model_name(Path("lite-bf16-00001-of-00003.gguf"))
    'lite'
    """
    if source.is_dir():
        return folder_name(source)
    return _FLOAT.sub("", _PART.sub("", source.stem))
