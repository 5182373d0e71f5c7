"""RabbitMQ: everything swarmq knows about the message broker.

Every process imports this package. It offers the interface `Broker` (protocol.py), the records it delivers, and
`TicketSource`; `AmqpBroker` (amqp.py) is the RabbitMQ implementation, imported on connecting because it loads the driver.
`topology` names all queues. `node` installs and runs a private RabbitMQ; `admin` manages users, invites and dead letters.
aio-pika is imported here and nowhere else. This package must never import client, proxy, collector, learner or engine.
"""

from swarmq.broker.deliveries import Deliveries, Delivery
from swarmq.broker.protocol import Broker, Depth, Receipts, declare_run
from swarmq.broker.tickets import TicketSource

__all__ = ["Broker", "Deliveries", "Delivery", "Depth", "Receipts", "TicketSource", "declare_run"]
