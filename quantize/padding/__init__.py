"""Sizes of a model made longer with zeros, so that rows are whole blocks of 256, and made shorter again.

A feed-forward block multiplies act(gate) by up, element by element, and then by down. Rows of zeros at the
end of gate and up give act(0) * 0 = 0, and columns at the end of down multiply nothing else. The model
computes the same numbers, bit for bit, with an inner size that a K- or IQ-type can hold.

    inner_sizes  which sizes a model has, which metadata key gives each, and which tensors have them
    padding      what the sizes become: shapes, metadata, rows
    choose       which of them are worth it for the types that are asked for
    hidden_size  the same for hidden states, which costs speed and memory too
    resized      rows of a tensor with zeros at their end, or without
    counterparts the sizes and importances of a padded file beside those of the model
"""

from __future__ import annotations

from typing import Literal, get_args

from gguf_tools.errors import BadArgument
from gguf_tools.text import quoted

PadWord = Literal["auto", "256", "off"]

PadChoice = PadWord | tuple[str, ...]
"""auto: sizes for which the file gets better; 256: all that are no whole blocks; off: none, and sizes that
are padded already lose their zeros; a tuple: the sizes of these keys, with or without the architecture before
them, and the others as with off."""

PAD_WORDS: tuple[PadWord, ...] = get_args(PadWord)


def parse_pad(text: str) -> PadChoice:
    """Read which sizes to pad; the keys are looked for in the model.

    raises  BadArgument for what can be no key
    """
    word = next((word for word in PAD_WORDS if word == text), None)
    if word is not None:
        return word
    keys = tuple(text.split(","))
    if not all(key.endswith("_length") for key in keys):
        raise BadArgument(
            f"{quoted(text)}, expected {', '.join(PAD_WORDS)}, or keys such as feed_forward_length"
        )
    return keys
