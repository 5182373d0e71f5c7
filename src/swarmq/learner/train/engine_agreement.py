"""Check that engine and learner compute the same model, because either may lack one of its features.

If the engine sampled tokens with the learner's present weights, the log-probabilities of both differ by rounding alone. If the
mean difference is larger, no ratio corrects it and no later step repairs it, so the learner stops before the step. Pure,
without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmq.config import Policy
from swarmq.errors import SetUpError

EXACT = 0.005
"""Limit in nats if engine and learner compute in FP32: fifty times the tolerance in the tests of model families."""
ROUNDED = 0.1
"""Limit in nats in BF16, which differs by 0.01 to 0.03 with dense models, by up to 0.05 with mixtures of experts."""
NARROW = 0.4
"""Limit in nats if either uses FP8. The significand of E4M3 has four bits fewer than that of BF16, so a rounding is 16 times as coarse.
BF16 rounds in more places, which leaves two to twelve times the difference in trained models, and about nine times in random ones of any depth
(tests/unit/learner/model/test_float8.py): at most 0.4 nats where BF16 differs by 0.03."""
MIN_TOKENS = 100
"""Minimum number of tokens from which the mean difference is compared with the limit."""


def agreement_limit(policy: Policy, *, cuda: bool) -> float:
    """Return the limit of the mean difference in nats; 0 means no limit, as for a policy without engines."""
    train, engine = policy.train, policy.engine
    if not engine.urls:
        return 0.0
    if train.engine_gap_max is not None:
        return train.engine_gap_max
    if train.uses_fp8 or engine.uses_fp8:
        return NARROW
    exact = engine.dtype == "float32" or (engine.dtype == "auto" and not cuda)
    return EXACT if exact and train.precision(cuda=cuda) == "no" else ROUNDED


def check_agreement(fields: Mapping[str, Any], limit: float, family: str) -> None:
    """Raise LearnerError if the metrics of a step, before it is taken, show that the engine samples from another model.

    `limit`: largest accepted mean difference in nats. `family`: the model's class, for the error.
    """
    gap, tokens = fields["same_weights_gap"], fields["same_weights_tokens"]
    if not limit or tokens < MIN_TOKENS or not gap > limit:  # a step with non-finite numbers is skipped later
        return
    raise SetUpError(
        f"engine and learner compute {family} differently: the log-probabilities of {tokens} tokens, sampled with the weights that "
        f"the learner has, are {gap:.3g} nats apart on average (rounding explains at most {limit:g}). Nothing was trained on them. Check that "
        "the engine serves the same model folder, in the precision of engine.dtype and without quantisation; otherwise transformers or "
        f"vLLM lacks a feature of {family}: report it. train.engine_gap_max sets the limit; 0 disables this check"
    )
