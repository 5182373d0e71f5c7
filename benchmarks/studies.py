"""A study whose leader, workers, broker and trials are killed, against the same study undisturbed and a ledger outside.

    python -m benchmarks.studies                 # 200 kills
    python -m benchmarks.studies --kills 30

    killer ──SIGKILL──> leader · 2 workers · broker · processes of trials          each is started again
    trials ──append───> outside.jsonl: every part of a trial that was really done

Two studies by successive halving run under kills: one whose budget suffices, and one whose budget does not. In the first, each trial must have
exactly one result, and the report, its chapter on operation left out, must be equal to the byte to that of the undisturbed study. In both, the budget must hold at every line of the ledger, and the time that trials were seen to take
outside must be within what the ledger charged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks import report
from support.broker import discarded
from swarmq.broker.node.process import PrivateNode
from swarmq.runtime.processes import die_with_parent
from swarmq.studies.ledger import StudyFolder, read_ledger
from swarmq.studies.records import TrialFailed, TrialResult
from swarmq.studies.report import compose, render_markdown
from swarmq.studies.state import StudyState, add
from swarmq.studies.worker import FOLDER_ENV

KILLS = 200
WORKERS = 2
RUNGS = [3, 6, 9]
PART_S = 0.1
"""Seconds of one step of a trial."""
AT_MOST = 3
"""Largest number of parts that are killed at one time."""
VICTIMS = {"leader": 5, "worker": 5, "trial": 5, "broker": 1}
"""Part -> how often it is killed, relative to the others."""
PAUSE_S = (0.0, 0.3)
AT_ONCE = 0.2
"""Share of kills that do not wait until a trial has gone on since the kill before."""
TOO_LONG_S = 300.0
"""Seconds after the last kill in which the study must come to its end."""
SHIPPED = Path(__file__).parents[1] / "docs" / "studies"

FUNCTION = '''
import json, os, random, time
from pathlib import Path

HERE = Path(__file__).parent


def tell(**fact):
    line = json.dumps(fact | {"pid": os.getpid()}) + "\\n"
    file = os.open(HERE / "outside.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def trial(attempt):
    """Walk to attempt.steps, from where an earlier start or rung has come; every step is kept."""
    walk = Path(attempt.folder) / "walk.json"
    values = json.loads(walk.read_text()) if walk.exists() else []
    while len(values) < attempt.steps:
        time.sleep(PART_S)
        chance = random.Random(f"{attempt.settings['x']}/{attempt.seed}/{len(values)}")
        values.append((values[-1] if values else 0.0) + attempt.settings["x"] + chance.gauss(0, 1))
        part = walk.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(values))
        tell(folder=attempt.folder, step=len(values), seconds=PART_S)
        part.replace(walk)
    if attempt.steps == LAST and attempt.seed == 0:  # the study goes on for as long as there are kills
        while not (HERE / "release").exists():
            time.sleep(PART_S)
            tell(folder=attempt.folder, step=0, seconds=PART_S)
    return {"score": values[attempt.steps - 1]}
'''


def study_file(arms: int, seeds: int, *, gpu_seconds: float) -> str:
    tables = "\n".join(f"[arms.arm-{n:02d}]\nsettings = {{ x = {n / arms:.3f} }}" for n in range(arms))
    return f"""
name = "kills"
question = "Which walk gets furthest?"
smallest_effect = 1.0
seeds = {list(range(seeds))}
max_failures = 1000
lease_s = 3.0
[metric]
name = "score"
[trial]
function = "walk:trial"
max_seconds = 60
{tables}
[budget]
gpu_seconds = {gpu_seconds}
[design]
kind = "halving"
rungs = {RUNGS}
keep = 0.5
"""


def write_study(folder: Path, arms: int, seeds: int, *, gpu_seconds: float) -> None:
    folder.mkdir(parents=True)
    (folder / "walk.py").write_text(f"PART_S, LAST = {PART_S}, {RUNGS[-1]}\n{FUNCTION}")
    (folder / "study.toml").write_text(study_file(arms, seeds, gpu_seconds=gpu_seconds))


class Part:
    """A process that is started again whenever it ends, until `done` or until it ends with success."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._command = [sys.executable, "-m", "swarmq", "study", *arguments]
        self._log = log
        self.process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        while self.process is None or self.process.returncode != 0:
            with self._log.open("ab") as sink:
                self.process = await asyncio.create_subprocess_exec(
                    *self._command, stdout=sink, stderr=sink, preexec_fn=die_with_parent
                )
            try:
                await self.process.wait()
            finally:
                self.kill()

    def kill(self) -> bool:
        """Kill the process, and nothing else; return whether it was alive."""
        if self.process is None or self.process.returncode is not None:
            return False
        self.process.kill()
        return True


class Nursery:
    """All parts of a study, each of which can be killed."""

    def __init__(self, folder: Path, node: PrivateNode, workers: int) -> None:
        study, amqp = str(folder / "study.toml"), ("--amqp", node.amqp_url)
        self._folder, self._node = folder, node
        self.leader = Part("run", study, *amqp, "--workers", "0", log=folder / "leader.log")
        self.workers = [Part("worker", study, *amqp, log=folder / f"worker-{n}.log") for n in range(workers)]
        self.kills: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[asyncio.Task[None]]:
        """Keep all parts alive; yield the task that ends with the leader's success."""
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(self.leader.keep())
            working = [tasks.create_task(worker.keep()) for worker in self.workers]
            try:
                yield leading
            finally:
                for task in (leading, *working):
                    task.cancel()

    async def kill_one(self, chance: random.Random) -> None:
        """Kill one part that is alive, as SIGKILL does it."""
        until = time.monotonic() + 30.0
        while time.monotonic() < until:  # there may be nothing left to kill
            (victim,) = chance.choices([*VICTIMS], [*VICTIMS.values()])
            killed = False
            match victim:
                case "leader":
                    killed = self.leader.kill()
                case "worker":
                    killed = chance.choice(self.workers).kill()
                case "trial":
                    killed = kill_trial(self._folder, chance)
                case "broker":
                    await self._node.kill()
                    await self._node.start()
                    killed = True
            if killed:
                self.kills[victim] += 1
                return
            await asyncio.sleep(0.05)


async def wait_for_progress(outside: Path, leading: asyncio.Task[None]) -> None:
    """Return when a trial has done a part from now on, or the study has ended."""
    before = size_of(outside)
    async with asyncio.timeout(TOO_LONG_S):
        while size_of(outside) == before and not leading.done():  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(0.02)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_trial(folder: Path, chance: random.Random) -> bool:
    """Kill one process of a trial of the study in this folder."""
    mark, found = f"{FOLDER_ENV}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(one.startswith(mark) for one in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    if not found:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(found), signal.SIGKILL)
    return True


async def run_study(
    folder: Path, *, arms: int, seeds: int, kills: int, gpu_seconds: float, seed: int = 0
) -> dict[str, Any]:
    """Run a study in `folder` with so many kills, and return what is to be told of it. Raises TimeoutError if it does not end."""
    write_study(folder, arms, seeds, gpu_seconds=gpu_seconds)
    chance, began = random.Random(seed), time.monotonic()
    async with discarded(PrivateNode(folder / "rabbitmq")) as node:
        nursery = Nursery(folder, node, WORKERS)
        async with nursery.run() as leading:
            while (left := kills - nursery.kills.total()) > 0:
                if chance.random() > AT_ONCE:
                    await wait_for_progress(folder / "outside.jsonl", leading)
                await asyncio.sleep(chance.uniform(*PAUSE_S))
                if leading.done():
                    break
                for _ in range(min(chance.randint(1, AT_MOST), left)):
                    await nursery.kill_one(chance)
                print(f"{folder.name}: {time.monotonic() - began:.0f} s, {dict(nursery.kills)}", flush=True)
            (folder / "release").touch()
            async with asyncio.timeout(TOO_LONG_S):
                await leading
    return check(folder) | {"kills": dict(nursery.kills), "seconds": round(time.monotonic() - began, 1)}


def check(folder: Path) -> dict[str, Any]:
    """Compare the study's ledger with itself and with the ledger outside."""
    entries = read_ledger(StudyFolder(folder / "study.toml", "kills").ledger)
    state, overrun, results = StudyState(), 0.0, Counter[str]()
    for entry in entries:
        state.apply(entry)
        if state.study is not None and (cap := state.study.budget.gpu_seconds) is not None:
            overrun = max(overrun, add(state.spent, state.reserved).gpu_seconds - cap)
        if isinstance(entry.fact, TrialResult):
            results[entry.fact.trial_id] += 1
    outside = [json.loads(line) for line in (folder / "outside.jsonl").read_text().splitlines()]
    assert state.stopped is not None
    steps = [(line["folder"], line["step"]) for line in outside if line["step"]]
    used_s = sum(line["seconds"] for line in outside)
    return {
        "stopped": state.stopped.kind,
        "trials": len(state.trials),
        "lost": sum(one.result is None for one in state.trials.values()),
        "twice": sum(times > 1 for times in results.values()),
        "overrun": max(overrun, used_s - state.spent.gpu_seconds, 0.0),
        "starts": state.num_starts,
        "failures": Counter(entry.fact.kind for entry in entries if isinstance(entry.fact, TrialFailed)),
        "steps_outside": len(steps),
        "steps_twice": len(steps) - len(set(steps)),
        "outside_s": round(used_s, 1),
        "charged_s": round(state.spent.gpu_seconds, 1),
        "entries": len(entries),
        "report": render_markdown(compose(entries, operation=False)),
    }


async def measure(folder: Path, *, kills: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return figures and details of all three studies."""
    arms, seeds = max(4, kills // 16), 3
    quiet = await run_study(folder / "quiet", arms=arms, seeds=seeds, kills=0, gpu_seconds=1e6)
    killed = await run_study(folder / "killed", arms=arms, seeds=seeds, kills=kills, gpu_seconds=1e6)
    few = max(kills // 10, 3)
    tight = await run_study(folder / "tight", arms=arms, seeds=seeds, kills=few, gpu_seconds=150, seed=1)
    figures = {
        "kills": float(sum(killed["kills"].values()) + sum(tight["kills"].values())),
        "results_lost": float(quiet["lost"] + killed["lost"]),
        "results_twice": float(quiet["twice"] + killed["twice"] + tight["twice"]),
        "budget_overrun": float(max(one["overrun"] for one in (quiet, killed, tight))),
        "reports_differ": float(quiet["report"] != killed["report"]),
    }
    detail = {"undisturbed": quiet, "killed": killed, "small_budget": tight}
    return figures, {name: {k: v for k, v in one.items() if k != "report"} for name, one in detail.items()}


def count_shipped() -> int:
    """Return the number of studies in docs/studies that have come to their end."""
    states = [StudyState(read_ledger(path)) for path in SHIPPED.glob("*/studies/*/ledger.jsonl")]
    return sum(state.stopped is not None and state.stopped.kind == "complete" for state in states)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures, detail = asyncio.run(measure(Path(folder), kills=arguments.kills))
    figures["studies_shipped"] = count_shipped()
    for name, one in detail.items():
        print(name, json.dumps(one))
    print(report.table(["figure", "value"], [[name, value] for name, value in figures.items()]))
    known, more = report.kept("studies", out=arguments.out)
    print("written", report.save("studies", known | figures, detail=more | detail, out=arguments.out))


if __name__ == "__main__":
    main()
