"""Stand-ins for tests: a broker in memory, a scripted engine, and a faulty network."""

from swarmq.testing.memory_broker import MemoryBroker
from swarmq.testing.relay import TcpRelay

__all__ = ["MemoryBroker", "TcpRelay"]
