"""Arguments of commands that may change the sizes of a model: --pad and --pad-hidden."""

from __future__ import annotations

import argparse

from quantize.padding.padding import PAD_CHOICES

_HELP = """\
inner sizes that are no multiple of 256 get zeros at their end, so that K- and IQ-types fit. The model
computes the same. auto: where types would fall back and the file gets better for its size; 256: wherever rows
do not fit; off: no zeros, and those of a padded input are taken away (default: {default})"""


def add_pad_argument(parser: argparse._ActionsContainer, default: str = "sizes stay as they are") -> None:
    """Add --pad and --pad-hidden.

    default  what happens without it, in a phrase
    """
    parser.add_argument("--pad", choices=PAD_CHOICES, help=" ".join(_HELP.format(default=default).split()))
    parser.add_argument(
        "--pad-hidden", action="store_true",
        help="pad the hidden size, too: each token costs more time, and more memory of the cache where heads"
        " are added; norms and their epsilon are scaled to match",
    )  # fmt: skip
