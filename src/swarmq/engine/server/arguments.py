"""vLLM arguments that are reserved, because they change how tokens are sampled or log-probabilities reported."""

from __future__ import annotations

from collections.abc import Sequence

from swarmq.config import Policy
from swarmq.errors import ConfigError

RESERVED_FLAGS = ("--logprobs-mode", "--generation-config", "--override-generation-config")
"""Flags fixed by swarmq: log-probabilities are those of the sampled distribution, and only requests set sampling parameters."""


def check_arguments(policy: Policy) -> None:
    """Raise ConfigError if the engine of a trained policy has one of `RESERVED_FLAGS`."""
    if policy.trained and (given := find_reserved(policy.engine.arguments)):
        raise ConfigError(
            f"policies.*.engine.arguments of {policy.model}: {', '.join(given)} would make the engine sample from, or report, "
            "a distribution other than the trained one: remove it; requests set temperature and other sampling parameters"
        )


def find_reserved(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that vLLM reads as one of `RESERVED_FLAGS`, as written."""
    return [word for word in arguments if _is_reserved(word)]


def _is_reserved(word: str) -> bool:
    """Return whether vLLM reads `word` as a reserved flag. vLLM accepts underscores for dashes, abbreviated flags, and
    `--flag=value` or `--flag.key=value`."""
    flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return len(flag) > len("--") and any(ours.startswith(flag) for ours in RESERVED_FLAGS)
