"""Control requests to a run that is up, and their answers by collector and learners.

  command ──> <run>.control (durable) ──> collector ──> <policy>.control (durable) ──> learners
     ^──────────── `control` events: refused or accepted, then applied from step N ────────┘

The command is durable and applied once; only the answers are events, which may be lost. A command without an answer is sent
again under the same id. A timeout does not mean that the command was not applied.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from swarmq.broker import Broker, topology
from swarmq.client.data.tasks import as_task, make_queue_id
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError, SwarmqError, TaskError
from swarmq.live_settings import format_value
from swarmq.messages import Action, Command, Event, Slot, Task, new_id

REPEAT_S = 5.0
PATIENCE_S = 60.0


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to a command."""

    accepted: dict[str, Any]
    """Fields of the collector's answer."""
    applied: dict[str, dict[str, Any]]
    """Policy -> fields of its learner's answer."""
    missing: tuple[str, ...] = ()
    """Policies whose learners have not answered yet, because they are not up."""


async def send_command(
    broker: Broker,
    run: str,
    action: Action,
    settings: Mapping[str, Any] | None = None,
    *,
    sender: str = "",
    patience_s: float = PATIENCE_S,
    repeat_s: float = REPEAT_S,
    say: Callable[[str], None] = lambda _: None,
) -> ControlAnswer:
    """Send a command and wait for its answers.

    `say`: called with a text when no answer has come for a while. `patience_s`: seconds to wait for the answers. `repeat_s`: seconds
    after which the command is sent again.
    Raises ConfigError if the run refuses the command, and SwarmqError if the collector does not answer in time.
    """
    command = Command(run=run, command_id=new_id(), action=action, settings=dict(settings or {}), sender=sender)
    accepted: dict[str, Any] = {}
    applied: dict[str, dict[str, Any]] = {}
    refused = ""
    async with broker.events(run) as events:
        sending = asyncio.create_task(_send(broker, run, command, say, repeat_s))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    async for fields in _answers(events, command.command_id):
                        match fields["state"]:
                            case "refused":
                                refused = str(fields["text"])
                            case "accepted":
                                accepted = fields
                            case _:
                                applied[fields["policy"]] = fields
                        if refused or (accepted and set(accepted["learners"]) <= applied.keys()):
                            break
        finally:
            sending.cancel()
    if refused:
        raise ConfigError(refused)
    if not accepted:
        raise SwarmqError(
            f"the collector of run {run!r} has not answered within {patience_s:g} s: check that the run is up. The command waits in the queue "
            f"{topology.control(run)} and will be executed"
        )
    missing = tuple(policy for policy in accepted["learners"] if policy not in applied)
    return ControlAnswer(accepted=accepted, applied=applied, missing=missing)


async def send_eval_tasks(
    broker: Broker, job: SwarmJob, tasks: Iterable[Any], kind: str, *, repeats: int, source: str = ""
) -> int:
    """Send tasks for evaluation rounds and return their number; tasks of the same `source` replace those sent before.

    Raises TaskError, before any task is sent, for a task that has no name, is of another kind, or is too large.
    """
    named = [as_task(value, default_id=f"task-{number}") for number, value in enumerate(tasks)]
    if repeated := [one for one, times in Counter(task.id for task in named).items() if times > 1]:
        raise TaskError(f"task id {repeated[0]!r} occurs more than once: ids must differ")
    bodies = []
    for task in named:
        name = make_queue_id(task, kind, source)
        try:
            bodies.append((name, msgspec.msgpack.encode(task.payload)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TaskError(f"task {task.id!r}: its data cannot be sent: {error}") from error
    for name, body in bodies:
        message = Task(
            run=job.run,
            slot=Slot(task_id=name),
            kind=kind,
            group_size=repeats,
            mode="eval",
            payload=msgspec.Raw(body),
        )
        await broker.publish(topology.control(job.run), message)
    return len(named)


async def _send(broker: Broker, run: str, command: Command, say: Callable[[str], None], repeat_s: float) -> None:
    for sent in itertools.count():
        await broker.publish(topology.control(run), command)
        if sent == 1:
            say(
                f"no answer yet: the command waits in the queue {topology.control(run)}; processes that start later execute it, too"
            )
        await asyncio.sleep(repeat_s)


async def _answers(events: AsyncIterator[Event], command_id: str) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        if event.name == "control" and event.fields.get("command_id") == command_id:
            yield event.fields


def describe_answer(answer: ControlAnswer) -> list[str]:
    """Return lines that describe what changed and from which step on."""
    stops = answer.accepted["action"] == "stop"
    lines = [
        f"{change['path']}: {format_value(change['before'])} -> {format_value(change['value'])}"
        for change in answer.accepted.get("changes", [])
        if not stops  # a learner that is one step further ends after that step, and reports it
    ]
    if "changes" in answer.accepted and not answer.accepted["changes"]:
        lines.append("nothing to change: the run has these settings already")
    if pace := answer.accepted.get("pace"):
        lines.append(f"the run is {pace}")
    for policy, fields in sorted(answer.applied.items()):
        if "checkpoint" in fields:
            lines.append(f"{policy}: checkpoint of step {fields['checkpoint']} written")
        if stops:
            lines += [
                f"{policy}: ends after step {_last(change)}, with a checkpoint; `swarmq up` then prints how to continue"
                for change in fields["changes"]
            ]
        else:
            lines += [f"{policy}: {change['path']} from step {change['from_step']} on" for change in fields["changes"]]
        if pace:
            lines.append(f"{policy}: after step {fields['from_step'] - 1}")
    lines += [
        f"{policy}: its learner has not answered yet; it executes the command when it is up"
        for policy in answer.missing
    ]
    return lines


def _last(change: Mapping[str, Any]) -> int:
    """Return the step after which learners stop: the requested one, or the one that they are in if that is later."""
    return int(max(change["value"], change["from_step"] - 1))
