"""vLLM arguments that are refused: they change how tokens are sampled or log-probabilities reported, or do not go with a setting."""

from __future__ import annotations

from collections.abc import Sequence

from swarmq.config import Policy
from swarmq.errors import ConfigError

RESERVED_FLAGS = ("--logprobs-mode", "--generation-config", "--override-generation-config")
"""Flags fixed by swarmq: log-probabilities are those of the sampled distribution, and only requests set sampling parameters."""
REPLICAS = ("--data-parallel-size", "-dp")
"""Flags for several replicas of a model in one server, with which vLLM never changes the number of drafts."""


def check_arguments(policy: Policy) -> None:
    """Raise ConfigError if the engine of a trained policy has one of `RESERVED_FLAGS`, or one with drafts one of `REPLICAS`."""
    if policy.trained and (given := find_reserved(policy.engine.arguments)):
        raise ConfigError(
            f"policies.*.engine.arguments of {policy.model}: {', '.join(given)} would make the engine sample from, or report, "
            "a distribution other than the trained one: remove it; requests set temperature and other sampling parameters"
        )
    if policy.engine.speculation != "none" and (given := _find(policy.engine.arguments, REPLICAS)):
        raise ConfigError(
            f"policies.*.engine.arguments of {policy.model}: {', '.join(given)} does not go with engine.speculation = "
            f'"{policy.engine.speculation}", whose drafts vLLM could not switch off: use engine.count for several replicas, or no drafts'
        )


def find_reserved(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that vLLM reads as one of `RESERVED_FLAGS`, as written."""
    return _find(arguments, RESERVED_FLAGS)


def _find(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    return [word for word in arguments if _is_one_of(word, flags)]


def _is_one_of(word: str, flags: Sequence[str]) -> bool:
    """Return whether vLLM reads `word` as one of the flags. vLLM accepts underscores for dashes, abbreviated flags, and
    `--flag=value` or `--flag.key=value`."""
    flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return len(flag) > len("--") and any(ours.startswith(flag) for ours in flags)
