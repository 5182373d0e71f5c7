"""Access to a run: the host's invite, clients, operator tokens, and logins to RabbitMQ's management UI."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import get_args

import click

from swarmq import keys
from swarmq.cli.common import JOB, RUN, SETS, load_live_run, main, print_table, private_files
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.keys import Role
from swarmq.messages import NAME
from swarmq.observe.live_runs import find_management_api


@main.command("invite")
@JOB
@SETS
@click.option(
    "--amqp",
    envvar="SWARMQ_CLIENTS_AMQP_URL",
    metavar="URL",
    help="RabbitMQ address for clients, with user and password; the job's broker by default.",
)
@click.option(
    "--proxy", envvar="SWARMQ_CLIENTS_PROXY_URL", metavar="URL", help="Proxy address for clients; ends in /v1."
)
def invite_command(job: Path, sets: tuple[str, ...], amqp: str | None, proxy: str | None) -> None:
    """Open a run whose processes are started one by one.

    Creates the run folder and prints the host's invite, as `swarmq up` does by itself. Other commands (feed, status, set, client
    add, ...) then find the run by its folder.

    \b
    swarmq invite job.toml --set broker.url=amqp://user:password@host:5672/ --proxy http://host:8000/v1
    docker compose run --rm swarmq invite /etc/swarmq/job.toml
    """
    from swarmq.broker.admin.invitations import invite_host

    with private_files():
        made = invite_host(SwarmJob.load(job, sets=sets), amqp=amqp, proxy=proxy)
    click.echo(f"export SWARMQ_INVITE={made.encode()}")


@main.group()
def client() -> None:
    """Invite, list and remove clients. See docs/how-to/access.md.

    \b
    swarmq client add alice                         one line for alice to paste
    swarmq client list
    swarmq client remove alice
    """


RUN_OPTION = click.option(
    "--run", "run", type=click.Path(path_type=Path), help="Folder of the run; the only one in runs/ by default."
)
MANAGEMENT = click.option(
    "--management",
    envvar="SWARMQ_MANAGEMENT_URL",
    metavar="URL",
    help="RabbitMQ's management API, http(s)://user:password@host:15672; not needed for a private node.",
)


DAYS = click.option(
    "--days",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0, max=3650, min_open=True),
    help="Days until the token expires.",
)
REVOKE = click.option("--revoke", is_flag=True, help="Refuse all tokens of this name permanently.")


@client.command("add")
@click.argument("name")
@RUN_OPTION
@MANAGEMENT
@click.option("--amqp", metavar="URL", help="RabbitMQ address for the client, e.g. amqps://gpu.example.org:5671/")
@click.option("--proxy", metavar="URL", help="Proxy address for the client, e.g. https://gpu.example.org/v1")
@click.option(
    "--ca", type=click.Path(path_type=Path), help="PEM certificate to trust for both addresses, if self-signed."
)
@click.option("--http", is_flag=True, help="Use HTTP to the proxy only, for networks that block AMQP.")
@click.option("--max-connections", type=click.IntRange(min=2), help="Connections to RabbitMQ, over all machines.")
def client_add(
    name: str,
    run: Path | None,
    management: str | None,
    amqp: str | None,
    proxy: str | None,
    ca: Path | None,
    http: bool,
    max_connections: int | None,
) -> None:
    """Invite a client and print the line that it needs. The client may run episodes, and nothing else.

    \b
    swarmq client add alice
    swarmq client add alice --amqp amqps://gpu.example.org:5671/ --proxy https://gpu.example.org/v1 --ca ca.pem
    swarmq client add bob --http --proxy https://gpu.example.org/v1
    """
    from swarmq.broker.admin.invitations import ClientAddresses, add_client
    from swarmq.broker.admin.users import MAX_CONNECTIONS
    from swarmq.client.episodes.invite_lookup import find_invite

    job, folder = only_run(run)
    invite = add_client(
        folder,
        find_invite(folder.path),
        name,
        find_management_api(job, folder, management),
        ClientAddresses(amqp=amqp, proxy=proxy, ca=ca, http=http),
        max_connections=max_connections or MAX_CONNECTIONS,
    )
    click.echo(f"export SWARMQ_INVITE={invite.encode()}")


@client.command("list")
@RUN_OPTION
def client_list(run: Path | None) -> None:
    """List invited and removed clients.

    \b
    swarmq client list --run runs/demo
    """
    from swarmq.registries.clients import read_clients

    _, folder = only_run(run)
    rows = [
        (one.name, day(one.added_at), day(one.removed_at), "RabbitMQ" if one.broker_user else "HTTP")
        for one in read_clients(folder.clients).values()
        if not keys.is_operator_entry(one.name)
    ]
    print_table(("client", "added", "removed", "reaches"), rows, when_empty="nobody was invited")


@client.command("remove")
@click.argument("name")
@RUN_OPTION
@MANAGEMENT
def client_remove(name: str, run: Path | None, management: str | None) -> None:
    """Remove a client: close its connections and refuse its keys. Episodes that it has ended are still trained.

    \b
    swarmq client remove alice
    """
    from swarmq.broker.admin.invitations import remove_client

    job, folder = only_run(run)
    remove_client(folder, name, find_management_api(job, folder, management))
    click.echo(f"removed client {name}")


@main.command()
@RUN
@click.option(
    "--role",
    "roles",
    type=click.Choice(get_args(Role)),
    multiple=True,
    help="rollout: begin and end episodes; read: status, episodes, metrics, dashboard; operate: read, and pause, set, stop and the like; "
    "admin: everything, engines included.",
)
@click.option(
    "--name", show_default="operator", help="Name of the token's holder; recorded in episodes that the token begins."
)
@DAYS
@REVOKE
def token(run: Path, roles: tuple[Role, ...], name: str | None, days: float, *, revoke: bool) -> None:
    """Print a token for the control routes, or revoke tokens.

    Operators send the token to a proxy (docs/reference/control.md). All tokens of a name are revoked together.

    \b
    swarmq token runs/demo --role rollout --name java-agents
    curl -H "Authorization: Bearer $(swarmq token runs/demo --role read)" $PROXY/v1/control/status
    swarmq token runs/demo --revoke --name java-agents
    """
    job, folder = load_live_run(run), RunFolder(run)
    print_token(folder.root_secret, folder.clients, run=job.run, roles=roles, name=name, days=days, revoke=revoke)


def print_token(
    root_secret: Path, registry: Path, *, run: str, roles: tuple[Role, ...], name: str | None, days: float, revoke: bool
) -> None:
    """Print an operator token, or revoke all tokens of a name. `run`: whose control routes it opens. `registry`: lists revoked
    names."""
    from swarmq.registries.clients import ClientRegistry, read_clients

    if revoke == bool(roles):
        raise ConfigError("--role: name at least one role, or revoke tokens with --revoke and no role")
    if revoke and name is None:
        raise ConfigError("--revoke needs --name NAME: all tokens of that name are refused permanently")
    name = "operator" if name is None else name
    member = keys.operator_entry(name)
    if revoke:
        with ClientRegistry.open(registry) as members:
            members.remove(member, now=time.time())
        click.echo(f"revoked: all tokens of {name} are refused")
        return
    _check_name(name)
    if math.isnan(days):
        raise ConfigError("--days: nan is not a number of days")
    if member in read_clients(registry):
        raise ConfigError(f"--name: the tokens of {name!r} were revoked permanently: choose another name")
    made = keys.Operator(run=run, name=name, roles=roles, expires_at=time.time() + days * 86_400)
    click.echo(keys.mint_operator(keys.derive_operator_secret(keys.load_root(root_secret), name), made))


@main.command()
@RUN
@click.option("--name", default="viewer", show_default=True, help="Name of the login's holder.")
@click.option("--remove", "gone", is_flag=True, help="Delete the login of this name.")
@MANAGEMENT
def viewer(run: Path, name: str, management: str | None, *, gone: bool) -> None:
    """Print a login for RabbitMQ's management UI.

    The login can see the queues' depths, but no messages.

    \b
    swarmq viewer runs/demo
    swarmq viewer runs/demo --name carol
    swarmq viewer runs/demo --name carol --remove
    """
    import secrets

    job = load_live_run(run)
    api = find_management_api(job, RunFolder(run), management)
    user = f"{job.run}.viewer.{name}"
    if gone:
        api.remove(user)
        click.echo(f"removed login {user}")
        return
    _check_name(name)
    api.add_viewer(user, password := secrets.token_urlsafe(18))
    click.echo(f"{' or '.join(api.urls)}  user {user}  password {password}")


def only_run(run: Path | None) -> tuple[SwarmJob, RunFolder]:
    """Return the run named by --run, or the only one in runs/. Raises ConfigError if the choice is ambiguous."""
    if run is None:
        found = [path.parent for path in Path("runs").glob("*/resolved.toml")]
        if len(found) != 1:
            names = ", ".join(sorted(path.name for path in found))
            raise ConfigError(
                f"--run: say which run; in {Path('runs').absolute()} there {f'are {names}' if names else 'is none'}"
            )
        [run] = found
    return load_live_run(run), RunFolder(run)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: 1 to 40 lower-case letters, digits or dashes")


def day(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else ""
