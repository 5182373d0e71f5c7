"""Daemons on the event loop collect cyclic garbage rarely, but they do collect it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, weakref
from swarmq.runtime import event_loop

class Node:
    pass

async def main():
    lost = Node()
    lost.itself = lost
    gone = weakref.ref(lost)
    del lost
    kept = [[] for _ in range({allocations})]
    print(gone() is None, gc.get_freeze_count() > 0)

event_loop.run(main())
"""


@pytest.mark.parametrize(("allocations", "is_collected"), [(5_000, False), (50_000, True)])
def test_collects_garbage_after_many_allocations(allocations: int, is_collected: bool) -> None:
    program = PROGRAM.format(allocations=allocations)
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert answer.split() == [str(is_collected), "True"]
