"""One RabbitMQ in a docker container, for machines where no server can run as our child.

All runs of a user share it, as they share any broker that is named to them; docker starts it again with the machine. Its
address and password are in a file that the user alone can read, its data in a volume of the same name.
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
LOOK_S = 1.0


class BrokerContainer(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, on loopback alone."""

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
    """The container that was started for this user, running. Raises BrokerError when its file cannot be read."""
    path = _container_file()
    if not path.exists() or shutil.which("docker") is None or not run_command(["docker", "start", NAME]).ok:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=BrokerContainer)
    except (OSError, msgspec.MsgspecError) as error:
        raise BrokerError(f"{path}: cannot be read ({error}): remove it, and `docker rm -f {NAME}`") from error


def start_container(report: Callable[[str], None]) -> None:
    """Returns when it takes clients. Raises BrokerError; then no container is left."""
    if (path := _container_file()).exists():  # its queues are not thrown away
        raise BrokerError(
            f"container {NAME} does not start; `docker start {NAME}` says why. To do without it: rm {path}"
        )
    report(f"starting {IMAGE} with docker, as {NAME}")
    made = BrokerContainer(
        user="swarmq", password=secrets.token_hex(24), amqp_port=_pick_port(5672), management_port=_pick_port(15672)
    )
    command = ["docker", "run", "--detach", "--name", NAME, "--hostname", NAME, "--restart", "unless-stopped"]
    command += ["--volume", f"{NAME}:/var/lib/rabbitmq"]
    command += ["--publish", f"127.0.0.1:{made.amqp_port}:5672", "--publish", f"127.0.0.1:{made.management_port}:15672"]
    command += ["--env", "RABBITMQ_DEFAULT_USER", "--env", "RABBITMQ_DEFAULT_PASS", IMAGE]
    given = {"RABBITMQ_DEFAULT_USER": made.user, "RABBITMQ_DEFAULT_PASS": made.password}  # not for `ps` to see
    run_command(["docker", "rm", "--force", NAME])
    run_command(["docker", "volume", "rm", NAME])  # of a container whose password nobody knows any more
    try:
        run_checked(command, variables=given)
        _wait_until_ready()
    except BrokerError:
        run_command(["docker", "rm", "--force", NAME])
        raise
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(made))


def _wait_until_ready() -> None:
    until = time.monotonic() + READY_S
    look = ["docker", "exec", NAME, "rabbitmq-diagnostics", "-q", "check_port_connectivity"]
    while not (answer := run_command(look)).ok:
        if time.monotonic() > until:
            raise BrokerError(f"{NAME} takes no clients after {READY_S:g} s ({answer.tail}): see `docker logs {NAME}`")
        time.sleep(LOOK_S)


def _pick_port(usual: int) -> int:
    return usual if is_port_free(usual) else find_free_port()


def _container_file() -> Path:
    return user_folder().with_name("container.json")
