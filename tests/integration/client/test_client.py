"""The client against the real RabbitMQ."""

import asyncio
import concurrent.futures
import contextlib
import os
import re
import signal
import threading

import msgspec
import pytest

from swarmq.broker import Depth, topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.client.async_client import AsyncSwarmClient
from swarmq.client.sync_client import SwarmClient
from swarmq.errors import BrokerError
from swarmq.messages import EpisodeBegin, EpisodeEnd
from swarmq.runtime.processes import reserve_port

pytestmark = pytest.mark.broker
FAST = {"retry_pause_s": 0.0, "progress": False}

WORKER = """
from swarmq import AsyncSwarmClient
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker_processes import run_workers
done = run_workers(AsyncSwarmClient(), {"math": "agent:attempt"}, RunnerOptions(concurrency=2, progress=False))
print(done["math"], flush=True)
"""
AGENT = """
import os, pathlib, threading
def attempt(ep):
    hang = pathlib.Path("hang").exists()
    os.write(1, f"attempting {ep.task.id}\\n".encode())  # at one go: other processes write there, too
    if hang:
        threading.Event().wait()
    return 1.0
"""


def ends_of(pieces):
    """Episode -> how it ended, and in whose name."""
    return {piece.episode_id: (piece.status, piece.client_id) for piece in pieces if isinstance(piece, EpisodeEnd)}


async def test_a_whole_run_of_episodes(run_in):
    async with run_in() as run:
        await run.issue(20)

        async def agent(ep):
            if ep.attempt == 0 and ep.task.id == "t1":
                raise ConnectionError("once")
            return 1.0

        async with AsyncSwarmClient(run.invite) as client:
            tasks = [{"id": f"t{number}"} for number in range(5)]
            summary = await client.run_episodes_until_all_complete(tasks, agent, **FAST)
        assert (summary.finished, summary.failed, summary.given_up) == (10, 2, 0)
        pieces = await run.pieces(lambda got: len(got) == 24)
        begins = [piece for piece in pieces if isinstance(piece, EpisodeBegin)]
        ends = {piece.episode_id: piece for piece in pieces if isinstance(piece, EpisodeEnd)}
        assert len({begin.ticket_id for begin in begins}) == len(begins) == len(ends) == 12
        assert all(pieces.index(ends[begin.episode_id]) > pieces.index(begin) for begin in begins)
        await run.until(topology.tickets(run.invite.run, "math"), Depth(8, 0))
        assert run.spooled == []


async def test_twenty_threads_on_one_client(run_in):
    async with run_in() as run:
        await run.issue(100)
        together = threading.Barrier(20, timeout=120)

        def everything():
            with SwarmClient(run.invite) as client:

                def work(number):
                    together.wait()
                    for _ in range(5):
                        with client.episode({"id": str(number)}) as ep:
                            ep.end(number)

                with concurrent.futures.ThreadPoolExecutor(20) as pool:
                    list(pool.map(work, range(20)))

        await asyncio.to_thread(everything)
        ends = await run.ends(100)
        assert len({end.episode_id for end in ends}) == 100


async def test_what_can_be_wrong_with_a_broker_is_said_plainly(run_in):
    async with run_in() as run:
        wrong = run.invite.amqp_url.replace("://", "://wrong-")
        with pytest.raises(BrokerError, match=r"(?i)password|refused|login|access"):
            async with AsyncSwarmClient(msgspec.structs.replace(run.invite, amqp_url=wrong)):
                pass


async def test_a_killed_workers_task_is_attempted_by_another(run_in, script, wait_for_line):
    async with run_in() as run:
        await run.issue(4)
        await run.feed("a")
        (run.folder / "agent.py").write_text(AGENT)
        (run.folder / "hang").touch()
        first = script(WORKER, run.environment)
        await wait_for_line(first, "attempting a")
        first.send_signal(signal.SIGKILL)
        (run.folder / "hang").unlink()
        second = script(WORKER, run.environment)
        pieces = await run.pieces(lambda got: len(ends_of(got)) == 2)
        cut_off, done = [piece for piece in pieces if isinstance(piece, EpisodeBegin)]
        assert cut_off.slot == done.slot
        assert ends_of(pieces) == {
            cut_off.episode_id: ("aborted", cut_off.client_id),
            done.episode_id: ("finished", done.client_id),
        }
        await wait_for_line(second, "attempting a")
        second.send_signal(signal.SIGTERM)
        assert "1 episode finished" in await wait_for_line(second, "1 ep")
        assert await asyncio.to_thread(second.wait) == 0
        await run.until(topology.tasks(run.invite.run, "math"), Depth(0, 0))


PROCESSES = """
from swarmq.client.runners.worker_processes import run_processes
from swarmq.client.episodes.invite_lookup import find_invite
if __name__ == "__main__":
    run_processes(find_invite(), {"math": "agent:attempt"}, 2)
"""


async def test_a_killed_process_of_a_worker_leaves_its_task_to_the_others(run_in, script, wait_for_line):
    async with run_in() as run:
        await run.issue(8)
        (run.folder / "agent.py").write_text(AGENT.replace("{ep.task.id}", "{ep.task.id} {os.getpid()}"))
        (run.folder / "hang").touch()
        main = script(PROCESSES, run.environment)
        await run.feed("a")
        first = await wait_for_line(main, "attempting a")
        (run.folder / "hang").unlink()
        os.kill(int(first.split()[-1]), signal.SIGKILL)
        pieces = await run.pieces(lambda got: "finished" in {status for status, _ in ends_of(got).values()})
        cut_off, done = [piece for piece in pieces if isinstance(piece, EpisodeBegin)]
        assert cut_off.client_id != done.client_id
        await wait_for_line(main, "worker_process_died", inside=True)
        main.send_signal(signal.SIGTERM)
        output, _ = await asyncio.to_thread(main.communicate)
        assert re.search(r"^swarmq-worker-[01], math: 1 episode finished", output, re.MULTILINE)
        assert "1 of 2 worker processes died" in output


async def test_the_first_signal_drains_a_worker_and_the_second_kills_it(run_in, script, wait_for_line):
    async with run_in() as run:
        await run.issue(4)
        await run.feed("a")
        (run.folder / "agent.py").write_text(AGENT)
        (run.folder / "hang").touch()
        worker = script(WORKER, run.environment)
        await wait_for_line(worker, "attempting a")
        worker.send_signal(signal.SIGTERM)
        await run.feed("b")
        assert worker.poll() is None
        while worker.poll() is None:  # two that come before it has looked are one
            worker.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
        assert worker.returncode == -signal.SIGTERM


async def test_ctrl_c_in_a_script_aborts_its_episodes(run_in, script, wait_for_line):
    async with run_in() as run:
        await run.issue(4)
        code = """
from swarmq import SwarmClient
import threading
def attempt(ep):
    print("attempting", flush=True)
    threading.Event().wait()
with SwarmClient() as client:
    client.run_episodes_until_all_complete([{"id": "a"}], attempt, repeats=1, progress=False)
"""
        process = script(code, run.environment)
        await wait_for_line(process, "attempting")
        process.send_signal(signal.SIGINT)
        [end] = await run.ends(1)
        assert end.status == "aborted"
        assert "KeyboardInterrupt" in (await asyncio.to_thread(process.communicate))[0]


async def test_a_script_that_just_ends_leaves_nothing_open(run_in, script):
    async with run_in() as run:
        await run.issue(1)
        process = script(
            "from swarmq import SwarmClient\nclient = SwarmClient()\nclient.begin_episode({'id': 'a'})\n",
            run.environment,
        )
        [end] = await run.ends(1)
        assert (end.status, end.reason) == ("aborted", "the client was closed")
        assert await asyncio.to_thread(process.wait) == 0
        said = process.stdout.read().splitlines()
        assert [line for line in said if "waiting" not in line] == [], "but for what a slow broker makes it say"


async def test_a_forked_child_is_told_to_make_its_own_client(run_in, script):
    async with run_in() as run:
        code = """
import os, warnings
warnings.simplefilter("ignore")
from swarmq import SwarmClient, SwarmqError
client = SwarmClient()
if os.fork() == 0:
    try:
        client.begin_episode({"id": "a"})
    except SwarmqError as error:
        print("refused:", error, flush=True)
    raise SystemExit
os.wait()
"""
        process = script(code, run.environment)
        output, _ = await asyncio.to_thread(process.communicate)
        assert "create a new client after a fork" in output
        assert process.returncode == 0


async def test_an_end_outlives_broker_and_process_and_is_delivered_by_the_next(opened, tmp_path, script, wait_for_line):
    code = """
from swarmq import SwarmClient
client = SwarmClient()
ep = client.begin_episode({"id": "a"})
print("begun", ep.episode_id, flush=True)
input_given = open("go").read()
ep.end(0.25)
"""
    node = PrivateNode(tmp_path / "node", port=reserve_port())
    async with node:
        async with opened(node.amqp_url, "r1", tmp_path) as run:
            await run.issue(1)
            os.mkfifo(tmp_path / "go")
            process = script(code, run.environment)
            episode_id = (await wait_for_line(process, "begun")).split()[1]
            [begin] = await run.begins(1)
            assert begin.episode_id == episode_id
        await node.kill()
        await asyncio.to_thread((tmp_path / "go").write_text, "go")
        while not run.spooled:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
        process.kill()
        await asyncio.to_thread(process.wait)
        await node.start()
        async with opened(node.amqp_url, "r1", tmp_path) as run:
            code = 'from swarmq import SwarmClient\nclient = SwarmClient()\nopen("go").read()'
            following = script(code, run.environment)
            [end] = await run.ends(1)
            assert (end.episode_id, end.rewards) == (episode_id, {"main": 0.25})
            await asyncio.to_thread((tmp_path / "go").write_text, "go")
            await asyncio.to_thread(following.wait)
        assert run.spooled == []


async def test_a_client_works_on_after_the_broker_was_restarted(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path / "spool"))
    node = PrivateNode(tmp_path / "node", port=reserve_port())
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(node)
        run = await stack.enter_async_context(opened(node.amqp_url, "r1", tmp_path))
        await run.issue(2)
        client = await stack.enter_async_context(AsyncSwarmClient(run.invite))
        ep = await client.begin_episode({"id": "a"})
        await node.kill()
        ending = asyncio.ensure_future(ep.end(1.0))
        beginning = asyncio.ensure_future(client.begin_episode({"id": "b"}))
        await node.start()
        await ending
        await (await beginning).end(0.0)
        async with AmqpBroker.open(node.amqp_url, name="reader", deadline_s=120.0) as broker:
            run.broker = broker
            ends = await run.ends(2)
    assert {end.rewards["main"] for end in ends} == {0.0, 1.0}
