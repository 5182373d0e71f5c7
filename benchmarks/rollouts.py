"""Rollouts in FP8 and with n-gram drafts beside plain ones: speed, and how far log-probabilities are from the learner's.

    python -m benchmarks.rollouts --size demo --warm-steps 20 5 --random tiny --streams 4 --seconds 2 --ways plain ngram --out /tmp/out
    python -m benchmarks.rollouts --size 85m --random 1.7b --device cuda          # one H200
    python -m benchmarks.rollouts --size 85m --device cuda --ways plain ngram ngram_vllm ngram_vllm_gpu --large-ways    # kinds of drafts

Two models. A small one is warmed up by demonstrations and asked in a loop of tool calls (`--loop files`: of calls that write a whole file),
as agents ask: text that repeats itself, and probabilities that mean something. A large one has random weights and samples long answers: how fast engines compute. Each way
is an engine of its own, all on one GPU; they start side by side, get their weights by a push, and are then asked one after the other, forwards
and backwards; the first round is not counted. Tokens are counted by vLLM's own counter. The small model's answers are compared
with the log-probabilities of transformers, in the learner's precision.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import aiohttp
import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import report
from benchmarks.learns import SIZES, ensure_model, release_memory
from benchmarks.loop.model import make_model
from benchmarks.proxy_h200 import sampled
from benchmarks.timelines.run import SHAPES
from benchmarks.tool_loops import LOOPS, Loop
from swarmq.config import EngineSettings, Policy
from swarmq.engine.auth import make_auth_headers
from swarmq.engine.server.launch import EngineProcess
from swarmq.runtime.processes import find_free_port
from swarmq.weights.push.pusher import WeightPusher

NGRAM = "ngram"
USUAL_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "fp8_cache": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    NGRAM: {"speculation": "ngram"},
}
"""Name of a way to sample -> its settings of `engine`."""
VLLM_DRAFTS = {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
WAYS = USUAL_WAYS | {
    f"{NGRAM}_vllm{place}": {
        "arguments": ("--speculative-config", json.dumps({"method": f"ngram{place}"} | VLLM_DRAFTS))
    }
    for place in ("", "_gpu")
}
"""vLLM's own drafts too: five tokens in each step, from the same conversation; `ngram` without asynchronous scheduling, `ngram_gpu` with it."""
SMALL, LARGE = "small", "large"
CACHE_BYTES = {SMALL: 64 << 20, LARGE: 80 << 20}
"""Of keys and values, for each stream."""
PROMPT, ANSWER = 512, 256
"""Tokens of a call to the large model."""
RAMP_S = 1.5
"""Seconds between the first call and the first counted token."""
GROUP = 8
"""Number of agents of the small model that solve the same problems."""
COMPARED = 128
"""Number of answers whose log-probabilities are compared."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, and the function that asks it."""

    model: str
    way: str
    engine: Any
    http: Any
    ask: Any
    """Coroutine function that asks for one answer after another; of a small model, in dialogues."""
    answers: list[Answer]
    """Newest answers of a small model."""
    rates: list[float]

    @property
    def name(self) -> str:
        return f"{self.model}_{self.way}"


def main() -> None:
    arguments = parse()
    place = report.place(arguments.device)
    with tempfile.TemporaryDirectory(prefix="swarmq-rollouts-", dir=arguments.scratch) as folder:
        served, gaps, pauses, accepted = asyncio.run(measure(Path(folder), arguments))
    rates = {one.name: statistics.median(one.rates) for one in served}
    served = [one for one in served if f"{one.model}_plain" in rates]  # every way is compared with it
    detail = {
        "tokens_per_s": {one.name: one.rates for one in served},
        "gaps": gaps,
        "pause_s": pauses,
        "accepted": accepted,
        "tokens_of_an_answer": {
            one.name: statistics.mean(len(answer.ids) for answer in one.answers) for one in served if one.answers
        },
        "streams": arguments.streams,
        "loop": arguments.loop,
        "models": {SMALL: arguments.size, LARGE: arguments.random},
    }
    rows = [[one.name, rates[one.name], ratio(rates, one), *gaps.get(one.name, {}).values()] for one in served]
    print(report.table(("engine", "tokens/s", "over plain"), [row[:3] for row in rows]))
    for name, gap in gaps.items():
        print(name, gap)
    print(f"accepted {accepted}, tokens of an answer {detail['tokens_of_an_answer']}")
    figures = {f"tokens_per_s_{name}": rate for name, rate in rates.items()}
    eights = [one for one in served if one.way.startswith("fp8")]
    if eights:
        own = {f"ratio_{one.name}": ratio(rates, one) for one in eights}
        own |= {f"k3_{name}": gap["k3"] for name, gap in gaps.items()}
        large = [own[f"ratio_{one.name}"] for one in eights if one.model == LARGE]
        own |= {"rollout_ratio": max(large)} if large else {}
        save(
            f"fp8_{place}",
            {name: value for name, value in figures.items() if NGRAM not in name} | own,
            detail,
            arguments,
        )
    drafts = [one for one in served if one.way.startswith(NGRAM)]
    if drafts:
        own = {f"tokens_ratio_{one.model}{ending(one)}": ratio(rates, one) for one in drafts}
        small = next((one for one in drafts if one.model == SMALL), drafts[0])
        own |= {"tokens_ratio": ratio(rates, small)}
        own |= {f"logprob_max_abs{ending(one)}": gaps[one.name]["max_abs"] for one in drafts if one.name in gaps}
        if f"{SMALL}_plain" in gaps:
            own |= {"logprob_max_abs_plain": gaps[f"{SMALL}_plain"]["max_abs"]}
        save(
            f"spec_{place}" if arguments.loop == "calls" else f"spec_{arguments.loop}_{place}",
            {name: value for name, value in figures.items() if "fp8" not in name} | own,
            detail,
            arguments,
        )


def save(name: str, figures: dict[str, float], detail: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write figures beside those of other scripts that are there."""
    before, other = report.kept(name, out=arguments.out)
    print(report.save(name, before | figures, detail=other | detail, out=arguments.out))


def ending(one: Served) -> str:
    """Return the end of the name of a figure of a way with drafts; empty for that of `engine.speculation`."""
    return one.way.removeprefix(NGRAM)


def ratio(rates: dict[str, float], one: Served) -> float:
    return rates[one.name] / rates[f"{one.model}_plain"]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="85m", choices=SIZES, help="of the model that is warmed up")
    parser.add_argument("--random", default="1.7b", choices=sorted(SHAPES), help="of the model of random weights")
    parser.add_argument("--ways", nargs="+", default=list(USUAL_WAYS), choices=WAYS, help="of the small model")
    parser.add_argument("--large-ways", nargs="*", default=list(USUAL_WAYS), choices=WAYS)
    parser.add_argument("--loop", default="calls", choices=LOOPS, help="of the small model's agents (tool_loops.py)")
    parser.add_argument("--streams", type=int, default=32, help="of the small model")
    parser.add_argument("--large-streams", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=2.0, help="for which tokens are counted each time")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--deadline",
        type=float,
        default=3600.0,
        help="seconds after the start of engines from which on no third round begins",
    )
    parser.add_argument("--warm-steps", type=int, nargs=2, default=(600, 100), metavar=("COPYING", "SETTLING"))
    parser.add_argument("--api-servers", type=int, default=2, help="of each engine on a GPU")
    parser.add_argument("--scratch", help="where models are written")
    arguments = parser.parse_args()
    for ways in (arguments.ways, arguments.large_ways):
        if ways and "plain" not in ways:
            parser.error("every way is compared with plain: name it, too")
    return arguments


async def measure(
    folder: Path, arguments: argparse.Namespace
) -> tuple[list[Served], dict[str, dict[str, float]], dict[str, float], dict[str, float]]:
    """Return the engines with their rates, and by engine the gaps of log-probabilities, the pauses for the push and the drafted tokens that
    were accepted in a step of a request."""
    fresh: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
    warming = asyncio.create_task(warm_up(folder / SMALL, arguments, fresh))
    random_model = folder / LARGE
    random_model.mkdir()
    await asyncio.to_thread(make_model, random_model, arguments.random, arguments.device)
    async with contextlib.AsyncExitStack() as stack:
        began = time.monotonic()
        wanted = [(SMALL, way, await fresh) for way in arguments.ways]
        wanted += [(LARGE, way, random_model) for way in arguments.large_ways]
        starting = [
            asyncio.create_task(stack.enter_async_context(serve(folder, model, way, place, arguments)))
            for model, way, place in wanted
        ]
        served = [one for one in await asyncio.gather(*starting, return_exceptions=True) if not failed(one)]
        print(f"{len(served)} engines after {time.monotonic() - began:.0f} s", flush=True)
        trained = await warming
        release_memory()
        print(f"warm start after {time.monotonic() - began:.0f} s", flush=True)
        pauses = {}
        for one in [*served]:
            source = trained if one.model == SMALL else random_model
            with leave_out(one, served):
                pauses[one.name] = await asyncio.to_thread(push, one, source, folder, arguments.device)
        for number in range(1 + arguments.repeats):
            if number > 1 and time.monotonic() - began > arguments.deadline:
                print(f"no time left for round {number} of {arguments.repeats}", flush=True)
                break  # two rounds are enough to compare
            for one in [*reversed(served)] if number % 2 else [*served]:
                with leave_out(one, served):
                    rate = await count(one, arguments)
                    print(f"{one.name}: {rate:.0f} tokens/s", flush=True)
                    if number:
                        one.rates.append(rate)
        accepted = {one.name: await count_accepted(one) for one in served if one.way.startswith(NGRAM)}
    gaps = await asyncio.to_thread(compare, served, trained, arguments.device)
    return served, gaps, pauses, accepted


@contextlib.contextmanager
def leave_out(one: Served, served: list[Served]) -> Iterator[None]:
    """Print what goes wrong with an engine, and measure the others all the same."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        print(f"{one.name} is left out", flush=True)
        served.remove(one)


def failed(outcome: Served | BaseException) -> TypeGuard[BaseException]:
    """Return whether an engine did not start, and print that; the others are measured all the same."""
    if isinstance(outcome, BaseException):
        print(f"an engine did not start: {outcome}", flush=True)
    return isinstance(outcome, BaseException)


async def warm_up(folder: Path, arguments: argparse.Namespace, fresh: asyncio.Future[Path]) -> Path:
    """Warm a model up and return its folder; `fresh` gets the folder of its first weights as soon as it is there."""
    loop = asyncio.get_running_loop()

    def report_fresh(made: Path) -> None:
        loop.call_soon_threadsafe(fresh.set_result, made)

    try:
        return await asyncio.to_thread(
            ensure_model,
            folder,
            SIZES[arguments.size],
            0,
            arguments.warm_steps,
            loop=LOOPS[arguments.loop],
            report_fresh=report_fresh,
        )
    except Exception as error:
        if not fresh.done():
            fresh.set_exception(error)
        raise


@contextlib.asynccontextmanager
async def serve(
    folder: Path, model: str, way: str, place: Path, arguments: argparse.Namespace
) -> AsyncIterator[Served]:
    streams = arguments.streams if model == SMALL else arguments.large_streams
    cuda = arguments.device == "cuda"
    extra = ["--kv-cache-memory-bytes", str(CACHE_BYTES[model] * streams)] if cuda else []
    extra += ["--api-server-count", str(arguments.api_servers)] if cuda else []
    chosen = dict(WAYS[way])
    settings = EngineSettings(
        max_model_len=1024,
        dtype="bfloat16" if cuda or "quantization" in chosen else "auto",
        gpu_memory_utilization=0.1 if cuda else None,
        arguments=("--max-num-seqs", str(max(streams, 8)), *extra, *chosen.pop("arguments", ())),
        **chosen,
    )
    name = f"{model}_{way}"
    engine = EngineProcess(
        Policy(model=str(place), engine=settings),
        port=find_free_port(),
        log_path=(arguments.out or folder) / f"engine.{name}.log",
        progress=lambda stage: print(f"{name}: {stage}", flush=True),
    )
    timeout, limits = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with (
        engine,
        aiohttp.ClientSession(
            engine.url, headers=make_auth_headers(engine.secret), timeout=timeout, connector=limits
        ) as http,
    ):
        answers: list[Answer] = []
        ask = (
            dialogues(http, str(place), LOOPS[arguments.loop], answers) if model == SMALL else completions(http, place)
        )
        yield Served(model=model, way=way, engine=engine, http=http, ask=ask, answers=answers, rates=[])


def push(one: Served, source: Path, folder: Path, device: str) -> float:
    """Push weights, which the engine quantises, and return the seconds for which it paused to take them."""
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device)
    pusher = WeightPusher([one.engine.url], folder, secret=one.engine.secret)
    pause_s: float = pusher.push(network.named_parameters(), 1).pause_s
    return pause_s


async def count(one: Served, arguments: argparse.Namespace) -> float:
    """Return the tokens per second with all streams open."""
    streams = arguments.streams if one.model == SMALL else arguments.large_streams
    del one.answers[:]
    asking = [asyncio.create_task(one.ask(number)) for number in range(streams)]
    await asyncio.sleep(RAMP_S)
    before, began = await sampled(one.http, one.engine), time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    tokens, took_s = await sampled(one.http, one.engine) - before, time.perf_counter() - began
    if failed := [task.exception() for task in asking if task.done()]:
        raise RuntimeError(f"{one.name}: {failed[0]!r}")
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return tokens / took_s


async def count_accepted(one: Served) -> float:
    """Return the drafted tokens that were accepted in a step of a request, by vLLM's counters."""
    async with one.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    accepted, drafts = (
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:spec_decode_num_{what}_total"))
        for what in ("accepted_tokens", "drafts")
    )
    return accepted / drafts if drafts else 0.0


def completions(http: aiohttp.ClientSession, place: Path) -> Callable[[int], Awaitable[None]]:
    """Ask for long answers to random prompts, half to one and a half times as long as `ANSWER`."""

    async def ask(number: int) -> None:
        dice = random.Random(number)
        while True:
            body = {
                "model": str(place),
                "token_ids": [dice.randrange(300, 2000) for _ in range(PROMPT)],
                "sampling_params": {
                    "max_tokens": dice.randint(ANSWER // 2, ANSWER * 3 // 2),
                    "logprobs": 0,
                    "ignore_eos": True,
                },
            }
            await post(http, "/inference/v1/generate", body)

    return ask


def dialogues(
    http: aiohttp.ClientSession, model: str, loop: Loop, answers: list[Answer]
) -> Callable[[int], Awaitable[None]]:
    """Run an agent, one task after another, in groups as in training."""

    async def ask(number: int) -> None:
        for task in loop.tasks(1000 + number // GROUP):
            messages = loop.opening(task)
            for turn in range(loop.max_turns):
                body = {
                    "model": model,
                    "messages": messages,
                    "tools": loop.tools,
                    "temperature": 1.0,
                    "max_tokens": loop.max_tokens,
                    "logprobs": True,
                    "return_token_ids": True,
                }
                answer = await post(http, "/v1/chat/completions", body)
                choice = answer["choices"][0]
                logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                answers.append(Answer(prompt=answer["prompt_token_ids"], ids=choice["token_ids"], logprobs=logprobs))
                message = choice["message"]
                if not message.get("tool_calls"):
                    break
                kept = ("role", "content", "tool_calls")
                messages.append({key: message[key] for key in kept if message.get(key) is not None})
                for call in message["tool_calls"]:
                    result = loop.answer(task, turn, call)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    return ask


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with http.post(path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {(await response.text())[:500]}")
        return await response.json()


def compare(served: list[Served], trained: Path, device: str) -> dict[str, dict[str, float]]:
    """Return the gaps between transformers, with FP32 weights under the learner's precision, and each engine of the small model."""
    network = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).to(device).eval()
    found = {}
    for one in served:
        if chosen := [answer for answer in one.answers if answer.ids][:COMPARED]:
            gap = np.concatenate([score(network, answer, device) - np.array(answer.logprobs) for answer in chosen])
            ratios = np.exp(np.minimum(gap, 20.0))
            found[one.name] = {
                "tokens": float(len(gap)),
                "k3": float(np.mean(ratios - gap - 1)),
                "mean_abs": float(np.abs(gap).mean()),
                "max_abs": float(np.abs(gap).max()),
                "p99": float(np.quantile(np.abs(gap), 0.99)),
                "effective_samples": float(ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)),
            }
    return found


@torch.no_grad()
def score(network: Any, answer: Answer, device: str) -> np.ndarray:
    ids = torch.tensor([[*answer.prompt, *answer.ids]], device=device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = network(ids).logits[0, len(answer.prompt) - 1 : -1].float()
    chosen = torch.tensor(answer.ids, device=device)[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].double().cpu().numpy()


if __name__ == "__main__":
    main()
