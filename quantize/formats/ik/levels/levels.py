"""The levels that ik_llama.cpp's non-linear types choose from.

A sub-block of such a type picks one of two sets of levels, the second a little above the first. Here a table
is both sets, one after the other, so that a code of set s of n levels stands for TABLE[n * s + code].

Sources: the tables iq2nl_values, iq2kl_values, iq3nl_values, iq4k_values and iq5nl_values of ggml-common.h,
as of ik_llama.cpp 8337e4c (2026-08-15).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.float32]

SUPER_ELEMS = 256
"""Weights of a block, of nearly all these types."""

LEVELS_2: Levels = np.array([-31, -13, 1, 17, -26, -8, 6, 22], np.float32)
"""IQ2_K's and IQ2_KS's: twice four levels."""

LEVELS_3: Levels = np.array(
    [-63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51],
    np.float32,
)
"""IQ3_K's and IQ3_KS's: twice eight levels."""

LEVELS_4: Levels = np.array(
    [
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
        [-123, -100, -79, -61, -45, -31, -18, -6, 5, 17, 29, 42, 57, 73, 93, 117],
    ],
    np.float32,
).reshape(-1)
"""IQ4_K's, IQ4_KS's and IQ4_KSS's: twice sixteen levels. The first set is IQ4_NL's."""

LEVELS_5: Levels = np.array(
    [
        [-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6],
        [-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121],
        [-124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16, -10, -4],
        [1, 7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123],
    ],
    np.float32,
).reshape(-1)
"""IQ5_K's and IQ5_KS's: twice thirty-two levels."""

_PAIRS = (
    "e9c1 0dc1 c1d8 f6d8 0dd8 2fd8 d8e9 e9e9 01e9 0de9 1ce9 c1f6 01f6 0df6 2ff6 e901"
    " f601 0101 0d01 1c01 d80d e90d f60d 010d 0d0d c11c e91c 011c 1c1c 2f1c e92f 0d2f"
)

LEVEL_PAIRS: Levels = (
    np.array([int(pair, 16) for pair in _PAIRS.split()], "<u2").view(np.int8).astype(np.float32)
)
"""IQ2_KL's: thirty-two pairs of levels; code q stands for LEVEL_PAIRS[2 * q] and LEVEL_PAIRS[2 * q + 1]."""
