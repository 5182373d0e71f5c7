"""Loss weights are fixed per episode before anything is folded, and nothing but tokens decides what is folded."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from support.episodes import make_group
from swarmq.config import Train
from swarmq.learner.batching.micro_batches import MicroBatch, MicroBatchBuilder, ModelProfile, build_rank_batch
from swarmq.learner.feed.batch_summary import batch_metrics
from swarmq.learner.methods.credit import compute_advantages, find_credit_levels, group_by_slot
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.messages import Rollout, Turn
from swarmq.timeline import Cost, PrefixTree, fold, lay_rows, resolve, unfold
from swarmq.token_drift import Drift

TRAITS = ModelProfile(cost=Cost(token=1.0, pair=1.0))
Laid = dict[tuple[int, int, int], tuple[float, float]]


@st.composite
def batches(draw: st.DrawFn) -> list[Rollout]:
    """Groups of different sizes and kinds of reward; few token ids, so that beginnings are shared."""
    made: list[Rollout] = []
    for number in range(draw(st.integers(1, 3))):
        rewards = tuple(draw(st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=2, max_size=4)))
        turns, vocab = draw(st.integers(1, 5)), draw(st.integers(2, 4))
        for episode in make_group(f"g{number}-{draw(st.integers(0, 99))}", rewards, turns=turns, vocab=vocab):
            calls = {t.call_id: draw(st.sampled_from((0.0, 1.0))) for t in episode.turns if draw(st.booleans())}
            agents = {"a": draw(st.sampled_from((0.0, 1.0)))} if draw(st.booleans()) else {}
            made.append(msgspec.structs.replace(episode, call_rewards=calls, agent_rewards=agents))
    return made


def laid(passes: list[MicroBatch]) -> Laid:
    """(episode, turn, offset) -> weight and advantage; each is there once."""
    found: Laid = {}
    for one in passes:
        columns = (one.layout.episodes, one.layout.turns, one.layout.offsets, one.weights, one.advantages)
        for e, t, offset, weight, advantage in zip(*(c.tolist() for c in columns), strict=True):
            assert (e, t, offset) not in found
            found[e, t, offset] = weight, advantage
    return found


@given(
    batch=batches(),
    normalisation=st.sampled_from(("token", "episode", "constant")),
    advantage=st.sampled_from(("rloo", "grpo", "batch_norm", "reinforce_plus_plus")),
    budget=st.integers(120, 400),
    world=st.integers(1, 3),
)
def test_weight_and_advantage_of_a_token_are_those_of_the_oracle_however_it_is_laid_out(
    batch: list[Rollout], normalisation: Any, advantage: Any, budget: int, world: int
) -> None:
    train = Train(normalisation=normalisation, advantage=advantage, micro_batch_tokens=budget)
    weigh = MicroBatchBuilder(batch, train)
    oracle = laid([weigh(lay_rows([(e, row) for row in unfold(resolve(one.turns))])) for e, one in enumerate(batch)])
    credit = compute_advantages(group_by_slot(batch), train)
    if normalisation == "episode":
        trained = sum(any(a is not None for a in of) for of in credit.values())
        assert abs(sum(weight for weight, _ in oracle.values()) - trained) < 1e-4
    for (e, t, _), (weight, value) in oracle.items():
        assert (weight == 0) == (credit[batch[e].episode_id][t] is None)
        assert abs(value - (credit[batch[e].episode_id][t] or 0.0)) < 1e-5
    for way in ("rows", "tree"):
        own = msgspec.structs.replace(train, layout=way)
        passes = [
            one
            for rank in range(world)
            for one in build_rank_batch(batch, own, TRAITS, rank=rank, world=world).passes
            if not one.idle
        ]
        assert laid(passes) == oracle


@st.composite
def disguised(draw: st.DrawFn, turn: Turn) -> Turn:
    """The same tokens, said by somebody else, in other words, and ended otherwise."""
    return msgspec.structs.replace(
        turn,
        messages=draw(st.binary(max_size=8)),
        agent=draw(st.none() | st.sampled_from(("planner", "user", "assistant", "system"))),
        finish_reason=draw(st.sampled_from(("stop", "length", "tool_calls", "abort"))),
    )


@given(data=st.data())
def test_timelines_do_not_depend_on_roles_or_text(data: st.DataObject) -> None:
    group = make_group(f"g{data.draw(st.integers(0, 999))}", (0.0, 1.0), turns=5, vocab=3)
    others = [[data.draw(disguised(turn)) for turn in episode.turns] for episode in group]
    plain, disguise = ([resolve(turns) for turns in each] for each in ([e.turns for e in group], others))
    for ours, theirs in zip(plain, disguise, strict=True):
        assert shape(fold(ours)) == shape(fold(theirs))
        assert all(shape(fold(ours))), "nothing is compared"
    assert shape(PrefixTree(plain).layouts(400)) == shape(PrefixTree(disguise).layouts(400))


def shape(made: Any) -> list[list[bytes]]:
    """All arrays of timelines or layouts."""
    return [
        [value.tobytes() for name in each.__struct_fields__ if hasattr(value := getattr(each, name), "tobytes")]
        for each in made
    ]


def test_figures_say_what_turns_are_credited_by_and_drift_as_everywhere_else() -> None:
    group = make_group("a", (0.0, 1.0), turns=4)
    first, *rest = group[0].turns
    turns = (msgspec.structs.replace(first, agent="a"), *(msgspec.structs.replace(t, agent=None) for t in rest))
    turns = (*turns[:3], msgspec.structs.replace(turns[3], repaired=True))
    group[0] = msgspec.structs.replace(
        group[0], turns=turns, call_rewards={"c1": 1.0}, agent_rewards={"a": 0.5, "nobody": 9.0}
    )
    assert find_credit_levels(group, Train()) == ["agent", "call", "episode", "episode", *["episode"] * 4]
    figures = batch_metrics(
        BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(group), settings=Train()), []
    )
    assert figures["credited"] == {"agent": 1 / 8, "call": 1 / 8, "episode": 6 / 8}
    assert figures["reward_credited"] == {"agent": 0.5, "call": 1.0}
    assert figures["drifted"] == Drift.of(turn for e in group for turn in e.turns).rate == 1 / 6
