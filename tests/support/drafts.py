"""What drafts leave as it is, on a CPU and on a GPU: tokens, their distribution and the log-probabilities that are recorded.

In this order, because an engine tries each number of drafts in its first steps, and may leave them out afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from support.engine import Vllm, logprobs_in
from swarmq.weights.vllm_plugin.draft_counts import FEWEST

TEMPERATURE = 0.2
"""At which the tiny model's answers repeat themselves, though not always."""
SAMPLES, LENGTH = 24, 24
IMPROBABLE = 4.5
"""Standard deviations, reached once in 150,000 runs."""
LOOPED, LOOP = range(100, 120), 60
"""A prompt after which the tiny model soon repeats itself, and a number of tokens until it does."""
ROUGHLY_LOOPED = range(200, 220)
"""A prompt after which it repeats itself roughly."""
FRESH, UNREPEATED = range(70, 90), 32
"""A prompt after which no two tokens follow each other twice, and a number of tokens for which that holds."""
LONG = 900
"""Tokens in which each number of drafts is tried, though every draft be accepted."""


async def assert_drafts_from_other_conversations(vllm: Vllm) -> None:
    """One of two finished conversations keeps its text when the next one takes a slot."""
    first, second = await vllm.sample(FRESH, UNREPEATED, n=2, temperature=1.0, top_k=1)
    text = [*FRESH, *first["token_ids"]]
    assert first["token_ids"] == second["token_ids"]
    assert len(set(itertools.pairwise(text))) == len(text) - 1, "the text repeats itself"
    _, before = await drafted_so_far(vllm)
    again = await vllm.generate(FRESH, UNREPEATED, temperature=1.0, top_k=1)
    _, after = await drafted_so_far(vllm)
    assert again["token_ids"] == first["token_ids"]
    assert after - before > UNREPEATED / 2


async def assert_exact_with_each_number_of_drafts(vllm: Vllm, network: torch.nn.Module, tolerance: float) -> None:
    """`tolerance`: of a log-probability, within which another token may be as probable as the greedy one."""
    before = await drafted_so_far(vllm)
    choice = await vllm.generate(ROUGHLY_LOOPED, LONG, temperature=0.0)
    drafts, accepted = (now - then for now, then in zip(await drafted_so_far(vllm), before, strict=True))
    ids = choice["token_ids"]
    table = table_of(network, ROUGHLY_LOOPED, ids)
    own = table.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert float((table.max(-1).values - own).max()) <= tolerance, "a token was not the most probable one"
    assert logprobs_in(choice) == pytest.approx(own.tolist(), abs=tolerance)
    assert accepted > LONG / 10
    left_out = LONG - accepted - drafts  # steps without drafts
    nothing_found = sum(drafted is None for drafted in draft(ROUGHLY_LOOPED, ids))
    assert left_out > nothing_found + FEWEST, "the number of drafts was never 0"


async def assert_sampled_from_the_model(vllm: Vllm, network: torch.nn.Module, tolerance: float) -> None:
    """`tolerance`: of a log-probability at temperature 1."""
    looped = (await vllm.generate(LOOPED, LOOP, temperature=0.0))["token_ids"]
    prompt = [*LOOPED, *looped]
    _, before = await drafted_so_far(vllm)
    hits = expected = variance = 0.0
    for choice in await vllm.sample(prompt, LENGTH, n=SAMPLES, temperature=TEMPERATURE):
        ids = choice["token_ids"]
        table = table_of(network, prompt, ids, TEMPERATURE)
        own = table.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert logprobs_in(choice) == pytest.approx(own.tolist(), abs=tolerance / TEMPERATURE)
        for at, drafted in enumerate(draft(prompt, ids)):
            if drafted is not None:
                chance = float(table[at, drafted].exp())
                hits, expected, variance = (
                    hits + (ids[at] == drafted),
                    expected + chance,
                    variance + chance * (1 - chance),
                )
    assert variance > 10, "too few drafts were in doubt"
    assert abs(hits - expected) < IMPROBABLE * math.sqrt(variance), (
        f"{hits} of drafts were sampled, {expected:.1f} expected"
    )
    _, after = await drafted_so_far(vllm)
    assert after - before > 20


async def drafted_so_far(vllm: Vllm) -> list[float]:
    """Return the number of steps of a request that had drafts, and the number of accepted tokens."""
    return [await vllm.metric(f"vllm:spec_decode_num_{what}_total") for what in ("drafts", "accepted_tokens")]


@torch.no_grad()
def table_of(
    network: torch.nn.Module, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of all tokens [sampled, vocabulary]."""
    device = next(network.parameters()).device
    logits = network(torch.tensor([[*prompt, *sampled]], device=device)).logits[0].float().cpu()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def draft(prompt: Sequence[int], ids: Sequence[int]) -> Iterator[int | None]:
    """What followed the newest two tokens the first time, at each place; None if they are new."""
    for at in range(len(ids)):
        known = [*prompt, *ids[:at]]
        yield next((known[i + 2] for i in range(len(known) - 2) if known[i : i + 2] == known[-2:]), None)
