"""Two runs of one name on one broker would share their queues."""

import pytest

from swarmq.broker import topology
from swarmq.errors import SwarmqError
from swarmq.testing import MemoryBroker
from swarmq.up.deployment import refuse_twin


async def test_a_second_run_of_one_name_is_refused_while_the_first_is_up():
    broker = MemoryBroker()
    await refuse_twin(broker, "r")
    await broker.declare("r", policies=["main"], kinds=["default"])
    await refuse_twin(broker, "r")
    async with broker.consume(topology.inbox("r"), prefetch=1):
        with pytest.raises(SwarmqError, match="run 'r' is up on this broker already"):
            await refuse_twin(broker, "r")
