"""Matrix products in FP8: how exact they are, what they leave as it is, and which models and hosts are refused. Emulated on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.episodes import make_group
from swarmq.config import Sft, SwarmJob, Train
from swarmq.errors import LearnerError
from swarmq.learner import main
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.doctor.examine import layouts_agree
from swarmq.learner.model.float8 import Float8Linear, convert_layers, multiply_unquantised
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.train.trainer import Trainer

TRAIN = Train(mixed_precision="bf16", learning_rate=1e-2, warmup_steps=0, token_log=False, trackers=())
SFT = Sft(demonstrations="none")
CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module", autouse=True)
def _bf16_beside_other_modules() -> Iterator[None]:
    """accelerate has one precision in a process."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def products(layer: nn.Linear, tokens: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias."""
    tokens = tokens.clone().requires_grad_()
    output = layer(tokens)
    output.backward(grad)
    return [each for each in (output.detach(), tokens.grad, layer.weight.grad, layer.bias.grad) if each is not None]


def distance(values: Tensor, wanted: Tensor) -> float:
    return float((values - wanted).detach().norm() / wanted.detach().norm())


def test_each_of_the_three_products_is_within_five_percent_of_fp32() -> None:
    """A factor in E4M3 is off by 2.7 % (a rounding error of up to 1/16, spread evenly), two of them by 3.8 %."""
    torch.manual_seed(0)
    exact, narrow = nn.Linear(64, 96), Float8Linear(64, 96)
    narrow.load_state_dict(exact.state_dict())
    tokens, grad = torch.randn(2, 35, 64), torch.randn(2, 35, 96)  # 70 tokens: no multiple of 16
    wanted, made = products(exact, tokens, grad), products(narrow, tokens, grad)
    assert all(0.005 < distance(a, b) < 0.05 for a, b in zip(made[:3], wanted[:3], strict=True))
    assert torch.equal(made[3], wanted[3])  # the bias is in no product


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_are_not_hidden() -> None:
    layer = Float8Linear(32, 16, bias=False)
    assert not layer(torch.zeros(16, 32)).any()
    spoilt = torch.ones(16, 32)
    spoilt[3, 5] = float("nan")
    assert not layer(spoilt).isfinite().any()  # its step is skipped


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"
)  # torch's compiler does
def test_layers_are_compiled_whole_and_once_for_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Float8Linear(32, 48), nn.SiLU(), Float8Linear(48, 32))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, dynamic=True, fullgraph=True, backend=counter)
    for count in (48, 33):
        tokens, made = torch.randn(count, 32), list[list[Tensor]]()
        for computed in (layers, compiled):
            layers.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = computed(tokens)
            output.float().square().sum().backward()
            made.append([output.detach(), *(p.grad for p in layers.parameters() if p.grad is not None)])
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert counter.frame_count == 1
    with multiply_unquantised(layers):
        assert torch.equal(compiled(tokens), layers(tokens)), "compiled anew"


@pytest.fixture(scope="module")
def trainers(tiny_qwen: Path) -> dict[str, Trainer]:
    return {
        name: Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, mixed_precision=name)) for name in ("bf16", "fp8")
    }


def gradient(trainer: Trainer) -> Tensor:
    work = build_rank_batch(make_group("a", (0.0, 1.0, 0.5), turns=3), trainer.train, trainer.traits)
    trainer.optimizer.zero_grad()
    trainer.accumulate(work, trainer.train)
    grads = torch.cat([p.grad.flatten() for p in trainer.lm.parameters() if p.grad is not None]).clone()
    trainer.optimizer.zero_grad()
    return grads


def test_the_gradient_of_a_batch_is_within_a_tenth_of_bf16s(trainers: dict[str, Trainer]) -> None:
    """With packed trees, activation checkpointing and the trainer's head."""
    assert 0.005 < distance(gradient(trainers["fp8"]), gradient(trainers["bf16"])) < 0.1


@pytest.mark.parametrize(("seed", "layers", "spread"), [(0, 2, 1.0), (1, 2, 4.0), (2, 8, 1.0), (3, 8, 4.0)])
def test_a_bf16_engine_is_about_nine_times_as_far_from_fp8_as_from_bf16(seed: int, layers: int, spread: float) -> None:
    """A significand of 4 bits instead of 8 rounds 16 times as coarsely; BF16 rounds in more places. `spread`: of the logits."""
    torch.manual_seed(seed)
    sizes = SMALL | {"hidden_size": 64, "num_hidden_layers": layers}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, initializer_range=0.1)).eval()
    model.lm_head.weight.data *= spread
    ids = torch.randint(0, SMALL["vocab_size"], (8, 64))

    @torch.no_grad()
    def learn() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(ids).last_hidden_state
        return model.lm_head(hidden.float()).log_softmax(-1)

    with torch.no_grad():
        engine = copy.deepcopy(model).bfloat16()(ids).logits.float().log_softmax(-1)
    sampled = torch.distributions.Categorical(logits=engine).sample()[..., None]
    in_bf16 = learn()
    convert_layers(model, CPU)
    gaps = [float((each - engine).gather(-1, sampled).abs().mean()) for each in (learn(), in_bf16)]
    assert 5 < gaps[0] / gaps[1] < 13


def test_the_doctor_compares_layouts_without_fp8(trainers: dict[str, Trainer]) -> None:
    record = BatchRecord(
        index=BatchIndex(record=1, version=1), episodes=tuple(make_group("a", turns=3)), settings=TRAIN
    )
    assert layouts_agree(trainers["fp8"], record) == layouts_agree(trainers["bf16"], record)
    assert any(isinstance(each, Float8Linear) for each in trainers["fp8"].lm.modules()), "it is FP8 again"


def test_weights_keep_their_names_and_stay_fp32_and_the_head_computes_as_before(
    trainers: dict[str, Trainer],
) -> None:
    lm, plain = trainers["fp8"].lm, trainers["bf16"].lm
    assert [(name, each.dtype) for name, each in lm.state_dict().items()] == [
        (name, each.dtype) for name, each in plain.state_dict().items()
    ]
    assert [name for name, _ in trainers["fp8"].weights_to_push()] == [
        name for name, _ in trainers["bf16"].weights_to_push()
    ]
    converted = {name.rpartition(".")[2] for name, each in lm.named_modules() if isinstance(each, Float8Linear)}
    assert converted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def losses(trainer: Trainer) -> list[float]:
    """Cross-entropy of the same episodes over twelve steps."""
    demonstrations = make_group("a", (1.0, 1.0), turns=2)
    work = trainer.build_supervised(demonstrations, msgspec.structs.replace(trainer.train, sft=SFT))
    assert work is not None
    made = []
    for step in range(1, 13):
        made.append(trainer._accumulate_cross_entropy(work, 1.0))
        trainer._update(trainer._clip(trainer.train), trainer.train, step, anything=True)
    return made


@pytest.mark.slow
def test_the_loss_comes_down_in_fp8_as_in_bf16(tiny_qwen: Path) -> None:
    curves = {
        name: losses(Trainer(str(tiny_qwen), msgspec.structs.replace(TRAIN, mixed_precision=name)))
        for name in ("bf16", "fp8")
    }
    fall = curves["bf16"][0] - curves["bf16"][-1]
    assert fall > 0.5
    assert max(abs(a - b) for a, b in zip(curves["fp8"], curves["bf16"], strict=True)) < 0.05 * fall


def test_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="mixed_precision: layers with adapters cannot multiply in FP8"):
        msgspec.convert({"mixed_precision": "fp8", "lora": {}}, Train)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL | {"intermediate_size": 40})), r"mlp\.gate_proj has 32 inputs and 40 outputs, and FP8 needs multiples of 16"),
        (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)), "its experts are stacked"),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)), r"its layers have no torch\.nn\.Linear"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_multiply_in_fp8_is_refused_unchanged(model: Any, reason: str) -> None:
    made = model()
    with pytest.raises(LearnerError, match=f"train.mixed_precision: {type(made).__name__} cannot .*{reason}.*; set it"):
        convert_layers(made, CPU)
    assert not any(isinstance(each, Float8Linear) for each in made.modules())


def test_the_sizes_of_every_layer_are_checked() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL | {"num_hidden_layers": 2}))
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(32, 40, bias=False)
    with pytest.raises(LearnerError, match=r"mlp\.gate_proj has 32 inputs and 40 outputs"):
        convert_layers(model, CPU)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(LearnerError, match=r"NVIDIA A100 has compute capability 8\.0, and FP8 needs 8\.9 or higher"):
        convert_layers(Qwen3ForCausalLM(Qwen3Config(**SMALL)), torch.device("cuda"))


def test_a_learner_without_a_gpu_refuses_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    policy = {"model": "m", "train": {"mixed_precision": "fp8"}}
    job = SwarmJob.build({"run": "r", "folder": str(tmp_path), "policies": {"main": policy}})
    with pytest.raises(LearnerError, match=r"train\.mixed_precision: FP8 matrix products need a GPU"):
        main.train(job, "main", no_push=True)
