"""`swarmq host`: invites for hosts that run engines or proxies of a run, and the daemon of a host that takes jobs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from swarmq.cli.access import DAYS, MANAGEMENT, REVOKE, RUN_OPTION, day, only_run, print_token
from swarmq.cli.common import HOST, main, print_table, private_files, require_extras
from swarmq.errors import ConfigError
from swarmq.hosts.addresses import ListenAddress, TlsFiles
from swarmq.keys import HOST_INVITE_PREFIX, HostInvite, Role
from swarmq.observe.live_runs import find_management_api

URL = click.option(
    "--url",
    metavar="URL",
    help="With an invite: address to announce, if it differs from --host (behind NAT or a reverse proxy).",
)
CERTIFICATE = click.option(
    "--certificate", type=click.Path(path_type=Path), help="With an invite: PEM certificate, to serve https."
)
REACH = click.option("--amqp", metavar="URL", help="RabbitMQ address for the host, e.g. amqps://gpu.example.org:5671/")
CA = click.option(
    "--ca", type=click.Path(path_type=Path), help="PEM certificate to trust for this address, if self-signed."
)
KEY = click.option("--key", type=click.Path(path_type=Path), help="With an invite: PEM key of the certificate.")


def read_host_invite(text: str, *, command: str = "swarmq host add") -> HostInvite:
    """Return the invite in `text`, or in the file that `text` names. `command`: prints such invites. Raises ConfigError if `text` is neither, KeyRefusedError if the
    invite is damaged."""
    if not text.startswith(f"{HOST_INVITE_PREFIX}."):
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--join {text}: neither an invite nor a file with one ({error}); `{command}` prints one"
            ) from error
    return HostInvite.decode(text)


def make_place(
    host: str | None, port: int | None, url: str | None, certificate: Path | None, key: Path | None
) -> ListenAddress:
    """Return where an engine or proxy listens on this host. Raises ConfigError for options that contradict each other, and for
    missing files."""
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key belong together: give both PEM files, or neither")
    for path in (certificate, key):
        if path and not path.is_file():
            raise ConfigError(f"{path}: no such file")
    tls = TlsFiles(certificate=str(certificate.resolve()), key=str(key.resolve())) if certificate and key else None
    return ListenAddress(host=host, port=port or 0, url=url, tls=tls)


@main.group()
def host() -> None:
    """Take jobs on this host, or invite other hosts to a run.

    An invite holds the run's root secret: anyone who has it can do everything that the run folder allows. Protect it like the folder.

    \b
    swarmq host serve                               take jobs from laptops (docs/how-to/laptop.md)
    swarmq host token --role operate --name ann     a token to send them with
    swarmq host add gpu2 > gpu2.invite              an invite for engines (docs/how-to/several-hosts.md)
    swarmq host list
    swarmq host remove gpu2
    """


@host.command("add")
@click.argument("name")
@RUN_OPTION
@MANAGEMENT
@REACH
@CA
@click.option(
    "--hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(min=0, max=87_600, min_open=True),
    help="Hours for which engines and proxies may join with the invite; those that have joined stay.",
)
def host_add(
    name: str, run: Path | None, management: str | None, amqp: str | None, ca: Path | None, hours: float
) -> None:
    """Print an invite for a host that runs engines or proxies. It is as powerful as the run folder.

    \b
    swarmq host add gpu2 > gpu2.invite
    swarmq host add gpu2 --amqp amqps://gpu.example.org:5671/ --ca ca.pem --hours 1 > gpu2.invite
    """
    from swarmq.broker.admin.hosts import add_host
    from swarmq.broker.admin.invitations import ClientAddresses

    job, folder = only_run(run)
    reach = ClientAddresses(amqp=amqp, ca=ca)
    click.echo(add_host(job, folder, name, find_management_api(job, folder, management), reach, hours=hours).encode())


@host.command("list")
@RUN_OPTION
def host_list(run: Path | None) -> None:
    """List hosts with the engines and proxies that joined from them.

    Removed hosts are listed, too.

    \b
    swarmq host list --run runs/demo
    """
    from swarmq.registries.hosts import read_hosts

    _, folder = only_run(run)
    rows = []
    for one in read_hosts(folder.hosts).values():
        expired = " (expired)" if one.expires_at < time.time() else ""
        urls = "\n".join([*one.engines, *one.proxies])
        rows.append((one.name, day(one.added_at), day(one.expires_at) + expired, day(one.removed_at), urls))
    headings = ("host", "added", "may join until", "removed", "engines and proxies")
    print_table(headings, rows, when_empty="no host was invited")


@host.command("remove")
@click.argument("name")
@RUN_OPTION
@MANAGEMENT
def host_remove(name: str, run: Path | None, management: str | None) -> None:
    """Remove a host, its engines, its proxies and its RabbitMQ user.

    The host still knows the run's root secret. To make that worthless, remove `secret` from the run folder and start the run again.

    \b
    swarmq host remove gpu2
    """
    from swarmq.broker.admin.hosts import remove_host

    job, folder = only_run(run)
    gone = remove_host(job, folder, name, find_management_api(job, folder, management))
    urls = [*gone.engines, *gone.proxies]
    click.echo(f"removed host {name}" + (f" with {', '.join(urls)}" if urls else ""))


FOLDER = click.argument("folder", default="runs", type=click.Path(path_type=Path))


@host.command("serve")
@FOLDER
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address or name of this host to listen on. Proxies of its runs listen there, too, unless their job names another proxy.host.",
)
@click.option(
    "--port", default=7000, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks a free one."
)
@click.option("--certificate", type=click.Path(path_type=Path), help="PEM certificate, to serve https.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM key of the certificate.")
@click.option(
    "--most-running",
    type=click.IntRange(min=1),
    help="Runs at the same time; by default one for each GPU, at least one.",
)
@click.option(
    "--most-queued", default=100, show_default=True, type=click.IntRange(min=0), help="Runs that may wait for room."
)
def host_serve(
    folder: Path,
    host: str,
    port: int,
    certificate: Path | None,
    key: Path | None,
    most_running: int | None,
    most_queued: int,
) -> None:
    """Take jobs over HTTP and run them on this host.

    FOLDER holds the runs; runs by default. A run outlives this process: when it is stopped, killed or updated, start it again, and it
    finds its runs. Senders of jobs need a token (`swarmq host token`) or the
    right to open FOLDER/.host/socket, as over ssh.

    \b
    swarmq host serve
    swarmq host serve /data/runs --host gpu-box --certificate cert.pem --key key.pem
    """
    require_extras(*HOST, "dashboard")
    from swarmq.host_daemon.main import serve

    tls = make_place(host, port, None, certificate, key).tls
    with private_files():
        serve(folder, host=host, port=port, tls=tls, most_running=most_running, most_queued=most_queued)


@host.command("token")
@FOLDER
@click.option(
    "--role",
    "roles",
    type=click.Choice(["read", "operate", "admin"]),
    multiple=True,
    help="read: see runs, logs and files; operate: also launch, change, stop and resume; admin: also delete, and jobs with programs of "
    "their own.",
)
@click.option("--name", show_default="operator", help="Name of the token's holder, shown as owner of runs.")
@DAYS
@REVOKE
def host_token(folder: Path, roles: tuple[Role, ...], name: str | None, days: float, *, revoke: bool) -> None:
    """Print a token for this host's daemon, or revoke tokens. FOLDER as for `swarmq host serve`.

    \b
    swarmq host token --role operate --name ann
    swarmq host token --revoke --name ann
    """
    from swarmq.host_daemon.access import AUDIENCE
    from swarmq.host_daemon.ledger import HostFolder

    place = HostFolder(folder)
    if not place.root_secret.exists():
        raise ConfigError(f"{folder}: no daemon has served this folder yet: `swarmq host serve {folder}`")
    print_token(place.root_secret, place.revoked, run=AUDIENCE, roles=roles, name=name, days=days, revoke=revoke)
