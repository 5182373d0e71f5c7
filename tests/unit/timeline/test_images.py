"""Equal placeholder tokens of different images are different tokens to folding and trees, and positions follow each path."""

import msgspec
import numpy as np
import pytest
import zstandard

from support.images import make_image, make_turn
from swarmq.errors import TimelineError
from swarmq.timeline import ImageTable, PrefixTree, fold, images, plan_rows, resolve
from swarmq.timeline.images import compute_positions

PAD = 7
CAT, DOG = make_image(1), make_image(2)
WIDE = make_image(3, height=1, width=3)


def turn(call_id, parts, sampled=(5,), **more):
    return make_turn(call_id, parts, sampled, placeholder=PAD, **more)


def lay(turns, budget=100):
    table = ImageTable()
    layouts = PrefixTree([resolve(turns, images=table)]).layouts(budget)
    return [msgspec.structs.replace(layout, images=table.images) for layout in layouts]


def test_sequences_share_an_image_and_never_another_one_of_equal_tokens():
    same, other = (lay([turn("a", [1, CAT, 2], [5]), turn("b", [1, image, 2], [6])]) for image in (CAT, DOG))
    assert [layout.num_tokens for layout in same] == [1 + 4 + 1 + 2]
    assert [layout.num_tokens for layout in other] == [1 + 2 * (4 + 1 + 1)]


def test_a_turn_does_not_continue_one_about_another_image():
    first = turn("a", [1, CAT, 2], [5])
    goes_on, starts_over = ([first, turn("b", [1, image, 2, 5, 3], [6])] for image in (CAT, DOG))
    assert len(fold(resolve(goes_on, images=ImageTable()))) == 1
    assert len(fold(resolve(starts_over, images=ImageTable()))) == 2


def test_shared_tokens_bring_their_images():
    first = turn("a", [1, CAT, 2], [5])
    table = ImageTable()
    turns = [
        first,
        turn("b", [1, CAT, 2, 5, 3, DOG], [6], parent=first),
        turn("c", [1, CAT, 9], [6], parent=first, shared=5),
    ]
    one, two, three = (resolved.token_ids.tolist() for resolved in resolve(turns, images=table))
    assert one == [1, *[-1] * 4, 2, 5]
    assert two == [*one, 3, *[-2] * 4, 6]
    assert three == [1, *[-1] * 4, 9, 6]
    assert len(table.images) == 2


def test_without_a_table_a_turn_has_the_tokens_that_the_engine_saw():
    [resolved] = resolve([turn("a", [1, CAT, 2])])
    assert resolved.token_ids.tolist() == [1, PAD, PAD, PAD, PAD, 2, 5]


def test_text_goes_on_after_the_largest_position_of_an_image():
    [layout] = lay([turn("a", [1, WIDE, 2, CAT, 3])])
    assert compute_positions(layout).tolist() == [
        [0, 1, 1, 1, 4, 5, 5, 5, 5, 7, 8],
        [0, 1, 1, 1, 4, 5, 5, 6, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 8],
    ]


def test_a_token_s_position_depends_on_the_images_of_its_own_path():
    turns = [turn("a", [1, 2, CAT, 3], [4]), turn("b", [1, 2, WIDE, 3], [4]), turn("c", [1, 2, 9, CAT, CAT], [4])]
    [tree] = lay(turns)
    assert tree.num_tokens < sum(len(one) for one in resolve(turns))
    found = compute_positions(tree)[:, tree.predictors]
    alone = [compute_positions(lay([one])[0])[:, -2] for one in turns]
    assert found.T.tolist() == np.stack(alone).tolist()


def test_a_tree_is_never_cut_within_an_image():
    turns = [turn("a", [1, CAT, 2], [5]), turn("b", [1, DOG, 2], [5]), turn("c", [1, CAT, CAT], [5])]
    layouts = lay(turns, budget=12)
    assert len(layouts) > 1
    for layout in layouts:
        assert compute_positions(layout).shape == (3, layout.num_tokens)


def test_rows_have_the_positions_of_their_turns():
    turns = [turn("a", [1, CAT, 2], [5]), turn("b", [WIDE, 2], [5])]
    table = ImageTable()
    [layout] = plan_rows([resolve(turns, images=table)], budget=100)
    positions = compute_positions(msgspec.structs.replace(layout, images=table.images))
    expected = [compute_positions(lay([one])[0]) for one in turns]
    order = np.argsort(layout.turns)
    assert positions[:, layout.predictors[order]].tolist() == np.stack([each[:, -2] for each in expected], 1).tolist()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"patches": b"no zstd"}, "cannot be read"),
        ({"patches": zstandard.compress(b"\0" * 64)}, "not those of its digest"),
        ({"digest": "0" * 64}, "not those of its digest"),
        ({"length": 3}, "3 tokens cannot stand for a grid of"),
    ],
)
def test_a_damaged_image_drops_its_episode_with_the_reason(changed, told):
    broken = turn("a", [1, msgspec.structs.replace(CAT, **changed), 2])
    with pytest.raises(TimelineError, match=told) as raised:
        resolve([broken], images=ImageTable())
    assert raised.value.reason == "image_damaged"


def test_an_image_that_claims_to_be_huge_is_not_decompressed(monkeypatch):
    monkeypatch.setattr(images, "MAX_PATCH_BYTES", 1000)
    with pytest.raises(TimelineError, match="claim to have .* more than 1000"):
        resolve([turn("a", [1, CAT, 2])], images=ImageTable())
