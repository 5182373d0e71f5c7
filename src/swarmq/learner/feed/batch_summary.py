"""Metrics of a batch that need no model: rewards, staleness, truncation, branches. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import msgspec

from swarmq.config import Train
from swarmq.estimates import MetricSum, add_metrics, keep_most_reported, sum_metrics
from swarmq.learner.methods.credit import find_credit_levels, group_by_slot
from swarmq.learner.methods.rewards.length_penalty import compute_length_penalty
from swarmq.learner.store.records import BatchIndex, BatchRecord, EpisodeSums
from swarmq.messages import Rollout
from swarmq.token_drift import Drift


def sum_episodes(episodes: Iterable[Rollout]) -> dict[str, EpisodeSums]:
    """Return kind -> sums over the kind's episodes."""
    sums: dict[str, EpisodeSums] = {}
    metrics: dict[str, list[dict[str, float]]] = {}
    for episode in episodes:
        one = EpisodeSums(
            episodes=1,
            reward=episode.reward,
            judged=int(episode.success is not None),
            successes=int(bool(episode.success)),
        )
        sums[episode.kind] = sums.get(episode.kind, EpisodeSums()) + one
        metrics.setdefault(episode.kind, []).append(episode.metrics)
    return {kind: msgspec.structs.replace(one, metrics=sum_metrics(metrics[kind])) for kind, one in sums.items()}


def add_sums(tallies: Iterable[dict[str, EpisodeSums]]) -> dict[str, EpisodeSums]:
    sums: dict[str, EpisodeSums] = {}
    for each in tallies:
        for kind, value in each.items():
            sums[kind] = sums.get(kind, EpisodeSums()) + value
    return sums


def batch_metrics(record: BatchRecord, since_last: Sequence[BatchIndex]) -> dict[str, Any]:
    """Return the metrics of a trained batch. `since_last`: records of drops since the last batch; their episodes also count in
    `reward`, `metrics` (means of the agents' own metrics, each over the episodes that report it), `equal_groups` and
    `dropped`."""
    episodes, indices = record.episodes, [record.index, *since_last]
    sums = add_sums(index.tally for index in indices)
    scored = sum(t.episodes for t in sums.values())
    grouped = group_by_slot(episodes)
    groups = len({episode.group_id for episode in episodes})
    equal = sum(index.groups_equal for index in indices)
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "reward": sum(t.reward for t in sums.values()) / max(scored, 1),
        "reward_trained": sum(e.reward for e in episodes) / max(len(episodes), 1),
        "reward_by_kind": {kind: t.reward / t.episodes for kind, t in sums.items()},
        "success_by_kind": {kind: t.successes / t.judged for kind, t in sums.items() if t.judged},
        "metrics": _means(keep_most_reported(reduce(add_metrics, (t.metrics for t in sums.values()), {}))),
        "metrics_by_kind": {kind: _means(keep_most_reported(t.metrics)) for kind, t in sums.items() if t.metrics},
        "groups_by_kind": dict(Counter(group[0].kind for group in grouped)),
        "episodes": len(episodes),
        "groups": groups,
        "equal_groups": equal / max(groups + equal, 1),
        "partial_groups": sum(len(g) < g[0].group_size for g in grouped) / max(groups, 1),
        "length_penalised": _share(compute_length_penalty(e, record.settings) > 0 for e in episodes)
        if record.settings
        else 0.0,
        "turns": len(turns),
        "rollout_s": statistics.median(map(rollout_s, episodes)) if episodes else 0.0,
        "tokens_sampled": sum(turn.num_sampled for turn in turns),
        "tokens_unfolded": sum(turn.num_prompt + turn.num_sampled for turn in turns),
        "staleness": dict(sorted(Counter(str(record.index.version - 1 - oldest_version(e)) for e in episodes).items())),
        "truncated": _share(turn.finish_reason == "length" for turn in turns),
        "branches": dict(Counter(turn.branch for turn in turns if turn.branch)),
        "drifted": Drift.of(turns).rate,
        "credited": _credit_shares(episodes, record.settings or Train()),
        "reward_credited": _mean_credited_rewards(episodes),
        "repaired": _share(turn.repaired for turn in turns),
        "code_versions": dict(Counter(e.code_version for e in episodes if e.code_version)),
        "dropped": dict(Counter(reason for index in indices for reason in index.dropped.values())),
    }


def _means(sums: Mapping[str, MetricSum]) -> dict[str, float]:
    return {name: one.mean for name, one in sums.items()}


def _credit_shares(episodes: Sequence[Rollout], train: Train) -> dict[str, float]:
    """Return the shares of turns credited with the reward of their call, their agent tag, or their episode."""
    counts = Counter(level for group in group_by_slot(episodes) for level in find_credit_levels(group, train))
    return {level: count / counts.total() for level, count in sorted(counts.items())}


def _mean_credited_rewards(episodes: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of all rewards by agent tag, and of all rewards by call, that credit a turn."""
    given: dict[str, list[float]] = {"agent": [], "call": []}
    for episode in episodes:
        agents, calls = {turn.agent for turn in episode.turns}, {turn.call_id for turn in episode.turns}
        given["agent"] += [reward for agent, reward in episode.agent_rewards.items() if agent in agents]
        given["call"] += [reward for call, reward in episode.call_rewards.items() if call in calls]
    return {level: statistics.fmean(rewards) for level, rewards in given.items() if rewards}


def _share(those: Iterable[bool]) -> float:
    flags = list(those)
    return sum(flags) / max(len(flags), 1)


def rollout_s(episode: Rollout) -> float:
    """Return the seconds from an episode's first model call to its last answer, measured by the proxies' clocks."""
    timings = [turn.timings for turn in episode.turns]
    return max((t.began_at + t.total_s for t in timings), default=0) - min((t.began_at for t in timings), default=0)


def oldest_version(episode: Rollout) -> int:
    """Return the weight version of the oldest sampled token; 0 if the engine was never given weights and reports no version."""
    return min((min((s.version for s in turn.versions), default=0) for turn in episode.turns), default=0)


def newest_version(episode: Rollout) -> int:
    return max((s.version for turn in episode.turns for s in turn.versions), default=0)
