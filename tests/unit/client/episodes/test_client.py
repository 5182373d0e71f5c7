"""Begin and end, on a broker in memory."""

import asyncio
import math
import shutil
import time

import httpx
import pytest
from structlog.testing import capture_logs

from support.deaf import deaf_port
from swarmq.broker import topology
from swarmq.client.data.tasks import SwarmTask
from swarmq.client.episodes.client import ClientLimits
from swarmq.errors import ClientError, EpisodeError, MessageError, OutcomeError, UnroutableError
from swarmq.keys import verify
from swarmq.messages import Slot
from swarmq.outcome import Outcome

ROOT = b"r" * 32
RUN = "r1"


async def settled(condition):
    """Let the loop turn until a fact holds; the test's own deadline ends it otherwise."""
    while not condition():  # noqa: ASYNC110 - the memory broker has no event for it
        await asyncio.sleep(0)


async def test_an_episode_begins_with_a_ticket_and_a_key_that_any_proxy_accepts(swarm, client):
    ep = await client.begin_episode({"id": "t1", "question": "6*7"})
    [begin] = swarm.begins
    assert (begin.episode_id, begin.slot.task_id, begin.kind, begin.group_size) == (ep.episode_id, "t1", "math", 2)
    assert begin.ticket_id == "ticket-1"
    assert begin.client_id.startswith("alice@")
    claims = verify(ROOT, ep.api_key, run=RUN, now=time.time())
    assert (claims.episode_id, claims.policies, claims.mode) == (ep.episode_id, ("main",), "train")
    assert (ep.base_url, ep.model, ep.payload) == ("http://127.0.0.1:2/v1", "main", {"id": "t1", "question": "6*7"})
    assert ep.api_key not in repr(ep)


async def test_the_ticket_is_gone_from_the_queue_once_the_begin_is_confirmed(swarm_of):
    swarm = await swarm_of()
    await swarm.issue(1)
    async with swarm.client() as client:
        await client.begin_episode("t")
    assert swarm.arrived(topology.tickets(RUN, "math")) == []


async def test_without_a_ticket_no_training_episode_begins_but_evaluation_does(swarm_of):
    swarm = await swarm_of()
    async with swarm.client() as client:
        waiting = asyncio.ensure_future(client.begin_episode("t"))
        await client.begin_episode("t", mode="eval")
        assert [begin.mode for begin in swarm.begins] == ["eval"]
        assert not waiting.done()
        await swarm.issue(1)
        await waiting
    assert [begin.mode for begin in swarm.begins] == ["eval", "train"]


async def test_a_run_without_tickets_begins_at_once(swarm_of):
    swarm = await swarm_of(ticketed=False)
    async with swarm.client() as client:
        await client.begin_episode("t")
    assert swarm.begins[0].ticket_id is None


async def test_a_begin_that_waits_too_long_says_what_it_waited_for(swarm_of):
    swarm = await swarm_of()
    async with swarm.client() as client:
        with pytest.raises(EpisodeError, match=r"within 0 s: the run is ahead of its learner"):
            await client.begin_episode("t", deadline_s=0)
        await swarm.issue(1)
        await client.begin_episode("t")


async def test_a_proxy_that_does_not_answer_is_named_once(client):
    with capture_logs() as told:
        assert [await client.proxy_serves() for _ in range(2)] == [False, False]
    assert [line["proxy"] for line in told if line["event"] == "proxy_away"] == ["http://127.0.0.1:2/health"]


async def test_a_client_without_rabbitmq_names_the_proxy_that_drops_its_packets(swarm_of, monkeypatch):
    for limit in ("CONNECT_TIMEOUT_S", "PROBE_TIMEOUT_S"):
        monkeypatch.setattr(f"swarmq.client.episodes.http.{limit}", 0.05)
    with deaf_port() as port, capture_logs() as told:
        swarm = await swarm_of(amqp_url="", base_url=f"http://127.0.0.1:{port}/v1")
        async with swarm.client() as client:
            beginning = asyncio.ensure_future(client.begin_episode("t"))
            await settled(lambda: any(line["event"] == "no_proxy_answers" for line in told))
            beginning.cancel()
    [line] = [line for line in told if line["event"] == "no_proxy_answers"]
    assert f"http://127.0.0.1:{port}/v1/control/episodes cannot be reached (timed out)" in line["reason"]
    assert "does a firewall drop packets to this port" in line["reason"]


async def test_a_cancelled_wait_gives_its_ticket_to_the_next(swarm_of):
    swarm = await swarm_of()
    async with swarm.client() as client:
        first = asyncio.ensure_future(client.begin_episode({"id": "first"}))
        second = asyncio.ensure_future(client.begin_episode({"id": "second"}))
        await asyncio.sleep(0)
        first.cancel()
        await swarm.issue(1)
        assert (await second).task.id == "second" or first.cancelled()
        assert [begin.slot.task_id for begin in swarm.begins] == ["second"]


async def test_a_wait_cancelled_in_the_moment_of_its_ticket_passes_the_ticket_on(swarm_of):
    swarm = await swarm_of()
    async with swarm.client() as client, asyncio.timeout(120):
        waiting = asyncio.ensure_future(client.begin_episode("t"))
        await settled(lambda: client._transport._ticket_sources and client._transport._ticket_sources["math"]._waiting)
        await swarm.issue(1)
        await settled(lambda: not client._transport._ticket_sources["math"]._waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.begin_episode("t")
    assert [begin.ticket_id for begin in swarm.begins] == ["ticket-1"]


async def test_a_begin_the_broker_refuses_keeps_its_ticket(swarm, client):
    await client.begin_episode("t")
    swarm.broker.delete(topology.inbox(RUN))
    with pytest.raises(UnroutableError):
        await client.begin_episode("t")
    await swarm.declare()
    await client.begin_episode("t")
    assert [begin.ticket_id for begin in swarm.begins] == ["ticket-2"]


async def test_a_missing_ticket_queue_is_an_error_for_those_who_wait_and_heals(swarm):
    swarm.broker.delete(topology.tickets(RUN, "math"))
    async with swarm.client() as client:
        with pytest.raises(UnroutableError):
            await client.begin_episode("t")
        await swarm.declare()
        await swarm.issue(1)
        await client.begin_episode("t")


async def test_poison_among_the_tickets_is_parked_and_the_next_ticket_is_used(swarm_of):
    from swarmq.messages import Task

    swarm = await swarm_of()
    await swarm.broker.publish(
        topology.tickets(RUN, "math"), Task(run=RUN, slot=Slot(task_id="x"), kind="math", group_size=1)
    )
    await swarm.issue(1)
    async with swarm.client() as client:
        await client.begin_episode("t")
    assert len(swarm.broker.stored(topology.DEAD)) == 1


async def test_repeated_attempts_fill_a_group(swarm, client):
    episodes = [await client.begin_episode("t") for _ in range(4)]
    slots = [ep.slot for ep in episodes]
    assert [slot.repeat for slot in slots] == [0, 1, 0, 1]
    assert slots[0].group_id == slots[1].group_id != slots[2].group_id == slots[3].group_id


async def test_a_retry_names_its_slot(swarm, client):
    first = await client.begin_episode("t")
    await first.fail("broken")
    again = await client.begin_episode("t", slot=first.slot, attempt=first.attempt + 1)
    assert (again.slot, again.attempt) == (first.slot, 1)
    assert again.episode_id != first.episode_id


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "chess"}, "kind 'chess' is not part of the run: the run's kinds are math, code"),
        ({}, "the task has no kind: the run's kinds are math, code"),
        ({"kind": "math", "policies": ["judge"]}, "policies: judge given; the run's policies are main"),
        ({"kind": "math", "policies": []}, "policies: none given"),
    ],
)
async def test_a_wrong_kind_or_policy_is_named_before_anything_is_sent(swarm_of, options, says):
    swarm = await swarm_of(kinds=("math", "code"))
    async with swarm.client() as client:
        with pytest.raises(EpisodeError, match=says):
            await client.begin_episode("t", **options)
    assert swarm.begins == []


async def test_kinds_are_served_apart(swarm_of):
    swarm = await swarm_of(kinds=("math", "code"))
    await swarm.issue(1, "code")
    async with swarm.client() as client:
        waiting = asyncio.ensure_future(client.begin_episode(SwarmTask("m", "math")))
        ep = await client.begin_episode(SwarmTask("c", "code"))
        assert ep.kind == "code"
        assert not waiting.done()
        waiting.cancel()


async def test_an_end_carries_everything_and_leaves_nothing_in_the_spool(swarm, client):
    ep = await client.begin_episode("t")
    await ep.end(0.5, success=True, metrics={"steps": 3}, metadata={"who": "me"}, call_rewards={"c": 1})
    [end] = swarm.ends
    assert (end.episode_id, end.status, end.rewards, end.success) == (ep.episode_id, "finished", {"main": 0.5}, True)
    assert (end.metrics, end.metadata, end.call_rewards) == ({"steps": 3.0}, {"who": "me"}, {"c": 1.0})
    assert swarm.spooled == []


async def test_an_end_takes_what_an_agent_s_function_returns(swarm, client):
    """`ep.end(attempt(ep))`, be it a number or an Outcome."""
    for returned in (0.5, Outcome(0.5, success=True)):
        await (await client.begin_episode("t")).end(returned)
        await client.end_episode(await client.begin_episode("t"), returned)
    assert [(end.rewards, end.success) for end in swarm.ends] == [({"main": 0.5}, s) for s in (None, None, True, True)]
    ep = await client.begin_episode("t")
    with pytest.raises(OutcomeError, match="put them into the Outcome"):
        await ep.end(Outcome(0.5), success=True)
    await ep.end(0.5)


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, "good"])
async def test_a_wrong_reward_sends_nothing_and_leaves_the_episode_open(swarm, client, reward):
    ep = await client.begin_episode("t")
    with pytest.raises(OutcomeError):
        await client.end_episode(ep, reward)
    assert swarm.ends == []
    await client.end_episode(ep, 1.0)
    assert [end.rewards for end in swarm.ends] == [{"main": 1.0}]


async def test_an_outcome_too_large_for_a_message_leaves_the_episode_open(swarm, client):
    ep = await client.begin_episode("t")
    with pytest.raises(MessageError, match="over the limit"):
        await ep.end(1.0, metadata={"log": "x" * 9_000_000})
    await ep.end(1.0)
    assert len(swarm.ends) == 1


async def test_ending_twice_alike_is_one_end_and_otherwise_an_error(swarm, client):
    ep = await client.begin_episode("t")
    await asyncio.gather(ep.end(1.0), ep.end(1.0), client.end_episode(ep.episode_id, 1.0))
    await ep.end(1.0)
    await client.end_episode(ep.episode_id, 1.0)
    with pytest.raises(
        EpisodeError, match="has already ended: finished with main 1; the new end is finished with main 0"
    ):
        await ep.end(0.0)
    with pytest.raises(EpisodeError, match=r"the new end is aborted \(enough\)"):
        await client.abort_episode(ep.episode_id, "enough")
    assert len(swarm.ends) == 1


async def test_ending_an_episode_of_somebody_else_is_an_error(client):
    with pytest.raises(EpisodeError, match="was not begun by this client"):
        await client.end_episode("0190-other", 1.0)


async def test_an_end_waits_while_the_broker_is_away_and_is_on_disk_meanwhile(swarm, client):
    ep = await client.begin_episode("t")
    swarm.broker.away(gone=True)
    ending = asyncio.ensure_future(ep.end(1.0))
    await settled(lambda: swarm.spooled)
    assert swarm.spooled == [f"{ep.episode_id}.end"]
    assert not ending.done()
    swarm.broker.away(gone=False)
    await ending
    assert len(swarm.ends) == 1
    assert swarm.spooled == []


async def test_an_end_whose_caller_gives_up_is_sent_all_the_same(swarm, client):
    ep = await client.begin_episode("t")
    swarm.broker.away(gone=True)
    ending = asyncio.ensure_future(ep.end(1.0))
    await settled(lambda: swarm.spooled)
    ending.cancel()
    swarm.broker.away(gone=False)
    await settled(lambda: swarm.ends)
    await ep.end(1.0)
    assert len(swarm.ends) == 1


async def test_what_one_client_could_not_deliver_the_next_one_does(swarm):
    async with swarm.client(limits=ClientLimits(drain_s=0.0)) as client:
        ep = await client.begin_episode("t")
        swarm.broker.away(gone=True)
        ending = asyncio.ensure_future(ep.end(0.25))
        await settled(lambda: swarm.spooled)
    with pytest.raises(ClientError, match="the end is in the spool"):
        await ending
    assert swarm.ends == []
    swarm.broker.away(gone=False)
    async with swarm.client():
        await settled(lambda: swarm.ends and not swarm.spooled)
    [end] = swarm.ends
    assert (end.episode_id, end.rewards) == (ep.episode_id, {"main": 0.25})


async def test_an_end_the_broker_has_no_queue_for_is_kept_and_may_be_sent_again(swarm, client):
    ep = await client.begin_episode("t")
    swarm.broker.delete(topology.inbox(RUN))
    with pytest.raises(UnroutableError):
        await ep.end(1.0)
    assert len(swarm.spooled) == 1
    await swarm.declare()
    await ep.end(1.0)
    assert len(swarm.ends) == 1
    assert swarm.spooled == []


async def test_a_client_that_stays_finds_the_proxies_that_tickets_name(swarm_of):
    first, second = (f"http://127.0.0.1:{port}/v1" for port in (2, 3))
    for given, wanted in (((first,), {first, second}), ((), {first})):
        swarm = await swarm_of(base_urls=given, base_url=first)
        await swarm.issue(1)
        await swarm.issue(32, proxies=(first, second))
        async with swarm.client() as client:
            assert (await client.begin_episode("before")).base_url == first
            used = {(await client.begin_episode("t")).base_url for _ in range(32)}
        assert used == wanted, "an invite to one proxy is to that one"


async def test_what_a_killed_client_left_open_is_aborted_in_its_name_by_the_next(swarm):
    async with swarm.client() as dead:
        ep = await dead.begin_episode("t")
        left = dead._spool.folder / f"{ep.episode_id}.begin"
        copy = left.read_bytes()
    ghost = swarm.spool / "ghost"
    ghost.mkdir()
    (ghost / "lock").touch()
    (ghost / left.name).write_bytes(copy)
    before = len(swarm.ends)
    async with swarm.client() as heir:
        await heir._first_delivery
    [end] = swarm.ends[before:]
    assert (end.episode_id, end.status, end.client_id) == (ep.episode_id, "aborted", dead.client_id)
    assert not end.final, "its slot may be attempted again"
    assert "died" in end.reason
    assert not ghost.exists()


async def test_a_full_disk_does_not_keep_an_end_from_the_broker(swarm, client, capsys):
    ep = await client.begin_episode("t")
    shutil.rmtree(client._spool.folder)
    await ep.end(1.0)
    assert len(swarm.ends) == 1
    assert "spool_unusable" in capsys.readouterr().out


async def test_the_block_of_an_episode_fails_it_with_the_traceback(swarm, client):
    with pytest.raises(ZeroDivisionError):
        async with client.episode("t"):
            1 / 0  # noqa: B018
    [end] = swarm.ends
    assert end.status == "failed"
    assert end.reason.endswith("ZeroDivisionError: division by zero\n")
    assert "1 / 0" in end.reason
    assert "swarmq/client" not in end.reason


async def test_leaving_the_block_without_end_fails_the_episode_visibly(swarm, client, capsys):
    async with client.episode("t"):
        pass
    assert [end.status for end in swarm.ends] == ["failed"]
    assert "episode_left_open" in capsys.readouterr().out


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError])
async def test_an_interrupt_aborts_the_episode(swarm, client, interrupt):
    with pytest.raises(interrupt):
        async with client.episode("t", last_attempt=True):
            raise interrupt
    assert [(end.status, end.reason) for end in swarm.ends] == [("aborted", f"interrupted by {interrupt.__name__}")]
    assert not swarm.ends[0].final, "its slot may be attempted again"


async def test_an_error_after_the_end_does_not_change_the_end(swarm, client):
    async def ends_and_raises():
        async with client.episode("t") as ep:
            await ep.end(1.0)
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        await ends_and_raises()
    assert [end.status for end in swarm.ends] == ["finished"]


async def test_closing_aborts_what_is_open(swarm):
    async with swarm.client() as client:
        ep = await client.begin_episode("t", last_attempt=True)
    assert [(end.status, end.reason) for end in swarm.ends] == [("aborted", "the client was closed")]
    assert not swarm.ends[0].final, "its slot may be attempted again"
    with pytest.raises(ClientError, match="closed"):
        await client.begin_episode("t")
    with pytest.raises(ClientError, match="closed"):
        await ep.end(1.0)


async def test_closing_lets_those_who_wait_for_a_ticket_go(swarm_of):
    swarm = await swarm_of()
    async with swarm.client() as client:
        waiting = asyncio.ensure_future(client.begin_episode("t"))
        await settled(lambda: client._transport._ticket_sources and client._transport._ticket_sources["math"]._waiting)
    with pytest.raises(ClientError, match="closed while this episode waited"):
        await waiting


async def test_a_client_that_was_not_entered_says_so(swarm):
    with pytest.raises(ClientError, match="async with"):
        await swarm.client().begin_episode("t")


async def test_after_a_fork_the_client_is_refused_instead_of_hanging(client, monkeypatch):
    ep = await client.begin_episode("t")
    monkeypatch.setattr(client, "_pid", -1)
    with pytest.raises(ClientError, match="after a fork"):
        ep.blocking().end(1.0)


async def test_a_blocking_call_on_the_clients_own_loop_is_refused_instead_of_hanging(client):
    ep = await client.begin_episode("t")
    with pytest.raises(ClientError, match="would wait for itself"):
        ep.blocking().end(1.0)


async def test_memory_does_not_grow_with_ended_episodes(swarm_of):
    swarm = await swarm_of(ticketed=False)
    async with swarm.client(limits=ClientLimits(remembered_ends=3)) as client:
        episodes = [await client.begin_episode("t") for _ in range(10)]
        for ep in episodes:
            await ep.end(1.0)
        assert (len(client._open), len(client._ended), len(client._sending)) == (0, 3, 0)
        await episodes[0].end(1.0)  # its handle still knows
        with pytest.raises(EpisodeError):
            await client.end_episode(episodes[0].episode_id, 1.0)


async def test_an_outcome_may_be_given_whole(swarm, client):
    ep = await client.begin_episode("t")
    await client.end_with(ep, Outcome(1.0, success=False))
    assert swarm.ends[0].success is False


async def test_an_agent_that_never_reads_its_key_is_told_so_once_for_its_kind(swarm, client):
    with capture_logs() as told:
        for task in ("a", "b"):
            async with client.episode({"id": task}) as ep:
                await ep.end(1.0)
        async with client.episode("c", mode="eval") as ep:
            await ep.end(1.0)
    [line] = told
    assert (line["event"], line["task"]) == ("episode_without_a_model_call", "a")
    assert line["seen"] == "the agent did not read ep.base_url and ep.api_key"
    assert line["action"].startswith("give the agent's model client base_url=ep.base_url (http")
    assert len(swarm.ends) == 3, "it is the agent's word all the same"


async def test_an_agent_that_has_its_key_is_trusted_to_use_it(client):
    with capture_logs() as told:
        async with client.episode("a") as ep:
            assert ep.blocking().api_key
            assert ep.base_url
            await ep.end(1.0)
    assert told == []


async def test_an_agent_that_never_reads_its_url_is_told_so(client):
    with capture_logs() as told:
        async with client.episode("a") as ep:
            assert ep.api_key
            await ep.end(1.0)
    assert [line["seen"] for line in told] == ["the agent did not read ep.base_url"]


async def test_an_agent_that_asks_another_server_is_told_which_also_if_it_fails(client):
    def ask(ep):
        mine = "http://127.0.0.1:1/v1"
        assert ep.base_url != mine
        httpx.post(f"{mine}/chat/completions", headers={"authorization": f"Bearer {ep.api_key}"})

    with capture_logs() as told, pytest.raises(httpx.ConnectError):
        async with client.episode("a") as ep:
            await asyncio.to_thread(ask, ep)
    assert [line["seen"] for line in told] == ["the agent sent ep.api_key to 127.0.0.1:1 instead of ep.base_url"]


async def test_a_training_episode_needs_a_policy_that_is_trained(swarm_of):
    swarm = await swarm_of(policies=("main", "judge", "rival"), frozen=("judge", "rival"))
    await swarm.issue(9)
    async with swarm.client() as client:
        with pytest.raises(EpisodeError, match=r"policies: judge, rival given, which no learner trains .* one of main"):
            await client.begin_episode("t", policies=["judge", "rival"])
        assert swarm.begins == [], "no ticket is spent on it"
        await client.begin_episode("t", policies=["judge"], mode="eval")
        await client.begin_episode("t", policies=["judge", "main"])
    assert [begin.policies for begin in swarm.begins] == [("judge",), ("judge", "main")]
