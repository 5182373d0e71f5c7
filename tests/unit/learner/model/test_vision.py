"""Images in packed rows and trees: log-probabilities and gradients are those of transformers' own forward pass, turn by turn."""

import shutil

import msgspec
import pytest
import torch
from benchmarks.vlm import oracle
from benchmarks.vlm.architecture import IMAGE, QWEN2_5_VL, QWEN3_VL
from safetensors.torch import save_file
from tokenizers import Tokenizer

from support.images import make_image, make_turn
from support.tiny_vision_model import DEVIATION, tiny_vision_model
from swarmq.config import Critic, Lora, Loss, Train
from swarmq.errors import SetUpError
from swarmq.learner.model.layout_model import LayoutModel
from swarmq.learner.model.loading import load_lm
from swarmq.learner.model.vision import read_input_norm
from swarmq.learner.train.trainer import Trainer, _check_vision

RELATIVE = 1e-5
"""Difference of gradients, and of log-probabilities in nats, between FP32 and float64."""


@pytest.fixture(scope="module", params=[QWEN2_5_VL, QWEN3_VL], ids=lambda kind: kind.family)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind):
    return tiny_vision_model(kind)


@pytest.fixture(scope="module")
def conversation(kind, folder):
    """Turns that continue, fork after an image, see different images of equal tokens, one image twice, or none, and one that
    samples the placeholder token as a word."""
    pad = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(IMAGE)
    cat, dog, tall = (make_image(seed, height=height, kind=kind) for seed, height in ((1, 2), (2, 2), (3, 3)))
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
    return oracle.compute_alone(folder, conversation)


@pytest.mark.parametrize(("way", "budget", "passes"), [("rows", 200, 1), ("tree", 200, 1), ("tree", 30, 2)])
def test_rows_and_trees_have_transformers_gradient(folder, conversation, expected, way, budget, passes):
    layouts = oracle.lay(conversation, way, budget)
    assert len(layouts) == passes
    model = LayoutModel(load_lm(str(folder), gradient_checkpointing=way == "tree"))
    assert model.rows_only is None
    distance = oracle.compare(oracle.compute(model, layouts), expected)
    assert max(distance) < RELATIVE


def test_rows_one_by_one_have_transformers_gradient(folder, conversation, expected):
    model = LayoutModel(load_lm(str(folder), gradient_checkpointing=False))
    model.rows_only = "to test it"
    model.model.set_attn_implementation("sdpa")
    distance = oracle.compare(oracle.compute(model, oracle.lay(conversation, "rows", 200)), expected)
    assert max(distance) < RELATIVE


@pytest.mark.parametrize(("way", "checkpointing"), [("rows", False), ("tree", True)])
def test_adapters_have_the_gradient_of_the_weights_that_they_add_to(folder, conversation, tmp_path, way, checkpointing):
    """Of W + s B A: s G A' for B and s B' G for A, where G is transformers' gradient of the merged weights."""
    lora = Lora(rank=2, alpha=6.0)
    trainer = Trainer(str(folder), Train(lora=lora, gradient_checkpointing=checkpointing, token_log=False))
    adapters = {name: each for name, each in trainer.lm.named_parameters() if each.requires_grad}
    torch.manual_seed(0)
    for each in adapters.values():
        each.data = 0.05 * torch.randn_like(each)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(dict(trainer.named_tensors()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    merged = oracle.compute_alone(tmp_path, conversation)
    gradients = {}
    for name in (name for name in adapters if ".lora_A." in name):
        other = name.replace(".lora_A.", ".lora_B.")
        whole = merged.gradients[name.replace(".lora_A.default", "")] * (lora.alpha / lora.rank)
        gradients[name] = adapters[other].detach().double().T @ whole
        gradients[other] = whole @ adapters[name].detach().double().T
    assert {part for part in oracle.PARTS for name in gradients if part in name} == {"visual", "language_model"}
    found = oracle.compute(trainer.model, oracle.lay(conversation, way, 200))
    assert max(oracle.compare(found, merged._replace(gradients=gradients))) < RELATIVE


def test_a_vision_tower_keeps_its_attention(folder):
    config = LayoutModel(load_lm(str(folder), gradient_checkpointing=False)).model.config
    assert config.vision_config._attn_implementation == "sdpa"
    assert config.text_config._attn_implementation == "swarmq_layout"


def test_without_a_processor_s_file_no_image_is_trained(folder, tmp_path):
    assert read_input_norm(str(folder)).scales == pytest.approx([1 / 255 / each for each in DEVIATION])
    with pytest.raises(SetUpError, match=r"takes images, but has neither of processor_config\.json"):
        read_input_norm(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    with pytest.raises(SetUpError, match="does not say how images are normalised"):
        read_input_norm(str(tmp_path))


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"teacher": "http://teacher:8000", "loss": Loss(name="distill")}, "train.teacher: .* without seeing them"),
        (
            {"teacher": "OTHER", "loss": Loss(name="distill")},
            "train.teacher: .*does not take the images of .*same type",
        ),
        ({"critic": Critic(model="OTHER"), "advantage": "gae"}, "train.critic: .*does not take the images of"),
    ],
)
def test_a_judge_that_would_not_see_the_images_is_refused(folder, kind, train, told):
    other = tiny_vision_model(QWEN2_5_VL if kind is QWEN3_VL else QWEN3_VL)
    settings = msgspec.convert(
        msgspec.json.decode(msgspec.json.encode(train).replace(b"OTHER", str(other).encode())), Train
    )
    with pytest.raises(SetUpError, match=told):
        _check_vision(str(folder), settings)
