"""`swarmq feed` killed with SIGKILL in the middle: every task is on the real queue once."""

import asyncio
import subprocess
import sys
import tomllib

import pytest

from swarmq.broker import topology
from swarmq.broker.amqp import AmqpBroker
from swarmq.client.data.tasks import strip_queue_id
from swarmq.config import SwarmJob
from swarmq.messages import idempotency_key

pytestmark = pytest.mark.broker
TASKS = 1500
JOB = 'run = "{run}"\nfolder = "{folder}"\nbroker.url = "{url}"\n[policies.main]\nmodel = "none"\n'


@pytest.fixture
def start_feed(tmp_path, run_name, amqp_url):
    folder = tmp_path / run_name
    folder.mkdir()
    text = JOB.format(run=run_name, folder=tmp_path, url=amqp_url)
    (folder / "resolved.toml").write_text(SwarmJob.build(tomllib.loads(text)).to_toml())
    (tmp_path / "data.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(TASKS)))
    started = []

    def start(*options):
        command = [sys.executable, "-m", "swarmq", "feed", str(folder), str(tmp_path / "data.jsonl"), *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


async def until(broker, queue, count):
    """Look at the queue, from another connection, until it holds so many; its depth is no event one can wait for."""
    while (await broker.depths([queue]))[queue].ready < count:  # noqa: ASYNC110
        await asyncio.sleep(0.005)  # RabbitMQ has others to answer


async def test_a_feed_killed_in_the_middle_goes_on_without_a_task_twice(start_feed, run_name, amqp_url):
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=120.0) as broker:
        await broker.declare(run_name, policies=["main"], kinds=["default"])
        queue = topology.tasks(run_name, "default")
        options = ("--repeats", "2", "--seed", "3")
        for after in (1, 700, 1400):
            feeding = start_feed(*options)
            await until(broker, queue, after)
            feeding.kill()
            await asyncio.to_thread(feeding.wait)
        feeding = start_feed(*options)
        output, _ = await asyncio.to_thread(feeding.communicate)
        assert feeding.returncode == 0, output
        keys = []
        async with broker.consume(queue, prefetch=1000) as deliveries:
            while len(set(keys)) < 2 * TASKS:
                batch = await deliveries.batch(1000)
                keys += [idempotency_key(delivery.message) for delivery in batch]
                await deliveries.ack_through(batch[-1])
        assert len(keys) == len(set(keys))
        assert (await broker.depths([queue]))[queue].ready == 0


def test_a_data_set_with_a_bad_line_feeds_nothing(start_feed, tmp_path, run_name):
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('{"id": 1}\n')
    feeding = start_feed()
    output, _ = feeding.communicate()
    assert feeding.returncode == 1
    assert f"data.jsonl line {TASKS + 1}" in output
    assert not list((tmp_path / run_name).glob("feed-*"))
    assert "Traceback" not in output


async def test_eval_tasks_go_to_the_collector_and_what_is_left_to_do_is_said(start_feed, run_name, amqp_url, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    async with AmqpBroker.open(amqp_url, name="test", deadline_s=120.0) as broker:
        await broker.declare(run_name, policies=["main"], kinds=["default"])
        feeding = start_feed("--eval", "--repeats", "4")
        output, _ = await asyncio.to_thread(feeding.communicate)
        assert (feeding.returncode, "stored 2 tasks for evaluation of default" in output) == (0, True), output
        assert f"swarmq set {tmp_path / run_name} eval.every=10" in output
        async with broker.consume(topology.control(run_name), prefetch=9) as deliveries:
            tasks = [(await anext(deliveries)).message for _ in range(2)]
        assert [(task.mode, task.group_size) for task in tasks] == [("eval", 4)] * 2
        assert [strip_queue_id(task.slot.task_id, "default") for task in tasks] == ["a", "b"]
        assert (await broker.depths([topology.tasks(run_name, "default")]))[
            topology.tasks(run_name, "default")
        ].ready == 0
