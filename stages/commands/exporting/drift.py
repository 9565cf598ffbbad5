"""How far an export is from base + adapter, measured by what the adapter itself changes.

With z the logits at the checked targets, the adapter's change is a = z(tuned) - z(base) and the
export's is e = z(export) - z(base):

    error  = |e - a| / |a|          0: the same model, 1: nothing of the change is left
    cosine = e·a / (|e| |a|)        1: the same direction

A loss is measured by the mean of |loss(tuned) - loss(base)| over single targets: the change of the
mean loss says little where targets gain and lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.commands.exporting.rows import Seen
from stages.core import console
from stages.core.errors import UserError

LOSS_FLOOR = 1e-3
"""A loss may always differ by this much (nats): a tenth of a percent of perplexity."""
NO_CHANGE = 1e-6
"""Changes below this share of the logits are rounding."""


@dataclass(frozen=True)
class Drift:
    """An export against base + adapter, on the same rows.

    Attributes:
        error, cosine: Of the change of the logits, see above.
        base, tuned, exported: Losses per target, in nats.
        moved: How far the adapter moves the loss of a single target, on average.
    """

    error: float
    cosine: float
    base: float
    tuned: float
    exported: float
    moved: float

    def loss_limit(self, most: float) -> float:
        """How far the exported loss may be from the tuned one."""
        return max(most * self.moved, LOSS_FLOOR)

    def within(self, most: float) -> bool:
        """Whether logits and loss are those of base + adapter, up to the share `most`."""
        near = abs(self.exported - self.tuned) <= self.loss_limit(most)
        return near and self.error <= most  # not so for NaN

    def needed(self) -> float:
        """The share `most` that this export is just within, or NaN."""
        apart = abs(self.exported - self.tuned)
        share = 0.0 if apart <= LOSS_FLOOR else apart / max(self.moved, NO_CHANGE)
        return float(np.maximum(self.error, share))


def measure(base: Seen, tuned: Seen, exported: Seen, exported_base: Seen | None = None) -> Drift:
    """Compare an export with base + adapter.

    Args:
        base, tuned: The model without and with its adapter.
        exported: What was exported.
        exported_base: The export's base where another library computed it.
    """
    base_z, tuned_z = base.logits.astype(np.float64), tuned.logits.astype(np.float64)
    own_base = base_z if exported_base is None else exported_base.logits.astype(np.float64)
    wanted, got = tuned_z - base_z, exported.logits.astype(np.float64) - own_base
    floor = NO_CHANGE * float(np.linalg.norm(tuned_z))
    size, got_size = float(np.linalg.norm(wanted)), float(np.linalg.norm(got))
    return Drift(
        error=float(np.linalg.norm(got - wanted)) / max(size, floor),
        cosine=float((got * wanted).sum()) / max(size * got_size, floor * floor),
        base=base.loss,
        tuned=tuned.loss,
        exported=exported.loss,
        moved=float(np.abs(tuned.losses - base.losses).mean()),
    )


def require(drift: Drift, most: float, what: str, target: str, fix: str) -> None:
    """Say what the check found.

    Args:
        what: What was exported ("fused model").
        target: Where it is to be.
        fix: What to do about a drift.

    Raises:
        UserError: The export is not base + adapter; nothing is written.
    """
    losses = f"loss {drift.exported:.5f} (with adapter {drift.tuned:.5f}, base {drift.base:.5f})"
    logits = f"change of the logits: error {drift.error:.2%}, cosine {drift.cosine:.4f}"
    if drift.within(most):
        console.say(f"{what}: {logits}; {losses}")
        return
    share = drift.needed()
    accept = f"; --max-drift {share * 1.1:.2g} takes it as it is" if np.isfinite(share) else ""
    raise UserError(
        f"The {what} is not base + adapter, so it is not written",
        where=target,
        found=f"{logits}; {losses}",
        expected=f"error at most {most:.0%}, loss within {drift.loss_limit(most):.5f}"
        " of that with the adapter",
        fix=fix + accept,
    )
