"""What RabbitMQ lets an invited client do, and what it does not."""

import asyncio
import contextlib
import re

import aio_pika
import msgspec
import pytest
from click.testing import CliRunner

from support.broker import discarded, is_refused
from support.tls import self_signed
from swarmq import cli, keys
from swarmq.broker import topology
from swarmq.broker.admin.dead_letters import list_letters, requeue_letters
from swarmq.broker.admin.invitations import ClientAddresses, add_client, remove_client, renew_rights
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.files import render_tls_listener
from swarmq.broker.node.process import PrivateNode
from swarmq.broker.session import open_session
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import BrokerSettings, RunFolder, SwarmJob
from swarmq.errors import BrokerError, ConfigError
from swarmq.keys import Invite
from swarmq.messages import Command, EpisodeBegin, EpisodeEnd, Slot, Task, Ticket, encode, new_id
from swarmq.runtime.processes import reserve_port

pytestmark = pytest.mark.broker
KINDS = ("math", "code")


class World:
    """A run on the node, its folder, and whoever is invited to it."""

    def __init__(self, node, run, folder, broker):
        self.node, self.run, self.folder, self.broker = node, run, RunFolder(folder), broker
        self.management = ManagementApi.of(node.amqp_url, node.identity.management_login)
        self.host = Invite(
            run=run,
            client="local",
            secret=b"s" * 32,
            amqp_url=node.amqp_url,
            base_url="http://127.0.0.1:1/v1",
            policies=("main",),
            kinds=KINDS,
            group_size=2,
        )

    def invite(self, name, **reach):
        return add_client(self.folder, self.host, name, self.management, ClientAddresses(**reach))

    async def arrived(self, queue=None):
        async with self.broker.consume(queue or topology.inbox(self.run), prefetch=10) as deliveries:
            delivery = await anext(deliveries)
            await delivery.ack()
            return delivery.message

    def begin(self, client_id, **fields):
        given = {"slot": Slot(task_id="t"), "kind": "math", "group_size": 1, "policies": ("main",)}
        return EpisodeBegin(run=self.run, episode_id=new_id(), client_id=client_id, **{**given, **fields})


@pytest.fixture
def world(broker_node, run_name, tmp_path, monkeypatch):
    """`async with world() as w`: not a generator, because a client belongs to one task."""
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path / "spool"))

    @contextlib.asynccontextmanager
    async def make(node=broker_node):
        async with AmqpBroker.open(node.amqp_url, name="test", deadline_s=120.0) as broker:
            await broker.declare(run_name, policies=["main"], kinds=KINDS)
            yield World(node, run_name, tmp_path / run_name, broker)

    return make


async def test_an_invited_client_runs_episodes_and_its_tasks(world):
    async with world() as w:
        invite = w.invite("alice")
        assert invite.invited
        assert w.host.amqp_url != invite.amqp_url
        await w.broker.publish(topology.tickets(w.run, "math"), Ticket(run=w.run, ticket_id="1", kind="math"))
        async with AsyncSwarmClient(Invite.decode(invite.encode())) as client:
            ep = await client.begin_episode({"id": "a"}, kind="math")
            await ep.end(1.0)
            begin, end = await w.arrived(), await w.arrived()
            assert (begin.episode_id, end.rewards) == (ep.episode_id, {"main": 1.0})
            again = Task(run=w.run, slot=Slot(task_id="t"), kind="math", group_size=1, attempt=1)
            await client.broker.publish(topology.retries(w.run, "math"), again)
            assert await w.arrived(topology.returned_tasks(w.run)) == again


async def test_a_client_can_neither_read_nor_write_nor_make_anything_else(world):
    async with world() as w:
        alice, _bob = w.invite("alice"), w.invite("bob")
        message = aio_pika.Message(encode(w.begin("alice@here")))

        async def publish(channel, exchange, key):
            target = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
            await target.publish(message, key, mandatory=True)

        async def read(channel, name):
            await (await channel.get_queue(name, ensure=False)).get(fail=False)

        async def purge(channel, name):
            await (await channel.get_queue(name, ensure=False)).purge()

        user = topology.client_user(w.run, "alice")
        assert not await is_refused(alice.amqp_url, lambda c: publish(c, topology.CLIENTS, f"{user}.in"))
        for exchange, key in [
            (topology.CLIENTS, f"{topology.client_user(w.run, 'bob')}.in"),
            (topology.CLIENTS, "another-run.alice.in"),
            (topology.CLIENTS, f"{user}.control"),
            (topology.CLIENTS, f"{user}.dead"),
            (topology.CLIENTS, f"{user}.main.control"),
            (topology.CLIENTS, f"{user}.tickets.math"),
            *[("", name) for name in (topology.inbox(w.run), topology.control(w.run), topology.evals(w.run, "math"))],
            (topology.EVENTS, f"{w.run}.up.warning"),
            (topology.DEAD, ""),
        ]:
            assert await is_refused(alice.amqp_url, lambda c, e=exchange, k=key: publish(c, e, k)), (exchange, key)
        others = [
            *(topology.inbox(w.run), topology.ready(w.run, "main"), topology.DEAD),
            *(topology.control(w.run), topology.control(w.run, "main")),
            *(f"swarmq.other.{what}.math" for what in ("tasks", "tickets", "eval")),
        ]
        shared = [name(w.run, "math") for name in (topology.tasks, topology.tickets, topology.evals)]
        for name in others:
            assert await is_refused(alice.amqp_url, lambda c, n=name: read(c, n)), name
            assert await is_refused(alice.amqp_url, lambda c, n=name: purge(c, n)), name
        for name in [*others, *shared]:
            assert await is_refused(alice.amqp_url, lambda c, n=name: c.queue_delete(n)), name
        assert await is_refused(alice.amqp_url, lambda c: c.declare_queue("mine", exclusive=True))
        assert await is_refused(alice.amqp_url, lambda c: c.declare_exchange("mine"))
        assert isinstance(await w.arrived(), EpisodeBegin)


async def test_what_a_client_sends_in_anothers_name_is_parked_and_never_used(world):
    async with world() as w:
        alice = w.invite("alice")
        w.invite("bob")
        forged = [
            w.begin("bob@laptop-1"),
            EpisodeEnd(run=w.run, episode_id=new_id(), client_id="alice-2@x", status="finished", rewards={"main": 9.0}),
            Ticket(run=w.run, ticket_id="1", kind="math"),
        ]
        user = topology.client_user(w.run, "alice")
        async with AmqpBroker.open(alice.amqp_url, name="evil", user=user, deadline_s=120.0) as evil:
            for message in forged:
                await evil.publish(topology.inbox(w.run), message)
            honest = w.begin("alice@laptop-1")
            await evil.publish(topology.inbox(w.run), honest)
        assert await w.arrived() == honest
        reasons = [one.reason for one in await list_letters(w.node.amqp_url) if one.queue == topology.inbox(w.run)]
        assert len(reasons) == len(forged)
        assert any("in the name of 'bob@laptop-1'" in reason for reason in reasons)
        assert any("may not send a Ticket" in reason for reason in reasons)


async def test_removing_a_client_closes_its_connections_and_refuses_it_from_then_on(world):
    async with world() as w:
        invite = w.invite("alice")
        connection = await aio_pika.connect(invite.amqp_url)
        closed = asyncio.Event()
        connection.close_callbacks.add(lambda *_: closed.set())
        await connection.channel()  # answered by a broker that has told its other parts of the connection
        remove_client(w.folder, "alice", w.management)
        async with asyncio.timeout(120):
            await closed.wait()
        with pytest.raises(BrokerError, match="refused user or password"):
            async with AsyncSwarmClient(invite):
                pass
        with pytest.raises(ConfigError, match="was removed, and its keys stay refused"):
            w.invite("alice")
        with pytest.raises(ConfigError, match="no client 'bob': this run has invited alice"):
            remove_client(w.folder, "bob", w.management)


async def test_what_a_removed_client_still_sends_ends_with_the_reason(world):
    async with world() as w:
        user = topology.client_user(w.run, "alice")

        def impatient(invite, name):
            return AmqpBroker.open(invite.broker_url, name=name, user=user, deadline_s=120.0, login_patience_s=0.1)

        async with AsyncSwarmClient(w.invite("alice"), open_broker=impatient) as client:
            ep = await client.begin_episode({"id": "t"}, kind="math", mode="eval")
            remove_client(w.folder, "alice", w.management)
            async with asyncio.timeout(240):
                with pytest.raises(BrokerError, match="the client was removed from the run"):
                    await ep.end(1.0)


async def third(invite):
    """One connection more, again and again: RabbitMQ counts them a moment after it has let them in."""
    while True:
        async with AmqpBroker.open(invite.amqp_url, name="third"):
            pass


async def test_a_clients_connections_are_limited(world):
    async with world() as w:
        invite = add_client(w.folder, w.host, "alice", w.management, ClientAddresses(), max_connections=2)
        held = [await aio_pika.connect(invite.amqp_url) for _ in range(2)]
        with pytest.raises(BrokerError, match="too many connections"):
            await asyncio.wait_for(third(invite), 120)
        for connection in held:
            await connection.close()


async def test_a_management_api_that_is_not_there_invites_nobody(world):
    async with world() as w:
        w.management = msgspec.structs.replace(w.management, urls=(f"http://127.0.0.1:{reserve_port()}",))
        with pytest.raises(BrokerError, match="--management"):
            w.invite("alice")
        assert not w.folder.clients.exists()
        assert w.invite("bob", http=True).over_http


async def test_a_client_joins_over_tls_and_trusts_the_invites_authority_alone(world, tmp_path):
    certificate = self_signed(tmp_path)
    port = reserve_port()
    settings = BrokerSettings(
        tls_port=port, certificate=str(certificate / "cert.pem"), key=str(certificate / "key.pem")
    )
    node = PrivateNode(tmp_path / "node", config=render_tls_listener(settings))
    async with discarded(node), world(node) as w:
        invite = w.invite("alice", amqp=f"amqps://127.0.0.1:{port}/", ca=certificate / "cert.pem")
        await w.broker.publish(topology.tickets(w.run, "math"), Ticket(run=w.run, ticket_id="1", kind="math"))
        async with AsyncSwarmClient(Invite.decode(invite.encode())) as client:
            ep = await client.begin_episode({"id": "a"}, kind="math")
            assert (await w.arrived()).episode_id == ep.episode_id
            await ep.abort()
        with pytest.raises(BrokerError, match=r"(?i)certificate"):
            async with AsyncSwarmClient(msgspec.structs.replace(invite, ca=b"")):
                pass


async def test_a_viewer_is_let_in_and_out_by_the_command_line(world, tmp_path, monkeypatch):
    async with world() as w:
        job = SwarmJob.build({"run": w.run, "policies": {"main": {"model": "m"}}, "broker": {"url": w.node.amqp_url}})
        (tmp_path / "resolved.toml").write_text(job.to_toml())
        monkeypatch.setenv("SWARMQ_MANAGEMENT_URL", w.node.identity.management_login)
        said = CliRunner().invoke(cli.main, ["viewer", str(tmp_path), "--name", "carol"]).output
        url, user, password = re.fullmatch(r"(\S+)  user (\S+)  password (\S+)\n", said).groups()
        assert user == f"{w.run}.viewer.carol"
        seen = ManagementApi.of(w.node.amqp_url, url.replace("://", f"://{user}:{password}@"))
        assert seen.connections("nobody") == 0, "the login works"
        with pytest.raises(BrokerError, match="401"):
            seen.users()
        assert CliRunner().invoke(cli.main, ["viewer", str(tmp_path), "--name", "carol", "--remove"]).exit_code == 0
        assert user not in w.management.users()


async def put(url, exchange, key, message, **headers):
    """Publish as whoever the url names, with headers of one's own choice."""
    connection = await aio_pika.connect(url)
    async with connection, await connection.channel(on_return_raises=True) as channel:
        target = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
        stamped = aio_pika.Message(encode(message), message_id=new_id(), headers=headers)
        await target.publish(stamped, key, mandatory=True)


async def open_dead_letters_to_clients(w, user):
    """Restore what older versions of swarmq allowed: clients publish to the dead letters."""
    own = rf"^{re.escape(user)}\.(in|dead|(tasks|eval)\..+)$"
    path = f"topic-permissions/%2F/{user}"
    await asyncio.to_thread(w.management._put, path, {"exchange": topology.CLIENTS, "write": own, "read": "^$"})
    connection = await aio_pika.connect(w.node.amqp_url)
    async with connection, await connection.channel() as channel:
        queue = await channel.get_queue(topology.DEAD, ensure=False)
        await queue.bind(topology.CLIENTS, routing_key="*.*.dead")


async def dead_letters_of(w, num):
    """The letters of this run, once so many are there: RabbitMQ parks a moment after it was asked to."""
    async with asyncio.timeout(120):
        while True:
            found = [
                one for one in await list_letters(w.node.amqp_url) if w.run in f"{one.queue} {one.sender} {one.reason}"
            ]
            if len(found) >= num:
                return found


async def test_a_client_does_not_become_operator_by_dead_letters(world):
    async with world() as w:
        alice, user = w.invite("alice"), topology.client_user(w.run, "alice")
        await open_dead_letters_to_clients(w, user)
        rate = Command(run=w.run, command_id="evil", action="set", settings={"policies.main.train.learning_rate": 0.5})
        begin = w.begin("bob@laptop")
        end = EpisodeEnd(
            run=w.run, episode_id=begin.episode_id, client_id="bob@laptop", status="finished", rewards={"main": 9.0}
        )
        bob = topology.client_user(w.run, "bob")
        for message, queue in [
            (rate, topology.control(w.run)),
            (begin, topology.inbox(w.run)),
            (end, topology.inbox(w.run)),
        ]:
            for forged in ({}, {"x-sq-sender": ""}, {"x-sq-sender": bob}):
                headers = {"x-sq-queue": queue, "x-sq-reason": "delivered too often", **forged}
                await put(alice.amqp_url, topology.CLIENTS, f"{user}.dead", message, **headers)
        found = await dead_letters_of(w, 9)
        assert {one.sender for one in found} == {user}
        await requeue_letters(w.node.amqp_url, [one.id for one in found])
        honest = Command(run=w.run, command_id="honest", action="pause")
        await w.broker.publish(topology.control(w.run), honest)
        assert await w.arrived(topology.control(w.run)) == honest
        own = w.begin("alice@laptop")
        await put(alice.amqp_url, topology.CLIENTS, f"{user}.in", own)
        assert await w.arrived() == own


async def test_the_right_to_park_is_taken_from_clients_that_were_invited_before(world):
    async with world() as w:
        alice, user = w.invite("alice"), topology.client_user(w.run, "alice")
        await open_dead_letters_to_clients(w, user)
        await w.broker.declare(w.run, policies=["main"], kinds=KINDS)
        renew_rights(w.folder, w.management)
        with pytest.raises(aio_pika.exceptions.ChannelClosed, match="ACCESS_REFUSED"):
            await put(alice.amqp_url, topology.CLIENTS, f"{user}.dead", w.begin("alice@x"))
        own = w.begin("alice@laptop")
        await put(alice.amqp_url, topology.CLIENTS, f"{user}.in", own, CC=[f"{user}.dead"])
        assert await w.arrived() == own
        assert not [one for one in await list_letters(w.node.amqp_url) if one.sender == user], (
            "nor by a second routing key"
        )


async def test_headers_of_a_parked_message_send_it_nowhere_else(world):
    async with world() as w:
        alice, user = w.invite("alice"), topology.client_user(w.run, "alice")
        stop = Command(run=w.run, command_id="evil", action="stop")
        control = topology.control(w.run)
        forged = {"CC": [control], "x-sq-queue": control, "x-sq-sender": "", "x-first-death-queue": control}
        await put(alice.amqp_url, topology.CLIENTS, f"{user}.in", stop, **forged)
        own = w.begin("alice@laptop")
        await put(alice.amqp_url, topology.CLIENTS, f"{user}.in", own)
        assert await w.arrived() == own
        [letter] = await dead_letters_of(w, 1)
        assert (letter.queue, letter.sender) == (topology.inbox(w.run), user)
        assert (await w.broker.depths([control]))[control].ready == 0


async def test_rabbitmq_vouches_for_queue_and_sender_of_what_it_parks(world):
    async with world() as w:
        alice, user = w.invite("alice"), topology.client_user(w.run, "alice")
        inbox, control = topology.inbox(w.run), topology.control(w.run)
        death = {"queue": inbox, "reason": "rejected", "exchange": "", "routing-keys": [control], "count": 1}
        forged = {
            "x-death": [death, {**death, "queue": control}],
            "x-first-death-queue": control,
            "x-first-death-exchange": "",
            "x-sq-queue": control,
            "x-sq-sender": "",
            "CC": [control],
        }
        stop = Command(run=w.run, command_id="evil", action="stop")
        await put(alice.amqp_url, topology.CLIENTS, f"{user}.in", stop, **forged)
        async with open_session(w.node.amqp_url, name="rejects") as session:
            queue = await session.channel.get_queue(inbox, ensure=False)
            async with queue.iterator() as arriving:
                await (await anext(arriving)).reject(requeue=False)
        [letter] = await dead_letters_of(w, 1)
        assert (letter.queue, letter.sender) == (inbox, user)
        await requeue_letters(w.node.amqp_url, [letter.id])
        own = w.begin("alice@laptop")
        await put(alice.amqp_url, topology.CLIENTS, f"{user}.in", own)
        assert await w.arrived() == own, "requeued as alice, and refused as at its first arrival"
        assert (await w.broker.depths([control]))[control].ready == 0


async def test_a_task_that_a_client_cannot_use_is_parked_by_rabbitmq_and_goes_back_unchanged(world):
    async with world() as w:
        alice, tasks = w.invite("alice"), topology.tasks(w.run, "math")
        fed = Task(run=w.run, slot=Slot(task_id="t"), kind="math", group_size=1)
        await w.broker.publish(tasks, fed)
        user = topology.client_user(w.run, "alice")
        async with (
            AmqpBroker.open(alice.amqp_url, name="worker", user=user, deadline_s=120.0) as worker,
            worker.consume(tasks, prefetch=1) as deliveries,
        ):
            await worker.dead_letter(await anext(deliveries), "its data cannot be read")
            [letter] = await dead_letters_of(w, 1)
        assert (letter.queue, letter.sender, letter.body) == (tasks, "", encode(fed))
        assert "refused by a client" in letter.reason
        assert (await requeue_letters(w.node.amqp_url, [letter.id])).sent == 1
        assert await w.arrived(tasks) == fed


async def test_a_client_gives_back_what_was_fed_and_adds_nothing(world):
    async with world() as w:
        alice, user = w.invite("alice"), topology.client_user(w.run, "alice")
        w.invite("bob")
        root = keys.load_root(w.folder.root_secret)
        tasks, again, evals = (name(w.run, "math") for name in (topology.tasks, topology.retries, topology.evals))
        payload = msgspec.Raw(msgspec.msgpack.encode({"question": "2+2"}))
        task = Task(run=w.run, slot=Slot(task_id="t"), kind="math", group_size=2, payload=payload)
        fed = keys.seal_task(keys.derive_task_secret(root), task)
        replace = msgspec.structs.replace
        invented = [
            task,
            replace(fed, payload=msgspec.Raw(msgspec.msgpack.encode({"question": "rm -rf /"}))),
            replace(fed, slot=Slot(task_id="t", repeat=1)),
            replace(fed, slot=Slot(task_id="t", epoch=1)),
            replace(fed, group_size=1),
            replace(fed, mode="eval"),
            replace(fed, kind="code"),
            keys.seal_task(alice.secret, task),
        ]
        tree = {"run": w.run, "policies": {"main": {"model": "m"}}, "mix": {"math": 0.5, "code": 0.5}}
        job = SwarmJob.build(tree | {"folder": str(w.folder.path.parent)})
        stop = asyncio.Event()
        with contextlib.closing(Store(w.folder.path / "collector.sqlite", run=w.run)) as store:
            collecting = asyncio.create_task(Collector(job, w.broker, store).run(stop))
            for one in invented:
                for queue in (tasks, again, evals):
                    await put(
                        alice.amqp_url, topology.CLIENTS, topology.client_key(user, queue), replace(one, attempt=1)
                    )
            await put(alice.amqp_url, topology.CLIENTS, topology.client_key(user, again), replace(fed, attempt=1))
            assert await w.arrived(again) == replace(fed, attempt=1)
            found = await dead_letters_of(w, 3 * len(invented))
            assert {one.sender for one in found} == {user}
            assert not (await w.broker.depths([evals]))[evals].ready
            stop.set()
            await collecting
