"""A curriculum of the user's own: a function that says in which order the tasks of an epoch are fed.

    def easy_first(tasks: Sequence[SwarmTask], epoch: int) -> Iterable[int]: ...

It returns the positions of the tasks, each once. All epochs are ordered and checked before the first task is fed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from swarmq.client.data.targets import load_object
from swarmq.client.data.tasks import SwarmTask
from swarmq.errors import TaskError
from swarmq.runtime.wording import count_of


def order_epochs(target: str, tasks: Sequence[SwarmTask], epochs: int) -> list[list[int]]:
    """Return the order of each epoch by the function `module:function`. Raises TaskError if it fails, never ends, changes from call to
    call, or leaves out or repeats a task."""
    function = load_object(target)
    orders = []
    for epoch in range(epochs):
        order, again = (_order(target, function, tasks, epoch) for _ in range(2))
        if order != again:
            raise TaskError(
                f"--curriculum {target}: it orders epoch {epoch} differently when it is called again, so a feed that is killed could not "
                "continue: use no random numbers but those of a seed, and no state"
            )
        orders.append(order)
    return orders


def _order(target: str, function: Any, tasks: Sequence[SwarmTask], epoch: int) -> list[int]:
    try:
        found: Any = function(tuple(tasks), epoch)
        if not isinstance(found, Iterable):
            raise TaskError(f"--curriculum {target}: returned a {type(found).__name__}, not positions of tasks")
        order = list(islice(found, len(tasks) + 1))
    except TaskError:
        raise
    except Exception as error:  # the function may raise anything
        raise TaskError(f"--curriculum {target}: raised {type(error).__name__}: {error}") from error
    if len(order) > len(tasks):
        raise TaskError(
            f"--curriculum {target}: epoch {epoch} has more than {len(tasks)} positions, one for each task: does it end?"
        )
    if wrong := [at for at in order if type(at) is not int or not 0 <= at < len(tasks)]:
        raise TaskError(
            f"--curriculum {target}: {wrong[0]!r} is not the position of a task, from 0 to {len(tasks) - 1}"
        )
    if left := sorted(set(range(len(tasks))) - set(order)):
        raise TaskError(
            f"--curriculum {target}: epoch {epoch} leaves out {count_of(len(left), 'task')}, such as {tasks[left[0]].id!r}"
        )
    return order
