"""What goes when room or time runs out: the dull and old before the interesting and new, and of everything something stays."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from swarmq.transcripts.retention import FORGOTTEN, SegmentIndex, find_protected, interest, plan_age, plan_size

INTERESTS = [0, 1, 2, 0]
FRAME = 50
KEPT = 2


@st.composite
def segments(draw):
    made = []
    now = 0.0
    for number in range(1, draw(st.integers(1, 5)) + 1):
        index = SegmentIndex(number=number, size=20)
        for _ in range(draw(st.integers(0, 12))):
            now += 1.0
            forgotten = draw(st.integers(0, 9)) == 0
            body = 0 if forgotten else draw(st.sampled_from([0, 10, 100, 400]))
            index.add(FORGOTTEN if forgotten else draw(st.integers(0, 3)), body, now)
            index.size += FRAME + body
        made.append(index)
    return made


def bodies(made):
    """(age rank, segment, frame, class, size) of every body, oldest first."""
    found = [
        (index.number, frame, index.classes[frame], size)
        for index in made
        for frame, size in enumerate(index.bodies)
        if size
    ]
    return [(rank, *rest) for rank, rest in enumerate(found)]


def gone(plan, number, frame):
    return (
        number in plan.remove
        or frame in plan.strip.get(number, frozenset())
        or frame in plan.forget.get(number, frozenset())
    )


@given(made=segments(), cap=st.integers(0, 6000))
def test_the_size_limit_removes_the_least_interesting_first(made, cap):
    target = int(cap * 0.9)
    plan = plan_size(made, INTERESTS, cap=cap, target=target, kept=KEPT)
    total = sum(index.size for index in made)
    if total <= cap:
        assert not plan
        return
    all_bodies = bodies(made)
    protected = find_protected(made, kept=KEPT)
    removed = [one for one in all_bodies if gone(plan, one[1], one[2])]
    stayed = [one for one in all_bodies if not gone(plan, one[1], one[2])]
    # of every class, the newest always stay
    for class_ in range(4):
        newest = [one for one in all_bodies if one[3] == class_][-KEPT:]
        assert not set(newest) & set(removed)
    # nothing goes while something duller, or as dull and older, stays
    for one in removed:
        for other in stayed:
            is_free = other[2] not in protected.get(other[1], frozenset())
            assert not is_free or (INTERESTS[other[3]], other[0]) > (INTERESTS[one[3]], one[0])
    # the segment that is written to stays, and whole segments go only if bodies are not enough
    assert made[-1].number not in plan.remove
    left = total - sum(index.size for index in made if index.number in plan.remove)
    left -= sum(made[number - 1].bodies[frame] for number, frames in plan.strip.items() for frame in frames)
    free = [one for one in stayed if one[2] not in protected.get(one[1], frozenset())]
    assert left <= target or not free
    if plan.remove:
        assert not free
    assert not plan.forget
    # no more goes than is needed: without the last body it would not be enough
    if removed and not plan.remove:
        assert left + max(one[4] for one in removed) > target


@given(made=segments(), before=st.floats(0, 70))
def test_the_age_limit_removes_old_segments_and_keeps_the_protected(made, before):
    plan = plan_age(made, before=before, kept=KEPT)
    protected = find_protected(made, kept=KEPT)
    assert not plan.strip
    for index in made[:-1]:
        is_aged = index.newest_at < before
        stay = protected.get(index.number, frozenset())
        assert (index.number in plan.remove) == (is_aged and not stay)
        if is_aged and stay:
            others = {frame for frame, class_ in enumerate(index.classes) if class_ != FORGOTTEN} - stay
            assert plan.forget.get(index.number, frozenset()) == others
        elif not is_aged:
            assert index.number not in plan.forget
    assert made[-1].number not in {*plan.remove, *plan.forget}


@given(made=segments())
def test_the_newest_of_every_class_are_protected_and_no_others(made):
    protected = find_protected(made, kept=KEPT)
    all_bodies = bodies(made)
    expected = Counter()
    for class_ in range(4):
        for _, number, frame, _, _ in [one for one in all_bodies if one[3] == class_][-KEPT:]:
            expected[number, frame] += 1
    assert {(number, frame) for number, frames in protected.items() for frame in frames} == set(expected)


def test_failures_and_evaluations_are_more_interesting_than_what_was_trained():
    assert interest("trained", "") == interest("dropped", "equal_rewards") == 0
    assert interest("dropped", "stale") == interest("dropped", "group_too_small") == 1
    assert {interest("dropped", reason) for reason in ("failed", "silent", "aborted", "no_turns")} == {2}
    assert interest("eval", "finished") == interest("eval", "failed") == 2
