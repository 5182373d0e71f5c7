"""The blocking client, from many threads."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading

import pytest

from swarmq.broker import topology
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.sync_client import SwarmClient
from swarmq.errors import BrokerError, ClientError, EpisodeError, OutcomeError
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, decode
from swarmq.testing import MemoryBroker

RUN = "r1"
FAST = {"retry_pause_s": 0.0, "progress": False}


@pytest.fixture
def broker():
    return MemoryBroker()


@pytest.fixture
def open_client(broker, make_invite, tmp_path):
    def make(tickets=1000, **changes):
        @contextlib.asynccontextmanager
        async def open_broker(invite, _name):
            await broker.declare(RUN, policies=invite.policies, kinds=invite.kinds)
            for number in range(tickets):
                await broker.publish(
                    topology.tickets(RUN, "math"), Ticket(run=RUN, ticket_id=f"ticket-{number}", kind="math")
                )
            yield broker

        return SwarmClient(make_invite(**changes), spool=tmp_path, open_broker=open_broker)

    return make


def arrived(broker, kind):
    found = [decode(stored.body) for stored in broker.stored(topology.inbox(RUN))]
    return [message for message in found if isinstance(message, kind)]


def test_twenty_threads_share_one_client(broker, open_client):
    together = threading.Barrier(20, timeout=120)
    with open_client() as client:

        def work(number):
            together.wait()
            for _ in range(10):
                ep = client.begin_episode({"id": str(number)})
                client.end_episode(ep, number)

        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            list(pool.map(work, range(20)))
    begins, ends = arrived(broker, EpisodeBegin), arrived(broker, EpisodeEnd)
    assert len({begin.slot.id for begin in begins}) == len(begins) == 200
    assert len({begin.ticket_id for begin in begins}) == 200
    assert {end.episode_id for end in ends} == {begin.episode_id for begin in begins}
    by_id = {begin.episode_id: begin for begin in begins}
    assert all(end.rewards["main"] == float(by_id[end.episode_id].slot.task_id) for end in ends)


def test_the_block_of_an_episode_behaves_like_its_asynchronous_twin(broker, open_client):
    with open_client() as client:
        with client.episode("t") as ep:
            ep.end(1.0, success=True)
        with pytest.raises(ValueError, match="broken"), client.episode("t"):
            raise ValueError("broken")
        with pytest.raises(KeyboardInterrupt), client.episode("t"):
            raise KeyboardInterrupt
        with client.episode("t"):
            pass
    assert [end.status for end in arrived(broker, EpisodeEnd)] == ["finished", "failed", "aborted", "failed"]


def test_errors_reach_the_thread_that_caused_them(open_client):
    with open_client() as client:
        ep = client.begin_episode("t")
        with pytest.raises(OutcomeError):
            ep.end(float("nan"))
        ep.end(1.0)
        with pytest.raises(EpisodeError):
            ep.fail("no")
        with pytest.raises(EpisodeError):
            client.abort_episode("nobody")


def test_episodes_run_in_threads_and_coroutines_on_a_loop_that_is_not_the_clients(broker, open_client):
    loops, threads = set(), set()

    async def coroutine(ep):
        loops.add(asyncio.get_running_loop())
        await ep.end(1.0)

    def function(ep):
        threads.add(threading.current_thread().name)
        ep.end(0.0)

    with open_client() as client:
        tasks = [{"id": str(number)} for number in range(4)]
        assert client.run_episodes_until_all_complete(tasks, coroutine, **FAST).reward_mean == 1.0
        assert client.run_episodes_until_all_complete(tasks, function, **FAST).reward_mean == 0.0
        assert client.evaluate(tasks, function, **FAST).mean_reward == 0.0
        assert client._client.loop not in loops
    assert len(loops) == 1
    assert threads == {"swarmq-agent"}


async def test_it_works_inside_a_running_loop_as_in_a_notebook(open_client):
    with open_client() as client, client.episode("t") as ep:
        ep.end(1.0)


def test_closing_is_idempotent_and_later_calls_say_so(broker, open_client):
    client = open_client()
    ep = client.begin_episode("t")
    client.close()
    client.close()
    assert [end.status for end in arrived(broker, EpisodeEnd)] == ["aborted"]
    with pytest.raises(ClientError, match="closed"):
        client.begin_episode("t")
    with pytest.raises(ClientError, match="closed"):
        ep.end(1.0)


def test_a_thread_that_waits_while_the_client_is_closed_is_told(open_client):
    client = open_client(tickets=0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.begin_episode, "t")
        while not (
            client._client._transport._ticket_sources and client._client._transport._ticket_sources["math"]._waiting
        ):
            threading.Event().wait(0.001)
        client.close()
        with pytest.raises(ClientError, match="closed"):
            waiting.result()


def test_a_broker_that_cannot_be_reached_is_an_error_at_once_and_leaves_no_thread(make_invite, tmp_path):
    def refuse(_invite, _name):
        raise BrokerError("nobody answers")

    before = set(threading.enumerate())
    with pytest.raises(BrokerError, match="nobody answers"):
        SwarmClient(make_invite(), spool=tmp_path, open_broker=refuse)
    assert set(threading.enumerate()) <= before


def test_an_interrupt_while_waiting_gives_the_place_in_the_line_up(broker, open_client, monkeypatch):
    with open_client(tickets=0) as client:
        real = concurrent.futures.Future.result

        def interrupted(future, timeout=None):
            if threading.current_thread() is not threading.main_thread():  # the client's loop reads futures too
                return real(future, timeout)
            monkeypatch.setattr(concurrent.futures.Future, "result", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.begin_episode({"id": "interrupted"})
        ticket = Ticket(run=RUN, ticket_id="only", kind="math")
        client._call(lambda: broker.publish(topology.tickets(RUN, "math"), ticket))
        assert client.begin_episode({"id": "next"}).task.id == "next"


@pytest.mark.parametrize(
    ("name", "returns"),
    [
        ("begin_episode", "Episode"),
        ("end_episode", "None"),
        ("run_episodes_until_all_complete", "RunSummary"),
        ("evaluate", "EvalReport"),
    ],
)
def test_the_signatures_people_see_are_the_real_ones(name, returns):
    blocking, original = getattr(SwarmClient, name), getattr(AsyncSwarmClient, name)
    shown = inspect.signature(blocking)
    (this, *given), (_, *wanted) = shown.parameters.values(), inspect.signature(original).parameters.values()
    assert (this.name, this.annotation) == ("self", inspect.Parameter.empty)
    assert given == wanted
    assert shown.return_annotation == returns
    assert blocking.__doc__ == original.__doc__
