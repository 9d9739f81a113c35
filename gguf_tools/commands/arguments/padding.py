"""Arguments of commands that may change the sizes of a model: --pad and --pad-hidden."""

from __future__ import annotations

import argparse

from gguf_tools.commands import command
from gguf_tools.commands.completion import completes
from gguf_tools.errors import BadArgument
from gguf_tools.text import quoted
from quantize.padding.padding import PAD_WORDS, PadChoice

_HELP = """\
inner sizes that are no multiple of 256 get zeros at their end, so that K- and IQ-types fit. The model
computes the same. auto: where types would fall back and the file gets better for its size; 256: wherever rows
do not fit; KEY,...: the sizes that these metadata keys give, such as expert_feed_forward_length; off: no
zeros, and those of a padded input are taken away (default: {default})"""


def add_pad_argument(parser: argparse._ActionsContainer, default: str = "sizes stay as they are") -> None:
    """Add --pad and --pad-hidden.

    default  what happens without it, in a phrase
    """
    pad = parser.add_argument(
        "--pad", type=command.argument(parse_pad), metavar="{auto,256,off,KEY,...}",
        help=" ".join(_HELP.format(default=default).split()),
    )  # fmt: skip
    completes(pad, PAD_WORDS)
    parser.add_argument(
        "--pad-hidden", action="store_true",
        help="pad the hidden size, too: each token costs more time, and more memory of the cache where heads"
        " are added; norms and their epsilon are scaled to match",
    )  # fmt: skip


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
