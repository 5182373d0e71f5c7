"""Evaluation during training: rounds of tasks that are never trained, on queues of their own. Pure.

  feed --eval ──> tasks stored here
  every N steps ──> round: each task, each repeat ──> eval.<kind> ──> workers, in lanes of their own
  ends ──> results, or given up ──> nothing more will come, or the deadline ──> pass@k by kind, with intervals

There is one round at a time: the next one begins when the present one is closed, so evaluations never pile up. A round is
closed when each attempt has a result or is given up and nobody works on it. Results that arrive before a round is closed are
counted, even those of attempts that were given up.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from swarmq.collector.decide import effects as do
from swarmq.config import Eval
from swarmq.estimates import bound_metrics, keep_most_reported, sum_metrics, warn_of_many, wilson
from swarmq.messages import EpisodeEnd, Evaluation, Slot, Task, encode

EVAL_ROUND = "eval_round"
"""Name of the counter that holds the weight version of the newest evaluation round plus one; 0 before the first round."""

RIGHT = 1.0
"""Minimum reward that counts as a success if the agent does not say whether it succeeded."""


class EvalTask(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation task; its payload is in the store."""

    task_id: str
    kind: str
    repeats: int


class EvalSlot(msgspec.Struct, kw_only=True):
    """One attempt that an evaluation round needs, with its result once it has ended."""

    slot: Slot
    kind: str
    version: int
    began_at: float
    reward: float | None = None
    success: bool = False
    metrics: dict[str, float] = {}
    done: bool = False
    given_up: bool = False
    """Whether no further try at the attempt will come. It may still get a result."""

    @property
    def lacks(self) -> bool:
        """Whether the attempt has no result yet and may still get one."""
        return not (self.done or self.given_up)


class Evals:
    """The evaluation tasks and the current round."""

    def __init__(self, tasks: Iterable[EvalTask] = (), slots: Iterable[EvalSlot] = ()) -> None:
        self.tasks = {task.task_id: task for task in tasks}
        self.slots = {one.slot.id: one for one in slots}
        self._warned: set[str] = set()
        """Kinds that were already warned of because they report too many metrics."""

    def add_task(self, task: Task) -> list[do.Effect]:
        """Store a task, used from the next round on."""
        if task.mode != "eval" or task.group_size < 1:
            return [
                do.SendDeadLetter(
                    f"task {task.slot.id}: only tasks of mode eval with at least one repeat are kept here"
                )
            ]
        kept = EvalTask(task_id=task.slot.task_id, kind=task.kind, repeats=task.group_size)
        self.tasks[kept.task_id] = kept
        return [do.SaveEvalTask(kept.task_id, kept.kind, kept.repeats, bytes(task.payload))]

    def advance(
        self,
        now: float,
        settings: Eval,
        *,
        running: Collection[str],
        version: int,
        counts: Counter[str],
        can_begin: bool,
        run: str,
        policies: Iterable[str],
    ) -> list[do.Effect]:
        """Close a round that is over, and begin one that is due. `running`: slots being worked on. `version`: the newest weights.
        `policies`: those whose learners get the results."""
        effects: list[do.Effect] = []
        if self.is_over(now, settings.deadline_s, running=running):
            effects += self._warn_of_metrics()
            began_at, results = min(one.began_at for one in self.slots.values()), self.close(now, settings.k)
            message = Evaluation(run=run, version=results["version"], began_at=began_at, results=results)
            effects += [do.Emit("evaluated", results), do.CloseRound()]
            effects += [do.SendEvaluation(policy, began_at, encode(message)) for policy in policies]
        every = settings.every
        is_due = every and version // every > (counts[EVAL_ROUND] - 1) // every
        if is_due and self.tasks and not self.slots and can_begin:
            counts[EVAL_ROUND] = version + 1
            effects += [_issue(one) for one in self.begin(version, now)]
        return effects

    def reissue(self, kind: str) -> list[do.Effect]:
        """Return the attempts of a kind that may still get a result, to be published again."""
        return [_issue(one) for one in self.slots.values() if one.kind == kind and one.lacks]

    def begin(self, version: int, now: float) -> list[EvalSlot]:
        """Begin a round and return its attempts, ordered so that partial results cover all tasks equally."""
        rounds = max((task.repeats for task in self.tasks.values()), default=0)
        wanted = [
            EvalSlot(
                slot=Slot(task_id=task.task_id, repeat=repeat, epoch=version),
                kind=task.kind,
                version=version,
                began_at=now,
            )
            for repeat in range(rounds)
            for task in self.tasks.values()
            if repeat < task.repeats
        ]
        self.slots = {one.slot.id: one for one in wanted}
        return wanted

    def finish(self, slot_id: str, end: EpisodeEnd) -> EvalSlot | None:
        """Record the result of an attempt; None if this round does not need it or already has it."""
        one = self.slots.get(slot_id)
        if one is None or one.done or end.status != "finished":
            return None
        one.done, one.reward = True, sum(end.rewards.values()) / len(end.rewards)
        one.success = end.success if end.success is not None else one.reward >= RIGHT
        one.metrics = bound_metrics(end.metrics)
        return one

    def give_up(self, slot_id: str) -> bool:
        """Record that no further try at an attempt will come. Returns whether that changes anything."""
        one = self.slots.get(slot_id)
        if one is None or not one.lacks:
            return False
        one.given_up = True
        return True

    def is_over(self, now: float, deadline_s: float, *, running: Collection[str]) -> bool:
        """Return whether there is a round and no more results will come. `running`: slots being worked on."""
        slots = self.slots.values()
        return bool(slots) and (
            not any(one.lacks or (not one.done and one.slot.id in running) for one in slots)
            or now - min(one.began_at for one in slots) >= deadline_s
        )

    def close(self, now: float, ks: Sequence[int]) -> dict[str, Any]:
        """Close the round and return its results. Attempts without a result are counted as `given_up` or, if they had not
        ended by the deadline, as `missing`."""
        slots = list(self.slots.values())
        self.slots = {}
        return {
            "version": slots[0].version,
            "seconds": now - slots[0].began_at,
            "missing": sum(one.lacks for one in slots),
            "given_up": sum(one.given_up and not one.done for one in slots),
            "kinds": {
                kind: figures([s for s in slots if s.kind == kind], ks) for kind in sorted({s.kind for s in slots})
            },
        }

    def _warn_of_metrics(self) -> Iterable[do.Effect]:
        """Yield a warning for each kind that reports more metrics than are shown, once per kind."""
        for kind in sorted({one.kind for one in self.slots.values()} - self._warned):
            sums = sum_metrics(one.metrics for one in self.slots.values() if one.kind == kind)
            if left_out := [name for name in sums if name not in keep_most_reported(sums)]:
                self._warned.add(kind)
                yield do.Emit("warning", {"text": f"evaluation: {warn_of_many(kind, left_out[0])}"})


def _issue(one: EvalSlot) -> do.IssueEval:
    return do.IssueEval(one.slot.id, msgspec.msgpack.encode(one.slot), one.kind, one.version, one.began_at)


def figures(slots: Sequence[EvalSlot], ks: Sequence[int]) -> dict[str, Any]:
    """Return the results of one kind's attempts: mean reward, pass@k with a 95 % interval for each k in `ks`, and means of
    the agents' metrics. Attempts without a result are left out, not counted as 0."""
    tasks: dict[str, list[bool]] = defaultdict(list)
    rewards = [one.reward for one in slots if one.reward is not None]
    for one in slots:
        if one.done:
            tasks[one.slot.task_id].append(one.success)
    passed = {}
    for k in ks:
        values = [pass_at(k, len(tried), sum(tried)) for tried in tasks.values() if len(tried) >= k]
        if values:
            low, high = wilson(sum(values) / len(values), len(values))
            passed[str(k)] = {"value": sum(values) / len(values), "low": low, "high": high, "tasks": len(values)}
    kept = keep_most_reported(sum_metrics(one.metrics for one in slots if one.done))
    return {
        "tasks": len(tasks),
        "episodes": len(rewards),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "pass": passed,
        "metrics": {name: one.mean for name, one in kept.items()},
    }


def pass_at(k: int, n: int, right: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k attempts succeeds, given `right` successes in n
    attempts (2107.03374)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
