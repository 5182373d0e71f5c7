"""The dead-letter queue as people use it. One node for this file, so the queue is ours alone."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.broker import discarded
from swarmq.broker import topology
from swarmq.broker.admin.dead_letters import format_letter, list_letters, purge_letters, requeue_letters
from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.node.process import PrivateNode
from swarmq.broker.session import open_session
from swarmq.config import SwarmJob
from swarmq.errors import UnroutableError
from swarmq.messages import EpisodeEnd, encode

pytestmark = [pytest.mark.broker, pytest.mark.asyncio(loop_scope="module")]


def end(run: str, number: int) -> EpisodeEnd:
    return EpisodeEnd(run=run, episode_id=f"e{number}", status="finished", rewards={"main": 1.0})


@pytest_asyncio.fixture(loop_scope="module")
async def broker(node: PrivateNode, run_name: str) -> AsyncIterator[AmqpBroker]:
    async with AmqpBroker.open(node.amqp_url, name="dead", deadline_s=120.0) as broker, asyncio.timeout(600):
        await broker.declare(run_name, policies=["main"], kinds=["math"])
        yield broker
        async with open_session(node.amqp_url, name="tidy") as session:  # with what others still hold of it
            await session.call(session.channel.queue_delete(topology.DEAD))


async def park(broker: AmqpBroker, run: str, count: int) -> None:
    inbox = topology.inbox(run)
    for number in range(count):
        await broker.publish(inbox, end(run, number))
    async with broker.consume(inbox, prefetch=count) as deliveries:
        for number in range(count):
            await broker.dead_letter(await anext(deliveries), f"reason {number}")


async def at_rest(broker: AmqpBroker, num: int) -> None:
    """Returns once so many letters wait: those that a session has looked at return when the broker has ended it."""
    async with asyncio.timeout(120):
        while (await broker.depths([topology.DEAD]))[topology.DEAD].ready != num:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_looking_loses_nothing(node: PrivateNode, broker: AmqpBroker, run_name: str) -> None:
    await park(broker, run_name, 3)
    for _ in range(30):  # RabbitMQ 4 drops messages after 20 looks unless told otherwise
        await at_rest(broker, 3)
        seen = await list_letters(node.amqp_url)
        assert [(letter.key, letter.reason) for letter in seen] == [(f"e{n}:end", f"reason {n}") for n in range(3)]
    await at_rest(broker, 3)
    assert len(await list_letters(node.amqp_url, limit=2)) == 2


async def test_a_letter_is_shown_as_its_record(node: PrivateNode, broker: AmqpBroker, run_name: str) -> None:
    await park(broker, run_name, 1)
    [letter] = await list_letters(node.amqp_url)
    text = format_letter(letter)
    for words in (f"queue: {topology.inbox(run_name)}", "reason: reason 0", "kind: end", '"episode_id": "e0"'):
        assert words in text


async def test_requeued_letters_arrive_under_their_old_key_and_are_dead_no_more(
    node: PrivateNode, broker: AmqpBroker, run_name: str
) -> None:
    await park(broker, run_name, 3)
    chosen = [letter.id for letter in await list_letters(node.amqp_url)][1:]
    await at_rest(broker, 3)
    answer = await requeue_letters(node.amqp_url, chosen)
    assert (answer.sent, answer.left) == (2, {})
    async with broker.consume(topology.inbox(run_name), prefetch=5) as deliveries:
        back = [await anext(deliveries), await anext(deliveries)]
        assert [delivery.key for delivery in back] == ["e1:end", "e2:end"]
        assert back[0].body == encode(end(run_name, 1))
        assert "x-sq-reason" not in back[0].arrival.headers
        await deliveries.ack_through(back[1])
    await at_rest(broker, 1)
    assert [letter.key for letter in await list_letters(node.amqp_url)] == ["e0:end"]


async def test_a_letter_whose_queue_is_gone_stays(node: PrivateNode, broker: AmqpBroker, run_name: str) -> None:
    await park(broker, run_name, 1)
    await node.ctl("delete_queue", topology.inbox(run_name))
    answer = await requeue_letters(node.amqp_url)
    assert answer.sent == 0
    assert list(answer.left.values()) == [f"queue {topology.inbox(run_name)} does not exist"]
    await at_rest(broker, 1)
    assert len(await list_letters(node.amqp_url)) == 1


async def test_purging_forgets_the_chosen_or_all(node: PrivateNode, broker: AmqpBroker, run_name: str) -> None:
    await park(broker, run_name, 3)
    [first, *_] = await list_letters(node.amqp_url)
    await at_rest(broker, 3)
    assert await purge_letters(node.amqp_url, [first.id]) == 1
    await at_rest(broker, 2)
    assert [letter.key for letter in await list_letters(node.amqp_url)] == ["e1:end", "e2:end"]
    await at_rest(broker, 2)
    assert await purge_letters(node.amqp_url) == 2
    assert await list_letters(node.amqp_url) == []


async def test_the_command_line_lists_shows_requeues_and_forgets(
    node: PrivateNode, broker: AmqpBroker, run_name: str, tmp_path: Path
) -> None:
    tree = {"run": run_name, "policies": {"main": {"model": "m"}}, "broker": {"url": node.amqp_url}}
    (tmp_path / "resolved.toml").write_text(SwarmJob.build(tree).to_toml())

    async def dead(verb: str, *arguments: str, num: int) -> tuple[int, str]:
        await at_rest(broker, num)
        command = [sys.executable, "-m", "swarmq", "dead", verb, str(tmp_path), *arguments]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=PIPE, stderr=STDOUT, env={**os.environ, "COLUMNS": "200"}
        )
        said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()

    await park(broker, run_name, 3)
    first, second, _ = [letter.id for letter in await list_letters(node.amqp_url)]
    status, said = await dead("list", num=3)
    assert status == 0
    assert all(words in said for words in (first, "reason 2", "e1:end", topology.inbox(run_name)))
    status, said = await dead("show", first, num=3)
    assert (status, '"episode_id": "e0"' in said) == (0, True)
    status, said = await dead("show", "nobody", num=3)
    assert (status, "no dead letter has the id 'nobody'" in said) == (1, True)
    for verb in ("requeue", "purge"):
        status, said = await dead(verb, first, "nobody", num=3)
        assert (status, "no dead letter has the id 'nobody'" in said) == (1, True), "and all stay"
    assert await dead("requeue", first, num=3) == (0, "requeued 1\n")
    assert (await broker.depths([topology.inbox(run_name)]))[topology.inbox(run_name)].ready == 1
    assert await dead("purge", second, num=2) == (0, "deleted 1\n")
    await at_rest(broker, 1)
    assert [letter.key for letter in await list_letters(node.amqp_url)] == ["e2:end"]
    assert await dead("purge", "--all", num=1) == (0, "deleted 1\n")
    assert await dead("list", num=0) == (0, "no dead letters\n")


async def test_a_message_that_kills_every_consumer_is_parked_not_dropped(
    node: PrivateNode, broker: AmqpBroker, run_name: str
) -> None:
    tasks = topology.tasks(run_name, "math")
    await broker.publish(tasks, end(run_name, 1))
    for _ in range(topology.DELIVERY_LIMIT + 1):
        async with broker.consume(tasks, prefetch=1) as deliveries:
            await anext(deliveries)
    async with broker.consume(topology.DEAD, prefetch=1) as dead:
        assert (await anext(dead)).key == "e1:end"
    await at_rest(broker, 1)
    [letter] = await list_letters(node.amqp_url)
    assert letter.queue == tasks
    assert "more than 100 times" in letter.reason
    await at_rest(broker, 1)
    assert (await requeue_letters(node.amqp_url)).sent == 1


async def test_a_broker_without_any_run_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with discarded(PrivateNode(tmp_path_factory.mktemp("fresh"))) as fresh:
        with pytest.raises(UnroutableError, match=r"swarmq\.dead"):
            await list_letters(fresh.amqp_url)
