"""Everything swarmq does with RabbitMQ. The driver is imported here and nowhere else."""

from swarmq.broker.amqp import AmqpBroker
from swarmq.broker.delivery import Deliveries, Delivery
from swarmq.broker.protocol import Broker, Depth, Receipts
from swarmq.broker.tickets import TicketDesk

__all__ = ["AmqpBroker", "Broker", "Deliveries", "Delivery", "Depth", "Receipts", "TicketDesk"]
