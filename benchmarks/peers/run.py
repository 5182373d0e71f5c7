"""Samples a second of swarmq, verl and TRL at the same multi-turn work on one card, one after the other in this run.

Every step trains eight groups of eight episodes; an episode is eight calls of 128 tokens with about 64 tokens to read
between them (work.py). The model has random weights, FP32 master weights under BF16, AdamW, GRPO, no reference, nothing
saved. verl runs `sync` and `colocate_async`, each with its pass that computes log-probabilities again (`verl_sync`,
`verl_async`) and without (`*_bypass`), with the attention and the log-probabilities that `probe` found fastest; TRL
runs with FP32 and with BF16 weights. The best of a peer is what swarmq is compared with.

    python -m benchmarks.peers --verl-python VERL/bin/python --trl-python TRL/bin/python       # one H200, 35 minutes

Every part is saved when it ends, beside the parts of earlier runs; one that fails or takes longer than its limit is
saved with the end of its log, and the next one runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.loop.model import make_model
from benchmarks.loop.run import Asked, Size, measure, multi_process_service, show_logs
from benchmarks.peers import verl_run
from benchmarks.peers.processes import PeerError, started, tail, wait_for_lines
from benchmarks.peers.work import EPISODES, PASS_TOKENS, PROMPTS, SAMPLED, TURNS, WORDS

MEASURED, BLOCK = 8, 2
"""Number of measured steps after the warm-up, and of those whose rate is told apart: the spread of the blocks is saved. Both are
even, because slow and fast steps alternate in verl's `colocate_async`."""
WARM_UP = {"sync": 1, "colocate_async": 2}
OWN_WARM_UP = 4
"""Steps of swarmq that warm up: the first steps find episodes of agents that began together."""
SWARMQ: dict[str, dict[str, Any]] = {
    "swarmq": {},
    "swarmq_keep_cache": {"keep_cache": True},
    "swarmq_mps": {"keep_cache": True, "mps": "learner-low"},
}
"""Part -> what is asked of benchmarks/loop/run.py beyond the defaults."""
LIMITS_S = {"probe": 180.0, **dict.fromkeys(SWARMQ, 420.0)}
LIMIT_S = 480.0
"""Seconds that each of the other parts may take: verl takes five minutes from a cold disk to its first step, half of them to start vLLM."""
RETRY_S = 120.0
"""Seconds that must be left of the limit for a failed part to be tried again."""
VERL = {
    "verl_sync_bypass": ("sync", True),
    "verl_async_bypass": ("colocate_async", True),
    "verl_sync": ("sync", False),
    "verl_async": ("colocate_async", False),
}
TRL = {"trl_fp32": "float32", "trl_bf16": "bfloat16"}
PARTS = ("probe", "verl_sync_bypass", *SWARMQ, "verl_async_bypass", "trl_fp32", "verl_sync", "verl_async", "trl_bf16")
ATTENTION = "sdpa"
LOGITS = "flash"
"""Log-probabilities that verl computes where nothing was probed."""


class Fast(NamedTuple):
    """Choices with which verl is run first."""

    attention: str
    logits: str
    liger: bool = True
    checkpointing: bool = False


PLAIN = Fast(ATTENTION, LOGITS, liger=False, checkpointing=True)._asdict()


def main() -> None:
    arguments = parse()
    ends = time.monotonic() + arguments.deadline
    name = f"peers_{report.place('cuda')}"
    _, detail = report.kept(name, out=arguments.out)
    logs, failed = (arguments.out or report.RESULTS) / "logs", 0
    with tempfile.TemporaryDirectory(prefix="swarmq-peers-", dir=arguments.scratch) as scratch:
        model = Path(scratch) / "model"
        for part in arguments.parts.split(","):
            folder, began = new(Path(scratch) / part), time.monotonic()
            limit_s = min(arguments.limit or LIMITS_S.get(part, LIMIT_S), ends - began)
            print(f"{time.strftime('%H:%M:%S')} {part}: at most {limit_s:.0f} s", flush=True)
            try:
                if part in VERL | TRL and not model.exists():
                    make_model(new(model), arguments.model, "cuda")
                detail[part] = runner(part, model, arguments, detail)(folder, limit_s=limit_s)
            except Exception as error:  # the next part is measured all the same
                failed += 1
                detail[part] = {"failed": f"{type(error).__name__}: {error}"[-6000:]}
                traceback.print_exc()
                show_logs(folder)
            detail[part]["part_s"] = time.monotonic() - began
            keep_logs(folder, logs, part)
            print(f"{part}: {outcome(detail[part])}", flush=True)
            report.save(name, figures(detail), detail=detail, out=arguments.out, finished=False)
    report.save(name, figures(detail), detail=detail, out=arguments.out)
    sys.exit(failed)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order, separated by commas")
    parser.add_argument("--model", default="1.7b", choices=("tiny", "1.7b"))
    parser.add_argument("--limit", type=float, help="seconds for each part, its start included")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for all parts")
    parser.add_argument("--verl-python", default=sys.executable, help="the interpreter of an environment that has verl")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter of an environment that has TRL")
    parser.add_argument("--attention", help="of verl and TRL, instead of the fastest that was probed")
    parser.add_argument("--logits", choices=("flash", "triton", "torch", "liger"), help="of verl, likewise")
    parser.add_argument("--scratch", help="where models and run folders are written")
    return parser.parse_args()


def runner(
    part: str, model: Path, arguments: argparse.Namespace, detail: dict[str, Any]
) -> Callable[..., dict[str, Any]]:
    """Return the function that runs a part, given a folder and the limit in seconds."""
    attention = arguments.attention or fastest(detail, "attention", ATTENTION)
    if part == "probe":
        return functools.partial(probe, python=arguments.verl_python)
    if part in SWARMQ:
        return functools.partial(swarmq, model=arguments.model, **SWARMQ[part])
    if part in VERL:
        mode, bypass = VERL[part]
        fast = Fast(attention, arguments.logits or fastest(detail, "logits", LOGITS))
        return functools.partial(verl, model=model, python=arguments.verl_python, mode=mode, bypass=bypass, fast=fast)
    if part in TRL:
        asked = {"python": arguments.trl_python, "weights": TRL[part], "attention": attention}
        return functools.partial(trl, model=model, **asked)
    raise SystemExit(f"unknown part {part}; there are {', '.join(PARTS)}")


def probe(folder: Path, *, python: str, limit_s: float) -> dict[str, Any]:
    result, log = folder / "probe.json", folder / "probe.log"
    command = [python, "-m", "benchmarks.peers.theirs.verl_probe", str(result)]
    with contextlib.suppress(subprocess.TimeoutExpired), started(command, {}, log) as process:
        process.wait(limit_s)
    if not result.exists():
        raise PeerError(tail(log, 40))
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def fastest(detail: dict[str, Any], kind: str, default: str) -> str:
    probed = detail.get("probe", {}).get(kind, {})
    timed = {name: seconds for name, seconds in probed.items() if isinstance(seconds, float)}
    return min(timed, key=lambda name: timed[name], default=default)


def verl(folder: Path, *, mode: str, limit_s: float, fast: Fast, **asked: Any) -> dict[str, Any]:
    """Run verl with the choices that are fastest here, and if that fails with those that run anywhere; `settings` says which."""
    ends, steps, failed = time.monotonic() + limit_s, WARM_UP[mode] + MEASURED, ""
    for settings in (fast._asdict(), PLAIN):
        try:
            made = verl_run.run(
                new(folder / f"try{bool(failed):d}"),
                mode=mode,
                steps=steps,
                least=WARM_UP[mode] + 1,
                deadline_s=ends - time.monotonic(),
                **asked,
                **settings,
            )
        except PeerError as error:
            failed += f"with {settings}: {error}\n"
            if ends - time.monotonic() < RETRY_S:
                break
        else:
            return made | rate(made["ends"], WARM_UP[mode]) | {"failed_before": failed}
    raise PeerError(failed)


def trl(folder: Path, *, model: Path, python: str, weights: str, attention: str, limit_s: float) -> dict[str, Any]:
    settings = {
        "model": str(model),
        "folder": str(folder / "trl"),
        "steps": WARM_UP["sync"] + MEASURED,
        "micro_batch": 4,
        "weights": weights,
        "attention": attention,
        "checkpointing": False,
        "liger": True,
        "correction": False,
        "gpu_share": 0.3,
    }
    logged, log = folder / "steps.jsonl", folder / "trl.log"
    began = time.monotonic()
    command = [python, "-m", "benchmarks.peers.theirs.trl_process", json.dumps(settings), str(logged)]
    with started(command, {"TRL_EXPERIMENTAL_SILENCE": "1"}, log) as process:
        ends = wait_for_lines(
            process, logged, settings["steps"], deadline=began + limit_s, log=log, least=WARM_UP["sync"] + 1
        )
    told = [json.loads(line) for line in logged.read_text().splitlines()]
    made = {"ends": [end - began for end in ends], "settings": settings, "steps": told}
    return made | rate(made["ends"], WARM_UP["sync"])


def swarmq(folder: Path, *, model: str, limit_s: float, **settings: Any) -> dict[str, Any]:
    size = Size(
        turns=TURNS,
        sampled=SAMPLED,
        words=WORDS,
        groups=PROMPTS,
        at_once=3 * EPISODES,
        pass_tokens=PASS_TOKENS,
        gpu_share=0.32,
    )
    steps = OWN_WARM_UP + MEASURED
    asked = Asked(device="cuda", steps=steps, warm_up=OWN_WARM_UP, deadline=limit_s, **settings)
    with multi_process_service(Path(tempfile.gettempdir()), wanted=asked.mps != "off"):
        figures, detail = asyncio.run(measure(folder, model, size, asked))
    episodes = sum(step["episodes"] for step in detail["steps"])
    return {
        "samples_per_s": episodes / detail["seconds"],
        "blocks": blocks(*zip(*((step["step_s"], step["episodes"]) for step in detail["steps"]), strict=True)),
        "step_s": figures["step_s"],
        "figures": figures,
        "detail": detail,
    }


def rate(ends: list[float], warm_up: int) -> dict[str, Any]:
    """Return samples a second after the warm-up, and the seconds of each measured step."""
    each = [after - before for before, after in zip(ends[warm_up - 1 :], ends[warm_up:], strict=False)]
    made = {"samples_per_s": EPISODES * len(each) / sum(each), "step_s": sum(each) / len(each), "steps_s": each}
    return made | {"blocks": blocks(each, [EPISODES] * len(each))}


def blocks(steps_s: Sequence[float], episodes: Sequence[int]) -> list[float]:
    """Return samples a second in each whole block of steps, given the seconds and the trained episodes of each step."""
    whole = (slice(first, first + BLOCK) for first in range(0, len(steps_s) - BLOCK + 1, BLOCK))
    return [sum(episodes[block]) / sum(steps_s[block]) for block in whole]


def figures(detail: dict[str, Any]) -> dict[str, float]:
    """Return the rate of each part that ended, and the ratio of each way of running swarmq to the best part of each peer.

    While a backlog lasts, swarmq trains more than it samples; what it samples may also grow too old to be trained. So
    `*_sampled` is the ratio of the episodes that swarmq sampled to those that the peer trained.
    """
    rates = {part: detail[part]["samples_per_s"] for part in PARTS if "samples_per_s" in detail.get(part, {})}
    sampled = {
        part: detail[part]["figures"]["sampled_tokens_per_s"] / (TURNS * SAMPLED) for part in SWARMQ if part in rates
    }
    found = {f"samples_per_s_{part}": value for part, value in rates.items()} | {"multi_turn": float(TURNS)}
    found |= {f"sampled_per_s_{part}": value for part, value in sampled.items()}
    for peer in ("verl_sync", "verl_async", "trl"):
        of_peer = [value for part, value in rates.items() if part.startswith(peer)]
        for part in sampled if of_peer else ():
            ratio = f"{'trl_tuned' if peer == 'trl' else peer}_ratio{part.removeprefix('swarmq')}"
            found |= {ratio: rates[part] / max(of_peer), f"{ratio}_sampled": sampled[part] / max(of_peer)}
    return found


def outcome(made: dict[str, Any]) -> str:
    if "samples_per_s" in made:
        return f"{made['samples_per_s']:.2f} samples/s, {made['step_s']:.2f} s a step, {made['part_s']:.0f} s in all"
    return str(made.get("failed", json.dumps({key: made[key] for key in made if key != "part_s"})))[-1500:]


def keep_logs(folder: Path, logs: Path, part: str) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in (*folder.glob("*.log"), *folder.glob("try*/*.log"), *folder.glob("runs/*/logs/*.log")):
        (logs / f"{part}.{log.parent.name}.{log.stem}.txt").write_text(tail(log))


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
