"""A small run folder made by the real collector core and store and the real batch log, without broker, engine or model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from support.episodes import make_turns
from support.families import tokenizer_of
from support.transcripts import write_segment
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import AWAKE_S, Core
from swarmq.collector.decide.state import HOLD_S, Rules
from swarmq.collector.service import build_rollout
from swarmq.collector.store import Store
from swarmq.config import RunFolder, SwarmJob
from swarmq.learner.store import token_trace
from swarmq.learner.store.batch_log import BatchLog
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.store.token_trace import EpisodeTrace, TurnTrace
from swarmq.messages import (
    EpisodeBegin,
    EpisodeEnd,
    Event,
    Message,
    Mode,
    Slot,
    StepReport,
    Turn,
    encode,
    pack_floats,
    unpack_floats,
)
from swarmq.transcripts.format import pack_frame
from swarmq.transcripts.writer import ClosedEpisode, describe

BEGAN = 1_700_000_000.0
SIZE = 2
"""Members of a group."""


class MadeRun:
    """A run whose clients, collector and learner are played step by step."""

    def __init__(self, folder: Path, *, policies: tuple[str, ...] = ("main",), name: str = "r") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        model.mkdir(exist_ok=True)
        tokenizer_of("chatml").save(str(model / "tokenizer.json"))
        self.job = SwarmJob.build(
            {
                "run": name,
                "folder": str(folder),
                "mix": {"math": 0.5, "code": 0.5},
                "policies": {policy: {"model": str(model)} for policy in policies},
                "groups": {"group_size": SIZE, "groups_per_batch": 1},
            }
        )
        self.folder: RunFolder = self.job.run_folder
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self.folder.resolved.write_text(self.job.to_toml())
        self.store = Store(self.folder.inbox, run=name)
        self.now = BEGAN
        self.core = Core(Rules.of(self.job), self.store, self.store.snapshot(), now=self.now)
        self.forwards: list[do.Forward] = []
        self.logs = {
            policy: BatchLog(self.folder.batch_log(policy), RunIdentity.of(self.job, policy)) for policy in policies
        }
        self.versions = dict.fromkeys(policies, 0)
        self.records = dict.fromkeys(policies, 0)
        self.closed: dict[str, ClosedEpisode] = {}
        self.parts: dict[str, tuple[EpisodeBegin, EpisodeEnd | None, list[Turn]]] = {}
        self.serial = 0

    def close(self) -> None:
        self.store.close()
        for log in self.logs.values():
            log.close()

    def take(self, *messages: Message) -> None:
        for message in messages:
            self.now += 0.01
            self._write(self.core.take(message, encode(message), self.now))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + AWAKE_S, until)
            self._write(self.core.tick(self.now))

    def _write(self, effects: list[do.Effect]) -> None:
        with self.store.transaction():
            for effect in [*effects, *self.core.settle()]:
                if isinstance(effect, do.Close) and (closed := self.store.closed(effect, self.now)):
                    self.closed[closed.episode_id] = closed
                self.store.write(effect)
        self.forwards += [effect for effect in effects if isinstance(effect, do.Forward)]
        for effect in effects:
            if isinstance(effect, do.Emit):
                self.emit("collector", effect.name, **effect.fields)

    def emit(self, source: str, name: str, **fields: object) -> None:
        event = Event(run=self.job.run, source=source, name=name, at=self.now, fields=dict(fields))
        with self.folder.events.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def begin(
        self,
        task: str,
        repeat: int = 0,
        *,
        kind: str = "math",
        mode: Mode = "train",
        turns: int = 2,
        said: Sequence[Mapping[str, object]] = (),
        **fields: object,
    ) -> str:
        """Begin an episode with turns, and return its id. `said`: messages of each turn, in place of a greeting."""
        self.serial += 1
        episode = f"{self.serial:08d}-{task}-{repeat}"
        begin = EpisodeBegin(
            run=self.job.run,
            episode_id=episode,
            slot=Slot(task_id=task, repeat=repeat),
            kind=kind,
            group_size=SIZE,
            policies=tuple(self.logs),
            mode=mode,
            **{"client_id": "client-a", "code_version": "v1", **fields},
        )
        made = []
        for policy in self.logs if turns else ():
            for turn in make_turns(
                random.Random(episode + policy),
                episode_id=episode,
                turns=turns,
                vocab=128,
                length=6,
                version=self.versions[policy],
            ):
                messages = msgspec.json.encode(
                    said or [{"role": "user", "content": "<b>hi</b>"}, {"role": "assistant", "content": turn.call_id}]
                )
                call = f"{policy}-{turn.call_id}"
                parent = turn.parent and f"{policy}-{turn.parent}"
                made.append(
                    msgspec.structs.replace(
                        turn,
                        run=self.job.run,
                        policy=policy,
                        mode=mode,
                        call_id=call,
                        request_id=call,
                        parent=parent,
                        messages=messages,
                    )
                )
        self.parts[episode] = (begin, None, made)
        self.take(begin, *made)
        return episode

    def end(
        self, episode: str, reward: float | None = 1.0, *, status: str = "finished", reason: str = "", **fields: object
    ) -> str:
        begin, _, turns = self.parts[episode]
        rewards = dict.fromkeys(self.logs, reward) if status == "finished" else {}
        end = EpisodeEnd(
            run=self.job.run,
            episode_id=episode,
            status=status,
            rewards=rewards,
            reason=reason,
            client_id="client-a",
            **fields,
        )
        self.parts[episode] = (begin, end, turns)
        self.take(end)
        return episode

    def finish(self, task: str, rewards: tuple[float, ...] = (0.0, 1.0), **fields: object) -> list[str]:
        """A whole group: begun, ended, and published."""
        episodes = [self.begin(task, repeat, **fields) for repeat in range(len(rewards))]
        return [self.end(episode, reward) for episode, reward in zip(episodes, rewards, strict=True)]

    def step(
        self,
        *,
        policy: str = "main",
        dropped: dict[str, str] | None = None,
        trace: bool = True,
        effects: bytes = b"",
        left_out: bytes = b"",
    ) -> int:
        """Train everything that was published and is not dropped, and return the step."""
        dropped = dropped or {}
        given = [forward for forward in self.forwards if forward.policy == policy]
        self.forwards = [forward for forward in self.forwards if forward.policy != policy]
        rollouts = [rollout for forward in given if (rollout := build_rollout(self.store, forward))]
        taken = tuple(rollout for rollout in rollouts if rollout.episode_id not in dropped)
        self.records[policy] += 1
        self.versions[policy] += bool(taken)
        step = self.versions[policy]
        train = self.job.policies[policy].train
        index = BatchIndex(
            record=self.records[policy],
            version=step,
            trained=tuple(one.episode_id for one in taken),
            dropped=dropped,
            at=self.now,
        )
        self.logs[policy].append(BatchRecord(index=index, episodes=taken, settings=train if taken else None))
        if trace and taken:
            token_trace.write_trace(
                self.folder.token_log(policy), step, [_trace(one, effects, left_out) for one in taken]
            )
        self.take(
            StepReport(
                run=self.job.run,
                policy=policy,
                record=index.record,
                version=step,
                trained=index.trained,
                dropped=dropped,
            )
        )
        if taken:
            reward = sum(one.reward for one in taken) / len(taken)
            self.emit(
                f"learner.{policy}",
                "step",
                version=step,
                reward=reward,
                episodes=len(taken),
                reward_by_kind={"math": reward},
            )
        return step

    def write_transcripts(self, number: int = 1, *, with_body: bool = True, generation: int = 0) -> None:
        """Write the transcripts of all closed episodes into one segment, as the collector's writer describes them."""
        described = map(describe, self.closed.values())
        frames = [
            pack_frame(msgspec.msgpack.encode(meta), zstandard.compress(body) if with_body else b"")
            for meta, body in described
        ]
        write_segment(self.folder.transcripts, number, frames, generation=generation)


def _trace(rollout, effects: bytes, left_out: bytes) -> EpisodeTrace:
    def of(turn: Turn) -> TurnTrace:
        logprobs = [value + 0.25 for value in unpack_floats(turn.logprobs)]
        return TurnTrace(
            call_id=turn.call_id,
            advantage=rollout.reward - 0.5,
            logprobs=pack_floats(logprobs),
            entropies=np.linspace(0, 2, len(logprobs), dtype="<f2").tobytes(),
            effects=(effects + bytes(len(logprobs)))[: len(logprobs)] if effects else b"",
            left_out=(left_out + bytes(len(logprobs)))[: len(logprobs)] if left_out else b"",
        )

    return EpisodeTrace(episode_id=rollout.episode_id, turns=tuple(map(of, rollout.turns)))


def make_whole_run(folder: Path, **fields: object) -> tuple[MadeRun, dict[str, str]]:
    """A run with an episode in every state; returns state or reason -> id of one."""
    run = MadeRun(folder, **fields)
    ids = {"trained": run.finish("taught")[0]}
    run.step(effects=b"\2", left_out=b"\0\1")
    equal = run.finish("equal", (1.0, 1.0), kind="code")
    ids["equal_rewards"] = equal[0]
    run.step(dropped=dict.fromkeys(equal, "equal_rewards"))
    ids["failed"] = run.end(run.begin("broken"), status="failed", reason="ZeroDivisionError: division by zero")
    ids["aborted"] = run.end(run.begin("given-up"), status="aborted")
    ids["no_turns"] = run.end(run.begin("quiet", turns=0))
    ids["silent"] = run.begin("hung")
    run.wait(run.job.groups.idle_timeout_s + 1)
    ids["silent eval"] = run.begin("hung-exam", mode="eval")
    run.wait(run.job.groups.idle_timeout_s + 1)
    run.take(EpisodeEnd(run=run.job.run, episode_id="stray-1", status="aborted", client_id="client-a"))
    run.wait(HOLD_S + 1)
    ids["eval"] = run.end(run.begin("exam", mode="eval"), 0.25, success=True, metrics={"score": 2.0})
    ids["waiting"] = run.end(run.begin("half"))
    ids["published"] = run.finish("sent", (0.25, 0.75))[0]
    ids["open"] = run.begin("running", kind="code")
    return run, ids
