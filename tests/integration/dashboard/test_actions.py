"""Every action of an operator, sent over the dashboard's HTTP API to a real RabbitMQ and a real collector: its effect on the run, and
that the run records who did it."""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
import pytest
from aiohttp import ClientSession, ClientTimeout

from support.collector_process import collector, make_job
from support.proxy import ROOT, served
from swarmq.broker import topology
from swarmq.broker.admin.invitations import ClientAddresses, add_client
from swarmq.broker.admin.users import ManagementApi
from swarmq.broker.amqp import BROKER_ANSWERED_ENV, AmqpBroker
from swarmq.collector.ledger import read_control
from swarmq.dashboard.access import LinkAccess
from swarmq.dashboard.app import create_app
from swarmq.dashboard.shelf import Shelf
from swarmq.errors import BrokerError
from swarmq.keys import Invite
from swarmq.messages import Control, Event, StepReport
from swarmq.observe.recorder import Intervals, record_run
from swarmq.registries.clients import read_clients

pytestmark = pytest.mark.broker

TOKEN = "sesame"
HEADERS = {"authorization": f"Bearer {TOKEN}", "x-swarmq-confirm": "yes"}
RATE = "policies.main.train.learning_rate"
STEP = 3
"""Step that the learner has made."""


class Operated:
    """A run with a real collector, seen and operated through the dashboard of ann."""

    def __init__(self, job, broker, http, url, management):
        self.job, self.broker, self.http, self.url, self.management = job, broker, http, url, management
        self.seen: list[Control] = []
        """What the learner was told."""

    async def act(self, action, **fields):
        body = {"action": action, **fields}
        address = f"{self.url}/api/runs/{self.job.run}/actions"
        async with self.http.post(address, json=body, headers=HEADERS) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return msgspec.json.decode(text)["text"]

    async def get(self, path):
        async with self.http.get(f"{self.url}/api/runs/{self.job.run}/{path}", headers=HEADERS) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    def control(self):
        return read_control(self.job.run_folder.inbox)

    async def recorded(self, action):
        """Return what the run's event file says about an action."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    for line in self.job.run_folder.events.read_bytes().splitlines():
                        event = msgspec.json.decode(line, type=Event)
                        fields = event.fields
                        if event.name == "control" and (fields.get("action"), fields.get("state")) == (
                            action,
                            "accepted",
                        ):
                            return fields
                await asyncio.sleep(0.05)

    async def until_collector_is(self, pace):
        """Wait until the collector itself reports its pace, and the overview shows it."""
        async with asyncio.timeout(60):
            while True:
                nodes = {node["id"]: node for node in (await self.get("overview"))["nodes"]}
                shown = nodes["collector"]["detail"].partition(",")[0]
                expected = {"running": ("0 groups open",), "draining": ("draining", "drained")}.get(pace, (pace,))
                if nodes["collector"]["state"] != "down" and shown in expected:
                    return
                await asyncio.sleep(0.1)

    async def obey(self):
        """Play the learner."""
        async with self.broker.consume(topology.control(self.job.run, "main"), prefetch=9) as deliveries:
            async for delivery in deliveries:
                state = delivery.message
                assert isinstance(state, Control)
                before = self.seen[-1].checkpoints if self.seen else 0
                self.seen.append(state)
                changes = [
                    {"path": one.path, "before": one.before, "value": one.value, "from_step": STEP + 1}
                    for one in state.changes
                    if one.number == state.number
                ]
                fields = {"state": "applied", "command_id": state.command_id, "number": state.number, "policy": "main"}
                fields |= {"pace": state.pace, "from_step": STEP + 1, "changes": changes}
                if state.checkpoints > before:
                    fields["checkpoint"] = STEP
                await delivery.ack()
                event = Event(run=self.job.run, source="learner.main", name="control", at=time.time(), fields=fields)
                await self.broker.emit(event)


@pytest.fixture
def operated(broker_node, run_name, tmp_path, monkeypatch):
    """`async with operated() as run`: not a generator, because a client belongs to one task."""
    monkeypatch.setenv(BROKER_ANSWERED_ENV, "1")  # a slow broker is waited for
    management = broker_node.identity.management_login
    monkeypatch.setenv("SWARMQ_MANAGEMENT_URL", management)

    @contextlib.asynccontextmanager
    async def open_run():
        job = make_job(tmp_path, run_name, broker_node.amqp_url, group_size=2, groups_per_batch=1)
        folder = job.run_folder
        folder.path.mkdir()
        folder.resolved.write_text(job.to_toml())
        folder.root_secret.write_bytes(ROOT)
        app = create_app(Shelf([folder.path], cache=tmp_path / "cache"), LinkAccess(TOKEN, name="ann", cookie="c"))
        async with contextlib.AsyncExitStack() as stack:
            broker = await stack.enter_async_context(AmqpBroker.open(job.broker.url, name="test", deadline_s=120.0))
            await broker.declare(job.run, policies=job.policies, kinds=job.mix)
            report = StepReport(run=job.run, policy="main", version=STEP, trained=())
            await broker.publish(topology.inbox(job.run), report)
            await stack.enter_async_context(record_run(job, broker, intervals=Intervals(board_s=0.2)))
            await stack.enter_async_context(collector(job))
            url = await stack.enter_async_context(served(app))
            http = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(total=120)))
            run = Operated(job, broker, http, url, ManagementApi.of(job.broker.url, management))
            obeying = asyncio.create_task(run.obey())
            try:
                await run.until_collector_is("running")
                yield run
            finally:
                obeying.cancel()
                await asyncio.gather(obeying, return_exceptions=True)

    return open_run


async def test_each_action_has_its_effect_and_is_recorded_with_who_did_it(operated):
    async with asyncio.timeout(240), operated() as run:
        assert "the run is paused" in await run.act("pause")
        assert run.control().pace == "paused"
        await run.until_collector_is("paused")

        assert "the run is running" in await run.act("resume")
        assert run.control().pace == "running"
        await run.until_collector_is("running")

        told = await run.act("set", settings={RATE: 5e-7, "groups.group_size": 4})
        assert f"{RATE}: 1e-06 -> 5e-07" in told
        assert f"main: {RATE} from step {STEP + 1} on" in told
        settings = await run.get("settings")
        assert {row["path"]: row["value"] for row in settings["settings"]}[RATE] == 5e-7

        assert f"main: checkpoint of step {STEP} written" in await run.act("checkpoint")
        assert run.control().checkpoints == run.seen[-1].checkpoints == 1

        assert "the run is draining" in await run.act("drain")
        assert run.control().pace == "draining"
        await run.until_collector_is("draining")

        assert "ends after step" in await run.act("stop", policy="main")
        assert {one.path for one in run.seen[-1].changes} >= {"policies.main.train.max_steps"}

        for action in ("pause", "resume", "set", "checkpoint", "drain", "stop"):
            assert (await run.recorded(action))["sender"] == "ann"
        history = (await run.get("settings"))["history"]
        changes = {row["path"]: (row["before"], row["value"], row["from_step"], row["sender"]) for row in history}
        assert changes[RATE] == (1e-6, 5e-7, STEP + 1, "ann")


async def test_a_revoked_client_is_out_and_the_run_records_who_did_it(operated):
    async with asyncio.timeout(240), operated() as run:
        host = Invite(
            run=run.job.run,
            client="local",
            secret=b"s" * 32,
            amqp_url=run.job.broker.url,
            base_url="http://127.0.0.1:1/v1",
            policies=("main",),
            kinds=("math",),
            group_size=2,
        )
        invite = add_client(run.job.run_folder, host, "alice", run.management, ClientAddresses())
        async with AmqpBroker.open(invite.amqp_url, name="alice", deadline_s=60.0):
            pass
        assert await run.act("revoke", client="alice@laptop-1-2") == "removed client alice"
        assert read_clients(run.job.run_folder.clients)["alice"].removed_at is not None
        with pytest.raises(BrokerError):
            async with AmqpBroker.open(invite.amqp_url, name="alice", deadline_s=5.0):
                pass
        fields = await run.recorded("revoke")
        assert (fields["sender"], fields["client"]) == ("ann", "alice")


async def test_what_the_run_refuses_changes_nothing(operated):
    async with asyncio.timeout(240), operated() as run:
        address = f"{run.url}/api/runs/{run.job.run}/actions"
        before = run.control()
        for body, text in (
            ({"action": "set", "settings": {"policies.main.model": "other"}}, "policies.main.model"),
            ({"action": "set", "settings": {RATE: "fast"}}, RATE),
            ({"action": "set"}, "name at least one setting"),
            ({"action": "stop", "policy": "critic"}, "'critic' is not a trained policy"),
            ({"action": "revoke", "client": "nobody"}, "no client 'nobody'"),
        ):
            async with run.http.post(address, json=body, headers=HEADERS) as answer:
                assert answer.status == 400
                assert text in (await answer.json())["error"]
        assert run.control() == before
