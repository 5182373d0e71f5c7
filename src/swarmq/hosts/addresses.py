"""The address that an engine or proxy on another host announces to the run's other processes."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

import msgspec

from swarmq.errors import ConfigError


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files with which an engine or proxy serves https."""

    certificate: str
    key: str


class ListenAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine or proxy listens on this host, and the URL that it announces to the run's other processes."""

    host: str | None = None
    """Address to listen on, which is also announced unless `url` is given; None: the address from which this host reaches RabbitMQ."""
    port: int = 0
    """Port to listen on; 0: a free one."""
    url: str | None = None
    """Announced URL; None: the URL of `host` and `port`."""
    tls: TlsFiles | None = None
    """Files for https; None: http."""

    def announce(self, host: str, port: int, path: str = "") -> str:
        """Return the URL to announce: `url`, or that of `host`, `port` and `path`."""
        return self.url.rstrip("/") if self.url else format_url("https" if self.tls else "http", host, port) + path


def split_address(url: str) -> tuple[str, int]:
    """Return host and port of a URL. Raises ConfigError if it has no host or no valid port."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"https": 443, "http": 80, "amqps": 5671, "amqp": 5672}[parts.scheme]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{url!r} is not a valid URL: give a scheme, a host and a port") from error
    if not parts.hostname:
        raise ConfigError(f"{url!r} is not a valid URL: it names no host")
    return parts.hostname, port


def resolve(host: str, port: int) -> str:
    """Return the first IP address of a host name. Raises ConfigError if the name resolves to nothing."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"{host}:{port}: the name {host!r} resolves to nothing on this host ({error.strerror}): check it, or give an IP address"
        ) from error


def find_own_address(host: str, port: int) -> str:
    """Return the IP address of this host from which packets to `host` leave. Raises ConfigError if there is no route."""
    there = resolve(host, port)
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, port))  # sends nothing
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be reached from this host ({error.strerror})") from error
        return str(probe.getsockname()[0])


def is_loopback(url: str) -> bool:
    """Return whether the host of `url` is a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_announced(url: str, *, is_run_on_this_host: bool) -> None:
    """Raise ConfigError if the run's other processes cannot reach this host at `url`. `is_run_on_this_host`: whether they may use a
    loopback address."""
    host, port = split_address(url)
    address = ipaddress.ip_address(resolve(host, port))
    if address.is_unspecified:
        raise ConfigError(
            f"{url} is no address that other hosts can reach: announce one with --url http://NAME:{port}, or leave --host out"
        )
    if address.is_loopback and not is_run_on_this_host:
        raise ConfigError(
            f"{url} is this host's loopback address, which the run's other hosts cannot reach: name the host's address with --host, or "
            "announce another one with --url"
        )


def replace_port(url: str, port: int) -> str:
    """Return scheme and host of `url` with another port."""
    parts = urlsplit(url)
    return format_url(parts.scheme, parts.hostname or "", port)


def format_url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
