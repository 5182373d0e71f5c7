"""Files in the folder of a private node: identity, configuration, logs and a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import IO

import msgspec

from swarmq.broker import topology
from swarmq.config import BrokerSettings
from swarmq.errors import BrokerError
from swarmq.runtime.files import write_atomically
from swarmq.runtime.logs import log
from swarmq.runtime.processes import is_port_free, reserve_port

HOST = "127.0.0.1"
COOKIE = ".erlang.cookie"
LAST_LINES = 6

DISK_LIMIT_BYTES = 2_000_000_000
"""Free disk space in bytes below which a private node accepts no messages."""
ALARM_TEXT = (
    "RabbitMQ accepts no messages: it is low on memory or disk; the run waits until that is over (a RabbitMQ started by `swarmq up` needs "
    f"{DISK_LIMIT_BYTES / 1e9:g} GB free on its disk)"
)

ACK_TIMEOUT_MS = round(topology.ACK_S * 1000)
CONFIG = """\
listeners.tcp.1 = {host}:{amqp_port}
management.tcp.ip = {host}
management.tcp.port = {management_port}
default_user = {user}
default_pass = {password}
loopback_users = none
log.console = false
# Tasks and batches are held unacknowledged for as long as they take: a week.
consumer_timeout = {ack_timeout_ms}
# A gibibyte of backlog is 850 MB of memory with RabbitMQ's default log segments, 300 MB with these.
raft.wal_max_size_bytes = 67108864
vm_memory_high_watermark.absolute = 1500MB
disk_free_limit.absolute = {disk_limit}
"""

ADVANCED_CONFIG = (
    f'[{{rabbit, [{{server_properties, [{{<<"{topology.ACK_TIMEOUT_PROPERTY}">>, signedint, {ACK_TIMEOUT_MS}}}]}}]}}].'
)
"""Erlang configuration with which the node states its `consumer_timeout` to clients; RabbitMQ does not do so by itself."""

TLS_CONFIG = """\
listeners.ssl.1 = 0.0.0.0:{port}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.cacertfile = {certificate}
ssl_options.verify = verify_none
ssl_options.versions.1 = tlsv1.3
ssl_options.versions.2 = tlsv1.2
"""


CLUSTER_CONFIG = """\
# A node without a majority accepts no clients, which go on to another node.
cluster_partition_handling = pause_minority
queue_leader_locator = balanced
"""

JOIN_CONFIG = "cluster_formation.classic_config.nodes.1 = {node}\n"


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Name, credentials and ports of a node. They survive restarts, except the last two ports, which only the node uses."""

    node: str
    """Erlang node name; names the data folder, too."""
    user: str
    password: str
    amqp_port: int
    management_port: int
    dist_port: int
    epmd_port: int

    @property
    def amqp_url(self) -> str:
        return f"amqp://{self.user}:{self.password}@{HOST}:{self.amqp_port}/"

    @property
    def management_url(self) -> str:
        return f"http://{HOST}:{self.management_port}/"

    @property
    def management_login(self) -> str:
        """URL of the management API, with user and password."""
        return f"http://{self.user}:{self.password}@{HOST}:{self.management_port}/"


def check_disk(folder: Path) -> None:
    """Raise BrokerError if a node in this folder would accept no messages for lack of disk space."""
    free = shutil.disk_usage(folder).free
    if free < DISK_LIMIT_BYTES:
        raise BrokerError(
            f"the disk of {folder} has {free / 1e9:.2f} GB free, and RabbitMQ accepts no messages below "
            f"{DISK_LIMIT_BYTES / 1e9:g} GB: free some, or set `folder` to another disk"
        )


def take_lock(folder: Path) -> IO[str]:
    """Lock a node's folder and return the lock file, which holds the lock until it is closed. Raises BrokerError naming the
    holder's process id."""
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise BrokerError(
            f"the RabbitMQ data in {folder} is in use by process {holder}: stop its run, or choose another folder"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def load_identity(folder: Path, *, port: int, epmd_port: int, first: NodeIdentity | None = None) -> NodeIdentity:
    """Load the node's identity, or create it at the first start. `port` 0: the port of the last start, or a free one. `first`: the
    cluster's first node, whose user and password the other nodes use. Raises BrokerError if the port is taken."""
    path = folder / "node.json"
    management, dist, amqp = _distinct_ports(3)
    fresh = NodeIdentity(
        node=f"swarmq-{secrets.token_hex(4)}@localhost",
        user="swarmq",
        password=secrets.token_hex(18),  # hex never begins with "-", which programs would take for an option
        amqp_port=port or amqp,
        management_port=management,
        dist_port=dist,
        epmd_port=epmd_port,
    )
    try:
        identity = msgspec.json.decode(path.read_bytes(), type=NodeIdentity)
    except FileNotFoundError:
        identity = fresh
    except msgspec.MsgspecError as error:
        identity = _recover(folder, fresh)
        log.warning("file_damaged", file=str(path), reason=str(error), action="rebuilt from the node's other files")
    identity = msgspec.structs.replace(
        identity,
        amqp_port=port or identity.amqp_port,
        management_port=identity.management_port if is_port_free(identity.management_port) else management,
        dist_port=dist,
        epmd_port=epmd_port,
    )
    if first:
        identity = msgspec.structs.replace(identity, user=first.user, password=first.password)
    if not is_port_free(identity.amqp_port):
        raise BrokerError(
            f"port {identity.amqp_port} is taken by another program: stop it, or set broker.port to a free one"
        )
    write_atomically(path, msgspec.json.encode(identity))
    return identity


def _recover(folder: Path, fresh: NodeIdentity) -> NodeIdentity:
    """Rebuild a damaged identity from the node's other files.

    The node name comes from the data folder; user, password and ports come from the last configuration or, where it is damaged
    too, from `fresh`. `PrivateNode` then sets that password.
    """
    names = [path.name for path in (folder / "mnesia").glob("swarmq-*@localhost")]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        settings = dict(re.findall(r"^([\w.]+) = (.+)\n", (folder / "rabbitmq.conf").read_text(), re.MULTILINE))
        amqp, management = settings.get("listeners.tcp.1", ""), settings.get("management.tcp.port", "")
        if {"default_user", "default_pass"} <= settings.keys():
            fresh = msgspec.structs.replace(fresh, user=settings["default_user"], password=settings["default_pass"])
        if amqp.rpartition(":")[2].isdecimal() and management.isdecimal():
            ports = {"amqp_port": int(amqp.rpartition(":")[2]), "management_port": int(management)}
            fresh = msgspec.structs.replace(fresh, **ports)
    return msgspec.structs.replace(fresh, node=names[0]) if names else fresh


def is_password_new(folder: Path, identity: NodeIdentity) -> bool:
    """Return whether the node has data whose user may have another password than `identity`: the last configuration does not
    contain it. Call before `write_node_files`."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if f"default_pass = {identity.password}\n" in (folder / "rabbitmq.conf").read_text():
            return False
    return has_data(folder)


def has_data(folder: Path) -> bool:
    return any((folder / "mnesia").glob("swarmq-*@localhost"))


def read_cookie(folder: Path) -> bytes:
    """Read the Erlang cookie, the secret that the nodes of a cluster share."""
    return (folder / "home" / COOKIE).read_bytes()


def render_tls_listener(settings: BrokerSettings, *, number: int = 0) -> str:
    """Return the rabbitmq.conf lines with which node `number` of a cluster listens for amqps from other machines; "" if
    `settings.tls_port` is 0. Raises BrokerError if a PEM file is missing."""
    if not settings.tls_port:
        return ""
    certificate, key = (Path(path or "").absolute() for path in (settings.certificate, settings.key))
    for path in (certificate, key):
        if not path.is_file():
            raise BrokerError(f"broker: the PEM file {path} does not exist")
    return TLS_CONFIG.format(port=settings.tls_port + number, certificate=certificate, key=key)


def read_identities(folder: Path) -> list[NodeIdentity]:
    """Return the identity of the private node in `folder`, or those of a cluster's nodes. Damaged files are left out."""
    found = []
    for path in [folder, *list_node_folders(folder)]:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode((path / "node.json").read_bytes(), type=NodeIdentity))
    return found


def list_node_folders(folder: Path) -> list[Path]:
    """Return the folders of a private cluster's nodes; an empty list for a single node."""
    return sorted(path for path in folder.glob("node[0-9]*") if path.is_dir())


def write_node_files(
    folder: Path, identity: NodeIdentity, *, config: str, advanced: str, cookie: bytes = b"", host: str = HOST
) -> None:
    """Write all files that the node reads when it starts, and empty the log of the last start. `cookie`: the Erlang
    cookie of the cluster that the node joins; b"" keeps the node's own. `host`: address at which the node listens."""
    home, logs = folder / "home", folder / "log"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs.mkdir(exist_ok=True)
    (logs / "start.log").write_bytes(b"")
    path = home / COOKIE
    if cookie or not path.exists() or not path.stat().st_size:
        write_atomically(path, cookie or secrets.token_hex(20).encode())
        path.chmod(0o400)
    settings = CONFIG.format(
        host=host,
        disk_limit=DISK_LIMIT_BYTES,
        ack_timeout_ms=ACK_TIMEOUT_MS,
        **msgspec.structs.asdict(identity),
    )
    write_atomically(folder / "rabbitmq.conf", (settings + config).encode())
    (folder / "advanced.config").write_text(advanced + "\n")
    (folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
    (folder / "env.conf").write_text("")


def build_environment(folder: Path, identity: NodeIdentity, erlang_bin: Path) -> dict[str, str]:
    """Return the environment for the broker, its name server and `rabbitmqctl`: this process's, with every RabbitMQ and Erlang
    variable replaced."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
    return kept | {
        "PATH": f"{erlang_bin}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "HOME": f"{folder}/home",
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_PORT": str(identity.epmd_port),
        "ERL_EPMD_ADDRESS": HOST,
        "ERL_CRASH_DUMP_SECONDS": "0",
        "RABBITMQ_NODENAME": identity.node,
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_NODE_PORT": str(identity.amqp_port),
        "RABBITMQ_DIST_PORT": str(identity.dist_port),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_BASE": str(folder),
        "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
        "RABBITMQ_LOG_BASE": f"{folder}/log",
        "RABBITMQ_LOGS": f"{folder}/log/node.log",
        "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
        "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
        "RABBITMQ_CONF_ENV_FILE": f"{folder}/env.conf",  # hides /etc/rabbitmq/rabbitmq-env.conf
        "RABBITMQ_PID_FILE": f"{folder}/pid",
        "RABBITMQ_GENERATED_CONFIG_DIR": f"{folder}/gen",
        "RABBITMQ_FEATURE_FLAGS_FILE": f"{folder}/feature_flags",
        "RUNNING_UNDER_SYSTEMD": "true",  # the script execs the virtual machine instead of waiting for it
    }


def extract_startup_error(output: str) -> str:
    """Return why a node ended: the first errors in its output, without the long report after them."""
    before = output.partition("BOOT FAILED")[0].splitlines()
    errors = [found[1].strip() for line in before if (found := re.search(r"\[error\] <\S+> (.*\S)", line))]
    lines = errors[:LAST_LINES] or [line.strip() for line in output.splitlines() if line.strip()][-LAST_LINES:]
    return " / ".join(lines)


def _distinct_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(reserve_port(HOST))
    return list(ports)
