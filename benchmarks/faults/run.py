"""Break everything, again and again, and count: every finished episode is trained exactly once, whatever dies.

    python -m benchmarks.faults --injections 1000 --seed 7
    python -m benchmarks.faults --injections 1000 --seed 7 --keep DIR              goes on in DIR if it was cut short
    python -m benchmarks.faults --injections 100 --nodes 3                         on a RabbitMQ cluster of three nodes
    python -m benchmarks.faults --injections 40 --collectors 2                     with two processes of the collector
    python -m benchmarks.faults --injections 60 --break acknowledge-before-log     a negative control: must be caught

The processes are the real ones, with a small model that really trains and, unless `--engine vllm`, an engine that
answers like vLLM from a script. docs/explanation/faults.md says what is injected and what is compared. Exits with 1 when an
episode was lost or trained twice, when a turn was trained that its agent did not receive, or otherwise than it was received,
when anything hung, or when the weights are not those of a replay without faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.faults.check import LongStall, Verdict, Weights, judge, longest, replayed
from benchmarks.faults.inject import FAULTS, HANG_S, HangError, Nemesis, plan, possible
from benchmarks.faults.nursery import Nursery
from benchmarks.faults.world import GROUP_SIZE, GROUPS_PER_BATCH, KIND, POLICY, RUN, World, make_model
from benchmarks.report import parser, save, table
from swarmq.broker import topology
from swarmq.collector.decide.state import HOLD_S
from swarmq.collector.ledger import read_fates
from swarmq.errors import BrokerError, CollectorError, LearnerError
from swarmq.learner.store import batch_log
from swarmq.messages import Rollout
from swarmq.runtime import logs

DRAIN_BROKEN_S = 180.0
STILL_BROKEN_S = 12.0
"""With a rule broken some episodes never come to an end, and what is wrong shows once nothing moves."""
QUIET_S = 4.0
GRACE_S = 180.0
BACK_S = 60.0
"""How long RabbitMQ may take to put back what a learner held that has gone."""


class Result(msgspec.Struct, kw_only=True):
    """All that a run says."""

    seconds: float
    interruptions: int
    """How often the run was cut short and gone on with."""
    injections: int
    hangs: list[str]
    verdict: Verdict
    weights: Weights | None
    own_deaths: Counter[str]
    starts: dict[str, int]
    dead_letters: int
    longest_stall_s: float
    stalls: list[LongStall]
    """The longest."""
    rabbitmq: str
    """Version of the broker."""

    @property
    def passed(self) -> bool:
        sound = self.weights is None or (self.weights.checkpoint_equal and not self.weights.pushes_wrong)
        return sound and not (self.hangs or self.verdict.faults)


async def play(
    folder: Path,
    nursery: Nursery,
    *,
    injections: int,
    seed: int,
    gap_s: float,
    model: Path,
    broken: str = "",
    vllm: bool = False,
    only: tuple[str, ...] = (),
    nodes: int = 1,
    collectors: int = 1,
) -> Result:
    """One run in `folder`: up, break, drain, stop in order, judge. What was interrupted there before goes on.

    SIGTERM and SIGINT end the injections early, and what there is by then is judged.
    """
    hangs: list[str] = []
    opened = World.open(folder, nursery, model=model, broken=broken, vllm=vllm, nodes=nodes, collectors=collectors)
    async with opened as world:
        nemesis = Nemesis(world, seed=seed)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, nemesis.stop.set)
        world.feed(on=True)
        try:
            await _until(lambda: world.segment() is not None and bool(world.lines()), HANG_S, "the first batch")
            world.watching.set()
            await nemesis.run(plan(injections, seed=seed, only=only or possible(world)), gap_s=gap_s)
        except HangError as hang:
            hangs.append(str(hang))
        hangs += await (_drain_broken(world) if broken else _drain(world))
        dead = await _dead_letters(world)
        for name in _in_order(world):
            if (status := await world.parts[name].stop(GRACE_S)) != 0:
                hangs.append(f"{name} was asked to stop and ended with status {status}")
        left = await _left_for_learner(world, back_s=QUIET_S if broken else BACK_S)
        verdict = judge(world.job, world.lines(), nemesis.injections, world.stalls.found, left=left, texts=not vllm)
        journal = None if vllm else folder / "engine.jsonl"
        weights = None if broken else await asyncio.to_thread(replayed, world.job, journal)
        return Result(
            seconds=time.time() - world.opened.found[0],
            interruptions=len(world.opened.found) - 1,
            injections=len(nemesis.injections),
            hangs=hangs,
            verdict=verdict,
            weights=weights,
            own_deaths=world.story(),
            starts={name: part.starts for name, part in world.parts.items()},
            dead_letters=dead,
            longest_stall_s=max((stall.seconds for stall in world.stalls.found), default=0.0),
            stalls=longest(world.stalls.found, nemesis.injections),
            rabbitmq=(await world.node.ctl("version")).strip(),
        )


async def _drain(world: World) -> list[str]:
    """No more tasks, no more faults: everything that was begun comes to its end. What did not, in words."""
    _calm(world)
    left, since = await _unsettled(world), time.monotonic()
    while left or world.still_s < QUIET_S:
        if time.monotonic() - max(since, world.moved_at) > HANG_S:
            return [f"the end of all episodes did not come, {left}"]
        await asyncio.sleep(0.5)
        if (now := await _unsettled(world)) != left:
            left, since = now, time.monotonic()
    try:
        await _caught_up(world)
        await _until(lambda: all(world.parts[name].listens for name in _in_order(world)), HANG_S, "every part")
    except HangError as hang:
        return [str(hang)]
    return []


async def _drain_broken(world: World) -> list[str]:
    """Drain as far as a broken rule allows: until nothing has moved for a while, with every process up.

    An end that misses turns must be given the time after which the collector gives it up: that drop is the evidence.
    """
    _calm(world)
    began = up_since = time.monotonic()
    while (left := await _unsettled(world)) or world.still_s < QUIET_S:
        now = time.monotonic()
        if not all(part.listens for part in world.parts.values()):
            up_since = now  # a process that was killed last is still starting
        idle_s = now - max(up_since, world.moved_at)
        stuck = idle_s > STILL_BROKEN_S and (idle_s > HOLD_S + STILL_BROKEN_S or not _holds_ends(world))
        if stuck or now - began > DRAIN_BROKEN_S:
            return [f"the end of all episodes did not come, {left}"]
        await asyncio.sleep(0.5)
    return []


def _holds_ends(world: World) -> bool:
    """Return whether the collector holds the confirmed end of an episode that is still open."""
    try:
        fates = read_fates(world.run_folder.inbox)
    except CollectorError:
        return False
    opened = {episode for episode, fate in fates.items() if fate.state == "open"}
    return any(line.event == "confirmed" and line.episode_id in opened for line in world.lines())


def _calm(world: World) -> None:
    world.feed(on=False)
    for relay in world.relays.values():
        relay.release()


def _in_order(world: World) -> list[str]:
    """The parts that are asked to stop, one after another."""
    return [*(part for part in world.parts if part.startswith("client")), "proxy", "learner", "collector"]


async def _unsettled(world: World) -> str:
    """What is not at its end yet; one finished group may wait for the other of its batch."""
    try:
        known, logged = read_fates(world.run_folder.inbox), _logged(world)
        depths = await world.broker.depths([topology.tasks(RUN, KIND), topology.retries(RUN, KIND)])
    except (BrokerError, CollectorError, LearnerError) as error:
        return str(error)
    states = Counter(fate.state for fate in known.values())
    tasks = sum(depth.ready for depth in depths.values())
    ends = sum(line.event == "confirmed" and line.episode_id not in known for line in world.lines())
    reports = len(logged ^ {episode for episode, fate in known.items() if fate.state == "trained"})
    batch = states["published"] > GROUP_SIZE * (GROUPS_PER_BATCH - 1)
    if tasks or ends or reports or batch or states["open"] or states["waiting"]:
        return f"{dict(states)}; on their way: {tasks} tasks, {ends} ends, reports on {reports} episodes"
    return ""


def _logged(world: World) -> set[str]:
    """Episodes in a batch of the log."""
    return {e for place in batch_log.scan_log(world.run_folder.batch_log(POLICY)) for e in place.index.trained}


async def _caught_up(world: World) -> None:
    """Return when the learner, which says how it is every two seconds, has trained all that is in its log."""
    try:
        async with asyncio.timeout(HANG_S), world.broker.events(RUN) as events:
            async for event in events:
                if (event.source, event.name) == (f"learner.{POLICY}", "state"):
                    places = batch_log.scan_log(world.run_folder.batch_log(POLICY))
                    if event.fields["version"] == max((place.index.version for place in places), default=0):
                        return
    except TimeoutError:
        raise HangError(f"the learner has not trained its log within {HANG_S:g} s") from None


async def _until(there: Callable[[], bool], within_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not there():  # noqa: ASYNC110 - files have no event
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise HangError(f"{what} did not come within {within_s:g} s") from None


async def _left_for_learner(world: World, *, back_s: float) -> set[str]:
    """Episodes that stand on the ready queue now that the learner has gone; they stay there.

    What it held comes back a moment later, so those that the collector calls published are waited for.
    """
    found = set[str]()
    published = {e for e, fate in read_fates(world.run_folder.inbox).items() if fate.state == "published"}
    owed = published - {
        e
        for place in batch_log.scan_log(world.run_folder.batch_log(POLICY))
        for e in (*place.index.trained, *place.index.dropped)
    }
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(back_s),
            world.broker.consume(topology.ready(RUN, POLICY), prefetch=1000) as deliveries,
        ):
            while owed - found:
                message = (await anext(deliveries)).message
                assert isinstance(message, Rollout)
                found.add(message.episode_id)
    return found


async def _dead_letters(world: World) -> int:
    with contextlib.suppress(BrokerError, KeyError):
        return (await world.broker.depths([topology.DEAD]))[topology.DEAD].ready
    return 0


def report(result: Result) -> str:
    heads = ("fault", "injections", "ended", "trained once", "twice", "lost", "unseen", "dropped", "longest stall s")
    counts = ("fault", "injections", "ended", "once", "twice", "lost", "unseen")
    rows = [
        (*(getattr(r, name) for name in counts), _reasons(r.dropped), round(r.longest_stall_s, 1))
        for r in result.verdict.rows
    ]
    account = result.verdict.account
    lines = [
        table(heads, rows),
        "",
        f"{result.injections} faults in {result.seconds:.0f} s, {result.interruptions} interruptions; processes started: {result.starts}",
        (
            f"episodes begun {account.begun}, outcomes confirmed {account.confirmed}, trained {account.trained}, dropped "
            f"{_reasons(Counter(account.dropped))}, waiting {account.waiting}, dead-lettered {result.dead_letters}; "
            f"unseen turns trained {len(result.verdict.unseen)}, received and not trained {len(result.verdict.unproven)}"
        ),
        *(
            f"nothing moved for {stall.seconds:.1f} s after {stall.before}; meanwhile: "
            + (", ".join(f"{fault} at {at:.0f} s" for at, fault in stall.during) or "no other fault")
            for stall in result.stalls
        ),
    ]
    if weights := result.weights:
        lines.append(
            f"version {weights.version}: checkpoint {'equals' if weights.checkpoint_equal else 'DIFFERS FROM'} a replay "
            f"without faults; {weights.pushes} pushes taken by engines, {len(weights.pushes_wrong)} of other weights"
        )
    lines += [f"not killed by us, {count} x: {what}" for what, count in result.own_deaths.items()]
    lines += [f"HANG: {hang}" for hang in result.hangs]
    lines.append("passed" if result.passed else f"FAILED: {result.verdict.faults}")
    return "\n".join(lines)


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "-"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--injections", type=int, default=1000)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--gap-s", type=float, default=0.7, help="mean time between two faults")
    options.add_argument("--engine", choices=("scripted", "vllm"), default="scripted")
    options.add_argument("--model", type=Path, help="a model folder; needed with --engine vllm")
    options.add_argument(
        "--break",
        dest="broken",
        default="",
        help="rules that parts are to break, with commas between; see benchmarks.faults.broken",
    )
    options.add_argument("--only", action="append", default=[], choices=FAULTS, help="only this fault; repeatable")
    options.add_argument("--nodes", type=int, default=1, help="RabbitMQ nodes; several form a cluster")
    options.add_argument("--collectors", type=int, default=1, help="processes of the collector")
    options.add_argument("--name", default="faults", help="name of the result")
    options.add_argument("--keep", type=Path, help="run in this folder and keep it; what was cut short there goes on")
    given = options.parse_args()
    logs.configure(role="faults", run=RUN)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="swarmq-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    with Nursery.open() as nursery:
        result = asyncio.run(
            play(
                folder,
                nursery,
                injections=given.injections,
                seed=given.seed,
                gap_s=given.gap_s,
                model=given.model or make_model(folder / "model"),
                broken=given.broken,
                vllm=given.engine == "vllm",
                only=tuple(given.only),
                nodes=given.nodes,
                collectors=given.collectors,
            )
        )
    print(report(result))
    if given.broken:
        sys.exit(0 if result.verdict.faults else "the broken rule was not caught")
    figures = {
        "injections": result.injections,
        "episodes_ended": result.verdict.account.confirmed,
        "lost": result.verdict.lost,
        "twice": result.verdict.twice,
        "unseen_turns_trained": len(result.verdict.unseen),
        "hangs": len(result.hangs),
        "longest_stall_s": result.longest_stall_s,
    }
    save(given.name, figures, detail=msgspec.to_builtins(result, str_keys=True), out=given.out)
    if result.passed and not given.keep:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if result.passed else f"what is left of it: {folder}")
