"""What a loss did to the policy gradient of a token, as steps count it and the token log keeps it. No torch in here."""

from __future__ import annotations

from enum import IntEnum


class LossEffect(IntEnum):
    WHOLE = 0
    MASKED = 1
    """No gradient is left: the probability has already moved far enough (`tis_mask`)."""
    CLIPPED = 2
    """No gradient is left: the ratio is beyond its bound (`ppo_clip`, `gspo`)."""
    TRUNCATED = 3
    """The ratio is beyond its bound, and the bound takes its place as the gradient's weight."""

    @property
    def cuts(self) -> bool:
        return self in {LossEffect.MASKED, LossEffect.CLIPPED}
