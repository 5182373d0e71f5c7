"""Results of many attempts, as numbers. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

import msgspec

from swarmq.client.runners.attempts import AttemptResult
from swarmq.estimates import Z95, wilson
from swarmq.runtime.wording import count_of

MANY_DIGITS = 1e6
MAX_DISTINCT = 1000
"""Maximum number of different failures that are counted separately."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `run_episodes_until_all_complete`. It prints as one line.

    episodes      attempts begun
    finished      attempts with a reward
    failed        attempts without a reward
    slots         repeats of tasks that are finished or given up
    given_up      slots whose every attempt failed
    reward_mean   mean reward of finished attempts; None without any
    success_rate  share of successes among finished attempts that reported success or failure; None if none did
    failures      `ErrorType: message` -> number of failures
    seconds       time from the first attempt's begin to the last attempt's end
    """

    episodes: int
    finished: int
    failed: int
    slots: int
    given_up: int
    reward_mean: float | None
    success_rate: float | None
    failures: dict[str, int]
    seconds: float

    def __str__(self) -> str:
        parts = [
            count_of(self.finished, "episode") + " finished",
            f"{self.failed} failed",
            count_of(self.given_up, "slot") + " given up",
        ]
        if self.reward_mean is not None:
            parts.append(f"mean reward {format_reward(self.reward_mean)}")
        if self.success_rate is not None:
            parts.append(f"success {self.success_rate:.1%}")
        return ", ".join(parts) + f", {self.seconds:.1f} s"


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `evaluate`. Repeats of one task are not independent, so errors are computed from the means of tasks.

    n                 episodes with a reward
    tasks             tasks with at least one such episode
    failed            slots without a reward after all attempts; never counted as reward 0, so check them before the means
    mean_reward       mean reward; None if no episode has a reward
    standard_error    standard error of the mean; None with fewer than two tasks
    reward_interval   95 % interval: mean +- 1.96 standard errors
    success_rate      share of successes; None if no episode reports success or failure
    success_interval  95 % interval like reward_interval; Wilson's if every task was attempted once
    reward_by_kind    kind -> mean reward
    failures          `ErrorType: message` -> number of failed attempts
    seconds           time from the first attempt's begin to the last attempt's end
    """

    n: int
    tasks: int
    failed: int
    mean_reward: float | None
    standard_error: float | None
    reward_interval: tuple[float, float] | None
    success_rate: float | None
    success_interval: tuple[float, float] | None
    reward_by_kind: dict[str, float]
    failures: dict[str, int]
    seconds: float

    def __str__(self) -> str:
        if self.mean_reward is None:
            return f"no episode finished, {self.failed} failed"
        error = "" if self.standard_error is None else f" ± {format_reward(Z95 * self.standard_error)}"
        success = "" if self.success_rate is None else f", success {self.success_rate:.1%}"
        reward = format_reward(self.mean_reward)
        return f"reward {reward}{error}{success} on {count_of(self.tasks, 'task')} ({count_of(self.n, 'episode')}, {self.failed} failed)"


class Tally:
    """Running counts of attempts, in constant memory."""

    def __init__(self) -> None:
        self.episodes = self.finished = self.failed = self.slots = self.given_up = 0
        self.failures: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._succeeded = self._judged = 0

    def add(self, attempted: AttemptResult) -> None:
        self.episodes += 1
        if attempted.reward is not None:
            self.finished += 1
            self._reward_sum += attempted.reward
        else:
            self.failed += 1
            line = summarize_error(attempted.error)
            self.failures[line if line in self.failures or len(self.failures) < MAX_DISTINCT else "others"] += 1
        if attempted.reward is not None and attempted.success is not None:
            self._judged += 1
            self._succeeded += attempted.success

    @property
    def most_failures(self) -> dict[str, int]:
        """The most frequent failures: `ErrorType: message` -> number of occurrences."""
        return dict(self.failures.most_common(20))

    @property
    def reward_mean(self) -> float | None:
        return self._reward_sum / self.finished if self.finished else None

    def summary(self, seconds: float) -> RunSummary:
        return RunSummary(
            episodes=self.episodes,
            finished=self.finished,
            failed=self.failed,
            slots=self.slots,
            given_up=self.given_up,
            reward_mean=self.reward_mean,
            success_rate=self._succeeded / self._judged if self._judged else None,
            failures=self.most_failures,
            seconds=seconds,
        )


def make_eval_report(
    attempts: Iterable[AttemptResult], *, failed: int, failures: dict[str, int], seconds: float
) -> EvalReport:
    """Return the report on the finished attempts; attempts with the same task_id are repeats of one task."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    successes: defaultdict[str, list[float]] = defaultdict(list)
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for done in attempts:
        if done.reward is None:
            continue
        rewards[done.task_id].append(done.reward)
        kinds[done.kind].append(done.reward)
        if done.success is not None:
            successes[done.task_id].append(float(done.success))
    n = sum(map(len, rewards.values()))
    mean, error = _mean_and_error([fmean(values) for values in rewards.values()])
    rate, rate_error = _mean_and_error([fmean(values) for values in successes.values()])
    once = all(len(values) == 1 for values in successes.values())
    return EvalReport(
        n=n,
        tasks=len(rewards),
        failed=failed,
        mean_reward=mean,
        standard_error=error,
        reward_interval=_normal_interval(mean, error),
        success_rate=rate,
        success_interval=wilson(rate, len(successes))
        if once and rate is not None
        else _normal_interval(rate, rate_error),
        reward_by_kind={kind: fmean(values) for kind, values in sorted(kinds.items())},
        failures=failures,
        seconds=seconds,
    )


def summarize_error(error: BaseException | None) -> str:
    """Return one line that describes a failure; equal failures have equal lines."""
    if error is None:
        return "ended by the agent without a reward"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


def format_reward(value: float) -> str:
    """Format a reward for display: three decimals, or three significant digits for large values."""
    return f"{value:.3f}" if abs(value) < MANY_DIGITS else f"{value:.3g}"


def _mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _normal_interval(mean: float | None, error: float | None) -> tuple[float, float] | None:
    return None if mean is None or error is None else (mean - Z95 * error, mean + Z95 * error)
