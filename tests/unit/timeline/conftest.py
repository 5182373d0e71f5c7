"""Random episodes: chats that grow, fork, are edited, retried, sampled several times and interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import strategies as st

from swarmq.messages import Turn, VersionSpan, pack_floats, pack_ids
from swarmq.timeline import ResolvedTurn, resolve


def _turn(
    call: int | str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    parent: int | str | None = None,
    shared: int = 0,
    versions: Sequence[tuple[int, int, int]] = (),
    logprobs: Sequence[float] | None = None,
) -> Turn:
    return Turn(
        run="r",
        episode_id="e",
        policy="main",
        call_id=f"c{call}",
        request_id=f"r{call}",
        parent=None if parent is None else f"c{parent}",
        shared=shared,
        prompt_ids=pack_ids(prompt),
        sampled_ids=pack_ids(sampled),
        logprobs=pack_floats([-0.5] * len(sampled) if logprobs is None else logprobs),
        versions=tuple(VersionSpan(version=v, start=a, end=b) for v, a, b in versions),
    )


@st.composite
def _episode(draw: st.DrawFn, max_turns: int = 8, vocab: int = 3, min_turns: int = 1) -> list[Turn]:
    """Turns over so few token ids that forks share prefixes, samples coincide, and prompts repeat by accident.

    Every turn continues an earlier one (all of it, or less: edited history) or starts anew; log-probabilities are
    distinct everywhere, so that a mix-up cannot go unnoticed.
    """
    token = st.integers(0, vocab - 1)
    turns: list[Turn] = []
    lengths: list[int] = []
    for call in range(draw(st.integers(min_turns, max_turns))):
        parent = draw(st.none() | st.integers(0, call - 1)) if call else None
        shared = 0
        if parent is not None:
            grows = draw(st.booleans())
            shared = lengths[parent] if grows else draw(st.integers(0, lengths[parent]))
        prompt = draw(st.lists(token, min_size=0 if shared else 1, max_size=4))
        sampled = draw(st.lists(token, min_size=1, max_size=4))
        first = draw(st.integers(0, 5))
        cut = draw(st.integers(0, len(sampled)))
        spans = [(first, 0, cut), (first + 1, cut, len(sampled))]
        turns.append(
            _turn(
                call,
                prompt,
                sampled,
                parent=parent,
                shared=shared,
                versions=[span for span in spans if span[1] < span[2]],
                logprobs=[-(call + 1) - i / 16 for i in range(len(sampled))],
            )
        )
        lengths.append(shared + len(prompt) + len(sampled))
    return turns


@pytest.fixture(scope="session")
def make_turn() -> Callable[..., Turn]:
    return _turn


@pytest.fixture(scope="session")
def episodes() -> Callable[..., st.SearchStrategy[list[Turn]]]:
    return _episode


@pytest.fixture(scope="session")
def groups() -> Callable[..., st.SearchStrategy[list[list[ResolvedTurn]]]]:
    """Several episodes, resolved; over so few token ids they share prefixes with one another too."""
    return lambda: st.lists(_episode(max_turns=5), min_size=1, max_size=4).map(
        lambda batch: [resolve(t) for t in batch]
    )
