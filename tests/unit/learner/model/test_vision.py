"""Images in packed rows and trees: log-probabilities and gradients are those of transformers' own forward pass, turn by turn."""

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration

from support.images import make_image, make_turn
from support.tiny_vision_model import IMAGE_TOKEN, PICTURES, tiny_vision_model
from swarmq.config import Lora, Train
from swarmq.errors import SetUpError
from swarmq.learner.model.layout_model import LayoutModel, PlacedLayout
from swarmq.learner.model.loading import load_lm
from swarmq.learner.model.vision import read_input_norm
from swarmq.learner.train.trainer import _check_vision
from swarmq.timeline import ImageTable, PrefixTree, plan_rows, resolve

CPU = torch.device("cpu")
RELATIVE = 1e-5
"""Difference of gradients, and of log-probabilities in nats, between FP32 and float64."""


@pytest.fixture(scope="module")
def folder():
    return tiny_vision_model()


@pytest.fixture(scope="module")
def conversation(folder):
    """Turns that continue, fork after an image, see different images of equal tokens, one image twice, or none, and one that
    samples the placeholder token as a word."""
    pad = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(IMAGE_TOKEN)
    cat, dog, tall = make_image(1), make_image(2), make_image(3, height=3)
    first = make_turn("1", [5, 6, cat, 7, 8], [9, 10, pad], placeholder=pad)
    rest = {
        "2": ([5, 6, cat, 7, 8, 9, 10, pad, 4, tall, 3], [11, 12]),
        "3": ([5, 6, dog, 7, 8], [9, 10]),
        "4": ([5, 6, cat, 7, 9, cat, 1], [2, 2, 3]),
        "5": ([5, 6, 1], [4, 4]),
    }
    parents = {"2": first}
    more = [make_turn(name, *each, placeholder=pad, parent=parents.get(name)) for name, each in rest.items()]
    return [first, *more]


@pytest.fixture(scope="module")
def expected(folder, conversation):
    """Log-probabilities by (turn, number of the token), and gradients of their sum, in float64."""
    lm = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    logprobs, total = {}, 0.0
    table = ImageTable()
    marked, plain = resolve(conversation, images=table), resolve(conversation)
    for number, (turn, real) in enumerate(zip(marked, plain, strict=True)):
        ids = torch.from_numpy(real.token_ids.astype(np.int64))
        scores = _forward(lm, ids, torch.from_numpy(turn.token_ids < 0), _list_shown(turn.token_ids, table))
        sampled = ids[turn.prompt_length :, None]
        chosen = scores.log_softmax(-1)[turn.prompt_length - 1 : -1].gather(1, sampled)[:, 0]
        logprobs |= {(number, at): value for at, value in enumerate(chosen.tolist())}
        total = total + chosen.sum()
    total.backward()
    return logprobs, {name: each.grad for name, each in lm.named_parameters() if each.grad is not None}


def _list_shown(token_ids, table):
    shown, at = [], 0
    while at < len(token_ids):
        if token_ids[at] < 0:
            shown.append(table.images[-1 - token_ids[at]])
        at += shown[-1].num_tokens if token_ids[at] < 0 else 1
    return shown


def _forward(lm, ids, places, shown):
    if not shown:
        return lm(input_ids=ids[None]).logits[0]
    values = torch.from_numpy(np.concatenate([image.values for image in shown])).double()
    mean, std = (torch.tensor(PICTURES[key], dtype=torch.float64)[:, None] for key in ("image_mean", "image_std"))
    pixels = ((values.unflatten(-1, (3, -1)) / 255 - mean) / std).flatten(-2)
    grids = torch.tensor([image.grid for image in shown])
    if (ids == lm.config.image_token_id).equal(places):
        of_images = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": places[None].long()}
        return lm(input_ids=ids[None], **of_images).logits[0]
    # transformers would take a sampled placeholder token for a place of the image
    seen = torch.cat(tuple(lm.get_image_features(pixels, grids, return_dict=True).pooler_output))
    embeddings = lm.get_input_embeddings()(ids).masked_scatter(places[:, None], seen)
    positions, _ = lm.model.get_rope_index(ids[None], places[None].long(), image_grid_thw=grids)
    return lm(inputs_embeds=embeddings[None], position_ids=positions).logits[0]


def compute(model, layouts):
    model.zero_grad()
    logprobs = {}
    for layout in layouts:
        chosen = model(PlacedLayout.of(layout, CPU)).logprobs
        places = zip(layout.turns.tolist(), layout.offsets.tolist(), strict=True)
        logprobs |= dict(zip(places, chosen.tolist(), strict=True))
        chosen.sum().backward()
    return logprobs, {name: each.grad for name, each in model.model.named_parameters() if each.grad is not None}


def compare(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=RELATIVE)
    assert found[1].keys() == expected[1].keys()
    for part in ("visual", "language_model"):  # the vision tower's gradient is small beside the other
        apart = sum(((found[1][name] - each) ** 2).sum() for name, each in expected[1].items() if part in name)
        size = sum((each**2).sum() for name, each in expected[1].items() if part in name)
        assert (apart / size).sqrt() < RELATIVE


def lay(conversation, plan):
    table = ImageTable()
    layouts = plan(resolve(conversation, images=table))
    return [msgspec.structs.replace(layout, images=table.images) for layout in layouts]


@pytest.mark.parametrize(("budget", "passes"), [(200, 1), (30, 2)])
def test_trees_have_transformers_gradient(folder, conversation, expected, budget, passes):
    layouts = lay(conversation, lambda turns: PrefixTree([turns]).layouts(budget))
    assert len(layouts) == passes
    compare(compute(LayoutModel(load_lm(str(folder), gradient_checkpointing=True)), layouts), expected)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_rows_have_transformers_gradient(folder, conversation, expected, one_by_one):
    model = LayoutModel(load_lm(str(folder), gradient_checkpointing=False))
    assert model.rows_only is None
    if one_by_one:
        model.rows_only = "to test it"
        model.model.set_attn_implementation("sdpa")
    compare(compute(model, lay(conversation, lambda turns: plan_rows([turns], budget=200))), expected)


def test_a_vision_tower_keeps_its_attention(folder):
    config = LayoutModel(load_lm(str(folder), gradient_checkpointing=False)).model.config
    assert config.vision_config._attn_implementation == "sdpa"
    assert config.text_config._attn_implementation == "swarmq_layout"


def test_without_a_processor_s_file_no_image_is_trained(folder, tmp_path):
    assert read_input_norm(str(folder)).scales == pytest.approx([1 / 255 / each for each in PICTURES["image_std"]])
    with pytest.raises(SetUpError, match=r"takes images, but has neither of processor_config\.json"):
        read_input_norm(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    with pytest.raises(SetUpError, match="does not say how images are normalised"):
        read_input_norm(str(tmp_path))


@pytest.mark.parametrize(
    ("ranks", "train", "told"), [(2, Train(), "with 1 rank, not 2"), (1, Train(lora=Lora()), "train.lora")]
)
def test_what_was_not_proven_with_images_is_refused(ranks, train, told):
    with pytest.raises(SetUpError, match=told):
        _check_vision("model", train, ranks)
