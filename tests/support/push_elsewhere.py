"""A learner's push to an engine on another machine: two machines of `benchmarks.hosts.machines`, and what runs on each of them."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from benchmarks.hosts.machines import Switch
from transformers import AutoModelForCausalLM

from support.engine import KNOWN, SECRET, tiny_policy
from swarmq.engine.server.launch import EngineProcess
from swarmq.weights.push.engine_control import EngineControl
from swarmq.weights.push.pusher import WeightPusher
from swarmq.weights.receiver.process import keep_receiver

PORT = 8000
PROMPT = [(7 * i) % 500 for i in range(64)]
PATIENCE_S = 600.0


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner's machine saw."""

    methods: list[str]
    """How the weights travelled."""
    gap: float
    """Largest difference in nats between what the engine samples from after the push and the pushed weights."""
    gap_before: float
    """The same with the weights that the engine had before."""


def push_between_machines(model: Path, *, gpus: tuple[int, int] | None) -> Pushed:
    """Push other weights of the model from one machine to an engine on another. `gpus`: of the learner and of the engine; None: none."""
    learner_gpu, engine_gpu = gpus or ("", "")
    program = [sys.executable, "-m", "support.push_elsewhere"]
    with Switch() as switch, switch.machine("learner") as learner, switch.machine("engine") as engine:
        engine.boot({"engine": [*program, "serve", engine.address, str(model), str(engine_gpu)]})
        url = f"http://{engine.address}:{PORT}"
        try:
            output = learner.run([*program, "push", url, str(model), str(learner_gpu)])
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{engine.logs()}") from error
        told = next(
            (line for line in reversed(output.splitlines()) if line.startswith("{")), ""
        )  # NCCL may print after it
        assert told, f"{output}\n{engine.logs()}"
    return msgspec.json.decode(told, type=Pushed)


async def serve(address: str, model: str, gpu: str) -> None:
    """Run an engine with a weight receiver beside it, until killed."""
    folder = Path(tempfile.mkdtemp())
    # with the cache's size, vLLM need not measure a GPU that others use, too
    arguments = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)) if gpu else ()
    async with (
        keep_receiver(address, 0, secret=SECRET, log_path=folder / "receiver.log") as receiver,
        EngineProcess(
            tiny_policy(Path(model), *arguments, max_model_len=512),
            host=address,
            port=PORT,
            log_path=folder / "engine.log",
            secret=SECRET,
            gpus=[int(gpu)] if gpu else None,
            environment=receiver.environment,
        ) as engine,
    ):
        await engine.wait()


async def push(url: str, model: str, gpu: str) -> None:
    """Wait for the engine, push, and print a `Pushed` as JSON."""
    device = f"cuda:{gpu}" if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    former = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    async with asyncio.timeout(PATIENCE_S), EngineControl(url, secret=SECRET) as engine:
        while not await engine.is_healthy():  # noqa: ASYNC110 - vLLM sends no notice
            await asyncio.sleep(0.2)
    pusher = WeightPusher([url], Path(tempfile.mkdtemp()), secret=SECRET, patience_s=0)
    report = await asyncio.to_thread(pusher.push, network.named_parameters(), 1)
    ids, logprobs = await sample(url, model)
    gaps = [
        max(abs(a - b) for a, b in zip(logprobs, score(weights, ids), strict=True)) for weights in (network, former)
    ]
    seen = Pushed(methods=list(report.methods.values()), gap=gaps[0], gap_before=gaps[1])
    sys.stdout.write(f"{msgspec.json.encode(seen).decode()}\n")


async def sample(url: str, model: str) -> tuple[list[int], list[float]]:
    """Return sampled tokens and their log-probabilities as the engine reports them."""
    sampling: dict[str, Any] = {"max_tokens": 16, "logprobs": 0, "ignore_eos": True}
    body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
    async with (
        aiohttp.ClientSession(headers=KNOWN) as http,
        http.post(f"{url}/inference/v1/generate", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


@torch.no_grad()
def score(network: torch.nn.Module, ids: list[int]) -> list[float]:
    """Return the log-probabilities of the tokens after PROMPT."""
    whole = torch.tensor([[*PROMPT, *ids]], device=next(network.parameters()).device)
    logits = network(input_ids=whole).logits[0, len(PROMPT) - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, whole[0, len(PROMPT) :, None])[:, 0].tolist()
    return found


if __name__ == "__main__":
    asyncio.run({"serve": serve, "push": push}[sys.argv[1]](*sys.argv[2:]))
