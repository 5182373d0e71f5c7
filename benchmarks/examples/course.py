"""One tutorial with one seed: `python -m benchmarks.examples.course NAME --seed 0 --folder runs/examples`.

toy model ─> `swarmq up` ─> held-out reward ─> `swarmq feed`, `swarmq worker` ─> last step ─> held-out reward

Each command is a process of its own, as a user would start it. The row is written when all is done; the runs of several seeds and
tutorials can be made side by side, since run, folder and ports differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks import report
from benchmarks.examples.manifest import EXAMPLES, ROOT, Manifest, digest, load, locate
from swarmq import AsyncSwarmClient, Episode, Outcome, open_run
from swarmq.client.data.readers import read_tasks
from swarmq.client.data.targets import load_object
from swarmq.config import RunFolder, SwarmJob
from swarmq.estimates import Z95
from swarmq.observe.curves import read_events
from swarmq.runtime.processes import die_with_parent

STARTED, LEARNED = "Ctrl-C stops everything", "every learner has made its last step"
"""What `swarmq up` prints when the run is up, and after the last step."""
START_S, STOP_S, ATTEMPT_S = 900.0, 120.0, 300.0
SHOWN = 4
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
"""Commands of a tutorial find this environment's `python`."""
REPORT = re.compile(r"^reward ([\d.e+-]+)(?: ± ([\d.e+-]+))?.* \((\d+) episodes, (\d+) failed\)$", re.MULTILINE)
"""Last line of `swarmq run --eval`."""


class CourseError(Exception):
    """A tutorial that could not be run to its end, with the reason."""


class KindReport(NamedTuple):
    """Held-out reward of one kind; None if no attempt finished."""

    reward: float | None
    standard_error: float
    episodes: int
    failed: int


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out reward, a mean over kinds."""

    reward: float
    standard_error: float
    episodes: int
    failed: int
    by_kind: dict[str, float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one tutorial came to with one seed."""

    name: str
    seed: int
    digest: str
    commit: str
    hardware: str
    steps: int = 0
    episodes: int = 0
    """Episodes that were trained."""
    model_minutes: float = 0.0
    """0 if the model was in the cache."""
    minutes: float = 0.0
    """From the start of the run to the last held-out attempt."""
    before: HeldOut | None = None
    after: HeldOut | None = None
    frozen: dict[str, HeldOut] = {}
    """Policy that is not trained, such as a teacher -> its own held-out reward."""
    rewards: dict[int, float] = {}
    """Step -> mean reward of its episodes, all policies' together."""
    problem: str = ""
    """Why the run did not come to its end."""

    @property
    def gain(self) -> float:
        assert self.before is not None
        assert self.after is not None
        return self.after.reward - self.before.reward


def row_path(folder: Path, name: str, seed: int) -> Path:
    return folder / "rows" / f"{name}-{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/examples"))
    parser.add_argument("--minutes", type=float, help="limit of the training, instead of the tutorial's own")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the tutorial's own")
    options = parser.parse_args()
    os.chdir(ROOT)
    manifest = load(options.name)
    changes = {"minutes": options.minutes, "steps": options.steps}
    manifest = msgspec.structs.replace(manifest, **{key: value for key, value in changes.items() if value})
    row = asyncio.run(Course(options.name, manifest, options.seed, options.folder.resolve()).run())
    path = row_path(options.folder, options.name, options.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(row), indent=1))
    if row.problem:
        sys.exit(f"{options.name}, seed {options.seed}: {row.problem}")


class Course:
    """A run of a tutorial."""

    def __init__(self, name: str, manifest: Manifest, seed: int, folder: Path) -> None:
        self._name, self._manifest, self._seed = name, manifest, seed
        self._job_file = EXAMPLES / name / "job.toml"
        self._plain = SwarmJob.load(self._job_file)
        self._run = f"{self._plain.run}-{seed}"
        self._runs = folder / "runs"
        self._folder = RunFolder(self._runs / self._run)
        self._began = time.monotonic()

    async def run(self) -> Row:
        """Return the row; a run that fails or exceeds its time has a `problem`."""
        row = Row(
            name=self._name,
            seed=self._seed,
            digest=digest(self._name),
            commit=report.commit(),
            hardware=report.hardware(),
        )
        before = after = None
        frozen: dict[str, HeldOut] = {}
        model_s, began, problem = 0.0, time.monotonic(), ""
        try:
            models, model_s = await self._ensure_models()
            began = time.monotonic()
            async with self._up(models) as learned:
                frozen = {name: await self._measure(policy=name) for name in self._plain.frozen}
                before = await self._measure()
                await self._train(learned)
                after = await self._measure()
        except CourseError as error:
            problem = str(error)
        steps, rewards, episodes = self._read_steps()
        return msgspec.structs.replace(
            row,
            steps=steps,
            rewards=rewards,
            episodes=episodes,
            model_minutes=round(model_s / 60, 2),
            minutes=round((time.monotonic() - began) / 60, 2),
            before=before,
            after=after,
            frozen=frozen,
            problem=problem,
        )

    async def attempt(self, repeats: int) -> None:
        """Bring the run up with the warmed-up model, attempt the held-out tasks, and print what became of them."""
        models, _ = await self._ensure_models()
        results: dict[str, list[tuple[float, str]]] = defaultdict(list)
        async with self._up(models):
            measured = await self._measure(
                repeats, lambda ep, reward: results[ep.task.id].append((reward, ep.episode_id))
            )
            await asyncio.sleep(1.0)  # the collector writes transcripts within a second
            self._show(measured, results)

    def _show(self, measured: HeldOut, results: dict[str, list[tuple[float, str]]]) -> None:
        rows = [one for attempts in results.values() for one in attempts]
        run = open_run(self._folder.path)
        for reward, episode_id in sorted(rows)[:: max(1, len(rows) // SHOWN)]:
            print(f"--- reward {reward:.3f}")
            detail = run.episode(episode_id)
            for turn in detail.turns:
                for message in turn.messages:
                    said = message.get("tool_calls") or message.get("content")
                    print(f"  {turn.agent or turn.policy} {message['role']}: {said!r}")
                print(f"    ({turn.prompt_tokens} prompt tokens, {turn.sampled_tokens} sampled, {turn.finish_reason})")
        unequal = sum(len({round(reward, 6) for reward, _ in attempts}) > 1 for attempts in results.values())
        print(
            f"{measured}\ntasks with unequal rewards in {len(rows) // max(len(results), 1)} attempts: {unequal} of {len(results)}"
        )

    async def _ensure_models(self) -> tuple[dict[str, Path], float]:
        """Return policy -> model folder, and the seconds that it took."""
        began, models = time.monotonic(), {}
        for policy, module in self._manifest.models.items():
            models[policy] = self._runs.parent / "models" / f"{self._name}-{policy}-{self._seed}"
            self._say(f"toy model of {policy}: made once, then found in the cache")
            process = await self._start("-m", "swarmq.toy_model", locate(self._name, module), str(models[policy]))
            await self._end(process, "the toy model could not be made")
        first = next(iter(models.values()))
        return {policy: models.get(policy, first) for policy in self._plain.policies}, time.monotonic() - began

    @contextlib.asynccontextmanager
    async def _up(self, models: dict[str, Path]) -> AsyncIterator[asyncio.Event]:
        """Keep `swarmq up` while the context is open; the event says that the last step is made."""
        shutil.rmtree(self._folder.path, ignore_errors=True)
        sets = [f"run={self._run}", f"folder={self._runs}"]
        for policy, settings in self._plain.policies.items():
            sets.append(f"policies.{policy}.model={models[policy]}")
            if settings.trained:
                train = f"policies.{policy}.train"
                sets += [f"{train}.max_steps={self._manifest.steps}", f"{train}.seed={self._seed}"]
        words = [word for text in sets for word in ("--set", text)]
        process = await self._start("-m", "swarmq", "up", str(self._job_file), *words, piped=True)
        assert process.stdout is not None
        up, learned, lines = asyncio.Event(), asyncio.Event(), []

        async def listen(output: asyncio.StreamReader) -> None:
            async for line in output:
                text = line.decode(errors="replace").rstrip()
                lines.append(text)
                self._say(text)
                for mark, event in ((STARTED, up), (LEARNED, learned)):
                    if mark in text:
                        event.set()

        listening = asyncio.create_task(listen(process.stdout))
        try:
            await _first(up.wait(), process.wait(), within_s=START_S)
            if not up.is_set():
                raise CourseError(f"`swarmq up` did not start within {START_S:.0f} s: {' / '.join(lines[-5:])}")
            yield learned
        finally:
            await self._stop(process)
            listening.cancel()

    async def _train(self, learned: asyncio.Event) -> None:
        """Feed, and work until the last step. Raises CourseError when the time is over or the worker ends."""
        for kind, target in self._manifest.feeds.items():
            feed = ("feed", str(self._folder.path), locate(self._name, target), "--kind", kind)
            more = ("--epochs", str(self._manifest.epochs), "--seed", str(self._seed))
            await self._end(await self._start("-m", "swarmq", *feed, *more), f"`swarmq feed` of kind {kind} failed")
        each = str(max(1, self._manifest.concurrency // len(self._manifest.feeds)))
        targets = [f"{kind}={locate(self._name, agent)}" for kind, agent in self._manifest.agents.items()]
        commands = [["worker", *targets, "--concurrency", each]] if targets else []
        commands += [
            self.command(kind, "--queue", "--kind", kind, "--concurrency", each) for kind in self._manifest.commands
        ]
        workers = [await self._start("-m", "swarmq", *command) for command in commands]
        limit_s = 60 * self._manifest.minutes
        try:
            await _first(learned.wait(), *(worker.wait() for worker in workers), within_s=limit_s)
            if not learned.is_set():
                steps = self._read_steps()[0]
                why = (
                    "a worker ended"
                    if any(worker.returncode is not None for worker in workers)
                    else f"{self._manifest.minutes:g} minutes were over"
                )
                raise CourseError(f"{why} after step {steps} of {self._manifest.steps}; logs: {self._folder.logs}")
        finally:
            for worker in workers:
                await self._stop(worker)

    async def _measure(
        self,
        repeats: int | None = None,
        keep: Callable[[Episode, float], None] = lambda _ep, _reward: None,
        *,
        policy: str | None = None,
    ) -> HeldOut:
        """Return the held-out reward of a policy, by default of those that the agents choose."""
        repeats = repeats or self._manifest.held_out_repeats
        found: dict[str, KindReport] = {
            kind: await self._measure_command(kind, repeats) for kind in self._manifest.commands
        }
        agents = {**self._manifest.agents, **self._manifest.held_out_agents}
        async with AsyncSwarmClient(str(self._folder.path)) as client:
            for kind, agent in agents.items():
                report = await client.evaluate(
                    list(read_tasks(locate(self._name, self._manifest.held_out[kind]))),
                    _kept(load_object(locate(self._name, agent)), keep),
                    repeats=repeats,
                    concurrency=self._manifest.concurrency,
                    policies=policy,
                    kind=kind,
                    attempt_timeout_s=ATTEMPT_S,
                    retry_pause_s=1.0,
                    progress=False,
                )
                found[kind] = KindReport(report.mean_reward, report.standard_error or 0.0, report.n, report.failed)
        if unscored := [kind for kind, one in found.items() if one.reward is None]:
            raise CourseError(f"no held-out attempt of {', '.join(unscored)} finished; logs: {self._folder.logs}")
        means = {kind: one.reward or 0.0 for kind, one in found.items()}
        measured = HeldOut(
            reward=math.fsum(means.values()) / len(means),
            standard_error=math.hypot(*(one.standard_error for one in found.values())) / len(means),
            episodes=sum(one.episodes for one in found.values()),
            failed=sum(one.failed for one in found.values()),
            by_kind=means,
        )
        self._say(
            f"held-out reward {f'of {policy} ' if policy else ''}{measured.reward:.3f} ± {measured.standard_error:.3f} (standard error)"
        )
        return measured

    async def _measure_command(self, kind: str, repeats: int) -> KindReport:
        """Evaluate by `swarmq run --eval`, and read what it prints."""
        tasks = locate(self._name, self._manifest.held_out[kind])
        counts = ("--repeats", str(repeats), "--concurrency", str(self._manifest.concurrency))
        process = await self._start(
            "-m", "swarmq", *self.command(kind, "--tasks", tasks, "--eval", "--kind", kind, *counts), piped=True
        )
        printed = (await process.communicate())[0].decode(errors="replace")
        return read_report(printed)

    def command(self, kind: str, *options: str) -> list[str]:
        """Return the arguments of `swarmq` that run the kind's command."""
        given = self._manifest.commands[kind].replace("$PWD", str(ROOT))
        return ["run", *options, "--logs", str(self._folder.logs / "attempts"), *shlex.split(given)]

    def _read_steps(self) -> tuple[int, dict[int, float], int]:
        """Return the newest step of the slowest policy, step -> reward, and how many episodes were trained."""
        rewards: dict[int, list[float]] = defaultdict(list)
        newest: dict[str, int] = {}
        episodes = 0
        if self._folder.events.exists():
            for event in read_events(self._folder.events):
                if event.name == "step":
                    version = int(event.fields["version"])
                    newest[event.fields.get("policy", "main")] = version
                    episodes += int(event.fields.get("episodes", 0))
                    if (reward := event.fields["reward"]) is not None:
                        rewards[version].append(float(reward))
        return (
            min(newest.values(), default=0),
            {version: round(math.fsum(those) / len(those), 4) for version, those in sorted(rewards.items())},
            episodes,
        )

    async def _start(self, *arguments: str, piped: bool = False) -> asyncio.subprocess.Process:
        self._folder.path.parent.mkdir(parents=True, exist_ok=True)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=ROOT,
            env=os.environ | {"SWARMQ_INVITE": str(self._folder.path), "COLUMNS": "240", "PATH": PATH},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else None,
            stderr=asyncio.subprocess.STDOUT if piped else None,
            preexec_fn=die_with_parent,
        )

    async def _end(self, process: asyncio.subprocess.Process, problem: str) -> None:
        if status := await process.wait():
            raise CourseError(f"{problem} (exit status {status})")

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_S)
        if process.returncode is None:
            process.kill()
            await process.wait()

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        print(f"[{self._name} {self._seed} {seconds:4.0f} s] {text}", flush=True)


def _kept(agent: Callable[..., Any], keep: Callable[[Episode, float], None]) -> Callable[..., Any]:
    """Return an agent that also hands its rewards to `keep`."""

    def note(ep: Any, returned: Any) -> Any:
        outcome = returned if isinstance(returned, Outcome) else Outcome(reward=float(returned))
        rewards = [outcome.reward] if outcome.reward is not None else list((outcome.rewards or {}).values())
        keep(ep, math.fsum(rewards) / max(len(rewards), 1))
        return returned

    if asyncio.iscoroutinefunction(agent):

        @functools.wraps(agent)
        async def attempt_async(ep: Any) -> Any:
            return note(ep, await agent(ep))

        return attempt_async

    @functools.wraps(agent)
    def attempt(ep: Any) -> Any:
        return note(ep, agent(ep))

    return attempt


async def _first(*waits: Any, within_s: float) -> None:
    """Return when one of the waits is over, or the time."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def read_report(printed: str) -> KindReport:
    """Read the report that `swarmq run --eval` prints, which has an interval of 1.96 standard errors on either side."""
    if (found := REPORT.search(printed)) is None:
        return KindReport(None, 0.0, 0, 0)
    reward, interval, episodes, failed = found.groups()
    return KindReport(float(reward), float(interval or 0.0) / Z95, int(episodes), int(failed))


def rows_in(folder: Path) -> Iterator[Row]:
    """Yield the rows of a folder that can be read."""
    for path in sorted((folder / "rows").glob("*.json")):
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(path.read_bytes(), type=Row)


if __name__ == "__main__":
    main()
