"""A run folder with many episodes, made by the parts that make real ones: core, store, transcripts, batch log.

Of ten groups, one has equal rewards and is dropped by the learner, and one has a member that fails; every twentieth group
is followed by an evaluation episode. Turns are short, because an index reads facts about episodes and not their tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.service import build_rollout
from swarmq.collector.store import Store
from swarmq.config import RunFolder, SwarmJob
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.messages import (
    EQUAL_REWARDS,
    EpisodeBegin,
    EpisodeEnd,
    Event,
    Message,
    Rollout,
    Slot,
    StepReport,
    Turn,
    VersionSpan,
    encode,
    new_id,
    pack_floats,
    pack_ids,
)
from swarmq.transcripts.writer import ClosedEpisode, TranscriptWriter

RUN, POLICY, GROUP_SIZE, GROUPS_PER_BATCH, TOKENS = "large", "main", 8, 8, 16
KINDS = ("math", "code")
TRANSCRIPT_BYTES = 2 * 10**9


def make_run(parent: Path, *, episodes: int, turns: int = 2, tokens: int = TOKENS) -> RunFolder:
    """Make the folder `parent/large` of a stopped run with about `episodes` episodes, each turn with `tokens` given and as many sampled."""
    folder = RunFolder(parent / RUN)
    folder.path.mkdir(parents=True)
    job = _load_job(folder, parent)
    store = Store(folder.inbox, run=RUN)
    store.keeps_bodies = True
    writer = TranscriptWriter(folder.transcripts, size_bytes=TRANSCRIPT_BYTES, age_s=1e9)
    log = BatchLog(folder.batch_log(POLICY), RunIdentity.of(job, POLICY))
    core = Core(Rules.of(job), store, store.snapshot(), now=time.time(), job=job)
    closed: list[ClosedEpisode] = []
    with folder.events.open("wb") as events:
        for version, messages in enumerate(_batches(episodes, turns, tokens), 1):
            with store.transaction():
                forwarded = _take(core, store, messages, closed)
            rollouts = [one for item in forwarded if (one := build_rollout(store, item)) is not None]
            report = _train(log, rollouts, version)
            with store.transaction():
                for item in forwarded:
                    for effect in core.confirm_forward(item.episode_id, item.policy):
                        store.write(effect)
                _take(core, store, [report], closed)
            writer.offer(closed)
            closed = []
            events.write(msgspec.json.encode(_step_event(rollouts, version)) + b"\n")
    writer.close()
    store.close()
    log.close()
    assert not writer.lost
    return folder


JOB = """
run = "large"
folder = PARENT
mix = { math = 0.5, code = 0.5 }

[policies.main]
model = "Qwen/Qwen3-1.7B"

[groups]
group_size = 8
groups_per_batch = 8
"""


def _load_job(folder: RunFolder, parent: Path) -> SwarmJob:
    folder.job.write_text(JOB.replace("PARENT", json.dumps(str(parent))))
    job = SwarmJob.load(folder.job)
    folder.resolved.write_text(job.to_toml())
    return job


def _take(core: Core, store: Store, messages: list[Message], closed: list[ClosedEpisode]) -> list[do.Forward]:
    """Decide messages as the service does; returns what is to be published."""
    forwarded: list[do.Forward] = []
    now = time.time()
    for message in messages:
        for effect in core.take(message, encode(message), now):
            if isinstance(effect, do.Close) and (episode := store.closed(effect, now)):
                closed.append(episode)
            store.write(effect)
            if isinstance(effect, do.Forward):
                forwarded.append(effect)
    for effect in core.settle():
        store.write(effect)
    return forwarded


def _batches(episodes: int, turns: int, tokens: int) -> Iterator[list[Message]]:
    """Yield the messages of GROUPS_PER_BATCH groups at a time."""
    for start in range(0, episodes // GROUP_SIZE, GROUPS_PER_BATCH):
        messages: list[Message] = []
        for number in range(start, start + GROUPS_PER_BATCH):
            kind = KINDS[number % len(KINDS)]
            for repeat in range(GROUP_SIZE):
                reward = 1.0 if number % 10 == 0 else float(repeat % 2)
                fails = number % 10 == 1 and not repeat
                slot = Slot(task_id=f"t{number}", repeat=repeat)
                if fails:
                    messages += _episode(
                        slot, kind, turns, tokens, EpisodeEnd(**_END, status="failed", reason="ValueError: no")
                    )
                end = EpisodeEnd(**_END, status="finished", rewards={POLICY: reward})
                messages += _episode(slot, kind, turns, tokens, end)
            if number % 20 == 0:
                slot = Slot(task_id=f"e{number % 7}", epoch=start)
                end = EpisodeEnd(**_END, status="finished", rewards={POLICY: 1.0})
                messages += _episode(slot, kind, turns, tokens, end, is_eval=True)
        yield messages


_END = {"run": RUN, "episode_id": ""}


def _episode(
    slot: Slot, kind: str, turns: int, tokens: int, end: EpisodeEnd, *, is_eval: bool = False
) -> list[Message]:
    name, parent, calls = new_id(), None, list[str]()
    begin = EpisodeBegin(
        run=RUN,
        episode_id=name,
        slot=slot,
        kind=kind,
        group_size=GROUP_SIZE,
        policies=(POLICY,),
        mode="eval" if is_eval else "train",
        client_id=f"client-{slot.repeat % 3}",
        code_version="0f3a",
    )
    messages: list[Message] = [begin]
    for number in range(turns):
        turn = Turn(
            run=RUN,
            episode_id=name,
            policy=POLICY,
            call_id=new_id(),
            request_id=new_id(),
            parent=parent,
            shared=2 * tokens * number,
            prompt_ids=pack_ids(range(tokens)),
            sampled_ids=pack_ids(range(tokens)),
            logprobs=pack_floats([-1.0] * tokens),
            versions=(VersionSpan(version=0, start=0, end=tokens),),
            messages=b'[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]',
        )
        messages.append(turn)
        parent = turn.call_id
        calls.append(turn.call_id)
    named = msgspec.structs.replace(end, episode_id=name, client_id=begin.client_id, calls=tuple(calls))
    return [*messages, named]


def _train(log: BatchLog, rollouts: list[Rollout], version: int) -> StepReport:
    """Log a batch as a learner does: groups of equal rewards are dropped."""
    rewards: dict[str, set[float]] = {}
    for rollout in rollouts:
        rewards.setdefault(rollout.group_id, set()).add(rollout.reward)
    trained = [one for one in rollouts if len(rewards[one.group_id]) > 1]
    dropped = {one.episode_id: EQUAL_REWARDS for one in rollouts if len(rewards[one.group_id]) == 1}
    ids = tuple(one.episode_id for one in trained)
    record = log.last.record + 1 if log.last else 1
    index = BatchIndex(record=record, version=version, trained=ids, dropped=dropped, at=time.time())
    log.append(BatchRecord(index=index, episodes=tuple(trained)))
    return StepReport(run=RUN, policy=POLICY, record=record, version=version, trained=ids, dropped=dropped)


def _step_event(rollouts: list[Rollout], version: int) -> Event:
    rewards = [one.reward for one in rollouts] or [0.0]
    fields = {"version": version, "reward": sum(rewards) / len(rewards), "train_s": 0.5, "wait_s": 0.1, "push_s": 0.1}
    return Event(run=RUN, source=f"learner.{POLICY}", name="step", at=time.time(), fields=fields)
