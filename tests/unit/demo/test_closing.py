"""The closing table finds what is missing or doubled, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from swarmq.demo.accounting import settle


def test_an_episode_in_none_of_the_records_is_lost():
    account = settle(["a", "b", "c", "d"], ["a"], {"b": "equal_rewards"}, ["c"])
    assert account.lost == ("d",)
    assert (account.confirmed, account.trained, account.dropped, account.waiting) == (4, 1, {"equal_rewards": 1}, 1)


def test_an_episode_in_two_steps_is_found():
    assert settle(["a"], ["a", "a"], {}, []).twice == ("a",)


def test_an_episode_still_listed_as_waiting_after_it_was_trained_counts_once():
    account = settle(["a"], ["a"], {}, ["a"])
    assert (account.trained, account.waiting, account.lost) == (1, 0, ())


@given(st.dictionaries(st.text("abc", max_size=3), st.sampled_from(["trained", "dropped", "waiting", "lost"])))
def test_every_episode_has_exactly_one_fate(fates):
    where = {fate: [e for e, f in fates.items() if f == fate] for fate in ("trained", "dropped", "waiting", "lost")}
    account = settle(fates, where["trained"], dict.fromkeys(where["dropped"], "stale"), where["waiting"])
    assert list(account.lost) == sorted(where["lost"])
    assert account.trained + sum(account.dropped.values()) + account.waiting + len(account.lost) == account.confirmed
    assert account.twice == ()
