import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.errors import TimelineError
from swarmq.timeline import pack


def first_fit_decreasing(lengths, budget):
    """The textbook: every item, longest first, into the first bin with room."""
    bins = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[i] for i in members) + lengths[item] <= budget:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


@given(lengths=st.lists(st.integers(1, 20)))
def test_packing_is_first_fit_decreasing(lengths):
    assert pack(lengths, 20) == first_fit_decreasing(lengths, 20)


@given(lengths=st.lists(st.integers(1, 20)), budget=st.integers(20, 60))
def test_every_item_is_in_one_bin_and_no_bin_overflows(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget for members in bins)


def test_an_item_over_the_budget_is_an_error_that_names_it():
    with pytest.raises(TimelineError, match="sequence 1 has 30 tokens") as refusal:
        pack([5, 30], 20)
    assert refusal.value.reason == "over_budget"
