"""Stand-ins for tests: a broker in memory and a faulty wire."""

from swarmq.testing.memory_broker import MemoryBroker
from swarmq.testing.relay import TcpRelay

__all__ = ["MemoryBroker", "TcpRelay"]
