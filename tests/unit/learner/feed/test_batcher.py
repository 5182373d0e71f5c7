"""Which episodes make a batch, which are dropped, and that nothing is ever taken twice or forgotten."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.episodes import make_episode, make_group, route
from swarmq.config import Loss, Train
from swarmq.errors import SetUpError
from swarmq.estimates import MetricSum
from swarmq.learner.feed.batch_summary import batch_metrics
from swarmq.learner.feed.batcher import MIN_KNOWN, WINDOWS_KNOWN, Batcher, BatchLimits
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.messages import Rollout, Sampling
from swarmq.task_mix import deal

TRAIN = Train()


def intake(
    groups: int = 1,
    *,
    mix: dict[str, float] | None = None,
    staleness: int = 4,
    logged: tuple[BatchIndex, ...] = (),
    train: Train = TRAIN,
    longest: int | None = None,
) -> Batcher:
    limits = BatchLimits(
        groups_per_batch=groups,
        mix=mix or {"default": 1.0},
        max_staleness=staleness,
        vocab_size=128,
        max_length=longest,
        train=train,
    )
    return Batcher(limits, logged)


def take(intake: Batcher, version: int = 0) -> BatchRecord | None:
    return intake.take(version=version, at=0.0, settings=intake.limits.train)


def feed(intake: Batcher, *groups: list[Rollout]) -> None:
    for group in groups:
        for episode in group:
            assert intake.accept(episode)


def altered(episode: Rollout, **turn_fields: object) -> Rollout:
    first, *rest = episode.turns
    return msgspec.structs.replace(episode, turns=(msgspec.structs.replace(first, **turn_fields), *rest))


def test_metrics_of_episodes_dropped_for_equal_rewards_count_as_their_rewards_do() -> None:
    box = intake()
    feed(
        box, make_group("same", (1.0, 1.0), metrics={"calls": 4.0}), make_group("a", (0.0, 1.0), metrics={"calls": 1.0})
    )
    record = take(box)
    assert record is not None
    assert record.index.tally["default"].metrics["calls"] == (sums := MetricSum(4, 10.0))
    shown = batch_metrics(record, [])
    assert (shown["metrics"], shown["metrics_by_kind"]) == ({"calls": sums.mean}, {"default": {"calls": 2.5}})


def test_the_names_of_metrics_are_bounded_over_the_run_and_after_a_restart_and_said_once() -> None:
    def report(name: str, first: int) -> list[Rollout]:
        return make_group(name, (0.0, 1.0), metrics={f"m{number}": 1.0 for number in range(first, first + 40)})

    box = intake()
    feed(box, report("a", 0))
    first = take(box)
    assert first is not None
    assert box.warnings() == []
    again = intake(logged=(first.index,))
    for name in ("b", "c"):
        feed(again, report(name, 40))
        record = take(again, version=1)
        assert record is not None
        assert list(record.index.tally["default"].metrics) == [f"m{number}" for number in range(40, 64)]
    (warning,) = again.warnings()
    assert "kind default report more than 64 different metrics" in warning
    assert "'m64'" in warning
    assert again.warnings() == []


def test_groups_of_one_are_said_to_be_no_use_where_attempts_are_compared() -> None:
    box = intake()
    feed(box, make_group("a", (1.0,)))
    assert take(box) is None
    (told,) = box.news()
    assert told.startswith(
        "dropped as group_too_small: a-0 is alone in its group, and advantage 'rloo' compares attempts"
    )
    alone = intake(train=Train(advantage="ema"))
    feed(alone, make_group("a", (1.0,)))
    assert take(alone)


def test_a_batch_holds_whole_groups_in_order_of_completion() -> None:
    box = intake(2)
    a, b, c = (make_group(name) for name in "abc")
    feed(box, a[:1], b, a[1:])
    record = take(box)
    assert record is not None
    assert [e.group_id for e in record.episodes] == ["b/0", "b/0", "a/0", "a/0"]
    assert (record.index.record, record.index.version, record.settings) == (1, 1, TRAIN)
    feed(box, c)
    assert take(box, 1) is None


def test_of_a_kind_the_group_with_the_oldest_token_is_taken_first_so_that_slow_ones_are_not_left_to_go_stale() -> None:
    box = intake(2, staleness=2)
    quick, slow, quicker = (make_group(name, version=version) for name, version in (("a", 2), ("b", 1), ("c", 2)))
    slow[0] = make_episode("b", 0, version=0)
    feed(box, quick, quicker, slow)  # in the order of completion
    record = take(box, version=2)
    assert record is not None
    assert [e.group_id for e in record.episodes] == ["b/0", "b/0", "a/0", "a/0"]
    assert record.index.dropped == {}
    feed(box, make_group("d", version=3))
    record = take(box, version=3)
    assert record is not None
    assert [e.group_id for e in record.episodes] == ["c/0", "c/0", "d/0", "d/0"]


def test_a_group_is_not_taken_before_its_last_member_came() -> None:
    box = intake()
    feed(box, make_group("a", (0.0, 1.0, 2.0))[:2])
    assert take(box) is None
    assert box.groups_incomplete == 1


def test_redelivery_of_what_waits_changes_nothing_and_of_what_is_logged_is_known() -> None:
    box = intake()
    group = make_group("a")
    feed(box, group, group)
    record = take(box)
    assert record is not None
    assert len(record.episodes) == 2
    assert not box.accept(group[0])
    assert not intake(logged=(record.index,)).accept(group[1])


def test_rollouts_of_a_former_collector_are_refused_also_after_a_restart() -> None:
    box = intake()
    old, new = (
        [msgspec.structs.replace(episode, term=term) for episode in make_group(name)]
        for name, term in (("old", 1), ("new", 2))
    )
    feed(box, old[:1], new)
    assert not box.accept(old[1])
    record = take(box)
    assert record is not None
    assert not intake(logged=(record.index,)).accept(old[1])


def test_equal_rewards_are_dropped_counted_and_recorded_but_seen_in_the_reward() -> None:
    box = intake()
    feed(box, make_group("a", (1.0, 1.0)))
    assert take(box) is None
    drops = box.drops(version=0, at=0.0)
    assert drops is not None
    assert drops.index.dropped == {"a-0": "equal_rewards", "a-1": "equal_rewards"}
    assert drops.index.tally["default"].reward == 2.0
    assert drops.index.groups_equal == 1
    assert box.drops(version=0, at=0.0) is None
    assert not box.accept(make_episode("a", 0))


def test_staleness_is_judged_when_the_batch_is_made() -> None:
    box = intake(staleness=2)
    feed(box, make_group("old", version=3), make_group("new", version=4))
    record = take(box, 6)
    assert record is not None
    assert record.index.trained == ("new-0", "new-1")
    assert record.index.dropped == {"old-0": "stale", "old-1": "stale"}


def test_tokens_of_weights_that_this_learner_never_made_are_not_taken_for_fresh_ones() -> None:
    """An engine served another run's, whose numbers are higher."""
    box = intake()
    feed(box, make_group("strange", version=57), make_group("new", version=6))
    record = take(box, 6)
    assert record is not None
    assert record.index.trained == ("new-0", "new-1")
    assert record.index.dropped == dict.fromkeys(("strange-0", "strange-1"), "version_unknown")
    (told,) = box.news()
    assert told.startswith("dropped as version_unknown: strange-0 has tokens of version 57, and the learner has made 6")


def test_fresh_members_of_a_partly_stale_group_are_trained_if_a_baseline_is_left() -> None:
    box = intake(staleness=1)
    group = [make_episode("a", i, reward=float(i), members=3, version=0 if i == 0 else 5) for i in range(3)]
    pair = [make_episode("b", i, reward=float(i), members=2, version=0 if i == 0 else 5) for i in range(2)]
    feed(box, pair, group)
    record = take(box, 5)
    assert record is not None
    assert record.index.trained == ("a-1", "a-2")
    assert record.index.dropped == {"a-0": "stale", "b-0": "stale", "b-1": "group_too_small"}


def test_no_fewer_members_than_min_group_are_compared_unless_the_group_never_had_more() -> None:
    box = intake(staleness=1)
    box.change(msgspec.structs.replace(box.limits, min_group=3))
    four, three = (
        [make_episode(name, i, reward=float(i), members=4, version=0 if i < stale else 5) for i in range(4)]
        for name, stale in (("a", 1), ("b", 2))
    )
    feed(box, four, three, make_group("pair", version=5))
    first, second = take(box, 5), take(box, 5)
    assert first is not None
    assert second is not None
    assert {first.index.trained, second.index.trained} == {("a-1", "a-2", "a-3"), ("pair-0", "pair-1")}
    assert first.index.dropped | second.index.dropped == dict.fromkeys(("a-0", "b-0", "b-1"), "stale") | dict.fromkeys(
        ("b-2", "b-3"), "group_too_small"
    )


def test_groups_that_wait_are_judged_by_settings_that_change_meanwhile() -> None:
    box = intake(train=Train(advantage="ema"))
    cut = altered(make_episode("b", 0, turns=1), finish_reason="length")
    feed(box, make_group("a", (1.0, 1.0)), [cut, make_episode("b", 1, reward=1.0)])
    assert box.groups_ready == {"default": 2}
    box.change(msgspec.structs.replace(box.limits, train=Train(advantage="rloo", overlong="drop")))
    assert box.groups_ready == {"default": 0}
    drops = box.drops(version=0, at=0.0)
    assert drops is not None
    assert drops.index.dropped == {
        "a-0": "equal_rewards",
        "a-1": "equal_rewards",
        "b-0": "overlong",
        "b-1": "group_too_small",
    }
    assert drops.index.groups_equal == 1


def test_a_server_is_not_asked_to_judge_what_was_sampled_at_another_temperature_than_it_judges() -> None:
    """Agents sampled it before the teacher was named."""
    served = Train(loss=Loss(name="distill"), teacher="http://127.0.0.1:8000/v1")
    warm = [altered(episode, sampling=Sampling(temperature=0.7)) for episode in make_group("a")]
    box = intake(train=served)
    feed(box, warm, make_group("b"))
    record = take(box)
    assert record is not None
    assert record.index.trained == ("b-0", "b-1")
    assert record.index.dropped == {"a-0": "no_teacher", "a-1": "no_teacher"}
    (told,) = box.news()
    assert "a-0 was sampled at temperature 0.7, which a served teacher cannot score" in told
    loaded = intake(train=msgspec.structs.replace(served, teacher="models/teacher"))
    feed(loaded, warm)
    assert take(loaded)


def test_a_groups_drops_are_recorded_with_the_group_so_that_it_is_complete_when_it_comes_again() -> None:
    box = intake(2)
    bad, *good = make_group("a", (0.0, 1.0, 2.0))
    bad = altered(bad, parent="nobody")
    feed(box, [bad, *good])
    assert box.drops(version=0, at=0.0) is None, "its siblings are in no record yet"
    feed(box, make_group("b"))
    record = take(box)
    assert record is not None
    assert record.index.dropped == {"a-0": "parent_unknown"}
    assert set(record.index.trained) == {"a-1", "a-2", "b-0", "b-1"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"sampled_ids": (128).to_bytes(4, "little"), "logprobs": b"\0\0\0\0", "versions": ()},
            "id_outside_vocabulary",
        ),
        ({"sampled_ids": b"", "logprobs": b"", "versions": ()}, "nothing_sampled"),
        ({"sampling": Sampling(top_p=0.9)}, "truncated_sampling"),
        ({"sampling": Sampling(temperature=0.0)}, "truncated_sampling"),
        ({"sampling": Sampling(temperature=0.001)}, "truncated_sampling"),
    ],
)
def test_an_episode_that_cannot_be_trained_is_dropped_with_its_reason(fields: dict[str, object], reason: str) -> None:
    box = intake()
    good, bad = [make_episode("a", i, reward=float(i), turns=1) for i in range(2)]
    feed(box, [good, altered(bad, **fields)])
    drops = box.drops(version=0, at=0.0)
    assert drops is not None
    assert drops.index.dropped == {"a-0": "group_too_small", "a-1": reason}
    (told,) = box.news()
    assert told.startswith(f"dropped as {reason}: turn c0 of a-1")


def test_the_first_drop_of_each_reason_is_told_in_words_and_once() -> None:
    box = intake(longest=10)
    short = altered(make_episode("a", 0, members=3, turns=1, length=4), sampling=Sampling(top_p=0.9))
    feed(box, [short, *(make_episode("a", i, members=3, turns=3, length=12) for i in (1, 2))])
    told = box.news()
    assert [text.split(":")[0] for text in told] == ["dropped as truncated_sampling", "dropped as over_budget"]
    assert "turn c0 of a-0 was sampled with top_p=0.9" in told[0]
    assert "tokens are more than the 10 of one pass" in told[1]
    feed(box, [altered(one, sampling=Sampling(top_k=3)) for one in make_group("b")])
    assert box.news() == []


def test_an_episode_without_turns_and_a_kind_outside_the_mix_are_dropped() -> None:
    box = intake()
    feed(box, make_group("a", turns=0), make_group("b", kind="other"))
    drops = box.drops(version=0, at=0.0)
    assert drops is not None
    assert Counter(drops.index.dropped.values()) == {"no_turns": 2, "kind_not_in_mix": 2}


SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=5)


@given(SHARES, st.integers(1, 12))
def test_the_mix_is_exact_over_time(parts: list[int], groups: int) -> None:
    mix = {f"k{i}": part / sum(parts) for i, part in enumerate(parts)}
    carry: dict[str, float] = {}
    taken: Counter[str] = Counter()
    for batch in range(1, 40):
        counts, carry = deal(mix, carry, groups)
        assert sum(counts.values()) == groups
        taken.update(counts)
        for i, part in enumerate(parts):
            assert abs(taken[f"k{i}"] - Fraction(part, sum(parts)) * groups * batch) < len(parts)


def test_a_batch_waits_for_no_kind_whose_share_is_lent_but_takes_what_there_is_of_it_up_to_its_share() -> None:
    box = intake(4, mix={"a": 0.5, "b": 0.5})
    box.change(msgspec.structs.replace(box.limits, lent=("b",)))
    feed(box, *(make_group(f"a{number}", (0.0, 1.0), kind="a") for number in range(6)))
    feed(box, *(make_group(f"b{number}", (0.0, 1.0), kind="b") for number in range(3)))
    held = [Counter(episode.kind for episode in take(box, version).episodes) for version in range(2)]
    assert held == [{"a": 4, "b": 4}, {"a": 6, "b": 2}], "two of each group"
    feed(box, *(make_group(f"a{number}", (0.0, 1.0), kind="a") for number in range(6, 9)))
    assert Counter(episode.kind for episode in take(box, 2).episodes) == {"a": 8}


def test_a_batch_waits_for_the_kind_that_is_owed_also_after_a_restart() -> None:
    box = intake(1, mix={"code": 0.5, "math": 0.5})
    feed(box, make_group("m1", kind="math"), make_group("m2", kind="math"), make_group("c1", kind="code"))
    first = take(box)
    assert first is not None
    box = intake(1, mix={"code": 0.5, "math": 0.5}, logged=(first.index,))
    other = "math" if first.episodes[0].kind == "code" else "code"
    feed(box, make_group("x", kind=first.episodes[0].kind))
    assert take(box, 1) is None
    feed(box, make_group("y", kind=other))
    second = take(box, 1)
    assert second is not None
    assert {e.kind for e in second.episodes} == {other}


@given(seed=st.integers(0, 2**32))
def test_whatever_crashes_and_comes_again_every_episode_is_in_exactly_one_record(seed: int) -> None:
    """Deliveries in any order with repeats; a crash forgets all but the log, and what is in no record comes again."""
    rng = random.Random(seed)
    groups = [
        make_group(
            f"g{i}",
            tuple(float(rng.randint(0, 2)) for _ in range(rng.randint(1, 4))),
            turns=1,
            version=rng.randint(0, 3),
        )
        for i in range(rng.randint(1, 8))
    ]
    waiting = [episode for group in groups for episode in group]
    log: list[BatchIndex] = []
    version, box = 0, intake(2, staleness=2)
    for _ in range(200):
        if not waiting:
            break
        roll = rng.random()
        if roll < 0.05:
            box = intake(2, staleness=2, logged=tuple(log))
        elif roll < 0.7:
            if not box.accept(episode := rng.choice(waiting)):
                waiting.remove(episode)
        else:
            record = take(box, version) or box.drops(version=version, at=0.0)
            if record is not None:
                log.append(record.index)
                version = max(version, record.index.version)
                if rng.random() < 0.5:  # else it died before the acks
                    gone = {*record.index.trained, *record.index.dropped}
                    waiting = [e for e in waiting if e.episode_id not in gone]
    ids = [i for index in log for i in (*index.trained, *index.dropped)]
    assert len(ids) == len(set(ids))
    assert [index.record for index in log] == list(range(1, len(log) + 1))
    by_group = [{e.episode_id for e in group} for group in groups]
    for index in log:
        taken = {*index.trained, *index.dropped}
        assert all(members <= taken or not members & taken for members in by_group), "half a group in a record"


def test_an_episode_cut_off_by_a_token_limit_is_dropped_only_where_asked() -> None:
    members = make_group("a", (0.0, 1.0, 2.0))
    members[0] = altered(members[0], finish_reason="length")
    for train, trained, dropped in (
        (Train(), ["a-0", "a-1", "a-2"], {}),
        (Train(overlong="drop"), ["a-1", "a-2"], {"a-0": "overlong"}),
    ):
        box = intake(train=train)
        feed(box, members)
        record = take(box)
        assert record is not None
        assert (list(record.index.trained), record.index.dropped) == (trained, dropped)


def test_what_ema_compares_with_is_recorded_with_the_batch_and_goes_on_after_a_restart() -> None:
    train = Train(advantage="ema", ema_decay=0.5)
    box = intake(train=train)
    feed(box, make_group("a", (1.0,)), make_group("b", (0.0,)), make_group("c", (1.0,)))
    first, second = take(box), take(box, 1)
    assert first is not None
    assert second is not None
    assert (first.baselines, first.index.baselines) == ({}, {"default": 1.0})
    assert (second.baselines, second.index.baselines) == ({"default": 1.0}, {"default": 0.5})
    again = intake(train=train, logged=(first.index, second.index))
    feed(again, make_group("c", (1.0,)))
    third = take(again, 2)
    assert third is not None
    assert third.baselines == {"default": 0.5}


def test_where_no_baseline_is_needed_equal_rewards_and_lone_episodes_are_trained() -> None:
    for train in (Train(advantage="ema"), Train(loss=Loss(name="sft"))):
        box = intake(2, train=train)
        feed(box, make_group("a", (1.0, 1.0)), make_group("b", (1.0,)))
        assert take(box) is not None


def test_ids_of_logged_episodes_are_kept_as_long_as_they_may_come_again_and_no_longer() -> None:
    box, per_record = intake(), 100
    for number in range(1, MIN_KNOWN // per_record + 2):
        trained = tuple(f"{number}.{n}" for n in range(per_record))
        box.note(BatchIndex(record=number, version=number, trained=trained))
    assert len(box.known) == MIN_KNOWN
    assert "2.0" in box.known
    assert "1.99" not in box.known


def test_a_large_window_is_kept_several_times() -> None:
    limits = BatchLimits(groups_per_batch=256, group_size=64, mix={"a": 1.0}, max_staleness=3)
    assert limits.num_known == WINDOWS_KNOWN * 4 * 256 * 64


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (b"", "turn .* of a-1 has no routed experts, so it was recorded without this setting"),
        (
            bytes(7),
            "7 bytes of routed experts.*the learner's model has 4 bytes for each, and 4 experts: its engine serves",
        ),
        (bytes([9] * 16), "up to number 9"),
    ],
)
def test_a_rollout_whose_routing_cannot_be_replayed_is_an_error_and_stays_where_it_is(
    experts: bytes, words: str
) -> None:
    """It is neither dropped nor acknowledged: who sets `train.routing_replay` to false can train it."""
    good, bad = route(make_group("a", (0.0, 1.0)))
    limits = intake().limits
    box = Batcher(msgspec.structs.replace(limits, routing=RoutingShape(layers=2, experts_per_token=2, experts=4)))
    assert box.accept(good)
    with pytest.raises(SetUpError, match=words):
        box.accept(altered(bad, routed_experts=experts))
    plain = intake()
    feed(plain, [good, bad])
    record = take(plain)
    assert record is not None
    assert len(record.episodes) == 2


def test_experts_that_are_no_whole_numbers_are_refused_with_the_reason() -> None:
    _, bad = route(make_group("a", (0.0, 1.0)))
    shape = RoutingShape(layers=2, experts_per_token=2, experts=300)
    with pytest.raises(SetUpError, match="7 bytes of routed experts"):
        shape.check(altered(bad, routed_experts=bytes(7)))
