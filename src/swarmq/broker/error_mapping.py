"""Mapping of RabbitMQ's and the driver's errors to swarmq's.

After a BrokerLostError, connect again. Any other BrokerError lasts until a person has changed something.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aio_pika import exceptions as amqp
from aiormq.exceptions import ConnectionInternalError

from swarmq.errors import BrokerError, BrokerLostError, LoginRefusedError, UnroutableError


def map_error(error: Exception, where: str) -> BrokerError:
    """Return the BrokerError for an error of the driver or the operating system."""
    text = extract_text(error)
    match error:
        case BrokerError():
            return error
        case amqp.AuthenticationError() | amqp.ProbableAuthenticationError():
            return LoginRefusedError(f"RabbitMQ at {where} refused user or password: check the broker's url")
        case amqp.InvalidFrameError() if "Connection.OpenOk" in text:  # the driver does not pass on the broker's text
            return BrokerError(
                f"RabbitMQ at {where} refused the connection: the virtual host at the end of the url does not exist, "
                "or its user may not use it or has too many connections"
            )
        case amqp.ChannelNotFoundEntity() if "down" not in text and "stopped" not in text:
            return UnroutableError(
                f"RabbitMQ at {where}: {text}; check the run's name, or start the run on this broker"
            )
        case amqp.ChannelClosed() if text.startswith("ACCESS_REFUSED"):
            return BrokerError(
                f"RabbitMQ at {where}: {text}; the user in the broker's url lacks this right. Rights that an older "
                "version gave to a client or host are renewed by the next `swarmq up`, or by inviting it again under another name"
            )
        case amqp.ChannelClosed() if text.startswith(("PRECONDITION_FAILED", "RESOURCE_LOCKED")):
            return BrokerError(f"RabbitMQ at {where}: {text}")
        case ConnectionInternalError():
            return BrokerLostError(
                f"RabbitMQ at {where} had an internal error ({text}), see its log; a queue that it cannot recover after a "
                "crash has to be deleted in the management UI and is then declared again"
            )
        case TimeoutError():
            return BrokerLostError(
                f"RabbitMQ at {where} does not answer: is it running, is the port right, and does a firewall drop packets to it?"
            )
        case _:
            return BrokerLostError(
                f"RabbitMQ at {where} cannot be reached ({text}): start it (`swarmq up` starts a run's own) or correct the url"
            )


def combine_failures(failures: Mapping[str, BrokerError]) -> BrokerError:
    """Return one error that names each failed node of a cluster with its reason. `failures`: `host:port/vhost` -> error.

    If a node refused, the error says so, because all nodes of a cluster have the same users.
    """
    if len(failures) == 1:
        return next(iter(failures.values()))
    reasons = {place: f"{place} ({extract_cause(error)})" for place, error in failures.items()}
    for place, error in failures.items():
        if not isinstance(error, BrokerLostError):
            del reasons[place]
            return type(error)(f"{error}; also tried: {'; '.join(reasons.values())}")
    return BrokerLostError(f"no node of the RabbitMQ cluster can be reached: {'; '.join(reasons.values())}")


def extract_cause(error: BrokerError) -> str:
    """Return the text of RabbitMQ or the operating system behind an error of `map_error`."""
    return extract_text(error.__cause__ or error)


def extract_text(error: BaseException) -> str:
    """Return the text of RabbitMQ or the operating system, without the driver's wrapping."""
    if isinstance(error, amqp.AMQPError) and not isinstance(error, amqp.DeliveryError) and error.args:
        return str(error.args[-1])
    return str(error) or type(error).__name__


def describe_closing(ended: asyncio.Future[Any], what: str) -> str:
    """Return why a connection or channel has closed, given the driver's `closing` future."""
    error = None if ended.cancelled() else ended.exception()
    return what if error is None else f"{what}: {extract_text(error)}"
