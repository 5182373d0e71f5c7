"""Effects of a loss on the policy gradient of a token, for metrics and the token trace. Without torch."""

from __future__ import annotations

from enum import IntEnum


class LossEffect(IntEnum):
    WHOLE = 0
    MASKED = 1
    """The gradient is 0, because the probability has already moved far enough (`tis_mask`)."""
    CLIPPED = 2
    """The gradient is 0, because the ratio is beyond its bound (`ppo_clip`, `gspo`)."""
    TRUNCATED = 3
    """The ratio is beyond its bound, so the gradient is weighted by the bound."""

    @property
    def cuts(self) -> bool:
        return self in {LossEffect.MASKED, LossEffect.CLIPPED}
