"""vLLM returns the experts of every token on a CPU: those of transformers' own router, whatever the cache and the pieces of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from support.engine import SECRET, running_engine
from support.tiny_model import tiny_experts
from swarmq.engine.client.protocol import Delta, RenderedPrompt
from swarmq.engine.client.vllm import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [(7 * i) % 500 for i in range(300)]
"""Longer than a piece, which has 256 tokens."""


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_experts("qwen3_moe"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "engine.log"
    with running_engine(tiny_experts("qwen3_moe"), log, "--enable-return-routed-experts") as running:
        yield running.url


@pytest.fixture
async def engine(url: str) -> AsyncIterator[VllmEngine]:
    async with VllmEngine.open(url, deadline_s=120.0, secret=SECRET) as engine:
        yield engine


def route(network: torch.nn.Module, tokens: Sequence[int]) -> NDArray[np.uint8]:
    """Experts by token, layer and rank."""
    layers: list[torch.Tensor] = []
    routers = [module for module in network.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]
    hooks = [router.register_forward_hook(lambda _module, _in, out: layers.append(out[2])) for router in routers]
    with torch.no_grad():
        network(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(layers, 1).numpy().astype(np.uint8)


async def sample(engine: VllmEngine, prompt: Sequence[int], count: int, *, start: int = 0, n: int = 1) -> list[Delta]:
    sampling = {"max_tokens": count, "temperature": 1.0, "logprobs": 0, "n": n, "ignore_eos": True}
    rendered = RenderedPrompt(token_ids=list(prompt), sampling=sampling | {"routed_experts_prompt_start": start})
    return [delta async for deltas in engine.generate(rendered, stream=n == 1) for delta in deltas]


def check(network: torch.nn.Module, prompt: Sequence[int], deltas: Sequence[Delta], *, start: int = 0) -> None:
    sampled = [token for delta in deltas for token in delta.token_ids]
    expected = route(network, [*prompt, *sampled])[start:-1]
    routed = deltas[-1].routed_experts
    assert routed is not None
    assert routed.num_tokens == len(expected)
    np.testing.assert_array_equal(
        np.sort(np.frombuffer(routed.ids, np.uint8).reshape(expected.shape)), np.sort(expected)
    )


async def test_experts_are_those_of_every_token_also_of_cached_ones(
    engine: VllmEngine, network: torch.nn.Module
) -> None:
    for start in (0, 0, 290):  # the second time the prompt is in the cache
        check(network, PROMPT, await sample(engine, PROMPT, 8, start=start), start=start)
    for choice in await sample(engine, PROMPT, 8, n=3):
        check(network, PROMPT, [choice])


async def test_requests_that_are_computed_together_get_their_own_experts(
    engine: VllmEngine, network: torch.nn.Module
) -> None:
    prompts = [[*PROMPT[:40], *range(k, k + 20 * k)] for k in range(1, 7)]
    for prompt, deltas in zip(prompts, await asyncio.gather(*(sample(engine, p, 9) for p in prompts)), strict=True):
        check(network, prompt, deltas)
