"""Every example runs as it stands, with the real SDK, against a scripted model and a broker in memory; the cocktail on a
real broker, with the proxy and the collector."""

import asyncio
import contextlib
import http.server
import importlib.util
import json
import shlex
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import swarmq
from support.proxy import ROOT, served
from swarmq.broker import topology
from swarmq.broker.admin.invitations import make_host_invite
from swarmq.broker.amqp import AmqpBroker
from swarmq.cli import main
from swarmq.client import async_client, sync_client
from swarmq.client.data import readers
from swarmq.client.data.feed import feed
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker, check_signature
from swarmq.client.runners.worker_processes import work_on_kinds
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.keys import Invite, derive_client_secret
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, decode
from swarmq.proxy.http.app import create_app
from swarmq.testing import MemoryBroker
from swarmq.testing.scripted_engine import ScriptedEngine

pytest.importorskip("openai")
EXAMPLES = Path(__file__).parents[3] / "examples"
KEYS = set()


class Model(http.server.BaseHTTPRequestHandler):
    """Answers every chat completion with the number 42, or what a test wants."""

    says = "42"

    def do_POST(self):
        KEYS.add(self.headers["Authorization"])
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": self.says}
        body = json.dumps(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": asked["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class ModelServer(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    """As many as agents that ask at once."""


@pytest.fixture
def model():
    with ModelServer(("127.0.0.1", 0), Model) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def run(model, monkeypatch, tmp_path):
    """A run in memory that clients made without arguments join; `ends()` are the outcomes it got."""
    broker = MemoryBroker()
    invite = Invite(
        run="r1",
        client="alice",
        secret=b"s" * 32,
        amqp_url="amqp://nowhere/",
        base_url=model,
        policies=("planner", "executor"),
        kinds=("default",),
        group_size=2,
    )

    @contextlib.asynccontextmanager
    async def open_memory(invite, _name):
        await broker.declare("r1", policies=invite.policies, kinds=invite.kinds)
        for number in range(1000):
            await broker.publish(
                topology.tickets("r1", "default"), Ticket(run="r1", ticket_id=f"t{number}", kind="default")
            )
        yield broker

    monkeypatch.setenv("SWARMQ_INVITE", invite.encode())
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path))
    for client in (async_client.AsyncSwarmClient, sync_client.SwarmClient):
        monkeypatch.setitem(client.__init__.__kwdefaults__, "open_broker", open_memory)

    def ends(kind=EpisodeEnd):
        pieces = [decode(stored.body) for stored in broker.stored(topology.inbox("r1"))]
        return [piece for piece in pieces if isinstance(piece, kind)]

    return ends


@pytest.fixture
def begins(run):
    return lambda: run(EpisodeBegin)


def load(name, path=None):
    spec = importlib.util.spec_from_file_location(name, path or EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the SDK's pools are closed when they are collected
def test_the_first_agent_trains(run, capsys, monkeypatch):
    example = load("first_agent")
    monkeypatch.setattr(example, "TASKS", [{"id": "a", "question": "6*7", "answer": 42}, *example.TASKS[:2]])
    example.main()
    assert "60 episodes finished, 0 failed" in capsys.readouterr().out
    assert {end.rewards["planner"] for end in run()} == {0.0, 1.0}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_loop_of_your_own_trains_and_evaluates(run, capsys):
    await load("own_loop").main()
    assert "on 4 tasks (4 episodes, 0 failed)" in capsys.readouterr().out
    assert {end.status for end in run()} == {"finished"}
    assert len(run()) == 4 * 2 + 4


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_two_policies_are_rewarded_apart(run, monkeypatch):
    example = load("two_policies")
    monkeypatch.setattr(example, "TASKS", example.TASKS[:2])
    example.main()
    assert {frozenset(end.rewards) for end in run()} == {frozenset({"planner", "executor"})}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("says", "stones", "wanted"),
    [
        ("1", 5, {"first": 1.0, "second": 0.0}),
        ("1", 6, {"first": 0.0, "second": 1.0}),
        ("3", 4, {"first": 1.0, "second": 0.0}),
        ("42", 6, {"first": 0.0}),
    ],
    ids=["the first takes the last one", "the second does", "no move is left for the second", "no move at all"],
)
def test_self_play_rewards_each_side_for_itself(run, monkeypatch, says, stones, wanted):
    example = load("self_play")
    monkeypatch.setattr(Model, "says", says)
    monkeypatch.setattr(example, "TASKS", [{"id": "nim", "stones": stones}])
    example.main()
    assert [end.agent_rewards for end in run()] == [{"planner": wanted}] * 2


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_workers_agent_understands_its_data_set(run):
    example = load("queue_worker")
    check_signature(example.attempt)
    tasks = list(readers.read_tasks(str(EXAMPLES / "data" / "questions.jsonl"), require=["question", "answer"]))
    with swarmq.SwarmClient() as client:
        report = client.evaluate(tasks, example.attempt, policies=["planner"], progress=False)
    assert (report.n, report.failed, report.mean_reward) == (5, 0, -0.1)
    assert len(KEYS) >= 5, "every episode has a key of its own"


@pytest.mark.parametrize(("says", "reward"), [("6 times 7 is\n42", 1.0), ("42 it is", 0.0), ("\n41 ", 0.1)])
def test_the_agent_of_swarmq_init_attempts_its_tasks(run, tmp_path, monkeypatch, says, reward):
    assert CliRunner().invoke(main, ["init", str(tmp_path / "new")]).exit_code == 0
    agent = load("agent", tmp_path / "new" / "agent.py")
    check_signature(agent.attempt)
    tasks = list(readers.read_tasks(str(tmp_path / "new" / "tasks.jsonl"), limit=3))
    monkeypatch.setattr(Model, "says", says.replace("42", str(tasks[0].payload["answer"])))
    with swarmq.SwarmClient() as client:
        report = client.evaluate(tasks[:1], agent.attempt, policies=["planner"], progress=False)
    assert (report.n, report.failed, report.mean_reward) == (1, 0, reward)


@pytest.mark.broker
async def test_a_cocktail_is_trained_in_its_mix_whatever_the_workers_would_rather_do(amqp_url, run_name, tmp_path):
    """Tutorial, part 1: fed by kind, attempted from the queues, held to the job's mix by the collector's tickets."""
    pytest.importorskip("reasoning_gym")
    example, stop, data = load("cocktail"), asyncio.Event(), {}
    sizes = ["groups.group_size=2", "groups.groups_per_batch=10", "groups.max_staleness=1"]
    job = SwarmJob.load(EXAMPLES / "cocktail.toml", sets=[f"run={run_name}", f"folder={tmp_path}", *sizes])
    for line in (EXAMPLES / "cocktail.toml").parent.joinpath("cocktail.py").read_text().splitlines():
        if line.startswith("swarmq feed"):
            _, _, _, source, _, kind = shlex.split(line)
            data[kind] = source.replace("size=1000", "size=12")
    assert set(data) == set(job.mix), "the example feeds every kind of its job"
    engine = ScriptedEngine()
    for _ in range(200):
        engine.say("42")
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=120.0) as broker, asyncio.TaskGroup() as tasks:
        await broker.declare(run_name, policies=["main"], kinds=job.task_kinds)
        for kind, source in data.items():
            fed = tmp_path / f"fed-{kind}.json"
            await feed(broker, run_name, readers.read_tasks(source), kind, repeats=2, progress_file=fed)
        tasks.create_task(Collector(job, broker, Store(None, run=run_name)).run(stop))
        app = create_app(job, root=ROOT, engines={"main": [engine]}, broker=broker)
        async with served(app) as url:
            at = msgspec.structs.replace(job, broker=msgspec.structs.replace(job.broker, url=amqp_url))
            invite = msgspec.structs.replace(
                make_host_invite(at, (f"{url}/v1",)), secret=derive_client_secret(ROOT, "local"), group_size=2
            )
            async with swarmq.AsyncSwarmClient(invite, spool=tmp_path / "spool") as client:
                agents = {kind: getattr(example, kind) for kind in data}
                plan = RunnerOptions(concurrency=1, progress=False)  # one after another: no group is left half begun
                working = tasks.create_task(work_on_kinds(client, agents, plan, stop))
                async with broker.consume(topology.ready(run_name, "main"), prefetch=100) as deliveries:
                    got = [(await anext(deliveries)).message for _ in range(2 * 20)]
                depths = await broker.depths([topology.tasks(run_name, kind) for kind in data])
                stop.set()
                done = await working
    assert Counter(one.kind for one in got) == {"math": 16, "words": 12, "logic": 12}, "40, 30 and 30 % of 20 groups"
    assert all(depth.ready for depth in depths.values()), "there was more to do of every kind"
    assert {kind: summary.failed for kind, summary in done.items()} == dict.fromkeys(data, 0)
    assert {kind: {len(one.turns) for one in got if one.kind == kind} for kind in data} == {
        "math": {1}, "words": {2}, "logic": {1}
    }  # fmt: skip
    assert {"right", "length", "first"} == {name for one in got for name in one.metrics}


async def test_workers_compete_for_what_was_fed_and_nothing_is_attempted_twice(run, tmp_path):
    """Tutorial, part 3."""
    example = load("queue_worker")
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(swarmq.AsyncSwarmClient()) for _ in range(3)]
        tasks = readers.read_tasks(str(EXAMPLES / "data" / "questions.jsonl"))
        fed = await feed(
            clients[0].broker, "r1", tasks, "default", repeats=2, epochs=2, seed=0, progress_file=tmp_path / "fed.json"
        )
        stop = asyncio.Event()
        working = [
            asyncio.ensure_future(
                Worker(client, example.attempt, options=RunnerOptions(concurrency=4, progress=False)).run(stop)
            )
            for client in clients
        ]
        while len(run()) < fed:  # noqa: ASYNC110 - what the workers send is no event here
            await asyncio.sleep(0.01)
        stop.set()
        done = [await worker for worker in working]
    assert sum(summary.finished for summary in done) == fed == len({end.episode_id for end in run()})


def test_an_edited_reward_is_attributed_to_the_new_code(run, begins, monkeypatch, tmp_path):
    """Tutorial, part 4: the file is edited between two starts of the client."""
    text = (EXAMPLES / "live_edit.py").read_text()
    old = "1.0 if str(answer) in text.split() else 0.0"
    assert old in text
    for version, body in enumerate([text, text.replace(old, "0.5 if text.strip() == str(answer) else 0.25")]):
        path = tmp_path / f"version_{version}" / "live_edit.py"
        path.parent.mkdir()
        path.write_text(body)
        example = load("live_edit", path)
        monkeypatch.setattr(example, "TASKS", [{"id": "a", "question": "33 + 9?", "answer": 42}])
        example.main()
    versions = {begin.episode_id: begin.code_version for begin in begins()}
    rewards = {}
    for end in run():
        rewards.setdefault(versions[end.episode_id], set()).add(end.rewards["planner"])
    assert list(rewards.values()) == [{1.0}, {0.5}]


def test_every_example_is_tested():
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'load("{path.stem}"' in tested, f"{path.name} has no test here"
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) < 60, f"{path.name} is no longer short"
