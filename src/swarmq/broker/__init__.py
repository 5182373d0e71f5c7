"""Everything swarmq does with RabbitMQ. The driver is imported here and nowhere else.

`AmqpBroker` is in `swarmq.broker.amqp`, which loads the driver: a client does so when it connects.
"""

from swarmq.broker.deliveries import Deliveries, Delivery
from swarmq.broker.protocol import Broker, Depth, Receipts
from swarmq.broker.tickets import TicketSource

__all__ = ["Broker", "Deliveries", "Delivery", "Depth", "Receipts", "TicketSource"]
