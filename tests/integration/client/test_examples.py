"""Every example runs as it stands, with the real SDK, against a scripted model and a broker in memory."""

import asyncio
import contextlib
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest

import swarmq
from swarmq.broker import topology
from swarmq.client import readers, session, sync_client
from swarmq.client.feed import feed
from swarmq.client.worker import Worker, check_signature
from swarmq.config import SwarmJob
from swarmq.keys import Invite
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, decode
from swarmq.testing import MemoryBroker

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


@pytest.fixture
def model():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
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
    for client in (session.AsyncSwarmClient, sync_client.SwarmClient):
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
async def test_a_loop_by_hand_trains_and_evaluates(run, capsys):
    await load("by_hand").main()
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


async def test_a_cocktail_has_an_agent_for_every_kind(run):
    """Tutorial, part 1."""
    pytest.importorskip("reasoning_gym")
    example = load("cocktail")
    job = SwarmJob.load(EXAMPLES / "cocktail.toml")
    sets = {"math": "chain_sum", "words": "letter_counting", "logic": "syllogism"}
    assert set(sets) == set(job.mix)
    async with swarmq.AsyncSwarmClient() as client:
        for kind, name in sets.items():
            tasks = list(readers.read_tasks(f"reasoning-gym:{name}?size=2"))
            report = await client.evaluate(tasks, getattr(example, kind), policies=["planner"], progress=False)
            assert (report.n, report.failed) == (2, 0), kind
            assert report.mean_reward is not None
    assert {"right", "length", "first"} == {name for end in run() for name in end.metrics}


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
            asyncio.ensure_future(Worker(client, example.attempt, concurrency=4).run(stop, progress=False))
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
