"""One RabbitMQ in a docker container, for machines where no server can run as a child process.

All runs of a user share the container, and docker restarts it with the machine. Address and password are in a file that only
the user can read; the data is in a volume of the container's name.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from swarmq.broker.node.commands import run_checked, run_command, user_folder
from swarmq.errors import BrokerError
from swarmq.runtime.files import write_atomically
from swarmq.runtime.processes import find_free_port, is_port_free

NAME = "swarmq-rabbitmq"
IMAGE = "rabbitmq:4-management"
READY_S = 180.0
POLL_S = 1.0


class BrokerContainer(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials and ports of the container, which listens on loopback only."""

    user: str
    password: str
    amqp_port: int
    management_port: int

    @property
    def amqp_url(self) -> str:
        return f"amqp://{self.user}:{self.password}@127.0.0.1:{self.amqp_port}/"

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.amqp_port}, in docker container {NAME} (management UI: port {self.management_port})"


def find_container() -> BrokerContainer | None:
    """Start this user's container if it was created before, and return it; None if there is none. Raises BrokerError if its
    file cannot be read."""
    path = _container_file()
    if not path.exists() or shutil.which("docker") is None or not run_command(["docker", "start", NAME]).ok:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=BrokerContainer)
    except (OSError, msgspec.MsgspecError) as error:
        raise BrokerError(f"{path}: cannot be read ({error}): remove it, and `docker rm -f {NAME}`") from error


def start_container(report: Callable[[str], None]) -> None:
    """Create the container and return when it accepts clients. Raises BrokerError and leaves no container."""
    if (path := _container_file()).exists():  # never delete its queues
        raise BrokerError(
            f"container {NAME} does not start; `docker start {NAME}` says why. To do without it: rm {path}"
        )
    report(f"starting {IMAGE} with docker, as {NAME}")
    container = BrokerContainer(
        user="swarmq", password=secrets.token_hex(24), amqp_port=_pick_port(5672), management_port=_pick_port(15672)
    )
    command = ["docker", "run", "--detach", "--name", NAME, "--hostname", NAME, "--restart", "unless-stopped"]
    command += ["--volume", f"{NAME}:/var/lib/rabbitmq"]
    command += [
        "--publish",
        f"127.0.0.1:{container.amqp_port}:5672",
        "--publish",
        f"127.0.0.1:{container.management_port}:15672",
    ]
    command += ["--env", "RABBITMQ_DEFAULT_USER", "--env", "RABBITMQ_DEFAULT_PASS", IMAGE]
    credentials = {
        "RABBITMQ_DEFAULT_USER": container.user,
        "RABBITMQ_DEFAULT_PASS": container.password,
    }  # not on the command line, which `ps` shows
    run_command(["docker", "rm", "--force", NAME])
    run_command(["docker", "volume", "rm", NAME])  # its container's password is lost
    try:
        run_checked(command, variables=credentials)
        _wait_until_ready()
    except BrokerError:
        run_command(["docker", "rm", "--force", NAME])
        raise
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(container))


def _wait_until_ready() -> None:
    until = time.monotonic() + READY_S
    look = ["docker", "exec", NAME, "rabbitmq-diagnostics", "-q", "check_port_connectivity"]
    while not (answer := run_command(look)).ok:
        if time.monotonic() > until:
            raise BrokerError(f"{NAME} takes no clients after {READY_S:g} s ({answer.tail}): see `docker logs {NAME}`")
        time.sleep(POLL_S)


def _pick_port(usual: int) -> int:
    return usual if is_port_free(usual) else find_free_port()


def _container_file() -> Path:
    return user_folder().with_name("container.json")
