"""Credit: the window, the mix, and that what is dropped comes back to the same kind."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.collector.decide.effects import IssueTicket
from swarmq.collector.decide.state import KindWindow, Rules
from swarmq.collector.decide.tickets import TicketWindow


def credit(mix, *, groups_per_batch=8, group_size=1, max_staleness=0, **memory) -> TicketWindow:
    rules = Rules(
        run="r",
        trained=("main",),
        known=("main",),
        mix=mix,
        groups_per_batch=groups_per_batch,
        group_size=group_size,
        max_staleness=max_staleness,
    )
    given = {"kinds": {}, "tickets": {}, "serial": 0, **memory}
    return TicketWindow(rules, given["kinds"], given["tickets"], given["serial"])


def issued(effects) -> dict[str, int]:
    return dict(Counter(effect.kind for effect in effects if isinstance(effect, IssueTicket)))


@pytest.mark.parametrize(
    ("mix", "batch", "wanted"),
    [
        ({"a": 0.5, "b": 0.25, "c": 0.25}, 8, {"a": 4, "b": 2, "c": 2}),
        ({"math": 0.4, "code": 0.3, "terminal": 0.3}, 10, {"math": 4, "code": 3, "terminal": 3}),
        ({"only": 1.0}, 3, {"only": 3}),
    ],
)
def test_every_batch_has_its_exact_shares(mix, batch, wanted):
    account = credit(mix, groups_per_batch=batch)
    for _ in range(50):
        assert issued(account.settle({}, starved=False, lacking={})) == wanted
        for kind, num in wanted.items():
            account.kinds[kind].trained += num
            account.out[kind].clear()


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_shares_are_never_off_by_a_group_per_other_kind(weights, batch, num_batches):
    mix = {f"k{n}": weight / sum(weights) for n, weight in enumerate(weights)}
    account = credit(mix, groups_per_batch=batch)
    for number in range(1, num_batches + 1):
        account.settle({}, starved=False, lacking={})
        for kind, share in mix.items():
            assert abs(account.kinds[kind].allocated - share * batch * number) < max(len(mix) - 1, 1e-6)
            account.kinds[kind].trained = account.kinds[kind].allocated
            account.out[kind].clear()


def test_the_window_is_the_staleness_bound(make_bench):
    assert make_bench(group_size=4, groups_per_batch=3, max_staleness=2).tickets == {"math": 3 * 3 * 4}


def test_tickets_follow_the_weight_version(make_bench, say):
    bench = make_bench(group_size=1, groups_per_batch=2, max_staleness=1)
    window = 4
    for version in range(3):
        for slot in range(2):
            name = f"e{version}{slot}"
            bench.take(say.begin(name, name, ticket_id=f"math.{2 * version + slot + 1}"), say.turn(episode=name))
            bench.take(say.end(name))
        assert bench.tickets["math"] == window + 2 * version
        bench.take(say.consumed(f"e{version}0", f"e{version}1", version=version + 1))
        assert bench.tickets["math"] == window + 2 * (version + 1)


def test_what_a_learner_drops_is_granted_to_the_same_kind_again(make_bench, say):
    bench = make_bench(mix={"a": 0.75, "b": 0.25}, groups_per_batch=4, max_staleness=0)
    assert bench.tickets == {"a": 3, "b": 1}
    (ticket,) = bench.core.tickets.out["b"]
    bench.take(say.begin(kind="b", ticket_id=ticket), say.turn(), say.end())
    assert bench.tickets == {"a": 3, "b": 1}
    bench.take(say.consumed(dropped={"e": "zero_variance"}))
    assert bench.tickets == {"a": 3, "b": 2}


def test_what_expires_is_granted_to_the_same_kind_again(make_bench, say):
    bench = make_bench(mix={"a": 0.5, "b": 0.5}, groups_per_batch=2, max_staleness=0)
    (ticket,) = bench.core.tickets.out["b"]
    bench.take(say.begin(kind="b", ticket_id=ticket))
    assert bench.tickets == {"a": 1, "b": 1}
    bench.wait(600)
    assert bench.tickets == {"a": 1, "b": 2}


def test_a_group_that_went_on_without_some_members_counts_as_a_whole_one(make_bench, say):
    bench = make_bench(group_size=4, groups_per_batch=1, max_staleness=0, min_group=2)
    for number in range(2):
        name = f"e{number}"
        bench.take(say.begin(name, repeat=number, group_size=4, ticket_id=f"math.{number + 1}"))
        bench.take(say.turn(episode=name), say.end(name))
    bench.wait(600)
    assert len(bench.sent) == 2
    assert bench.tickets["math"] == 4
    bench.take(say.consumed("e0", "e1"))
    assert bench.tickets["math"] == 6  # two are still out: a window of four again


def test_a_ticket_used_twice_is_counted_and_the_credit_adjusts(make_bench, say):
    bench = make_bench(groups_per_batch=2, max_staleness=0)
    bench.take(say.begin("e", "t", ticket_id="math.1"), say.begin("f", "u", ticket_id="math.1"))
    assert bench.core.counts["ticket_unknown"] == 1
    assert bench.tickets["math"] == 2
    bench.take(say.end("f", status="aborted"))
    assert bench.tickets["math"] == 2
    bench.take(say.end("e", status="aborted"))
    assert bench.tickets["math"] == 3


def test_a_redelivered_begin_uses_its_ticket_once(make_bench, say):
    bench = make_bench()
    bench.take(say.begin(ticket_id="math.1"))
    bench.restart()
    bench.take(say.begin(ticket_id="math.1"))
    assert bench.core.counts["ticket_unknown"] == 0
    assert bench.core.counts["duplicates"] == 1


def test_episodes_without_tickets_are_welcome_and_use_credit(make_bench, say):
    bench = make_bench(groups_per_batch=2, max_staleness=0)
    bench.take(say.begin("e"))
    bench.take(say.begin("f", "u", ticket_id="math.1"), say.end("f", status="failed"))
    assert bench.tickets["math"] == 2


def test_an_eval_episode_gives_its_ticket_back_at_once(make_bench, say):
    bench = make_bench(groups_per_batch=2, max_staleness=0)
    bench.take(say.begin(mode="eval", ticket_id="math.1"))
    assert bench.tickets["math"] == 3


def test_tickets_that_are_out_are_known_after_a_restart(make_bench):
    bench = make_bench()
    issued = bench.tickets["math"]
    bench.restart()
    bench.settle()
    assert bench.tickets["math"] == issued


def test_a_kind_that_left_the_mix_gives_its_share_to_the_others():
    kinds = {"old": KindWindow(allocated=9, trained=5, debt=0.5), "new": KindWindow(allocated=4, trained=2)}
    account = credit({"new": 1.0}, groups_per_batch=6, kinds=kinds, serial=13)
    assert issued(account.settle({}, starved=False, lacking={})) == {"new": 6}


def test_a_dry_kind_keeps_its_share_waiting(make_bench, say):
    bench = make_bench(mix={"a": 0.5, "b": 0.5}, groups_per_batch=2, max_staleness=0)
    bench.take(say.begin(kind="a", ticket_id="a.1"), say.turn(), say.end())
    bench.wait(1)
    assert bench.tickets == {"a": 1, "b": 1}


def test_half_open_groups_get_the_tickets_they_lack_when_learners_starve(make_bench, say):
    bench = make_bench(group_size=2, groups_per_batch=2, max_staleness=0)
    for number in range(4):
        name = f"e{number}"
        bench.take(say.begin(name, name, group_size=2, ticket_id=f"math.{number + 1}"), say.turn(episode=name))
        bench.take(say.end(name))
        assert bench.tickets["math"] == (4 if number < 3 else 5)
    bench.take(say.begin("f0", "e0", 1, group_size=2, ticket_id="math.5"))
    assert bench.tickets["math"] == 5
    bench.take(say.turn(episode="f0"), say.end("f0"))
    assert len(bench.sent) == 2
    assert bench.tickets["math"] == 6


def test_an_absurd_group_size_neither_floods_nor_blocks_the_tickets(make_bench, say):
    bench = make_bench(group_size=2, groups_per_batch=1, max_staleness=0, min_group=1)
    bench.take(say.begin(group_size=10**9, ticket_id="math.1"))
    bench.take(say.begin("f", "u", group_size=10**9, ticket_id="math.2"))
    for name in ("e", "f"):
        bench.take(say.turn(episode=name), say.end(name))
    assert bench.tickets["math"] == 4
    bench.wait(600)
    assert len(bench.sent) == 2
    bench.take(say.consumed("e", "f"))
    assert bench.tickets["math"] == 4


def test_no_ticket_goes_beyond_the_window_while_a_learner_has_a_batch(make_bench, say):
    bench = make_bench(group_size=1, groups_per_batch=1, max_staleness=1)
    for number in range(2):
        name = f"e{number}"
        bench.take(say.begin(name, name, ticket_id=f"math.{number + 1}"), say.turn(episode=name), say.end(name))
    bench.wait(1000)
    assert bench.tickets["math"] == 2


def test_learners_that_wait_for_different_groups_get_one_more(make_bench, say):
    both = ("a", "b")
    bench = make_bench(trained=both, known=both, groups_per_batch=2, max_staleness=0)
    for name in ("e", "f"):
        bench.take(say.begin(name, name, policies=both, ticket_id=f"math.{1 if name == 'e' else 2}"))
        bench.take(say.turn("1", name, policy="a"), say.turn("2", name, policy="b"))
        bench.take(say.end(name, rewards={"a": 1.0, "b": 0.0}))
    assert bench.tickets["math"] == 2
    bench.take(say.consumed(policy="a", dropped={"e": "equal"}), say.consumed(policy="b", dropped={"f": "equal"}))
    assert bench.tickets["math"] == 3


def test_a_kind_that_is_short_gets_its_tickets_though_learners_have_plenty_of_another(make_bench, say):
    """Failed attempts leave a kind's window full of half-open groups; another kind's groups do not fill the batch."""
    bench = make_bench(mix={"a": 0.5, "b": 0.5}, group_size=2, groups_per_batch=2, max_staleness=1)
    for number in range(2):
        for repeat in range(2):
            name = f"a{number}{repeat}"
            ticket = min(bench.core.tickets.out["a"])
            bench.take(say.begin(name, f"a{number}", repeat, kind="a", group_size=2, ticket_id=ticket))
            bench.take(say.turn(episode=name), say.end(name))
    for number in range(4):
        name, ticket = f"b{number}", min(bench.core.tickets.out["b"])
        bench.take(
            say.begin(name, name, kind="b", group_size=2, ticket_id=ticket), say.turn(episode=name), say.end(name)
        )
    assert bench.core.groups.ready["main"] == 2, "as many as a batch, and none of b"
    assert len(bench.core.tickets.out["b"]) == 1


def test_a_kind_gets_tickets_for_what_rounding_owes_it(make_bench, say):
    """Of a third of two groups a batch holds one, or none, or what earlier ones owe: the learner alone knows which."""
    bench = make_bench(mix={"a": 1 / 3, "b": 2 / 3}, group_size=2, groups_per_batch=3, max_staleness=1)
    for repeat in range(2):
        ticket = min(bench.core.tickets.out["a"])
        bench.take(say.begin(f"a{repeat}", "a", repeat, kind="a", group_size=2, ticket_id=ticket))
        bench.take(say.turn(episode=f"a{repeat}"), say.end(f"a{repeat}"))
    for number in range(2):
        name, ticket = f"half{number}", min(bench.core.tickets.out["a"])
        bench.take(say.begin(name, name, kind="a", group_size=2, ticket_id=ticket), say.turn(episode=name))
        bench.take(say.end(name))
    assert bench.core.groups.ready_of["main"] == {"a": 1}
    assert len(bench.core.tickets.out["a"]) == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_a_policy_at_its_last_step_keeps_no_tickets_from_the_others(make_bench, say, restarted):
    both = ("a", "b")
    bench = make_bench(trained=both, known=both, groups_per_batch=1, max_staleness=0, last_steps={"a": 1, "b": 9})

    def play(number: int) -> None:
        name, ticket = f"e{number}", min(bench.core.tickets.out["math"])
        bench.take(say.begin(name, name, policies=both, ticket_id=ticket))
        bench.take(say.turn("1", name, policy="a"), say.turn("2", name, policy="b"))
        bench.take(say.end(name, rewards={"a": 1.0, "b": 0.0}))

    play(0)
    bench.take(say.consumed("e0", policy="a", version=1), say.consumed("e0", policy="b", version=1))
    if restarted:
        bench.restart()
        bench.settle()
    for step in range(2, 6):
        play(step)
        assert bench.tickets["math"] == step, "one batch in the window, and b has it"
        bench.take(say.consumed(f"e{step}", policy="b", version=step))
        assert bench.tickets["math"] == step + 1
    assert bench.state("e5") == ("published", ""), "a may be given more steps"


def test_nothing_is_begun_for_policies_that_are_all_at_their_last_step(make_bench, say):
    bench = make_bench(groups_per_batch=1, max_staleness=0, last_steps={"main": 1})
    bench.take(say.begin(ticket_id="math.1"), say.turn(), say.end(), say.consumed("e", version=1))
    before = bench.tickets["math"]
    bench.take(say.begin("f", "f", ticket_id="math.2"), say.turn(episode="f"), say.end("f"))
    bench.wait(1000)
    assert bench.tickets["math"] == before


def test_half_open_groups_get_no_tickets_for_slots_that_are_given_up(make_bench, say):
    bench = make_bench(group_size=4, groups_per_batch=1, max_staleness=0)
    bench.take(say.begin("x", "e0", 3, group_size=4), say.end("x", "failed", final=True))
    for number in range(4):
        name, ticket = f"e{number}", min(bench.core.tickets.out["math"])
        bench.take(say.begin(name, name, group_size=4, ticket_id=ticket), say.turn(episode=name), say.end(name))
    assert len(bench.core.tickets.out["math"]) == 2, "the nearest group lacks two, and one will never come"


def test_a_slot_that_is_given_up_binds_no_credit(make_bench, say):
    bench = make_bench(group_size=2, groups_per_batch=2, max_staleness=0)
    bench.take(say.begin("e0", "e", 0, group_size=2, ticket_id="math.1"), say.turn(episode="e0"), say.end("e0"))
    bench.take(say.begin("e1", "e", 1, group_size=2, ticket_id="math.2"))
    assert bench.tickets["math"] == 4
    bench.take(say.end("e1", "failed", final=True))
    assert bench.tickets["math"] == 6, "that of the slot, and that of the only member it left"
    assert len(bench.core.tickets.out["math"]) == 4


def test_a_kind_whose_groups_lack_hopeless_slots_keeps_no_learner_waiting(make_bench, say):
    bench = make_bench(mix={"a": 0.5, "b": 0.5}, group_size=3, groups_per_batch=2, max_staleness=0)

    def attempt(name, task, repeat, kind, **end):
        ticket = min(bench.core.tickets.out[kind])
        bench.take(say.begin(name, task, repeat, kind=kind, group_size=3, ticket_id=ticket), say.turn(episode=name))
        bench.take(say.end(name, **end))

    for step in range(1, 6):
        for kind in "ab":
            for repeat in range(3):
                hopeless = {"status": "failed", "final": True} if (kind, repeat) == ("b", 1) else {}
                attempt(f"{kind}{step}{repeat}", f"{kind}{step}", repeat, kind, **hopeless)
        ready = {item.episode_id for item in bench.sent if item.episode_id[1] == str(step)}
        assert len(ready) == 5
        bench.take(say.consumed(*ready, version=step))
    assert bench.core.tickets.kinds["a"].trained == bench.core.tickets.kinds["b"].trained == 5
    assert {kind: len(out) for kind, out in bench.core.tickets.out.items()} == {"a": 3, "b": 3}
