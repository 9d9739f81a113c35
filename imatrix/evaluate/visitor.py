"""The divergence of models from a base, from slices of their logits: one pass, with running maxima.

Let m and n be the maxima of the logits a of the base and b of a model. Three sums over the vocabulary are
enough: A of e^(a-m), B of e^(b-n), and C of e^(a-m) (a - b). The divergence is C/A - ln A + ln B - m + n. A
slice with a larger maximum shrinks the sums so far. Sums are float64: the terms cancel where models agree.

A base from a file has log probabilities instead of logits, which are too high where they share the lowest
code. llama-perplexity leaves those out, and takes the others as they are: e^m (C + A (ln B + n)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from gguf_tools.errors import BadActivation
from imatrix.evaluate.divergence import TokenValues
from imatrix.forward.device import to_cpu, to_numpy, to_torch
from imatrix.forward.logits import Positions, predicted_positions
from imatrix.texts.chunks import Chunks


class DivergenceVisitor:
    """A LogitVisitor of a base, which comes first, and any number of models.

    paths   of all models, for messages
    report  called with the number of chunks that are done, and of all
    floor   of a base that has log probabilities: those not above it are left out; None: it has logits
    raises  BadActivation from `finish_chunk` for logits with NaN or infinity

    State of every model and measured token, each (n_models, n_measured):
    maxima, sums   running maximum m of the logits, and the sum of e^(logit - m)
    crosses        the sum of e^(base - m) (base - logit), with the base's m
    right          logit of the token that follows
    tops           the most likely token
    """

    def __init__(
        self,
        chunks: Chunks,
        paths: Sequence[Path],
        device: torch.device,
        report: Callable[[int, int], object],
        floor: float | None = None,
    ) -> None:
        self.positions: Positions = predicted_positions(chunks)
        self._chunks = chunks
        self._paths, self._report, self._floor = tuple(paths), report, floor
        self._targets = to_torch(chunks.tokens[chunks.scored], device)
        shape = len(paths), len(self._targets)

        def filled(value: float) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.float64, device=device)

        self._maxima, self._sums = filled(float("-inf")), filled(0)
        self._crosses, self._right = filled(0), filled(0)
        self._tops = torch.zeros(shape, dtype=torch.int64, device=device)

    def visit(self, at: slice, first: int, logits: Sequence[torch.Tensor]) -> None:
        targets = self._targets[at]
        n_tokens = logits[0].shape[1]
        here = (targets >= first) & (targets < first + n_tokens)
        columns = targets[here] - first
        base = logits[0].to(targets.device).double()
        base_weights = torch.empty(0)
        base_shrink = torch.empty(0)
        for model, own in enumerate(logits):
            values = base if model == 0 else own.to(targets.device).double()
            row = (model, at)
            self._right[row][here] = values[here, columns]
            top, where = values.max(-1)
            before = self._maxima[row].clone()
            self._tops[row] = torch.where(top > before, where + first, self._tops[row])
            maxima = torch.maximum(before, top)
            shrink = torch.exp(before - maxima)
            weights = torch.exp(values - maxima[:, None])
            if model == 0 and self._floor is not None:
                weights = torch.where(values > self._floor, weights, 0.0)
            self._maxima[row] = maxima
            self._sums[row] = self._sums[row] * shrink + weights.sum(-1)
            if model == 0:
                base_weights, base_shrink = weights, shrink
            else:
                cross = (base_weights * (base - values)).sum(-1)
                self._crosses[row] = self._crosses[row] * base_shrink + cross

    def finish_chunk(self, chunk: int) -> None:
        sums = self._sums[:, self.positions.place(chunk)]
        sound_ones = to_cpu(torch.isfinite(sums).all(-1)).tolist()
        for path, sound in zip(self._paths, sound_ones, strict=True):
            if not sound:
                raise BadActivation(f"{path}: the logits have NaN or infinity")
        self._report(chunk + 1, self.positions.n_chunks)

    def log_prob(self, model: int) -> np.ndarray:
        """Return the log probability of each measured token's successor, float64 (n_measured,)."""
        found = self._right[model]
        if model or self._floor is None:
            found = found - self._maxima[model] - self._sums[model].log()
        values: np.ndarray = to_numpy(found)
        return values

    def values(self, model: int) -> TokenValues:
        """Compute the values of each token for a model, counted from 1, against the base."""
        logs = self._sums.log()
        if self._floor is None:
            kld = self._crosses[model] / self._sums[0] - logs[0] + logs[model]
            kld = kld - self._maxima[0] + self._maxima[model]
        else:
            kld = self._crosses[model] + self._sums[0] * (logs[model] + self._maxima[model])
            kld = kld * torch.exp(self._maxima[0])
        tokens = to_numpy(self.positions.tokens)
        chunk = self._chunks.chunk_of(tokens)
        return TokenValues(
            chunk=chunk,
            position=tokens - self._chunks.bounds[chunk],
            base_log_prob=self.log_prob(0),
            log_prob=self.log_prob(model),
            kld=to_numpy(kld),
            base_top=to_numpy(self._tops[0]),
            top=to_numpy(self._tops[model]),
            base_top_p=to_numpy(1 / self._sums[0] if self._floor is None else torch.exp(self._maxima[0])),
        )
