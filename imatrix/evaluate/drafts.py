"""Drafts of a model's MTP layer: how far from the base's drafts, and how often the model itself agrees.

At a position, the draft predicts the same token as the model, from a hidden state less; see
imatrix/forward/mtp.py. It is accepted if its most likely token is the model's own. So does llama.cpp's
speculative decoding accept the first draft of each step when it decodes greedily. The figure is about a given
text: while a model writes its own, shares are higher.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imatrix.evaluate.divergence import Estimate, Spread, TokenValues, measure, share_of


@dataclass(frozen=True)
class Drafts:
    """The drafts of a model, against those of its base.

    kld            divergence KL(the base's draft || the model's) of the token after the next
    same_top       share of positions, 0 to 1, where both drafts have the same most likely token
    accepted       share of positions where the model's draft is the model's own most likely token
    base_accepted  the same of the base
    """

    kld: Spread
    same_top: Estimate
    accepted: Estimate
    base_accepted: Estimate

    @classmethod
    def of(cls, tokens: TokenValues, drafts: TokenValues) -> Drafts:
        """Compare drafts with the predictions at the same positions, `tokens`."""
        found = measure(drafts)
        return cls(
            kld=found.kld,
            same_top=found.same_top,
            accepted=share_of(drafts.top == tokens.top),
            base_accepted=share_of(drafts.base_top == tokens.base_top),
        )

    def to_json(self) -> dict[str, Any]:
        """Return as JSON data what was measured: ratios as fractions."""
        shares = {
            "same_top": self.same_top,
            "accepted": self.accepted,
            "base_accepted": self.base_accepted,
        }
        kld = {"mean": self.kld.mean.value, "error": self.kld.mean.error, **self.kld.percentiles}
        values = {name: share.value for name, share in shares.items()}
        return {"kld": kld, **values, **{f"{name}_error": share.error for name, share in shares.items()}}


DRAFTS_ARE = "drafts of the MTP layer, one token further; accepted if the model itself would choose it"
"""Explanation of a table of drafts."""

DRAFT_HEADINGS = ("model", "KLD", "median", "99%", "same draft", "accepted", "base's")


def draft_rows(models: Iterable[tuple[Path, Drafts | None]]) -> Iterator[tuple[str, ...]]:
    """Yield a row under DRAFT_HEADINGS for each file that drafts."""
    for path, found in models:
        if found is not None:
            yield (
                path.name,
                found.kld.mean.text(6),
                *(f"{found.kld.percentiles[name]:.5f}" for name in ("median", "p99")),
                *(f"{share.value:.2%}" for share in (found.same_top, found.accepted, found.base_accepted)),
            )
