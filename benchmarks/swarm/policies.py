"""Two models of different sizes trained in one episode: an opener and a closer solve a chain sum that neither can alone.

    question ──> opener: may call the tool once ──> what is left ──> closer: may call the tool once, then answers

The tool does one operation, and the problems have two, so the answer is right when both work and pass on what they
found. Both models are warmed up to guess early more often than not; that working pays is left to learning. The
opener is paid by reasoning-gym's verifier of the whole problem, the closer by whether it solved what it was handed,
so a spoilt hand-over is not the closer's fault. In the middle of the run the closer's learner is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import msgspec
from openai import OpenAI

from swarmq import AsyncSwarmClient, Episode, Outcome, SwarmTask
from swarmq.broker.amqp import AmqpBroker
from swarmq.collector.ledger import read_fates
from swarmq.config import EngineSettings, GroupSettings, Policy, SamplingDefaults, SwarmJob, Train
from swarmq.demo.agent import MAX_TOKENS, TOOLS, opening, run_tool, simplify
from swarmq.demo.model_recipe import DemoRecipe, user_cache_folder
from swarmq.demo.problems import SPLIT_SIZE, Problem, Split, problems, score, solution
from swarmq.learner.store.batch_log import read_records
from swarmq.observe.monitor import Follower, follow
from swarmq.toy_model.recipe import Architecture
from swarmq.up import Deployment, deploy

CACHE = user_cache_folder()
OPENER, CLOSER = "opener", "closer"
RECIPES = {
    OPENER: DemoRecipe(steps=420, settling_steps=80),
    CLOSER: DemoRecipe(steps=420, settling_steps=80, architecture=Architecture(hidden=96, heads=3, feed_forward=256)),
}
SEED_STRIDE = 1_000_000
HELD_OUT = 96
CONCURRENCY = 16
PATIENCE_S = 7200.0
MAKE = "import sys; from benchmarks.swarm.policies import make; make(sys.argv[1])"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed came to."""

    seed: int
    before: dict[str, float]
    """Policy -> held-out reward of the warmed-up models."""
    after: dict[str, float]
    steps: dict[str, int]
    seconds: float
    killed_at: int
    """Step of the closer at which its learner was killed."""
    trained: dict[str, int]
    twice: int
    """Episodes that one policy trained more than once."""
    fates: dict[str, int]


def make(policy: str) -> None:
    """Warm a policy's model up, unless it is in the cache, and print its folder."""
    from swarmq.demo.warmup import load_or_warm_up  # noqa: PLC0415 - torch stays in the process that needs it

    print(load_or_warm_up(CACHE, RECIPES[policy], report=lambda _: None))


def run(seed: int, *, steps: int) -> Result:
    models = ensure_models()
    with tempfile.TemporaryDirectory(prefix="swarmq-policies-") as folder:
        return asyncio.run(_run(job_of(models, folder=folder, seed=seed, steps=steps), seed, steps))


def ensure_models() -> dict[str, str]:
    """Policy -> folder; both are warmed up side by side, once."""
    print("models: warmed up once, then found in the cache", flush=True)
    making = {
        policy: subprocess.Popen([sys.executable, "-c", MAKE, policy], stdout=subprocess.PIPE, text=True)
        for policy in RECIPES
    }
    said = {policy: process.communicate()[0] for policy, process in making.items()}
    if failed := [policy for policy, process in making.items() if process.returncode]:
        raise RuntimeError(f"the models of {' and '.join(failed)} could not be made; what they said is above")
    return {policy: text.split()[-1] for policy, text in said.items()}


def job_of(models: dict[str, str], *, folder: str, seed: int, steps: int) -> SwarmJob:
    def policy(name: str) -> Policy:
        return Policy(
            model=models[name],
            engine=EngineSettings(max_model_len=256, dtype="float32", arguments=("--max-num-seqs", "64")),
            sampling=SamplingDefaults(max_tokens=MAX_TOKENS),
            train=Train(
                learning_rate=3e-4,
                warmup_steps=3,
                max_steps=steps,
                gradient_checkpointing=False,
                checkpoint_every=5,
                seed=seed,
            ),
        )

    return SwarmJob(
        run="policies",
        folder=folder,
        mix={"sum": 1.0},
        policies={name: policy(name) for name in models},
        groups=GroupSettings(group_size=8, groups_per_batch=6, max_staleness=2),
    )


async def _run(job: SwarmJob, seed: int, steps: int) -> Result:
    async with (
        deploy(job, report=lambda line: print(f"  {line}", flush=True)) as deployment,
        AmqpBroker.open(deployment.invite.amqp_url, name="benchmark") as broker,
        follow(deployment.job, broker) as follower,
        AsyncSwarmClient(deployment.invite) as client,
    ):
        relay = Relay(client.invite.base_url)
        before = await held_out(client, relay)
        print(f"seed {seed}: held-out reward before {before}", flush=True)
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            working = tasks.create_task(
                client.run_episodes_until_all_complete(
                    pairs("train", start=seed * SEED_STRIDE), relay, concurrency=CONCURRENCY, progress=False
                )
            )
            killed_at = await kill_learner(deployment, follower, steps // 2)
            print(f"seed {seed}: killed the closer's learner at step {killed_at}", flush=True)
            await deployment.learners_done.wait()
            working.cancel()
        seconds = time.monotonic() - began
        after = await held_out(client, relay)
        print(f"seed {seed}: held-out reward after {after}, {seconds:.0f} s", flush=True)
    counts = {
        name: Counter(i for r in read_records(job.run_folder.batch_log(name)) for i in r.index.trained)
        for name in job.policies
    }
    return Result(
        seed=seed,
        before=before,
        after=after,
        steps={
            name: max(r.index.version for r in read_records(job.run_folder.batch_log(name))) for name in job.policies
        },
        seconds=seconds,
        killed_at=killed_at,
        trained={name: len(count) for name, count in counts.items()},
        twice=sum(times > 1 for count in counts.values() for times in count.values()),
        fates=dict(Counter(f"{f.state} {f.reason}".strip() for f in read_fates(job.run_folder.inbox).values())),
    )


def pairs(split: Split, *, start: int = 0) -> Iterator[SwarmTask]:
    """Chain sums of two operations, without end."""
    for problem in problems("sum", split, SPLIT_SIZE - start, start=start):
        if len(solution(problem)[0].split()) == 5:
            yield SwarmTask(problem.task_id, "sum", msgspec.to_builtins(problem))


class Relay:
    """The agent: opener, then closer."""

    def __init__(self, base_url: str) -> None:
        self._openai = OpenAI(base_url=base_url, api_key="set per episode", max_retries=8, timeout=300.0)

    def __call__(self, ep: Episode) -> Outcome:
        problem = msgspec.convert(ep.payload, Problem)
        expression = solution(problem)[0]
        client = self._openai.with_options(base_url=ep.base_url, api_key=ep.api_key)
        handed = self._tool_result(self._ask(client, OPENER, opening(problem.question))) or expression
        messages = opening(problem.question.replace(expression, handed))
        message = self._ask(client, CLOSER, messages)
        if result := self._tool_result(message):
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result})
            message = self._ask(client, CLOSER, messages)
        reply = message.content or ""
        solved = score(problem, reply)
        return Outcome(
            rewards={OPENER: solved, CLOSER: float(f"<answer>{value_of(handed)}</answer>" in reply)},
            success=solved == 1.0,
        )

    def _ask(self, client: OpenAI, policy: str, messages: list[Any]) -> Any:
        completion = client.chat.completions.create(
            model=policy,
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]
            temperature=1.0,
            max_tokens=MAX_TOKENS,
        )
        return completion.choices[0].message

    def _tool_result(self, message: Any) -> str:
        """What the tool says to the first call of an answer; empty where it does not call it, or calls it wrongly."""
        if not message.tool_calls:
            return ""
        function = message.tool_calls[0].function
        result = run_tool(function.name, function.arguments)
        return "" if result.startswith("error") else result


def value_of(expression: str) -> str:
    while " " in expression:
        expression = simplify(expression)
    return expression


async def held_out(client: AsyncSwarmClient, relay: Relay) -> dict[str, float]:
    """Policy -> mean reward on problems that are never trained."""
    rewards: list[dict[str, float]] = []

    def scored(ep: Episode) -> Outcome:
        outcome = relay(ep)
        rewards.append(dict(outcome.rewards or {}))
        return outcome

    tasks = list(itertools.islice(pairs("held-out"), HELD_OUT))
    await client.evaluate(tasks, scored, concurrency=CONCURRENCY, progress=False)
    return {policy: fmean(reward[policy] for reward in rewards) for policy in RECIPES}


async def kill_learner(deployment: Deployment, follower: Follower, at: int) -> int:
    """SIGKILL the closer's learner once it has reached a step; that step."""

    def version() -> int:
        steps = follower.board.steps.get(CLOSER)
        return int(steps[-1]["version"]) if steps else 0

    await follower.until(lambda _: version() >= at)
    learner = deployment.daemons[f"learner.{CLOSER}"].process
    assert learner is not None
    os.kill(learner.pid, signal.SIGKILL)
    return version()
