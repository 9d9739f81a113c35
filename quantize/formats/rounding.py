"""Lanes to integers: the reference's rounding, with what it does to numbers beyond its range.

ggml adds 1.5 * 2**23, where float32 has steps of one, and takes the sum's fraction bits. Within +-2**22 this
rounds to nearest even. Beyond, the bits are those of a coarser number: an infinity gives -2**22, a NaN
gives 0 for the quiet ones that arithmetic makes. Searches that divide by a tiny range do get there.
"""

from __future__ import annotations

import numpy as np

from quantize.formats.kernel import part
from quantize.formats.lanes import Floats, Ints, bits, maximum, minimum

_MAGIC = np.float32(1.5 * 2**23)
_FRACTION = 0x007FFFFF
_ZERO = 0x00400000


@part
def nearest_int(value: Floats) -> Ints:
    """Return Floats as the Ints that ggml's nearest_int gives."""
    return (bits(value + _MAGIC) & _FRACTION) - _ZERO


@part
def clamp(value: Ints, low: int, high: int) -> Ints:
    """Return Ints limited to low .. high."""
    return maximum(minimum(value, high), low)
