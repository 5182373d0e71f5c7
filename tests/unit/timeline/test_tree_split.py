"""A tree that fits no pass: what its passes compute, against every other way to divide it."""

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.timeline.pack import pack
from swarmq.timeline.tree_split import divide


def random_tree(draw, leaves, longest):
    """Tokens and parents of nodes in depth-first order; `draw(a, b)` is a number from a to b."""
    lengths, parents = [], []

    def grow(parent, leaves):
        node = len(lengths)
        lengths.append(draw(1, longest))
        parents.append(parent)
        while leaves > 1:
            share = draw(1, leaves - 1)
            grow(node, share)
            leaves -= share
        if node + 1 < len(lengths) or draw(0, 1):
            grow(node, 1)

    while leaves:
        share = draw(1, leaves)
        grow(-1, share)
        leaves -= share
    return lengths, parents


def paths_to_leaves(parents):
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path, node = set(), leaf
        while node >= 0:
            path.add(node)
            node = parents[node]
        paths.append(path)
    return paths


def total(lengths, passes):
    return sum(lengths[node] for nodes in passes for node in nodes)


def deepest(lengths, parents):
    return max(total(lengths, [path]) for path in paths_to_leaves(parents))


def fewest_tokens(lengths, parents, budget):
    """Over all partitions of the leaves."""
    paths = paths_to_leaves(parents)
    sizes = [total(lengths, [set().union(*held)]) for held in subsets(paths)]
    best = [0] * len(sizes)
    for chosen in range(1, len(sizes)):
        first = chosen & -chosen
        best[chosen] = min(
            best[chosen ^ part] + sizes[part]
            for part in range(1, chosen + 1)
            if part & chosen == part and part & first and sizes[part] <= budget
        )
    return best[-1]


def subsets(items):
    return [[item for i, item in enumerate(items) if chosen >> i & 1] for chosen in range(1 << len(items))]


def cheapest_cuts(lengths, parents, budget):
    """Over all ways of cutting the leaves into ranges, by plain recursion over the first range."""
    paths = paths_to_leaves(parents)
    least = [0] * (len(paths) + 1)
    for start in reversed(range(len(paths))):
        ends = range(start + 1, len(paths) + 1)
        sizes = [(total(lengths, [set().union(*paths[start:end])]), end) for end in ends]
        least[start] = min(size + least[end] for size, end in sizes if size <= budget)
    return least[0]


@given(data=st.data())
def test_passes_hold_every_node_with_its_ancestors_and_repeat_no_more_than_the_best_cuts_in_order(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    lengths, parents = random_tree(draw, draw(1, 12), longest=9)
    budget = deepest(lengths, parents) + draw(0, 30)
    passes = divide(lengths, parents, budget)
    assert set().union(*passes) == set(range(len(lengths)))
    for nodes in passes:
        assert total(lengths, [nodes]) <= budget
        assert {parents[node] for node in nodes} <= nodes | {-1}
    assert total(lengths, passes) <= cheapest_cuts(lengths, parents, budget)


def test_no_partition_of_a_small_tree_is_much_better():
    """First-fit decreasing may need three passes where two would do, never more than half too many; nearly always the
    passes are the best there are."""
    random_, ratios = random.Random(0), []
    for _ in range(300):
        lengths, parents = random_tree(random_.randint, random_.randint(2, 6), random_.choice([3, 12, 40]))
        budget = deepest(lengths, parents) + random_.randint(0, 30)
        ratios.append(total(lengths, divide(lengths, parents, budget)) / fewest_tokens(lengths, parents, budget))
    assert min(ratios) == 1
    assert max(ratios) <= 1.5
    assert sum(ratios) / len(ratios) < 1.005


def test_members_are_packed_whatever_order_they_arrived_in():
    for order in itertools.permutations([6, 6, 4, 4]):
        passes = divide([10, *order], [-1, 0, 0, 0, 0], 20)
        assert total([10, *order], passes) == 40


@pytest.mark.parametrize("prompt", [4000, 8000])
def test_a_group_too_large_for_a_pass_repeats_its_prompt_as_rarely_as_its_members_can_be_packed(prompt):
    random_ = random.Random(0)
    members = [random_.randint(500, 6000) for _ in range(64)]
    lengths = [prompt, *members]
    bins = pack(members, 16384 - prompt)
    assert total(lengths, divide(lengths, [-1] + [0] * 64, 16384)) <= sum(members) + prompt * len(bins)


def test_room_that_one_subtree_leaves_is_filled_by_its_neighbours():
    lengths, parents = [10, 5, 50, 50, 30, 30], [-1, 0, 1, 1, 0, 0]
    assert total(lengths, divide(lengths, parents, 100)) == 2 * (10 + 5 + 50 + 30)


def test_members_that_begin_alike_do_not_keep_passes_from_being_full():
    """Six members of which three begin with the same token: together those are too large for the room beside another."""
    lengths, parents = [1000, 1, 300, 300, 300, 450, 450, 450], [-1, 0, 1, 1, 1, 0, 0, 0]
    assert total(lengths, divide(lengths, parents, 2260)) == 2 * 1000 + 2 + 3 * 300 + 3 * 450


def test_cuts_in_order_are_taken_where_packing_needs_more_passes():
    lengths = [1000, 4, 3, 3, 4, 3, 3]
    assert len(pack(lengths[1:], 10)) == 3
    assert total(lengths, divide(lengths, [-1] + [0] * 6, 1010)) == 2020


def test_a_batch_of_a_million_tokens_is_divided_in_moments():
    """512 episodes of 40 turns whose template strips thoughts: 20,480 leaves."""
    lengths, parents = [], []
    for _ in range(64):
        prompt = len(lengths)
        lengths.append(1000)
        parents.append(-1)
        for _ in range(8):
            above = prompt
            for _ in range(40):
                lengths += [40, 30]
                parents += [above, len(parents)]
                above = len(parents) - 2
    began = time.process_time()
    passes = divide(lengths, parents, 16384)
    assert time.process_time() - began < 3
    assert total(lengths, passes) < 1.05 * sum(lengths)


def test_no_trees_need_no_pass():
    assert divide([], [], 10) == []
