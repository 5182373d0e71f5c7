"""Ports of a run's proxies and engines: the same at every start where they are free, so that clients find the run again."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Iterable

import msgspec

from swarmq.config import MetricsSettings, SwarmJob
from swarmq.errors import ConfigError
from swarmq.runtime.files import read_or_reset, write_atomically
from swarmq.runtime.processes import is_port_free, reserve_port

PORTS = msgspec.json.Decoder(dict[str, int])
ANY = "0.0.0.0"  # noqa: S104 - such a socket only keeps others from the port
WAIT_S = 5.0
POLL_S = 0.1


def proxy_names(job: SwarmJob) -> list[str]:
    return ["proxy", *(f"proxy.{number}" for number in range(1, job.proxy.count))]


def assign_proxy_ports(job: SwarmJob, engines: Iterable[str]) -> dict[str, int]:
    """Return the port of each proxy: `proxy.port` and the ports after it, or free ones. `engines` names the engines whose ports
    are stored in the same file."""
    names = proxy_names(job)
    if job.proxy.port:
        return {name: job.proxy.port + number for number, name in enumerate(names)}
    ports = assign_ports(job, [*engines, *names, *metrics_names(job)])
    return {name: ports[name] for name in names}


def metrics_names(job: SwarmJob) -> list[str]:
    """Return the names of the processes that serve their metrics on a port of their own."""
    return ["collector", *(f"learner.{policy}" for policy in job.trained)]


def assign_metrics_ports(job: SwarmJob, engines: Iterable[str]) -> MetricsSettings:
    """Return the settings with a port for the metrics of the collector and each learner: the configured one, or else a free
    one. `engines` is as in `assign_proxy_ports`."""
    ports = assign_ports(job, [*engines, *proxy_names(job), *metrics_names(job)])
    learners = {policy: job.metrics.learner_ports.get(policy) or ports[f"learner.{policy}"] for policy in job.trained}
    collector = job.metrics.collector_port or ports["collector"]
    return msgspec.structs.replace(job.metrics, collector_port=collector, learner_ports=learners)


async def wait_for_proxy_ports(job: SwarmJob, *, wait_s: float = WAIT_S) -> None:
    """Wait up to `wait_s` seconds until the ports that the job names for its proxies are free, because a run that was just killed
    releases its ports with a delay.

    Raises ConfigError if another program holds a port.
    """
    for port in range(job.proxy.port, job.proxy.port + job.proxy.count) if job.proxy.port else ():
        until = time.monotonic() + wait_s
        while True:
            try:
                socket.create_server((job.proxy.host, port)).close()
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise ConfigError(
                        f"proxy.port: cannot listen on {job.proxy.host}:{port} ({os.strerror(error.errno or 0)}); set another port or host, "
                        f"remove the setting to get a free port, or find the process that uses the port: ss -ltnp 'sport = :{port}'"
                    ) from error
            await asyncio.sleep(POLL_S)


def assign_ports(job: SwarmJob, names: list[str]) -> dict[str, int]:
    """Return a port for each name: the last start's if it is free, else a new one. They are free, and kept, at all addresses of the
    host, since proxies may listen at any of them."""
    path = job.run_folder.path / "ports.json"
    known = read_or_reset(path, PORTS.decode, dict[str, int](), action="proxies and engines get other ports")
    ports = {
        name: known[name] if name in known and is_port_free(known[name], ANY) else reserve_port(ANY) for name in names
    }
    write_atomically(path, msgspec.json.encode(ports))
    return ports
