"""A tool server that fails: `python -m benchmarks.poisoned --rates 0 0.3 0.6 0.9 --seeds 0 1 2 --jobs 1`.

For a share of all attempts the search server of the retrieval tutorial is down: the attempt dies at its first search. An attempt
that guesses without a search never dies. The tutorial's model is trained twice at each rate, on the same seeds:

    ours    the agent raises: the episode has failed and is never trained, the slot is attempted again
    zero    the agent catches the exception and returns a reward of 0, which other systems do by themselves

A failed attempt is repeated until one of its slot ends, so both ways make the same number of optimizer steps of the same number of
episodes. Held-out reward is measured without failures, on the same tasks in all runs. Each run is a process of its own on `--cores`
cores, `--jobs` of them at once; finished runs in `--folder` are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec
from examples.retrieval import environment
from examples.retrieval.agent import attempt, run_tool

from benchmarks import report
from benchmarks.examples.manifest import EXAMPLES
from benchmarks.pinned import CorePool
from swarmq import AsyncSwarmClient, Episode, Outcome, keys
from swarmq.broker.amqp import AmqpBroker
from swarmq.client.data.feed import feed
from swarmq.client.data.tasks import as_task
from swarmq.client.runners.attempts import RunnerOptions
from swarmq.client.runners.worker import Worker
from swarmq.config import SwarmJob
from swarmq.learner.store.batch_log import read_records
from swarmq.observe.curves import read_events
from swarmq.observe.monitor import follow
from swarmq.up import deploy

Way = Literal["ours", "zero"]
WAYS: tuple[Way, ...] = ("ours", "zero")
STEPS, CONCURRENCY, EPOCHS = 40, 48, 40
"""Of one run: optimizer steps, attempts at once, and times that the tasks are fed, which are more than it can take."""
REPEATS = 2
"""Attempts at each held-out task."""
JOB, MODEL = EXAMPLES / "retrieval" / "job.toml", Path("runs/toy/retrieval").absolute()
MAX_ATTEMPTS = 200
"""Attempts at a slot: if nine in ten fail, so many in a row fail once in a billion times."""
RETRY_PAUSE_S = 0.1
"""Attempts take less than a second, so their pauses are short, too."""
LIMIT_S = 3 * 3600.0
"""Longest training of one run, which fails if it has not made all steps by then."""


class SearchServerDown(Exception):  # noqa: N818 - the name of what happened
    """The failure that is injected."""


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    rate: float
    way: Way
    seed: int
    before: float
    after: float
    """Held-out reward, measured without failures."""
    steps: int
    seconds: float
    rewards: list[float]
    """Mean reward of the trained episodes by step."""
    begun: int
    killed: int
    trained: int
    killed_trained: int
    """Episodes among the trained ones that the server had killed."""


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--cores", type=int, default=2, help="cores of each run")
    parser.add_argument("--folder", type=Path, default=Path("runs/poisoned"), help="results of single runs")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/poisoned.png"))
    parser.add_argument("--one", nargs=3, metavar=("RATE", "WAY", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rate, way, seed = options.one
        done = asyncio.run(train(float(rate), way, int(seed), options.steps))
        if done.steps != options.steps:
            sys.exit(f"{done.steps} of {options.steps} steps in {done.seconds:.0f} s")
        sys.stdout.buffer.write(b"\n" + msgspec.json.encode(done) + b"\n")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    # The longest first: at a rate of 0.9 a trained episode takes ten attempts.
    wanted = [
        (rate, way, seed) for rate in sorted(options.rates, reverse=True) for way in WAYS for seed in options.seeds
    ]
    if not all(_row(options, one).exists() for one in wanted):
        subprocess.run(
            [sys.executable, "-m", "swarmq.toy_model", "examples.retrieval.demonstrations", str(MODEL)], check=True
        )
    pool = CorePool(options.jobs, options.cores)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        runs = [run for run in threads.map(lambda one: _run_one(one, options, pool), wanted) if run]
    if len(runs) == len(wanted):
        publish(runs, options)


def _row(options: argparse.Namespace, one: tuple[float, Way, int]) -> Path:
    """The file of one run's result."""
    rate, way, seed = one
    folder: Path = options.folder
    return folder / f"{rate:g}-{way}-{seed}-{options.steps}.json"


def _run_one(one: tuple[float, Way, int], options: argparse.Namespace, pool: CorePool) -> Trained | None:
    (rate, way, seed), path = one, _row(options, one)
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Trained)
    command = [
        sys.executable,
        "-m",
        "benchmarks.poisoned",
        "--steps",
        str(options.steps),
        "--one",
        str(rate),
        way,
        str(seed),
    ]
    log = path.with_suffix(".log")
    with pool.pinned() as pinned, log.open("wb") as sink:
        done = subprocess.run([*pinned, *command], stdout=subprocess.PIPE, stderr=sink, check=False)
    log.write_bytes(log.read_bytes() + done.stdout)
    if done.returncode:
        print(f"rate {rate:g}, {way}, seed {seed}: failed, see {log}", flush=True)
        return None
    result = msgspec.json.decode(done.stdout.splitlines()[-1], type=Trained)
    path.write_bytes(msgspec.json.encode(result))
    print(
        f"rate {rate:g}, {way}, seed {seed}: {result.before:.3f} -> {result.after:.3f}, {result.steps} steps",
        flush=True,
    )
    return result


async def train(rate: float, way: Way, seed: int, steps: int) -> Trained:
    """Train the tutorial's model while the search server is down for this share of the attempts."""
    with tempfile.TemporaryDirectory(prefix="swarmq-poisoned-") as folder:
        plain = msgspec.to_builtins(SwarmJob.load(JOB))
        plain["policies"]["main"]["train"] |= {"max_steps": steps, "seed": seed}
        plain["policies"]["main"]["model"] = str(MODEL)
        job = SwarmJob.build(plain | {"run": "poisoned", "folder": folder})
        async with contextlib.AsyncExitStack() as stack:
            deployment = await stack.enter_async_context(deploy(job, report=_say))
            broker = await stack.enter_async_context(AmqpBroker.open(deployment.invite.amqp_url, name="poisoned"))
            await stack.enter_async_context(follow(deployment.job, broker, record=job.run_folder.events))
            client = await stack.enter_async_context(AsyncSwarmClient(deployment.invite))
            await feed(
                broker,
                job.run,
                [as_task(task) for task in environment.train()],
                "default",
                repeats=job.groups.group_size,
                epochs=EPOCHS,
                seed=seed,
                progress_file=job.run_folder.path / "fed.json",
                secret=keys.derive_task_secret(keys.load_root(job.run_folder.root_secret)),
            )
            agent = Poisoned(rate, way)
            before = await _measure(client)
            began = time.monotonic()
            seconds = await _work(client, agent, deployment.learners_done)
            _say(f"trained in {time.monotonic() - began:.0f} s")
            after = await _measure(client)
        events = list(read_events(job.run_folder.events))
        log = [record for record in read_records(job.run_folder.batch_log("main")) if record.episodes]
    rewards = [float(event.fields["reward"]) for event in events if event.name == "step"]
    trained = [episode.episode_id for record in log for episode in record.episodes]
    return Trained(
        rate=rate,
        way=way,
        seed=seed,
        before=before,
        after=after,
        steps=len(rewards),
        seconds=seconds,
        rewards=rewards,
        begun=agent.begun,
        killed=len(agent.killed),
        trained=len(trained),
        killed_trained=len(agent.killed.intersection(trained)),
    )


class Poisoned:
    """The tutorial's agent, with a search server that is down for some attempts."""

    def __init__(self, rate: float, way: Way) -> None:
        self.rate, self.way = rate, way
        self.begun = 0
        self.killed: set[str] = set()
        """Episodes that died of their first search."""

    def is_down(self, episode_id: str) -> bool:
        """Return whether the server is down for an attempt, whatever its task is."""
        return random.Random(episode_id).random() < self.rate

    def train(self, ep: Episode) -> Outcome:
        self.begun += 1
        try:
            return attempt(ep, self._break_search if self.is_down(ep.episode_id) else run_tool)
        except SearchServerDown:
            self.killed.add(ep.episode_id)
            if self.way == "ours":
                raise
            return Outcome(0.0)

    @staticmethod
    def _break_search(_texts: environment.Corpus, _name: str, _arguments: str) -> str:
        raise SearchServerDown


async def _work(client: AsyncSwarmClient, agent: Poisoned, done: asyncio.Event) -> float:
    """Work until the learner's last step, or until the time limit; the seconds that it took."""
    began, stop = time.monotonic(), asyncio.Event()
    options = RunnerOptions(
        concurrency=CONCURRENCY, max_attempts=MAX_ATTEMPTS, retry_pause_s=RETRY_PAUSE_S, progress=False
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(Worker(client, agent.train, kind="default", options=options).run(stop))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), LIMIT_S)
        seconds = time.monotonic() - began
        stop.set()
    return seconds


async def _measure(client: AsyncSwarmClient) -> float:
    tasks = list(environment.held_out())
    measured = await client.evaluate(tasks, attempt, repeats=REPEATS, concurrency=CONCURRENCY, progress=False)
    return measured.mean_reward or 0.0


def publish(runs: list[Trained], options: argparse.Namespace) -> None:
    """Print the table, draw the figure and save the result."""
    print(
        report.table(
            (
                "rate",
                "way",
                "seed",
                "before",
                "after",
                "steps",
                "seconds",
                "begun",
                "killed",
                "trained",
                "killed, trained",
            ),
            [
                (
                    r.rate,
                    r.way,
                    r.seed,
                    r.before,
                    r.after,
                    r.steps,
                    r.seconds,
                    r.begun,
                    r.killed,
                    r.trained,
                    r.killed_trained,
                )
                for r in sorted(runs, key=lambda r: (r.rate, r.way, r.seed))
            ],
        )
    )
    draw(runs, options.picture)
    figures = {
        f"reward_after_{rate * 100:.0f}_{'ours' if way == 'ours' else 'scored_zero'}": statistics.mean(
            r.after for r in runs if (r.rate, r.way) == (rate, way)
        )
        for rate, way in sorted({(r.rate, r.way) for r in runs})
    }
    figures["killed_episodes_trained_ours"] = sum(r.killed_trained for r in runs if r.way == "ours")
    report.save("poisoned", figures, detail={"runs": msgspec.to_builtins(runs)}, out=options.out)


def draw(runs: list[Trained], path: Path) -> None:
    """Draw held-out reward after training by rate, and the reward by step at each rate."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rates = sorted({r.rate for r in runs})
    colours = {"ours": "#1f78b4", "zero": "#d95f02"}
    labels = {"ours": "failed attempts are never trained", "zero": "failed attempts are scored 0"}
    figure, panels = plt.subplots(1, len(rates), figsize=(3.1 * len(rates), 3.0), sharey=True, layout="constrained")
    for rate, panel in zip(rates, panels, strict=True):
        for way in WAYS:
            for number, run in enumerate(r for r in runs if (r.rate, r.way) == (rate, way)):
                ends = [run.before, run.after]
                label = labels[way] if number == 0 else None
                panel.plot([0, run.steps], ends, "o--", color=colours[way], label=label, linewidth=1.0)
                smooth = _smooth(run.rewards)
                panel.plot(range(1, len(smooth) + 1), smooth, color=colours[way], alpha=0.4, linewidth=1.0)
        panel.set_title(f"down for {rate:.0%} of attempts")
        panel.set_xlabel("step")
        panel.set_ylim(0, 1)
    panels[0].set_ylabel("reward (dots: held out, lines: trained)")
    panels[0].legend(fontsize=7, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _smooth(values: list[float], width: int = 5) -> list[float]:
    return [statistics.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
