"""The main job on three seeds, and how quick a client is: `python -m benchmarks.demo --seeds 0 1 2`.

Each seed is a whole `swarmq demo` in a process of its own: fresh run folder, held-out reward before and after, a client
killed half-way, every episode accounted for; what agents felt of a weight push is read from its batch log. Then, with a run up, a client script is started over and over: seconds to
its first answered completion, and, after an edit that breaks its reward function, to its first traceback. With other settings the
demo is all that runs, and its result has a name of its own:

    python -m benchmarks.demo --seeds 0 --steps 20 --name demo_lora --set policies.main.train.lora.rank=8
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import report
from swarmq.config import RunFolder
from swarmq.demo.make_model import ensure_model
from swarmq.demo.run import DemoOptions, DemoResult, demo_settings
from swarmq.learner.store.batch_log import read_records
from swarmq.messages import Turn
from swarmq.up import deploy

SCRIPTS = Path(__file__).parent / "scripts"
IMPORT = "import time; t = time.perf_counter(); from swarmq import SwarmClient; print(time.perf_counter() - t)"
REPEATS = 7


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="optimizer steps of each run; the demo's own number by default")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="KEY=VALUE; needs --name")
    parser.add_argument("--name", default="demo", help="of the result")
    options = parser.parse_args()
    if options.sets and options.name == "demo":
        parser.error("--set: give the result another --name than demo")
    results, felt = zip(*(run_seed(seed, options.steps, options.sets) for seed in options.seeds), strict=True)
    if options.sets:
        runs = msgspec.to_builtins(results, str_keys=True)
        report.save(options.name, learned(results), detail={"runs": runs, "sets": options.sets}, out=options.out)
        return
    imports = [float(_python("-c", IMPORT)) for _ in range(REPEATS)]
    answered, traced = asyncio.run(client_seconds())
    rows = [
        (
            r.seed,
            r.steps,
            min(r.held_out.items())[1],
            max(r.held_out.items())[1],
            round(r.train_s),
            r.account.begun,
            r.account.trained,
            sum(r.account.dropped.values()),
            r.account.redelivered,
            len(r.account.lost),
            len(r.account.twice),
        )
        for r in results
    ]
    heads = (
        "seed",
        "steps",
        "before",
        "after",
        "train s",
        "begun",
        "trained",
        "dropped",
        "taken over",
        "lost",
        "twice",
    )
    print(report.table(heads, rows))
    figures = {
        **learned(results),
        "client_import_s": statistics.median(imports),
        "first_completion_s": statistics.median(answered),
        "edit_to_traceback_s": statistics.median(traced),
        "pause_s": statistics.median(r.step_medians["pause_s"] for r in results),
        "pause_felt_s": statistics.median(felt),
        **{
            f"step_{key}": statistics.median(r.step_medians[key] for r in results)
            for key in ("wait_s", "rollout_s", "train_s", "push_s")
        },
    }
    detail = {
        "runs": msgspec.to_builtins(results, str_keys=True),
        "pause_felt_s": felt,
        "client_import_s": imports,
        "first_completion_s": answered,
        "edit_to_traceback_s": traced,
    }
    print(report.table(("figure", "value"), list(figures.items())))
    report.save(options.name, figures, detail=detail, out=options.out)


def learned(results: Sequence[DemoResult]) -> dict[str, float]:
    """What the runs came to, the worst of each."""
    return {
        "seeds": len(results),
        "reward_before_max": max(min(r.held_out.items())[1] for r in results),
        "reward_after_min": min(max(r.held_out.items())[1] for r in results),
        "train_seconds_max": max(r.train_s for r in results),
        "episodes_lost": sum(len(r.account.lost) for r in results),
        "episodes_twice": sum(len(r.account.twice) for r in results),
    }


def run_seed(seed: int, steps: int | None, sets: Sequence[str] = ()) -> tuple[DemoResult, float]:
    """One whole demo, and what its agents felt of a push. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory(prefix="swarmq-demo-") as folder:
        command = ["demo", "--plain", "--folder", folder, "--run", "bench", "--seed", str(seed)]
        print(f"--- seed {seed}", flush=True)
        subprocess.run(
            [
                *(sys.executable, "-m", "swarmq", *command),
                *(["--steps", str(steps)] if steps else []),
                *(word for text in sets for word in ("--set", text)),
            ],
            check=True,
        )
        run = RunFolder(Path(folder) / "bench")
        result = msgspec.json.decode((run.path / "result.json").read_bytes(), type=DemoResult)
        log = read_records(run.batch_log("main"))
        return result, pause_felt([turn for record in log for episode in record.episodes for turn in episode.turns])


def pause_felt(turns: Sequence[Turn]) -> float:
    """Seconds, median over the answers that a weight push fell into: by how much each took longer than the median of
    the other answers of its length. Answers of a length that no other has are left out."""
    calm: dict[int, list[float]] = {}
    for turn in turns:
        if len(turn.versions) == 1:
            calm.setdefault(len(turn.sampled_ids), []).append(turn.timings.total_s)
    usual = {length: statistics.median(seconds) for length, seconds in calm.items()}
    return statistics.median(
        turn.timings.total_s - usual[length]
        for turn in turns
        if len(turn.versions) > 1 and (length := len(turn.sampled_ids)) in usual
    )


async def client_seconds() -> tuple[list[float], list[float]]:
    """Seconds from the start of a client script to its first completion, and to its first traceback."""
    with tempfile.TemporaryDirectory(prefix="swarmq-clients-") as folder:
        options = DemoOptions(run="clients", folder=folder)
        job = demo_settings(options, await ensure_model(options.cache, print))
        async with deploy(job, report=print) as deployment:
            environment = os.environ | {"SWARMQ_INVITE": deployment.invite.encode()}
            return (
                await _times("first_completion.py", b"ANSWERED", environment),
                await _times("edited_reward.py", b"IndexError", environment),
            )


async def _times(script: str, mark: bytes, environment: dict[str, str]) -> list[float]:
    """Seconds until `mark` is seen; the first start warms file caches and is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPTS / script),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        seen = b""
        while mark not in seen:
            line = await process.stdout.readline()
            if not line:
                raise RuntimeError(f"{script} ended without {mark!r}: {seen.decode()}")
            seen += line
        seconds.append(time.perf_counter() - began)
        await process.wait()
    return seconds[1:]


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
