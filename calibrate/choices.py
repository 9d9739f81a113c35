"""What a user chooses about a calibration."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from calibrate.coverage import Coverage
from forward.options import ForwardOptions
from forward.text.tokens import Cut, Text, read_text
from gguf_tools.format.values import Metadata


@dataclass(frozen=True)
class Choices:
    """How tensors are encoded under the activations of a text.

    text        UTF-8 file
    cut         the part of it that is used
    sequential  let every tensor see what the ones before it, as they are written, make of the text, and make
                up for it; False: all see what the original makes of it, which takes half the time
    two_sided   round matrices under the covariance of the gradients at their outputs, too; it takes a pass
                back through the model
    embedding   round token_embd under the covariance of the gradients there
    any_text    use the text even if it is nonsense; see forward/text/quality.py
    forward     how the model is computed; `n_threads` is that of the run
    """

    text: str | os.PathLike[str]
    cut: Cut = field(default_factory=Cut)
    sequential: bool = True
    two_sided: bool = True
    embedding: bool = True
    any_text: bool = False
    forward: ForwardOptions = field(default_factory=ForwardOptions)

    def read(self, metadata: Metadata, coverage: Coverage) -> Text:
        """Return the chunks of the text, as the tokenizer of a model cuts it."""
        vocab = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        return read_text(Path(self.text), vocab, coverage.network.vocab_size, self.cut)
