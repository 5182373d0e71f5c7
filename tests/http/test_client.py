"""A client that reaches nothing but the proxy has the guarantees of one with RabbitMQ."""

import asyncio
import contextlib
import functools
import time

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from support.proxy import ROOT, served
from support.tls import self_signed
from swarmq import keys
from swarmq.broker import topology
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.episodes.client import ClientLimits
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.client.episodes.http import HttpError, post_json
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker
from swarmq.config import SwarmJob
from swarmq.errors import ClientError, EpisodeError, KeyRefusedError, OutcomeError
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, Turn, decode
from swarmq.proxy.http.app import create_app
from swarmq.registries.clients import ClientRegistry, InvitedClient
from swarmq.runtime.processes import reserve_port
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

RUN = "r1"
INVITE = keys.Invite(
    run=RUN,
    client="alice",
    secret=keys.derive_client_secret(ROOT, "alice"),
    amqp_url="",
    base_url="",
    policies=("main",),
    kinds=("math",),
    group_size=2,
)


class Far:
    """The proxy, its broker, and an ASGI wrapper that swallows answers on demand."""

    def __init__(self, folder):
        self.job = SwarmJob.build(
            {"run": RUN, "folder": str(folder), "mix": {"math": 1.0}, "policies": {"main": {"model": "x"}}}
        )
        self.broker = MemoryBroker()
        self.spool = folder / "spool"
        self.swallow = 0
        self.unknown = b""
        """A field that the proxy refuses, as one of another version does."""
        self.asked = []
        self.engine = ScriptedEngine()

    @contextlib.asynccontextmanager
    async def open(self, tls=None):
        await self.broker.declare(RUN, policies=["main"], kinds=["math"])
        self.job.run_folder.path.mkdir(exist_ok=True)
        app = create_app(self.job, root=ROOT, engines={"main": [self.engine]}, broker=self.broker)

        async def wire(scope, receive, send):
            if scope.get("path") == "/health":  # a client looks at the clock
                await app(scope, receive, send)
                return
            if scope["type"] == "http":
                self.asked.append(scope["path"])
            if scope["type"] == "http" and self.unknown:
                body = await receive()
                if self.unknown in body["body"]:
                    await send({"type": "http.response.start", "status": 400, "headers": []})
                    await send({"type": "http.response.body", "body": b"unknown field"})
                    return
                receive = functools.partial(asyncio.sleep, 0, body)
            if scope["type"] != "http" or not self.swallow:
                await app(scope, receive, send)
                return
            self.swallow -= 1
            await app(scope, receive, lambda _message: asyncio.sleep(0))
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": b"the answer was lost"})

        async with served(wire, tls=tls) as url:
            self.invite = msgspec.structs.replace(INVITE, base_url=f"{url}/v1")
            yield self

    def client(self, **options):
        return AsyncSwarmClient(**{"invite": self.invite, "spool": self.spool, **options})

    async def issue(self, count):
        for number in range(count):
            await self.broker.publish(
                topology.tickets(RUN, "math"), Ticket(run=RUN, ticket_id=f"ticket-{number}", kind="math")
            )

    def pieces(self, kind):
        return [m for one in self.broker.stored(topology.inbox(RUN)) if isinstance(m := decode(one.body), kind)]


@pytest.fixture
def far(tmp_path):
    return Far(tmp_path)


async def test_an_episode_begins_and_ends_over_http_alone(far):
    async with far.open():
        await far.issue(1)
        async with far.client(code_version="v7") as client:
            async with client.episode({"id": "a"}, attempt=1) as ep:
                await ep.end(0.5, success=True, metrics={"turns": 3}, metadata={"note": "x"})
            [begin], [end] = far.pieces(EpisodeBegin), far.pieces(EpisodeEnd)
        assert (begin.slot.task_id, begin.kind, begin.attempt, begin.code_version) == ("a", "math", 1, "v7")
        assert (begin.ticket_id, begin.client_id) == ("ticket-0", client.client_id)
        assert (end.rewards, end.success, end.metrics, end.metadata) == (
            {"main": 0.5},
            True,
            {"turns": 3},
            {"note": "x"},
        )
        claims = keys.verify(ROOT, ep.api_key, run=RUN, now=time.time())
        assert (claims.episode_id, claims.client) == (ep.episode_id, "alice")
        assert not list(far.spool.rglob("*.end"))


@pytest.mark.parametrize("hours", [-5, 3])
@pytest.mark.parametrize("over_http", [True, False])
async def test_a_client_whose_clock_is_hours_off_is_answered(far, over_http, hours):
    async with far.open():
        await far.issue(1)
        now = lambda: time.time() + hours * 3600  # noqa: E731

        @contextlib.asynccontextmanager
        async def open_broker(_invite, _name):
            yield far.broker

        invite = far.invite if over_http else msgspec.structs.replace(far.invite, amqp_url="amqp://x/")
        with capture_logs() as said:
            async with far.client(invite=invite, now=now, open_broker=open_broker) as client:
                ep = await client.begin_episode({"id": "a"}, lifetime_s=600)
                far.engine.say("4")
                await ask(ep)
                claims = keys.verify(ROOT, ep.api_key, run=RUN, now=time.time())
                assert 500 < claims.expires_at - time.time() < 700, "by the proxy's clock"
                await ep.end(0.5)
        [warning] = [one for one in said if one["event"] == "clock_differs"]
        assert abs(warning["behind_s"] + hours * 3600) < 60
        assert [end.rewards for end in far.pieces(EpisodeEnd)] == [{"main": 0.5}]


async def ask(ep, **headers):
    """An agent's call; the id of its answer."""
    body = {"model": ep.model, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {ep.api_key}", **headers}
    async with httpx.AsyncClient() as http:
        return (await http.post(f"{ep.base_url}/chat/completions", json=body, headers=headers)).json()["id"]


@pytest.mark.parametrize("proxy", ["this one", "an older one"])
async def test_an_end_names_the_calls_whose_answers_its_agent_received(far, proxy):
    far.unknown = b'"received"' if proxy == "an older one" else b""
    async with far.open():
        await far.issue(1)
        async with far.client() as client, client.episode({"id": "a"}) as ep:
            for _ in range(2):
                far.engine.say("x")
            calls = (await ask(ep), await ask(ep))
            await ep.end(0.5)
            await ep.end(0.5)
        [end] = far.pieces(EpisodeEnd)
        assert end.calls is None
        assert end.received == (calls if proxy == "this one" else None)
        assert all(turn.observed for turn in far.pieces(Turn))


async def test_a_reward_for_a_call_whose_answer_did_not_arrive_is_told_to_the_client(far):
    async with far.open():
        await far.issue(1)
        async with far.client() as client, client.episode({"id": "a"}) as ep:
            far.engine.say("x")
            call = await ask(ep)
            with capture_logs() as lines:
                await ep.end(0.5, call_rewards={call: 1.0, "lost.0": 2.0})
        [told] = [line for line in lines if line["event"] == "reward_for_a_call_without_an_answer"]
        assert told["calls"] == ["lost.0"]


async def test_it_speaks_https_and_trusts_the_invites_authority_alone(far, tmp_path):
    async with far.open(tls=self_signed(tmp_path)):
        ca = keys.read_certificate(tmp_path / "cert.pem")
        async with far.client(invite=msgspec.structs.replace(far.invite, ca=ca)) as client:
            ep = await client.begin_episode({"id": "a"}, mode="eval")
            await ep.end(1.0)
        assert [end.rewards for end in far.pieces(EpisodeEnd)] == [{"main": 1.0}]
        with pytest.raises(HttpError, match=r"(?i)certificate"):
            await run_in_thread(lambda: post_json(f"{far.invite.base_url}/control", {}, token="t", timeout_s=30.0))


async def test_answers_that_are_lost_change_nothing(far):
    async with far.open():
        await far.issue(3)
        async with far.client() as client:
            far.swallow = 2
            ep = await client.begin_episode({"id": "a"})
            far.swallow = 2
            await ep.end(1.0)
            await ep.end(1.0)
            far.swallow = 1
            failed = await client.begin_episode({"id": "b"})
            far.swallow = 1
            await failed.fail("broken")
        assert len(far.pieces(EpisodeBegin)) == len(far.pieces(EpisodeEnd)) == 2
        assert [end.status for end in far.pieces(EpisodeEnd)] == ["finished", "failed"]


@pytest.mark.parametrize("older", [False, True])
async def test_a_last_attempt_is_told_as_the_last_where_the_proxy_understands_it(far, older):
    async with far.open():
        async with far.client() as client:
            ep = await client.begin_episode({"id": "a"}, mode="eval", last_attempt=True)
            far.unknown = b'"final"' if older else b""
            await ep.fail("broken")
        [end] = far.pieces(EpisodeEnd)
        assert (end.status, end.reason, end.final) == ("failed", "broken", not older)
        assert sum(path.endswith("abort") for path in far.asked) == 1 + older
        assert not list(far.spool.rglob("*.end"))


async def test_a_begin_waits_for_its_ticket_and_can_be_given_up(far):
    async with far.open():
        async with far.client() as client:
            with pytest.raises(EpisodeError, match=r"could begin within 0\.2 s"):
                await client.begin_episode({"id": "a"}, deadline_s=0.2)
            beginning = asyncio.ensure_future(client.begin_episode({"id": "b"}))
            while sum(path.endswith("episodes") for path in far.asked) < 2:  # noqa: ASYNC110 - another loop's matter
                await asyncio.sleep(0.01)
            await far.issue(2)
            ep = await beginning
            assert ep.task.id == "b"
            waiting = asyncio.ensure_future(client.begin_episode({"id": "c"}))
            await asyncio.sleep(0)
            await ep.abort()
        with pytest.raises(ClientError):
            await waiting


async def test_an_end_that_finds_no_proxy_is_spooled_and_delivered_by_the_next_client(far):
    async with far.open():
        await far.issue(1)
        async with far.client(limits=ClientLimits(drain_s=0.1)) as client:
            ep = await client.begin_episode({"id": "a"})
            client._transport._invite = msgspec.structs.replace(
                far.invite, base_url=f"http://127.0.0.1:{reserve_port()}/v1"
            )
            client._transport._homes.clear()
            ending = asyncio.ensure_future(ep.end(0.25))
            while not list(far.spool.rglob("*.end")):  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.01)
        with pytest.raises(ClientError, match="in the spool"):
            await ending
        assert not far.pieces(EpisodeEnd)
        async with far.client() as following:
            await following._first_delivery
        [end] = far.pieces(EpisodeEnd)
        assert (end.episode_id, end.rewards) == (ep.episode_id, {"main": 0.25})


async def test_what_the_proxy_refuses_is_said_and_not_tried_again(far):
    async with far.open():
        async with far.client(invite=msgspec.structs.replace(far.invite, secret=b"x" * 32)) as client:
            with pytest.raises(KeyRefusedError, match="signature is wrong"):
                await client.begin_episode({"id": "a"}, mode="eval")
        async with far.client() as client:
            ep = await client.begin_episode({"id": "a"}, mode="eval")
            with pytest.raises(OutcomeError):
                await ep.end(float("nan"))
            client.client_id = "bob@elsewhere"
            with pytest.raises(KeyRefusedError, match="the token belongs to client 'alice'"):
                await client.begin_episode({"id": "b"}, mode="eval")
            with ClientRegistry.open(far.job.run_folder.clients) as members:
                members.put(InvitedClient(name="alice", added_at=1.0, removed_at=2.0))

            async def begin_for_ever():  # until the proxy looks again
                while True:
                    await client.begin_episode({"id": "c"}, mode="eval")

            client.client_id = "alice@here"
            with pytest.raises(KeyRefusedError, match="client 'alice' was removed"):
                await begin_for_ever()


async def test_a_worker_needs_rabbitmq_and_says_so(far):
    async with far.open(), far.client() as client:
        worker = Worker(client, lambda _ep: 1.0, options=RunnerOptions(progress=False))
        with pytest.raises(ClientError, match="task queues need RabbitMQ: use an invite with RabbitMQ"):
            await worker.run(asyncio.Event())


async def test_a_proxy_that_does_not_answer_is_passed_over_for_begin_and_end(far, tmp_path):
    nobody = f"http://127.0.0.1:{reserve_port()}/v1"
    async with far.open():
        await far.issue(4)
        there = far.invite.base_url
        invite = msgspec.structs.replace(far.invite, base_url=nobody, base_urls=(nobody, there))
        async with far.client(invite=invite) as client:
            for name in "abcd":  # whichever of the two is their home
                async with client.episode({"id": name}) as ep:
                    assert ep.base_url == there, "the agent is sent to the one that took the begin"
                    await ep.end(1.0)
            late = await client.begin_episode({"id": "e"}, mode="eval")
            client._transport._homes[late.episode_id] = nobody  # it has died since
            await late.end(0.5)
    assert len(far.pieces(EpisodeBegin)) == len(far.pieces(EpisodeEnd)) == 5


async def test_groups_and_proxies_are_followed_as_they_change(far):
    async with far.open():
        here = far.invite.base_url
        other = here.replace("127.0.0.1", "localhost")
        ticket = Ticket(run=RUN, ticket_id="t", kind="math", group_size=3, proxies=(other,))
        for number in range(4):
            ticket = msgspec.structs.replace(ticket, ticket_id=f"ticket-{number}")
            await far.broker.publish(topology.tickets(RUN, "math"), ticket)
        async with far.client(invite=msgspec.structs.replace(far.invite, base_urls=(here,))) as client:
            first = await client.begin_episode({"id": "a"})
            assert client.group_size_of("math") == 3
            second = await client.begin_episode({"id": "b"})
            assert (first.base_url, second.base_url) == (here, other)
            await first.end(1.0)
            await second.end(1.0)
        async with far.client() as client:  # by an address of its own, e.g. a reverse proxy's
            ep = await client.begin_episode({"id": "c"})
            assert ep.base_url == here
            await ep.end(1.0)
    assert [begin.group_size for begin in far.pieces(EpisodeBegin)] == [2, 3, 2]
