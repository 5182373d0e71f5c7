"""`swarmq study`: a study from its file to its report."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmq.cli.access import MANAGEMENT
from swarmq.cli.common import main, print_table, private_files, run_until_signalled
from swarmq.cli.hosts import CA, REACH, read_host_invite
from swarmq.errors import BrokerError, ConfigError, FilesDifferError, LearnerError, MissingExtraError, StudyError
from swarmq.observe.live_runs import find_management_api_of
from swarmq.runtime.amqp_urls import redact_url, split_nodes
from swarmq.runtime.terminal import visible
from swarmq.runtime.wording import count_of

if TYPE_CHECKING:
    from swarmq.keys import HostInvite
    from swarmq.studies.ledger import StudyFolder
    from swarmq.studies.records import Entry, PlannerDecided, StudyStopped
    from swarmq.studies.state import StudyState
    from swarmq.studies.study import Study

STUDY = click.argument("study_file", metavar="[STUDY]", type=click.Path(path_type=Path), default="study.toml")
NAMED_STUDY = click.argument("study_file", metavar="STUDY", type=click.Path(path_type=Path))
"""The study of commands that take a second argument."""
AMQP = click.option(
    "--amqp", metavar="URL", envvar="SWARMQ_AMQP_URL", help="RabbitMQ of the study; the study's own by default."
)
STOP_WORKER_S = 60.0
LOG_LINES = 12
"""Number of last lines of a parked trial's output that `status` shows; the ledger has more."""


def _check_name(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    from swarmq.studies.study import check_name

    try:
        check_name(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return name


NEW_NAME = click.argument("name", callback=_check_name)


@main.group("study")
def study_group() -> None:
    """Answer a question by many trials: plan, run, report.

    \b
    swarmq study new loss               a study file to start from
    swarmq study check study.toml       what it would run and cost
    swarmq study run study.toml         run its trials here, also after a crash
    swarmq study invite study.toml gpu2 > gpu2.invite   an invite for another host
    swarmq study worker --join gpu2.invite              run trials there
    """


@study_group.command("new")
@NEW_NAME
def new(name: str) -> None:
    """Write a commented study file.

    \b
    swarmq study new loss
    """
    path = Path("study.toml")
    if path.exists():
        raise ConfigError(f"{path}: already exists, so nothing was written; rename it, or go to another folder")
    path.write_text(files("swarmq").joinpath("starter", "study.toml").read_text().replace("NAME", name))
    click.echo(f"{path} written. Edit it, then: swarmq study check {path}")


@study_group.command("check")
@STUDY
def check(study_file: Path) -> None:
    """Check a study and say what it would run and cost.

    \b
    swarmq study check study.toml
    """
    from swarmq.studies.design import choose_arms
    from swarmq.studies.identity import TrialMaker
    from swarmq.studies.records import Spending
    from swarmq.studies.state import largest_cost, list_caps
    from swarmq.studies.study import KILL_S

    study, folder = _load(study_file)
    _check_functions(study, folder)
    most, seeds = largest_cost(study), len(study.seeds)
    arms = study.design.num_arms if study.design.kind == "optuna" else len(choose_arms(study))
    count = arms * seeds + study.noise_trials
    click.echo(f"{study.name}: {study.question}")
    first = ", before any arm is promoted" if study.design.rungs else ""
    if study.planner.kind == "endpoint":
        first += f", before the planner adds at most {count_of(study.planner.max_arms, 'arm')}"
    click.echo(
        f"{count_of(arms, 'arm')} with {count_of(seeds, 'seed')} each and {count_of(study.noise_trials, 'A/A trial')}: "
        f"{count_of(count, 'trial')}{first}"
    )
    click.echo(
        f"each may take {study.trial.max_seconds:g} s, and {KILL_S:g} s to be killed: all of them at most "
        f"{count * most.gpu_seconds:,.0f} GPU seconds"
    )
    with contextlib.suppress(ModuleNotFoundError):  # the extra `studies`
        from swarmq.studies.analysis import announce_power

        click.echo(announce_power(study))
    titles = {"gpu_seconds": "GPU seconds", "trials": "starts"}
    caps = [(titles.get(name, name), need, cap) for name, need, _, cap in list_caps(study, Spending(), 0)]
    if enough := [(math.floor(cap / need + 1e-9), name, cap) for name, need, cap in caps if need]:
        number, name, cap = min(enough)
        spare = f", {number - count} more than that" if number > count else ""
        click.echo(
            f"the budget of {cap:,.10g} {name} is enough for {count_of(number, 'such trial')}{spare}. Each running trial whose worker and leader die "
            "together, as on one host, counts as one of them, however short it was"
        )
    if outside := TrialMaker(study, folder.root).list_outside():
        click.echo(f"outside the study's folder, and not sent to hosts that join by an invite: {', '.join(outside)}")


@study_group.command("run")
@STUDY
@AMQP
@click.option("--workers", default=1, show_default=True, type=click.IntRange(min=0), help="Workers on this host.")
@click.option(
    "--amend", metavar="REASON", default="", help="Accept a changed study file, code or tasks, and record why."
)
@click.option("--resume", metavar="REASON", default="", help="Go on with a study that was stopped, and record why.")
@click.option("--tls-port", type=click.IntRange(1, 65535), help="Open the study's own RabbitMQ to other hosts (amqps).")
@click.option("--certificate", type=click.Path(path_type=Path), help="With --tls-port: PEM certificate.")
@click.option("--key", type=click.Path(path_type=Path), help="With --tls-port: PEM key of the certificate.")
def run(
    study_file: Path,
    amqp: str | None,
    workers: int,
    amend: str,
    resume: str,
    tls_port: int | None,
    certificate: Path | None,
    key: Path | None,
) -> None:
    """Run a study, or continue it where it was interrupted.

    \b
    swarmq study run study.toml
    swarmq study run study.toml --workers 4
    swarmq study run study.toml --amend "arm C added, because A and B do not differ"
    swarmq study run study.toml --tls-port 5671 --certificate cert.pem --key key.pem
    """
    listener = _render_listener(tls_port, certificate, key)
    if listener and amqp:
        raise ConfigError(
            "--tls-port opens the study's own RabbitMQ, and --amqp (or SWARMQ_AMQP_URL) names another one: give one of them"
        )
    study, folder = _load(study_file)
    _check_functions(study, folder)
    lanes = _split_gpus(study, workers) if workers else []
    if len(lanes) < workers:
        raise ConfigError(
            f"--workers: {count_of(workers, 'worker needs', 'workers need')} {count_of(workers * study.trial.gpus, 'GPU')}, {study.trial.gpus} each (trial.gpus), and this host has "
            f"enough for {len(lanes)}; start fewer"
        )
    with private_files():
        run_until_signalled(_lead(study, folder, study_file, amqp, listener, lanes, amend, resume))


def _render_listener(tls_port: int | None, certificate: Path | None, key: Path | None) -> str:
    """Return the lines of rabbitmq.conf that open an amqps port. Raises ConfigError or BrokerError."""
    from swarmq.broker.node.files import render_tls_listener
    from swarmq.config import BrokerSettings

    if len({bool(tls_port), bool(certificate), bool(key)}) > 1:
        raise ConfigError("--tls-port, --certificate and --key belong together: give all three, or none")
    if not tls_port:
        return ""
    return render_tls_listener(BrokerSettings(tls_port=tls_port, certificate=str(certificate), key=str(key)))


@study_group.command("invite")
@NAMED_STUDY
@click.argument("name")
@REACH
@CA
@MANAGEMENT
@click.option(
    "--hours",
    default=24.0 * 7,
    show_default=True,
    type=click.FloatRange(min=0, max=87_600, min_open=True),
    help="Hours for which workers may join; those that have joined stay.",
)
@click.option("--remove", is_flag=True, help="Delete the host's RabbitMQ user; its trials go to other workers.")
def invite(
    study_file: Path,
    name: str,
    amqp: str | None,
    ca: Path | None,
    management: str | None,
    hours: float,
    *,
    remove: bool,
) -> None:
    """Print an invite for a host that has no copy of the study.

    \b
    swarmq study invite study.toml gpu2 --amqp amqps://leader:5671/ --ca cert.pem > gpu2.invite
    swarmq study invite study.toml gpu2 --remove
    """
    from swarmq.broker.admin.hosts import add_user_of_host, remove_user_of_host
    from swarmq.broker.admin.invitations import ClientAddresses
    from swarmq.hosts.addresses import is_loopback
    from swarmq.studies.identity import TrialMaker
    from swarmq.studies.reports import run_of

    study, folder = _load(study_file, is_checked=False)
    _read_opened(folder)
    url = _read_endpoint(folder)
    api = find_management_api_of(url, folder.broker, management)
    if remove:
        remove_user_of_host(folder.hosts, name, api)
        click.echo(f"removed host {name}")
        return
    away = [name for name in TrialMaker(study, folder.root).list_outside() if not Path(name).is_absolute()]
    if away:
        raise ConfigError(
            f"{', '.join(away)}: outside {folder.root}, so {name} does not get it; move it into that folder, or name it by a path "
            "that is the same on all hosts"
        )
    if not amqp and is_loopback(split_nodes(url)[0]):
        raise ConfigError(
            "--amqp: missing, and the study's RabbitMQ listens on this host alone; start `swarmq study run` with --tls-port, "
            "--certificate and --key, and give --amqp amqps://THIS-HOST:PORT/ --ca CERTIFICATE here"
        )
    reach = ClientAddresses(amqp=amqp, ca=ca)
    with private_files():
        made = add_user_of_host(run_of(study.name), folder.hosts, name, api, reach, url, hours=hours, emits=False)
    click.echo(made.encode())


@study_group.command("worker")
@STUDY
@AMQP
@click.option(
    "--join",
    metavar="INVITE",
    help="Run them with an invite of `swarmq study invite`, or a file that holds it, instead of the study's folder.",
)
@click.option("--parallel", type=click.IntRange(min=1), help="Trials at once; by default as many as the GPUs allow.")
def worker(study_file: Path, amqp: str | None, join: str | None, parallel: int | None) -> None:
    """Run trials on this host, in a copy of the study or with an invite.

    \b
    swarmq study worker --join gpu2.invite
    swarmq study worker study.toml --amqp amqps://user:password@leader:5671
    """
    with private_files():
        if join:
            run_until_signalled(_join(read_host_invite(join, command="swarmq study invite"), parallel))
        else:
            study, folder = _load(study_file)
            url = amqp or _read_endpoint(folder)
            run_until_signalled(_work(study, folder, url, parallel))


@study_group.command("status")
@STUDY
def status(study_file: Path) -> None:
    """Show trials, costs and failures of a study.

    \b
    swarmq study status study.toml
    """
    from swarmq.studies.state import StudyState

    _, folder = _load(study_file, is_checked=False)
    state = StudyState(entries := _read_opened(folder))
    study = state.study  # as it was opened or amended, whatever the file says now
    assert study is not None
    metric = study.metric.name
    newest = {one.trial.id for one in state.newest}
    rungs = ("rung",) if study.design.rungs else ()
    print_table(
        ("arm", "seed", *rungs, "state", metric, "GPU s", "failures"),
        (
            (
                one.trial.arm + (" (A/A)" if one.trial.purpose == "noise" else ""),
                str(one.trial.seed),
                *(str(one.trial.rung) for _ in rungs),
                one.status + ("" if one.trial.id in newest else ", before an amendment"),
                f"{one.result.metrics[metric]:g}" if one.result else "",
                f"{one.result.cost.gpu_seconds:.1f}" if one.result else "",
                str(one.num_failures or ""),
            )
            for one in state.trials.values()
        ),
        when_empty="no trial is planned",
    )
    budget = study.budget
    spent = [
        f"{name} {used:,.10g}{'' if cap is None else f' of {cap:,.10g}'}"
        for name, used, cap in (
            ("GPU seconds", round(state.spent.gpu_seconds, 1), budget.gpu_seconds),
            ("calls", state.spent.calls, budget.calls),
            ("money", state.spent.money, budget.money),
            ("seconds with a leader", round(entries[-1].elapsed_s, 1), budget.wall_clock_s),
            ("starts", state.num_starts, budget.trials),
        )
        if used or cap is not None
    ]
    click.echo(f"spent: {', '.join(spent)}")
    for one in state.trials.values():
        if one.parked:
            log = "\n".join(one.parked.log.strip().splitlines()[-LOG_LINES:])
            click.echo(visible(f"{one.trial} is parked: {one.parked.reason}\n{log}"))
    click.echo(f"stopped: {state.stopped.reason}" if state.stopped else "not stopped")


@study_group.command("stop")
@STUDY
@AMQP
@click.option("--reason", required=True, help="Why, for the ledger and the report.")
def stop(study_file: Path, amqp: str | None, reason: str) -> None:
    """Start no further trial of a study; running ones end.

    \b
    swarmq study stop study.toml --reason "the answer is clear"
    """
    from swarmq.studies.records import StudyStopped
    from swarmq.studies.state import StudyState

    study, folder = _load(study_file, is_checked=False)
    if stopped := StudyState(_read_opened(folder)).stopped:
        click.echo(f"already stopped: {stopped.reason}")
    elif asyncio.run(_record(study, folder, amqp, StudyStopped(kind="asked", reason=reason))):
        click.echo("the leader starts no further trial, and ends when the running ones have ended")


@study_group.command("approve")
@NAMED_STUDY
@click.argument("arm")
@AMQP
@click.option("--refuse", is_flag=True, help="Refuse the arm instead.")
@click.option("--by", required=True, help="Your name, for the ledger.")
@click.option("--reason", default="", help="Why, for the ledger and the report.")
def approve(study_file: Path, arm: str, amqp: str | None, refuse: bool, by: str, reason: str) -> None:
    """Approve or refuse an arm that the planner has proposed.

    \b
    swarmq study approve study.toml higher-clip --by ada
    """
    from swarmq.studies.records import PlannerDecided
    from swarmq.studies.state import StudyState

    study, folder = _load(study_file, is_checked=False)
    waiting = StudyState(_read_opened(folder)).waiting
    if arm not in waiting:
        raise StudyError(
            f"{arm!r} is no arm that waits for approval in {folder.ledger}; waiting: {', '.join(waiting) or 'none'}"
        )
    if by == "rule":
        raise ConfigError("--by: 'rule' stands for automatic decisions in the ledger; give the name of a person")
    decided = PlannerDecided(arm=arm, decision="refused" if refuse else "accepted", reason=reason, by=by)
    asyncio.run(_record(study, folder, amqp, decided))


@study_group.command("report")
@STUDY
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder; by default studies/NAME/report.")
def report(study_file: Path, out: Path | None) -> None:
    """Write the report of a study as Markdown, HTML and PDF.

    \b
    swarmq study report study.toml
    """
    try:
        from swarmq.studies.report import write_report
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a report needs {error.name}: pip install 'swarmq[studies]'") from error

    _, folder = _load(study_file, is_checked=False)
    for path in write_report(_read_opened(folder), out or folder.path / "report", study_file=study_file.name):
        click.echo(path)


@study_group.command("fork")
@NAMED_STUDY
@NEW_NAME
def fork(study_file: Path, name: str) -> None:
    """Write the file of a new study that begins as a copy of this one.

    The file has another name and states this study as its parent.

    \b
    swarmq study fork study.toml loss-longer
    """
    import tomli_w
    from msgspec.structs import replace

    from swarmq.studies.ledger import hash_ledger

    study, folder = _load(study_file, is_checked=False)
    _read_opened(folder)
    if name == study.name:
        raise ConfigError(f"{name!r} is the name of the study itself; choose another name for the new one")
    target = study_file.with_name(f"{name}.toml")
    if target.exists():
        raise ConfigError(f"{target}: already exists, so nothing was written; choose another name")
    fork = replace(study, name=name, parent=f"{study.name}@{hash_ledger(folder.ledger)}")
    target.write_text(tomli_w.dumps(_to_table(fork)))
    click.echo(f"{target} written. Edit it, then: swarmq study check {target}")


def _to_table(section: Any) -> dict[str, Any]:
    """Return a section as a table of TOML, without the settings that have their defaults."""
    from msgspec import NODEFAULT, Struct
    from msgspec.structs import fields

    table = {}
    for field in fields(section):
        value = getattr(section, field.name)
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        if isinstance(value, dict):
            value = {name: _to_table(one) if isinstance(one, Struct) else one for name, one in value.items()}
        if value != default:
            table[field.name] = _to_table(value) if isinstance(value, Struct) else value
    return table


def _load(study_file: Path, *, is_checked: bool = True) -> tuple[Study, StudyFolder]:
    from swarmq.studies.identity import TrialMaker
    from swarmq.studies.ledger import StudyFolder
    from swarmq.studies.study import load_study

    study = load_study(study_file)
    folder = StudyFolder(study_file, study.name)
    if is_checked:
        os.chdir(folder.root)  # jobs and tasks are named from there
        TrialMaker(study, folder.root).check()
    return study, folder


def _check_functions(study: Study, folder: StudyFolder) -> None:
    """Raise TaskError for a function or agent that cannot be imported from the study's folder, and name modules there that it imports
    although no hash of a trial contains them."""
    from swarmq.client.data.targets import load_object
    from swarmq.environments import is_environment
    from swarmq.studies.identity import TrialMaker

    before = {*sys.modules}
    agents = (study.trial.agent, *(arm.agent for arm in study.arms.values()))
    for target in {study.trial.function, *(agent for agent in agents if not is_environment(agent))} - {""}:
        load_object(target)
    loaded = [getattr(module, "__file__", None) for name, module in [*sys.modules.items()] if name not in before]
    if found := TrialMaker(study, folder.root).find_unlisted(Path(file) for file in loaded if file):
        _say(
            f"not in trial.code, so an edit makes no other trial, and hosts that join by an invite lack it: {', '.join(found)}"
        )


def _read_opened(folder: StudyFolder) -> list[Entry]:
    """Return the ledger's entries. Raises StudyError if the study has never run."""
    from swarmq.studies.ledger import read_ledger

    if entries := read_ledger(folder.ledger):
        return entries
    raise StudyError(f"{folder.ledger}: missing or empty, so the study has never run; start it with `swarmq study run`")


async def _lead(
    study: Study,
    folder: StudyFolder,
    study_file: Path,
    amqp: str | None,
    listener: str,
    lanes: Sequence[dict[str, str]],
    amend: str,
    resume: str,
) -> None:
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.runtime.files import write_atomically
    from swarmq.studies.leader import open_leader

    with open_leader(study, folder, report=_say) as leader:
        await leader.open(amend=amend, resume=resume)
        if leader.is_over and leader.state.stopped:
            _say(f"stopped: {leader.state.stopped.reason}; {_name_next(leader.state, study_file)}")
            return
        async with (
            _open_node(folder, amqp, listener) as url,
            AmqpBroker.open(url, name=f"study {study.name}") as broker,
        ):
            write_atomically(folder.endpoint, url.encode())
            async with _keep_workers(folder, study_file.name, lanes):
                await leader.run(broker)
        _say(_name_next(leader.state, study_file))


def _name_next(state: StudyState, study_file: Path) -> str:
    """Say what can be done with a study that has stopped."""
    kind = state.stopped.kind if state.stopped else ""
    if kind == "budget":
        return f"to go on, raise its budget in {study_file} and give --amend REASON"
    if kind == "asked":
        return "to go on, give --resume REASON"
    if kind == "complete" and any(one.parked for one in state.newest):
        return "to start parked trials again, give --resume REASON"
    return f"for its report: swarmq study report {study_file}"


async def _work(study: Study, folder: StudyFolder, url: str, parallel: int | None) -> None:
    """Run trials in the study's folder, or in a copy of it."""
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.studies.worker import TrialWorker

    environments = _split_gpus(study, parallel)
    async with AmqpBroker.open(url, name=f"study {study.name}", deadline_s=None) as broker:
        where = redact_url(url)
        await TrialWorker(broker, study, folder, environments=environments, where=where, report=_say).run()


async def _join(invite: HostInvite, parallel: int | None) -> None:
    """Run trials with nothing but an invite: the study and its files come from the leader. Once they are amended, this process starts
    itself again, because it may have imported some of them."""
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.studies.reports import parse_run
    from swarmq.studies.shared_files import fetch
    from swarmq.studies.worker import TrialWorker, no_leader

    invite.check_current(time.time())
    if not (name := parse_run(invite.run)):
        raise ConfigError(
            f"--join: this is an invite to the run {invite.run!r}, not to a study; `swarmq study invite` prints one"
        )
    here, where, is_amended = Path.cwd() / invite.run, redact_url(invite.amqp_url), False

    def report_silence(seconds: float) -> None:
        _say(no_leader(name, where, seconds))

    async with AmqpBroker.open(invite.broker_url, name=f"study {name}", user=invite.user, deadline_s=None) as broker:
        study, folder = await fetch(broker, name, here, report_silence=report_silence)
        os.chdir(folder.root)  # jobs and tasks are named from there
        lanes = _split_gpus(study, parallel)
        worker = TrialWorker(broker, study, folder, environments=lanes, host=invite.host, where=where, report=_say)
        try:
            await worker.run()
        except* FilesDifferError:
            newer, there = await fetch(broker, name, here, report_silence=report_silence)
            if (newer, there.root) == (study, folder.root):
                raise
            is_amended = True
    if is_amended:
        _say("the study was amended; starting again with its files")
        os.chdir(here.parent)
        os.execv(sys.executable, [sys.executable, "-m", "swarmq", *sys.argv[1:]])  # noqa: S606 - there is nothing to quote


def _split_gpus(study: Study, parallel: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each lane, which name its GPUs. Raises StudyError if a trial needs more than there are."""
    from swarmq.engine.server.gpus import find_visible_gpus
    from swarmq.engine.server.launch import build_gpu_environment

    each, there = study.trial.gpus, len(find_visible_gpus())
    if not there:
        return [{}] * (parallel or 1)
    if there < each:
        raise StudyError(f"trial.gpus: a trial needs {count_of(each, 'GPU')}, and this host has {there}")
    return [build_gpu_environment(range(n, n + each)) for n in range(0, there - each + 1, each)][:parallel]


async def _record(study: Study, folder: StudyFolder, amqp: str | None, fact: StudyStopped | PlannerDecided) -> bool:
    """Record what a person has decided; return whether it was sent to a leader that runs, because only that one may write."""
    from swarmq.broker.amqp import AmqpBroker
    from swarmq.studies.leader import open_leader
    from swarmq.studies.records import StudyStopped
    from swarmq.studies.reports import inbox, pack

    try:
        with open_leader(study, folder, report=_say) as leader:
            await (leader.stop(fact.reason) if isinstance(fact, StudyStopped) else leader.decide(fact))
    except LearnerError:
        async with AmqpBroker.open(amqp or _read_endpoint(folder), name=f"study {study.name}") as broker:
            await broker.publish(inbox(study.name), pack(study.name, fact), deadline_s=30.0)
        return True
    return False


def _read_endpoint(folder: StudyFolder) -> str:
    try:
        return folder.endpoint.read_text()
    except OSError as error:
        raise BrokerError(
            f"{folder.endpoint}: no leader has run on this host; start `swarmq study run`, or give --amqp URL"
        ) from error


@contextlib.asynccontextmanager
async def _open_node(folder: StudyFolder, amqp: str | None, listener: str) -> AsyncIterator[str]:
    """Yield the URL of the study's RabbitMQ; start its own unless one is given, and restart it when it dies. `listener`: further lines
    of its configuration."""
    if amqp:
        yield amqp
        return
    from swarmq.broker.node.process import PrivateNode
    from swarmq.up.supervision import keep_broker

    async with PrivateNode(folder.broker, config=listener) as node, asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_broker(node, _say))
        yield node.amqp_url
        keeping.cancel()


@contextlib.asynccontextmanager
async def _keep_workers(folder: StudyFolder, study_file: str, lanes: Sequence[dict[str, str]]) -> AsyncIterator[None]:
    """Run a worker on this host for each lane, and restart those that die."""
    from swarmq.up.supervision import Daemon

    command = [sys.executable, "-m", "swarmq", "study", "worker", str(folder.root / study_file), "--parallel", "1"]
    daemons = [
        Daemon(name=f"worker {n}", argv=command, log_path=folder.logs / f"worker-{n}.log", environment=lane)
        for n, lane in enumerate(lanes, 1)
    ]
    async with asyncio.TaskGroup() as tasks:
        try:
            for daemon in daemons:
                await daemon.start()
            keeping = [tasks.create_task(daemon.keep_running(_say)) for daemon in daemons]
            yield
            for task in keeping:
                task.cancel()
        finally:
            await asyncio.gather(*(daemon.stop(STOP_WORKER_S) for daemon in daemons))


def _say(text: str) -> None:
    click.echo(visible(text))
