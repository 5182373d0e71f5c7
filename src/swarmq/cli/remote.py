"""`--host URL`: the same command for a run of another host, where `swarmq host serve` takes it.

Most commands run there as they are, and print here. Those that concern a run as a whole, or need files of this machine, ask the daemon
itself: `up`, `stop`, `resume`, `runs` and `feed`. All others run here only, and say so.
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from swarmq.cli.common import print_table
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.remote.commands import ROLES, WRITES, CommandRequest, Output, Terminal
from swarmq.remote.records import RunView
from swarmq.runtime.files import write_atomically
from swarmq.runtime.wording import count_of

if TYPE_CHECKING:
    from swarmq.remote.client import HostClient

HOST_HELP = "Run the command on another host, for a run by its NAME: http(s)://HOST:PORT or ssh://HOST of its `swarmq host serve`."
TOKEN_HELP = "With --host: operator token of the host, which ssh does not need; $SWARMQ_TOKEN by default."  # noqa: S105


def add_host_options(group: click.Group) -> None:
    """Give the commands that can run on another host their options `--host` and `--token`."""
    for words, command in list_commands(group):
        assert command.callback
        if words in ROLES or words in INSTEAD:
            command.callback = _run_here_or_there(command.callback, words)
            command.params += [
                click.Option(["--host", "elsewhere"], metavar="URL", help=HOST_HELP),
                click.Option(["--token", "host_token"], help=TOKEN_HELP),
            ]
        elif own := next((param for param in command.params if "--host" in param.opts), None):
            own.callback = functools.partial(_refuse_host, words)
        else:
            refused = functools.partial(_refuse_host, words)
            command.params.append(click.Option(["--host"], hidden=True, expose_value=False, callback=refused))


def list_commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the words of every command below a group, and the command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from list_commands(command, (*words, name))
        else:
            yield (*words, name), command


def _refuse_host(words: tuple[str, ...], _: click.Context, option: click.Option, value: str | None) -> str | None:
    """Refuse the URL of a host. Some commands have a `--host` of their own, which is an address to listen on."""
    if value is None or not (option.hidden or "://" in value):
        return value
    name = " ".join(words)
    raise ConfigError(
        f"--host {value}: `swarmq {name}` works on this machine only; "
        + HERE_ONLY.get(name, "docs/how-to/laptop.md lists the commands for runs of another host")
    )


def find_command(group: click.Group, words: Sequence[str]) -> click.Command:
    """Return a command by its words. Raises KeyError if there is none."""
    command: click.Command = group
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def _run_here_or_there(here: Callable[..., Any], words: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(here)
    def run(*, elsewhere: str | None = None, host_token: str | None = None, **params: Any) -> Any:
        if elsewhere is None:
            if host_token is not None:
                raise ConfigError("--token goes with --host")
            return here(**params)
        from swarmq.remote.client import HostClient

        with HostClient(elsewhere, token=host_token) as host:
            if instead := INSTEAD.get(words):
                return instead(host, **params)
            source = click.get_current_context().get_parameter_source  # the host has an environment of its own
            given = {name: value for name, value in params.items() if source(name) != ParameterSource.ENVIRONMENT}
            return _run_there(host, words, given)

    return run


def _run_there(host: HostClient, words: tuple[str, ...], params: Mapping[str, Any]) -> None:
    """Run a command on the host, print its output, write its file, and exit with its status."""
    size = shutil.get_terminal_size()
    terminal = Terminal(columns=size.columns, lines=size.lines, is_interactive=sys.stdout.isatty())
    plain = msgspec.to_builtins(params, enc_hook=str)
    request = CommandRequest(command=words, params=plain, terminal=terminal)
    file = b""
    for output in _read_lines(host.stream("/v1/commands", body=request, timeout_s=None)):
        if output.status:
            sys.exit(output.status)
        file += output.file
        click.echo(output.text, nl=False, err=output.stream == "err", color=terminal.is_interactive or None)
    if file:
        _write(params[WRITES[words]], file)


def _write(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error


def _read_lines(pieces: Iterator[bytes]) -> Iterator[Output]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=Output)


def _up(host: HostClient, *, job: Path, sets: tuple[str, ...], nodes: int | None, show: bool, until_done: bool) -> None:
    if show or nodes or until_done:
        raise ConfigError(
            "--show, --nodes and --until-done cannot be combined with --host; runs of a host end after their last step"
        )
    from swarmq.remote.run import launch

    run = launch(SwarmJob.load(job, sets=sets), host=host)
    _say(run.status())
    click.echo(f"to follow it: swarmq watch {run.name} --host {host.address}")


def _stop(host: HostClient, *, run: Path, after: int | None, policy: str | None) -> None:
    from swarmq.remote.run import RemoteRun

    one = RemoteRun(host, str(run))
    if after is None and policy is None:
        _say(one.stop())
        return
    if after is None:
        raise ConfigError("--policy needs --after with --host, which otherwise stops the whole run")
    policies = [policy] if policy else list(one.status().policies)
    click.echo(one.set({f"policies.{name}.train.max_steps": after for name in policies}))


def _resume(host: HostClient, *, run: Path) -> None:
    from swarmq.remote.run import RemoteRun

    _say(RemoteRun(host, str(run)).resume())


def _runs(host: HostClient, *, folder: Path, as_json: bool) -> None:
    if folder != Path("runs"):
        raise ConfigError("FOLDER cannot be combined with --host: the host has one folder of runs")
    views = host.runs()
    if as_json:
        for view in views:
            click.echo(msgspec.json.encode(view))
        return
    now = time.time()
    rows = [
        (
            view.run,
            _describe(view),
            ", ".join(f"{name} {one.step}" for name, one in view.policies.items()),
            ", ".join("-" if one.reward is None else f"{one.reward:.3f}" for one in view.policies.values()),
            view.owner,
            f"{(now - view.launched_at) / 3600:.1f} h ago",
        )
        for view in views
    ]
    print_table(("run", "state", "step", "reward", "owner", "launched"), rows, when_empty="no runs")


def _feed(
    host: HostClient,
    *,
    run: Path,
    data: str,
    kind: str | None,
    repeats: int | None,
    curriculum: str | None,
    for_eval: bool,
    restart: bool,
    **more: Any,
) -> None:
    """Read the data set here, and send its tasks."""
    from swarmq.cli.tasks import plan_feed
    from swarmq.client.data.tasks import hash_source_name
    from swarmq.remote.run import RemoteRun

    if curriculum:
        raise ConfigError("--curriculum cannot be combined with --host: put the tasks of DATA in order instead")
    plan = plan_feed(data, kind, curriculum=None, for_eval=for_eval, restart=restart, **more)
    answer = RemoteRun(host, str(run)).feed(
        plan.read(),
        source=hash_source_name(plan.data),
        kind=plan.kind,
        repeats=repeats,
        epochs=more["epochs"],
        seed=more["seed"],
        restart=restart,
        for_eval=for_eval,
    )
    what = (
        f"stored {count_of(answer.fed, 'task')} for evaluation of {answer.kind}"
        if for_eval
        else f"published {count_of(answer.fed, 'slot')}"
    )
    click.echo(what)


def _say(view: RunView) -> None:
    click.echo(f"{view.run}: {_describe(view)}")


def _describe(view: RunView) -> str:
    more = [
        f"place {view.position}" if view.position else "",
        view.pace if view.pace != "running" else "",
        view.detail.partition("\n")[0],
    ]
    return ", ".join([view.state, *filter(None, more)])


JOIN = (
    "join the run with `swarmq client add NAME --http --run RUN --host URL`, which prints an invite for $SWARMQ_INVITE"
)
HERE_ONLY = {
    "worker": JOIN,
    "run": JOIN,
    "train": "start the run with `swarmq up JOB --host URL`, and " + JOIN,
    "dashboard": "each proxy of a run serves a dashboard; `swarmq token RUN --role read --host URL` prints a token for it",
}
"""Words of commands that other ones replace for a run of another host -> how."""
INSTEAD: dict[tuple[str, ...], Callable[..., None]] = {
    ("up",): _up,
    ("stop",): _stop,
    ("resume",): _resume,
    ("runs",): _runs,
    ("feed",): _feed,
}
"""Words of each command that asks the daemon itself -> function to call instead."""
