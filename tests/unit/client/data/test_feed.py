"""A data set goes onto the queue in a fixed order, and on from where it stopped."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.broker import topology
from swarmq.client.data import feed as feeding
from swarmq.client.data.feed import WINDOW, default_progress_file, feed, plan_tasks
from swarmq.client.data.tasks import SwarmTask, hash_source_name, make_queue_id, strip_queue_id
from swarmq.errors import TaskError, UnroutableError

RUN = "r1"
TASKS = topology.tasks(RUN, "math")


def data(count):
    return [SwarmTask(str(number), payload={"n": number}) for number in range(count)]


@pytest.fixture
def progress(tmp_path):
    return default_progress_file(tmp_path, RUN, "math", "data.jsonl")


async def fed(swarm):
    return [message.slot for message in swarm.arrived(TASKS)]


def named(slots):
    return [slot.task_id.removeprefix("math:") for slot in slots]


async def test_every_repeat_of_every_task_in_every_epoch_is_fed_once_and_siblings_together(swarm, progress):
    seen = []
    count = await feed(
        swarm.broker,
        RUN,
        data(7),
        "math",
        repeats=3,
        epochs=2,
        seed=5,
        progress_file=progress,
        report=lambda done, total: seen.append((done, total)),
    )
    slots = await fed(swarm)
    assert count == len(slots) == len({slot.id for slot in slots}) == 42
    assert all(len({slot.group_id for slot in slots[first : first + 3]}) == 1 for first in range(0, 42, 3))
    assert [slot.epoch for slot in slots] == [0] * 21 + [1] * 21
    assert seen[-1] == (42, 42)
    assert {message.group_size for message in swarm.arrived(TASKS)} == {3}


async def test_shuffling_is_the_same_for_a_seed_and_different_between_epochs(swarm, progress):
    await feed(swarm.broker, RUN, data(20), "math", repeats=1, epochs=2, seed=1, progress_file=progress)
    names = named(await fed(swarm))
    assert names[:20] != names[20:]
    assert sorted(names[:20]) == sorted(names[20:])
    assert names[:20] != [str(number) for number in range(20)]
    bodies = [(str(number), b"") for number in range(20)]
    again = [task.slot for task in plan_tasks(RUN, bodies, "math", repeats=1, seed=1, numbers=range(40))]
    assert named(again) == names


async def test_without_a_seed_the_order_is_that_of_the_data(swarm, progress):
    await feed(swarm.broker, RUN, data(5), "math", repeats=1, progress_file=progress)
    assert named(await fed(swarm)) == ["0", "1", "2", "3", "4"]


def test_tasks_of_two_kinds_with_the_same_id_are_different_slots():
    slots = [
        task.slot
        for kind in ("math", "code")
        for task in plan_tasks(
            RUN, [(make_queue_id(SwarmTask("1"), kind), b"")], kind, repeats=2, seed=0, numbers=range(2)
        )
    ]
    assert len({slot.id for slot in slots}) == 4


async def test_what_was_published_before_the_progress_was_written_is_not_published_again(swarm, progress, monkeypatch):
    def disk_full(_path, _fed):
        raise OSError(28, "no space left")

    with monkeypatch.context() as broken:
        broken.setattr(feeding, "_write_progress", disk_full)
        with pytest.raises(OSError, match="no space"):
            await feed(swarm.broker, RUN, data(10), "math", repeats=1, progress_file=progress)
    assert len(await fed(swarm)) == 10
    await feed(swarm.broker, RUN, data(10), "math", repeats=1, progress_file=progress)
    assert len(await fed(swarm)) == 10


async def test_a_feed_goes_on_exactly_where_it_was_interrupted(swarm, progress):
    windows = itertools.count()

    def interrupt(done, total):
        if next(windows) == 2:
            raise KeyboardInterrupt

    options = {"repeats": 2, "epochs": 2, "seed": 3, "progress_file": progress}
    with pytest.raises(KeyboardInterrupt):
        await feed(swarm.broker, RUN, data(150), "math", report=interrupt, **options)
    first = len(await fed(swarm))
    assert first == 2 * WINDOW
    assert await feed(swarm.broker, RUN, data(150), "math", **options) == 600 - first
    slots = await fed(swarm)
    assert len(slots) == len({slot.id for slot in slots}) == 600


async def test_a_feed_can_be_cancelled_while_it_reads_its_tasks(swarm, progress):
    this, read = asyncio.current_task(), itertools.count()

    def tasks():
        for task in data(10 * WINDOW):
            if next(read) == WINDOW:
                this.cancel()
            yield task

    with pytest.raises(asyncio.CancelledError):
        await feed(swarm.broker, RUN, tasks(), "math", repeats=1, progress_file=progress)
    assert this.uncancel() == 0
    assert next(read) == 2 * WINDOW


async def test_more_epochs_go_on_behind_the_earlier_ones_and_a_second_feed_does_nothing(swarm, progress):
    options = {"repeats": 1, "seed": 3, "progress_file": progress}
    assert await feed(swarm.broker, RUN, data(5), "math", epochs=1, **options) == 5
    assert await feed(swarm.broker, RUN, data(5), "math", epochs=1, **options) == 0
    assert await feed(swarm.broker, RUN, data(5), "math", epochs=3, **options) == 10
    slots = await fed(swarm)
    assert len({slot.id for slot in slots}) == len(slots) == 15
    assert await feed(swarm.broker, RUN, data(5), "math", epochs=1, restart="one", **options) == 5
    assert await feed(swarm.broker, RUN, data(5), "math", epochs=1, restart="one", **options) == 0, "it was sent again"
    assert await feed(swarm.broker, RUN, data(5), "math", epochs=1, restart="two", **options) == 5
    assert len(await fed(swarm)) == 25


@pytest.mark.parametrize("windows", [0, 1])
@pytest.mark.parametrize("again", [{"restart": "one"}, {}], ids=["sent again", "continued"])
async def test_a_restart_that_was_interrupted_goes_on_where_it_stopped(swarm, progress, windows, again):
    options = {"repeats": 1, "progress_file": progress}
    await feed(swarm.broker, RUN, data(300), "math", **options)

    def interrupt(done, total):
        if done == windows * WINDOW:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await feed(swarm.broker, RUN, data(300), "math", restart="one", report=interrupt, **options)
    assert await feed(swarm.broker, RUN, data(300), "math", **options, **again) == 300 - windows * WINDOW
    assert {len([*group]) for _, group in itertools.groupby(sorted(named(await fed(swarm))))} == {2}


@pytest.mark.parametrize("change", [{"seed": 4}, {"repeats": 3}, {"tasks": data(6)}])
async def test_a_feed_does_not_go_on_with_other_data_or_settings(swarm, progress, change):
    options = {"tasks": data(5), "repeats": 1, "seed": 3, "progress_file": progress}
    await feed(swarm.broker, RUN, kind="math", **options)
    with pytest.raises(TaskError, match="belongs to a feed of other data.*--restart"):
        await feed(swarm.broker, RUN, kind="math", **{**options, **change})


async def test_bad_input_feeds_nothing(swarm, progress):
    with pytest.raises(TaskError, match="0 tasks"):
        await feed(swarm.broker, RUN, [], "math", repeats=1, progress_file=progress)
    with pytest.raises(TaskError, match="0 repeats"):
        await feed(swarm.broker, RUN, data(1), "math", repeats=0, progress_file=progress)
    with pytest.raises(TaskError, match="task 'x': its data cannot be sent"):
        await feed(swarm.broker, RUN, [SwarmTask("x", payload=object())], "math", repeats=1, progress_file=progress)
    with pytest.raises(UnroutableError):
        await feed(swarm.broker, RUN, data(1), "chess", repeats=1, progress_file=progress)
    progress.write_text("rubbish")
    with pytest.raises(TaskError, match="remove it to start over"):
        await feed(swarm.broker, RUN, data(1), "math", repeats=1, progress_file=progress)
    assert await fed(swarm) == []


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.none() | st.integers(0, 5), st.integers(0, 60))
def test_any_two_halves_of_the_plan_are_the_whole(count, repeats, epochs, seed, cut):
    bodies = [(str(number), b"") for number in range(count)]
    total = count * repeats * epochs

    def slots(numbers):
        return [task.slot for task in plan_tasks(RUN, bodies, "math", repeats=repeats, seed=seed, numbers=numbers)]

    cut = min(cut, total)
    whole = slots(range(total))
    assert slots(range(cut)) + slots(range(cut, total)) == whole
    assert len({slot.id for slot in whole}) == total


async def test_equal_ids_of_two_data_sets_are_two_tasks_and_agents_see_the_ids_they_know(swarm, tmp_path):
    for name in ("train.jsonl", "more.jsonl"):
        (tmp_path / name).touch()
        mark = hash_source_name(str(tmp_path / name))
        file = default_progress_file(tmp_path, RUN, "math", mark)
        assert await feed(swarm.broker, RUN, data(3), "math", repeats=2, progress_file=file, source=mark) == 6
    slots = await fed(swarm)
    assert len({slot.id for slot in slots}) == 12
    assert [strip_queue_id(slot.task_id, "math") for slot in slots] == ["0", "0", "1", "1", "2", "2"] * 2


def test_a_data_set_is_the_same_however_its_place_is_written(tmp_path, monkeypatch):
    (tmp_path / "data.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert hash_source_name("data.jsonl") == hash_source_name(str(tmp_path / "data.jsonl"))
    assert hash_source_name("reasoning-gym:a") != hash_source_name("reasoning-gym:b")


def test_an_id_is_given_back_as_it_was():
    for name in ("1", "a:b", "math:1", "math@0:1"):
        for source in ("", "0a1b2c3d"):
            assert strip_queue_id(make_queue_id(SwarmTask(name), "math", source), "math") == name
    assert strip_queue_id("math-2:1", "math") == "math-2:1", "not ours: from a loop of somebody's own"


async def test_a_task_of_another_kind_or_with_a_taken_id_feeds_nothing(swarm, progress):
    for wrong, says in (
        (SwarmTask("x", "code"), "task 'x' is of kind 'code' by its own field, and is fed as 'math'"),
        (SwarmTask("0"), "the id '0' occurs more than once"),
    ):
        with pytest.raises(TaskError, match=says):
            await feed(swarm.broker, RUN, [*data(2), wrong], "math", repeats=1, progress_file=progress)
    assert await fed(swarm) == []
    assert await feed(swarm.broker, RUN, [SwarmTask("x", "math")], "math", repeats=1, progress_file=progress) == 1
