"""Mapping of RabbitMQ's and the driver's errors to swarmq's.

After a BrokerLostError, connect again. Any other BrokerError lasts until a person has changed something.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote, urlsplit

from aio_pika import exceptions as amqp
from aiormq.exceptions import ConnectionInternalError

from swarmq.errors import BrokerError, BrokerLostError, LoginRefusedError, UnroutableError

URL_HINT = "write it as amqp://user:password@host:5672/vhost"


def redact_url(url: str) -> str:
    """Return `host:port/vhost` of an AMQP URL, for messages without the password. Raises BrokerError for a malformed URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
    except ValueError as error:
        raise BrokerError(f"the broker's url is malformed ({error}): {URL_HINT}") from error
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise BrokerError(f"the broker's url needs amqp:// or amqps:// and a host: {URL_HINT}")
    vhost = unquote(parts.path[1:])
    return f"{parts.hostname}:{port}" + (f"/{vhost}" if vhost.strip("/") else "")


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
            return BrokerError(f"RabbitMQ at {where}: {text}; the user in the broker's url lacks this right")
        case amqp.ChannelClosed() if text.startswith(("PRECONDITION_FAILED", "RESOURCE_LOCKED")):
            return BrokerError(f"RabbitMQ at {where}: {text}")
        case ConnectionInternalError():
            return BrokerLostError(
                f"RabbitMQ at {where} had an internal error ({text}), see its log; a queue that it cannot recover after a "
                "crash has to be deleted in the management UI and is then declared again"
            )
        case TimeoutError():
            return BrokerLostError(f"RabbitMQ at {where} does not answer: is it running, and is the port right?")
        case _:
            return BrokerLostError(
                f"RabbitMQ at {where} cannot be reached ({text}): start it (`swarmq up` starts a run's own) or correct the url"
            )


def extract_text(error: BaseException) -> str:
    """Return the text of RabbitMQ or the operating system, without the driver's wrapping."""
    if isinstance(error, amqp.AMQPError) and not isinstance(error, amqp.DeliveryError) and error.args:
        return str(error.args[-1])
    return str(error) or type(error).__name__


def describe_closing(ended: asyncio.Future[Any], what: str) -> str:
    """Return why a connection or channel has closed, given the driver's `closing` future."""
    error = None if ended.cancelled() else ended.exception()
    return what if error is None else f"{what}: {extract_text(error)}"
