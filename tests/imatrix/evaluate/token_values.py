"""Values of tokens in chunks of one length, from arrays with a row for each chunk."""

from __future__ import annotations

import numpy as np

from imatrix.evaluate.divergence import TokenValues


def token_values(
    base_log_prob: np.ndarray, log_prob: np.ndarray, kld: np.ndarray, same_top: np.ndarray, first: int = 0
) -> TokenValues:
    """Return the values of tokens; all arrays are (n_chunks, n_positions), and `first` is the first position.

    The base's most likely token is 0, and it gives it the probability of the token that follows.
    """
    chunk, position = (numbers.ravel() for numbers in np.indices(kld.shape))
    return TokenValues(
        chunk=chunk,
        position=first + position,
        base_log_prob=base_log_prob.ravel(),
        log_prob=log_prob.ravel(),
        kld=kld.ravel(),
        base_top=np.zeros(kld.size, np.int64),
        top=(~same_top).ravel().astype(np.int64),
        base_top_p=np.exp(base_log_prob.ravel()),
    )
