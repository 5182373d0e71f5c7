"""A number and its noun agree."""

from swarmq.runtime.wording import count_of


def test_a_noun_and_its_verb_follow_their_number():
    assert [count_of(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [count_of(n, "group waits", "groups wait") for n in (1, 2)] == ["1 group waits", "2 groups wait"]
