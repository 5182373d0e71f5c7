"""Arguments that would have a vLLM server sample, or report, otherwise than training takes for granted."""

from __future__ import annotations

from collections.abc import Sequence

from swarmq.config import Policy
from swarmq.errors import ConfigError

RESERVED_FLAGS = ("--logprobs-mode", "--generation-config", "--override-generation-config")
"""What is reported is what was sampled, and nothing but the request decides how."""


def check_arguments(policy: Policy) -> None:
    """Raises ConfigError when the engine of a policy that is trained is given one of `OURS`."""
    if policy.trained and (given := find_reserved(policy.engine.arguments)):
        raise ConfigError(
            f"policies.*.engine.arguments of {policy.model}: {', '.join(given)} would have the engine sample from, or report, "
            "another distribution than the one that is trained: take it out; requests say the temperature and the like"
        )


def find_reserved(arguments: Sequence[str]) -> list[str]:
    """Those that vLLM would take for one of `OURS`, as they were written."""
    return [word for word in arguments if _is_reserved(word)]


def _is_reserved(word: str) -> bool:
    """vLLM takes underscores for dashes, flags that are shortened, and a value, or a key of it, in the same word."""
    flag = word.partition("=")[0].partition(".")[0].replace("_", "-")
    return len(flag) > len("--") and any(ours.startswith(flag) for ours in RESERVED_FLAGS)
