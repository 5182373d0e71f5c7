"""Put a data set on the tasks queue of a kind, from which any number of workers take tasks.

  window: publish what has no receipt ──> progress file, fsynced ──> receipts cleared ──> next window

The order of tasks is a pure function of the data, the seed and the epoch, so the number of confirmed tasks is all that a feed
must remember to resume. The progress file holds that number, and the broker keeps receipts of the tasks that were published
after the file's last write. A feed that is killed at any moment and started again therefore puts every task on the queue once.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from swarmq import keys
from swarmq.broker import Broker, topology
from swarmq.client.data.curriculum import order_epochs
from swarmq.client.data.tasks import SwarmTask, make_queue_id, strip_queue_id
from swarmq.errors import TaskError
from swarmq.messages import Slot, Task
from swarmq.runtime.files import write_atomically
from swarmq.runtime.logs import log
from swarmq.runtime.wording import count_of

WINDOW = 128
"""Number of tasks that are published together; the progress file is written after each window."""


class FeedProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the progress file. `data` identifies the data set and the settings to which the file belongs."""

    data: str
    confirmed: int
    """Number of tasks in the queue, counted from the beginning of the first epoch."""
    restart: str = ""
    """Id of the restart with which the feed began."""


async def feed(
    broker: Broker,
    run: str,
    tasks: Iterable[SwarmTask],
    kind: str,
    *,
    repeats: int,
    epochs: int = 1,
    seed: int | None = None,
    curriculum: str | None = None,
    progress_file: Path,
    source: str = "",
    secret: bytes | None = None,
    restart: str = "",
    report: Callable[[int, int], None] = lambda _confirmed, _total: None,
) -> int:
    """Publish every repeat of every task in every epoch, and return the number of published tasks. With `seed`, each epoch is
    shuffled; with `curriculum`, a function `module:function` orders it (curriculum.py).

    Equal ids are the same task, to be trained once, unless their data sets have different marks (`source`, see
    `hash_source_name`). With `secret` (`keys.task_secret`), invited clients can also return tasks for another attempt.
    `report(confirmed, total)` is called after each window. The feed continues after the tasks that `progress_file` counts as
    confirmed; only `epochs` may then have changed. With `restart`, an id of its own for each restart, it starts again with the same
    slots, and slots that were trained are not trained again; a feed that began with this id continues.

    Raises TaskError for a task of another kind, for an id that occurs twice, and for continuing with other data, repeats or seed.
    """
    tasks, bodies = await _read_and_encode(tasks, kind, source)
    if repeated := [one for one, times in Counter(name for name, _ in bodies).items() if times > 1]:
        raise TaskError(f"the id {strip_queue_id(repeated[0], kind)!r} occurs more than once: ids must differ")
    if not bodies or repeats < 1 or epochs < 1:
        raise TaskError(
            f"nothing to feed: {count_of(len(bodies), 'task')}, {count_of(repeats, 'repeat')}, {count_of(epochs, 'epoch')}"
        )
    orders = order_epochs(curriculum, tasks, epochs) if curriculum else None
    data = _hash_feed(bodies, kind, repeats, seed, orders)
    total = len(bodies) * repeats * epochs
    queue = topology.tasks(run, kind)
    async with broker.receipts(topology.receipts(run, kind, data)) as receipts:
        # the receipts exclude other feeds of this data
        if restart and not _is_from_restart(progress_file, restart):
            await receipts.clear()  # before the file, else a killed restart would take old receipts for its own
            _write_progress(progress_file, FeedProgress(data=data, confirmed=0, restart=restart))
        progress = _read_progress(progress_file, data)
        start = progress.confirmed
        if start >= total:
            log.info("nothing_left_to_feed", confirmed=start, action="raise epochs to feed more of it")
        report(min(start, total), total)
        for begin in range(start, total, WINDOW):
            window = range(begin, min(begin + WINDOW, total))
            planned = plan_tasks(run, bodies, kind, repeats=repeats, seed=seed, numbers=window, orders=orders)
            await receipts.publish(queue, [keys.seal_task(secret, task) if secret else task for task in planned])
            _write_progress(progress_file, msgspec.structs.replace(progress, confirmed=window.stop))
            await receipts.clear()
            report(window.stop, total)
        await receipts.close()
    return max(0, total - start)


def count_fed(
    tasks: Iterable[SwarmTask],
    kind: str,
    *,
    repeats: int,
    seed: int | None,
    curriculum: str | None,
    progress_file: Path,
    source: str = "",
) -> int:
    """Return how many tasks an earlier `feed` with these arguments has confirmed. Raises TaskError if it had others."""
    tasks = list(tasks)
    orders = order_epochs(curriculum, tasks, 1) if curriculum else None
    data = _hash_feed(_encode_tasks(tasks, kind, source), kind, repeats, seed, orders)
    return _read_progress(progress_file, data).confirmed


def plan_tasks(
    run: str,
    bodies: Sequence[tuple[str, bytes]],
    kind: str,
    *,
    repeats: int,
    seed: int | None,
    numbers: Iterable[int],
    orders: Sequence[list[int]] | None = None,
) -> Iterator[Task]:
    """Yield the tasks at these positions (from 0) in the endless sequence of epochs. The repeats of a task follow one another.
    `bodies`: (task id, encoded payload) of each task. `orders`: order of each epoch; None: by `seed`."""
    known = dict(enumerate(orders or ()))
    for number in numbers:
        epoch, place = divmod(number, len(bodies) * repeats)
        order = known.get(epoch)
        if order is None:
            order = known[epoch] = _shuffle(len(bodies), seed, epoch)
        task_id, payload = bodies[order[place // repeats]]
        yield Task(
            run=run,
            slot=Slot(task_id=task_id, repeat=place % repeats, epoch=epoch),
            kind=kind,
            group_size=repeats,
            payload=msgspec.Raw(payload),
        )


def default_progress_file(folder: Path, run: str, kind: str, source: str) -> Path:
    """Return the path of the progress file, one for each run, kind and data set (by its mark)."""
    return folder / f"feed-{run}-{kind}-{source}.json"


def _shuffle(count: int, seed: int | None, epoch: int) -> list[int]:
    order = list(range(count))
    if seed is not None:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


async def _read_and_encode(
    tasks: Iterable[SwarmTask], kind: str, source: str
) -> tuple[list[SwarmTask], list[tuple[str, bytes]]]:
    """Return the tasks, and what `_encode_tasks` returns of them. Can be cancelled after every WINDOW tasks, because a large file takes
    seconds to read."""
    found: list[SwarmTask] = []
    bodies: list[tuple[str, bytes]] = []
    unread = iter(tasks)
    while window := list(islice(unread, WINDOW)):
        found += window
        bodies += _encode_tasks(window, kind, source)
        await asyncio.sleep(0)
    return found, bodies


def _encode_tasks(tasks: Iterable[SwarmTask], kind: str, source: str) -> list[tuple[str, bytes]]:
    """Return id on the queue and encoded payload of each task."""
    return [(make_queue_id(task, kind, source), _encode_payload(task)) for task in tasks]


def _encode_payload(task: SwarmTask) -> bytes:
    try:
        return msgspec.msgpack.encode(task.payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TaskError(f"task {task.id!r}: its data cannot be sent: {error}") from error


def _hash_feed(
    bodies: Sequence[tuple[str, bytes]],
    kind: str,
    repeats: int,
    seed: int | None,
    orders: Sequence[list[int]] | None = None,
) -> str:
    digest = hashlib.sha256(f"{kind}:{repeats}:{seed}".encode())
    for task_id, payload in bodies:
        digest.update(f"{len(task_id)}:{task_id}:{len(payload)}:".encode() + payload)
    if orders:  # the first one alone, because `epochs` may be raised
        digest.update(repr(orders[0]).encode())
    return digest.hexdigest()


def _is_from_restart(path: Path, restart: str) -> bool:
    try:
        return msgspec.json.decode(path.read_bytes(), type=FeedProgress).restart == restart
    except (OSError, msgspec.MsgspecError):  # a restart needs no earlier feed
        return False


def _read_progress(path: Path, data: str) -> FeedProgress:
    try:
        fed = msgspec.json.decode(path.read_bytes(), type=FeedProgress)
    except FileNotFoundError:
        return FeedProgress(data=data, confirmed=0)
    except (OSError, msgspec.MsgspecError) as error:
        raise TaskError(
            f"{path}: the progress of an earlier feed cannot be read ({error}): remove it to start over"
        ) from error
    if fed.data != data:
        raise TaskError(
            f"{path}: belongs to a feed of other data, kind, repeats, seed or curriculum: begin again with `swarmq feed --restart`, "
            "or remove the file"
        )
    return fed


def _write_progress(path: Path, fed: FeedProgress) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(fed))
    except OSError as error:
        raise TaskError(f"{path}: the progress cannot be written: {error}") from error
