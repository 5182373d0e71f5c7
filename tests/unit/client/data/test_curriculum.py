"""A curriculum of one's own orders the tasks of every epoch, and is checked before anything is fed."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest

from swarmq.broker import topology
from swarmq.client.data.feed import count_fed, default_progress_file, feed
from swarmq.client.data.tasks import SwarmTask
from swarmq.errors import TaskError

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "own-methods.md"
TASKS = [SwarmTask(str(n), payload={"difficulty": d}) for n, d in enumerate((3, 1, 2))]


def by_turns(tasks, epoch):
    return sorted(range(len(tasks)), reverse=epoch % 2 == 1)


def endless(tasks, epoch):
    return itertools.cycle(range(len(tasks)))


def drawn(tasks, epoch):
    return random.sample(range(len(tasks)), len(tasks))


def short(tasks, epoch):
    return [0, 1]


def beyond(tasks, epoch):
    return [0, 1, 3]


def broken(tasks, epoch):
    return {}["difficulty"]


def nothing(tasks, epoch):
    return None


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setitem(sys.modules, "curricula", sys.modules[__name__])


async def fed(swarm, folder, curriculum, **how):
    path = default_progress_file(folder, "r1", "math", "data")
    await feed(swarm.broker, "r1", TASKS, "math", repeats=1, curriculum=curriculum, progress_file=path, **how)
    return [message.slot.task_id.removeprefix("math:") for message in swarm.arrived(topology.tasks("r1", "math"))]


async def test_each_epoch_has_its_order_and_a_feed_goes_on_in_it(swarm, tmp_path):
    assert await fed(swarm, tmp_path, "curricula:by_turns") == ["0", "1", "2"]
    assert await fed(swarm, tmp_path, "curricula:by_turns", epochs=2) == ["0", "1", "2", "2", "1", "0"]


async def test_what_was_fed_with_a_curriculum_is_counted_under_it_alone(swarm, tmp_path):
    path, how = default_progress_file(tmp_path, "r1", "math", ""), {"repeats": 2, "seed": 0}
    await feed(swarm.broker, "r1", TASKS, "math", epochs=2, curriculum="curricula:by_turns", progress_file=path, **how)
    assert count_fed(TASKS, "math", curriculum="curricula:by_turns", progress_file=path, **how) == 12
    with pytest.raises(TaskError, match="belongs to a feed of other data, kind, repeats, seed or curriculum"):
        count_fed(TASKS, "math", curriculum=None, progress_file=path, **how)


async def test_the_curriculum_of_the_page_feeds_easy_tasks_first(swarm, tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n# my_tasks.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert await fed(swarm, tmp_path, "my_tasks:easy_first") == ["1", "2", "0"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("endless", "epoch 0 has more than 3 positions, one for each task: does it end?"),
        ("drawn", "it orders epoch 0 differently when it is called again"),
        ("short", "epoch 0 leaves out 1 task, such as '2'"),
        ("beyond", "3 is not the position of a task, from 0 to 2"),
        ("broken", "raised KeyError: 'difficulty'"),
        ("nothing", "returned a NoneType, not positions of tasks"),
    ],
)
async def test_a_curriculum_that_cannot_be_followed_is_refused_and_nothing_is_fed(
    swarm, tmp_path, monkeypatch, name, says
):
    draws = itertools.cycle(([0, 1, 2], [2, 1, 0]))
    monkeypatch.setattr(random, "sample", lambda *_: next(draws))
    with pytest.raises(TaskError, match=re.escape(f"--curriculum curricula:{name}: {says}")):
        await fed(swarm, tmp_path, f"curricula:{name}")
    assert list(tmp_path.iterdir()) == []
