"""Every fate of an episode leaves a readable transcript, across collectors that are killed and stopped, on a real broker."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
from array import array

import pytest

from support.collector_process import collector, make_job
from swarmq.broker import topology
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.collector.ledger import read_fates
from swarmq.messages import EpisodeBegin, EpisodeEnd, Rollout, Slot, StepReport, Turn, VersionSpan, encode
from swarmq.transcripts.read import read, scan

pytestmark = pytest.mark.broker

FATES = {
    "trained": ("trained", ""),
    "equal": ("dropped", "equal_rewards"),
    "failed": ("dropped", "failed"),
    "aborted": ("dropped", "aborted"),
    "silent": ("dropped", "silent"),
    "superseded": ("dropped", "superseded"),
    "eval": ("eval", "finished"),
}


@pytest.fixture
def job(tmp_path, run_name, amqp_url, monkeypatch):
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")  # a slow broker is waited for
    return make_job(tmp_path, run_name, amqp_url, group_size=1, groups_per_batch=1, min_group=1)


def messages(job, name):
    """Begin, two turns and end of the episode with this fate."""
    task = "trained" if name == "superseded" else name
    common = {"run": job.run, "episode_id": name}
    yield EpisodeBegin(
        **common,
        slot=Slot(task_id=task),
        kind="math",
        group_size=1,
        policies=("main",),
        mode="eval" if name == "eval" else "train",
        client_id="c",
        idle_timeout_s=1.0 if name == "silent" else None,
    )
    for number in range(2):
        yield Turn(
            **common,
            policy="main",
            call_id=f"{name}-{number}",
            request_id=f"{name}-{number}",
            parent=f"{name}-0" if number else None,
            shared=5 * number,
            prompt_ids=array("i", [len(name), number, 7]).tobytes(),
            sampled_ids=array("i", [11, 12]).tobytes(),
            logprobs=array("f", [-0.25, -0.5]).tobytes(),
            versions=(VersionSpan(version=number, start=0, end=2),),
            messages=json.dumps([{"role": "user", "content": f"{name}: \u202e\x1b[31m<script>"}]).encode(),
        )
    status = name if name in {"failed", "aborted"} else "finished"
    if name != "silent":
        rewards = {"main": 0.5} if status == "finished" else {}
        yield EpisodeEnd(**common, status=status, rewards=rewards, metrics={"steps": 2.0}, reason="why")


async def fates(job, *names):
    """Wait until the ledger has what became of these episodes."""
    while not set(names) <= {  # noqa: ASYNC110
        name for name, fate in read_fates(job.run_folder.inbox).items() if (fate.state, fate.reason) == FATES[name]
    }:
        await asyncio.sleep(0.05)


async def transcripts(job, *names):
    """Wait until these episodes can be read."""
    while not set(names) <= {meta.episode_id for _, meta in scan(job.run_folder.transcripts)}:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_every_fate_leaves_a_transcript_with_the_exact_tokens_and_messages(job):
    inbox = topology.inbox(job.run)
    async with AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0) as broker, asyncio.timeout(240):
        await broker.declare(job.run, policies=job.policies, kinds=job.mix)
        async with collector(job):
            for name in ("trained", "equal", "failed", "aborted", "silent"):
                for message in messages(job, name):
                    await broker.publish(inbox, message)
            async with broker.consume(topology.ready(job.run, "main"), prefetch=2) as deliveries:
                ready = [(await anext(deliveries)).message for _ in range(2)]
            assert {one.episode_id for one in ready if isinstance(one, Rollout)} == {"trained", "equal"}
            await fates(job, "failed", "aborted", "silent")
            await transcripts(job, "failed", "aborted", "silent")
        async with collector(job) as last:  # the first one was killed
            for name in ("superseded", "eval"):
                for message in messages(job, name):
                    await broker.publish(inbox, message)
            report = StepReport(
                run=job.run,
                policy="main",
                record=1,
                version=1,
                trained=("trained",),
                dropped={"equal": "equal_rewards"},
            )
            await broker.publish(inbox, report)
            await fates(job, *FATES)
            last.send_signal(signal.SIGTERM)
            assert await last.wait() == 0

    folder = job.run_folder.transcripts
    found = list(scan(folder))
    assert {meta.episode_id: (meta.state, meta.reason) for _, meta in found} == FATES
    assert len(found) == len(FATES)
    for position, meta in found:
        transcript = read(folder, position)
        begin, first, second, *rest = messages(job, meta.episode_id)
        assert encode(transcript.begin) == encode(begin)
        assert [encode(turn) for turn in transcript.turns] == [encode(first), encode(second)]
        assert (meta.turns, meta.sampled_tokens, meta.prompt_tokens, meta.versions) == (2, 4, 11, (0, 1))
        assert meta.began_at <= meta.ended_at <= meta.closed_at
        if rest:
            (end,) = rest
            assert transcript.end.rewards == end.rewards
            assert (meta.status, meta.metrics, meta.detail) == (end.status, {"steps": 2.0}, "why")
        else:
            assert transcript.end is None
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
