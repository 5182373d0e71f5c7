"""Whether a model is sharded follows from what it takes of a GPU; what does not fit says what is missing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmq.config import Lora, Loss, Train
from swarmq.engine.server.model_check import count_fans
from swarmq.errors import LearnerError
from swarmq.learner.distributed import accelerator
from swarmq.learner.distributed.accelerator import make_accelerator
from swarmq.learner.distributed.sharding import PRECISION, build_fsdp_plugin
from swarmq.learner.memory import plan
from swarmq.learner.memory.estimate import GIB, ModelShape, learner_bytes
from swarmq.learner.memory.plan import (
    GpuMemory,
    adapt_to_single_rank,
    check_gpu,
    check_shape,
    choose_sharding,
    has_room_for_whole,
    load_shape,
)
from swarmq.learner.memory.ranks import check_rank_count, num_ranks
from swarmq.learner.model.lora import add_lora
from swarmq.runtime.wording import count_of

TRAIN = Train(mixed_precision="bf16")
MIDDLE = ModelShape(parameters=6_500_000_000, hidden=4096, layers=36, fans=2_700_000)
GPU = GpuMemory(total=139 * GIB, free=80 * GIB)


def test_what_does_not_fit_says_how_much_is_missing_and_what_to_change() -> None:
    with pytest.raises(
        LearnerError, match=r"6\.5 B parameters does not fit: .* \(other processes take 59\.0\), \d+\.\d are"
    ):
        check_shape(MIDDLE, TRAIN, ranks=1, gpu=GPU)


@pytest.mark.parametrize(
    ("asked", "cuda", "computed"),
    [("auto", True, "bf16"), ("auto", False, "no"), ("no", True, "no"), ("bf16", False, "bf16")],
)
def test_a_gpu_computes_in_bf16_where_nothing_else_is_asked(
    asked: str, cuda: bool, computed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Train(mixed_precision=asked)
    made: dict[str, object] = {}
    monkeypatch.setattr(accelerator, "Accelerator", lambda **settings: made.update(settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(plan, "load_shape", lambda _: MIDDLE)
    make_accelerator(train, "m")
    assert made["mixed_precision"] == computed
    assert build_fsdp_plugin(train).mixed_precision_policy == PRECISION[computed]


def test_other_hosts_get_the_tokenizer_of_a_served_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(accelerator, "Accelerator", lambda **_: None)
    monkeypatch.setattr(accelerator, "send_model_files", sent.append)
    monkeypatch.setattr(plan, "load_shape", lambda _: MIDDLE)
    make_accelerator(Train(loss=Loss(name="distill"), teacher="http://h:8000/v1", teacher_tokenizer="other"), "m")
    assert sent == ["m", "other"]


def test_memory_is_planned_for_what_a_gpu_computes_in() -> None:
    assert Train().mixed_precision == "auto"
    assert learner_bytes(MIDDLE, Train()) == learner_bytes(MIDDLE, TRAIN)
    assert learner_bytes(MIDDLE, Train(mixed_precision="no")) != learner_bytes(MIDDLE, TRAIN)


def test_what_is_shared_out_among_ranks_fits_and_says_how() -> None:
    assert "of 80.0 free GiB" in check_shape(MIDDLE, TRAIN, ranks=4, gpu=GPU)


def test_layers_stay_gathered_only_where_the_whole_fits_beside_a_share(tiny_qwen: Path) -> None:
    shape, source = load_shape(str(tiny_qwen)), str(tiny_qwen)
    share = learner_bytes(shape, TRAIN, ranks=2)
    needed = share + shape.parameters * (2 + 4)  # weights in BF16, the gradient in FP32
    for free, holds in ((needed, True), (needed - 1, False)):
        assert has_room_for_whole(source, TRAIN, ranks=2, gpu=GpuMemory(total=GIB, free=free)) is holds
    offloaded = msgspec.structs.replace(TRAIN, sharding="full", cpu_offload=True)
    assert not has_room_for_whole(source, offloaded, ranks=2, gpu=GpuMemory(total=GIB, free=GIB)), (
        "which asks for little memory"
    )


def test_adapters_take_less_than_full_parameters() -> None:
    assert learner_bytes(MIDDLE, msgspec.structs.replace(TRAIN, lora=Lora())) < learner_bytes(MIDDLE, TRAIN) / 2


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_adapters_have_as_many_parameters_as_they_are_planned_with(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "moe_intermediate_size": 24} if family == "qwen3_moe" else {}
    config = AutoConfig.for_model(family, **sizes, head_dim=16, intermediate_size=48, vocab_size=64, **experts)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    add_lora(model, Lora(rank=8))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert trained == 8 * load_shape(str(tmp_path)).fans
    routers = 2 * (4 + 32) if experts else 0
    assert count_fans(config.to_dict()) == load_shape(str(tmp_path)).fans - routers


def test_the_rank_of_adapters_is_what_they_take(tiny_qwen: Path) -> None:
    """Weights, gradient and AdamW's moments in FP32; where ranks hold the whole each, also the buckets of the sum."""
    shape = load_shape(str(tiny_qwen))
    small, large = (msgspec.structs.replace(TRAIN, lora=Lora(rank=rank)) for rank in (8, 136))
    for count, full, taken in ((1, True, 16), (2, True, 8), (2, False, 20)):
        more = learner_bytes(shape, large, ranks=count, full=full) - learner_bytes(shape, small, ranks=count, full=full)
        assert more == taken * 128 * shape.fans


def test_judges_and_the_buffer_of_pushes_take_room_and_a_served_teacher_takes_none() -> None:
    def taken(ranks: int = 1, **changed: object) -> float:
        return learner_bytes(MIDDLE, msgspec.structs.replace(TRAIN, **changed), ranks=ranks) / MIDDLE.parameters

    plain, kl, distilled = taken(), {"loss": Loss(kl=0.1)}, {"loss": Loss(name="distill")}
    assert taken(**kl) == pytest.approx(plain + 4)
    for served in ("http://teacher:8000/v1", "policies.teacher"):
        assert taken(**distilled, teacher=served) == pytest.approx(plain)
    assert taken(**distilled, teacher="a/model") == pytest.approx(plain + 4)
    assert taken(optimizer="adamw_8bit") == pytest.approx(plain - 6), "moments of two bytes in place of eight"
    assert taken(2, **kl) == pytest.approx(taken(2) + 2), "shared out like the policy"
    adapters = {"lora": Lora()}
    assert taken(**kl, **adapters) == taken(**adapters), "the initial model is there already"
    assert taken(**kl, **adapters, reference="a/model") == pytest.approx(taken(**adapters) + 4)
    several = learner_bytes(MIDDLE, TRAIN, ranks=2, full=False)
    assert several / MIDDLE.parameters == pytest.approx(plain + 4), "each holds the whole, and the buckets of the sum"


def test_a_judge_counts_with_its_own_size(tiny_qwen: Path) -> None:
    room = learner_bytes(load_shape(str(tiny_qwen)), TRAIN) + 1000
    gpu = GpuMemory(total=room, free=room)
    check_gpu(str(tiny_qwen), TRAIN, ranks=1, full=False, gpu=gpu)
    with pytest.raises(LearnerError, match="a reference .*, teacher .* or critic .* takes memory"):
        check_gpu(str(tiny_qwen), msgspec.structs.replace(TRAIN, loss=Loss(kl=0.1)), ranks=1, full=False, gpu=gpu)
    adapters = msgspec.structs.replace(TRAIN, lora=Lora())
    room = learner_bytes(load_shape(str(tiny_qwen)), adapters)
    gpu = GpuMemory(total=room, free=room)
    check_gpu(str(tiny_qwen), msgspec.structs.replace(adapters, loss=Loss(kl=0.1)), ranks=1, full=False, gpu=gpu)


def test_a_models_size_is_known_without_its_weights(tiny_qwen: Path) -> None:
    shape = load_shape(str(tiny_qwen))
    assert (shape.hidden, shape.layers) == (32, 2)
    assert shape.parameters > 10_000


def test_adapters_are_trained_in_a_model_that_ranks_share_out_where_no_gpu_holds_it(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen: Path
) -> None:
    adapters, source = msgspec.structs.replace(TRAIN, lora=Lora()), str(tiny_qwen)
    whole = learner_bytes(load_shape(source), adapters, ranks=2, full=False)
    assert learner_bytes(load_shape(source), adapters, ranks=2) < whole
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for total, full in ((2 * whole, False), (whole, True)):
        monkeypatch.setattr(
            "torch.cuda.get_device_properties", lambda _, total=total: SimpleNamespace(total_memory=total)
        )
        assert choose_sharding(source, adapters).full is full
    assert not choose_sharding(source, msgspec.structs.replace(adapters, sharding="none")).full
    share = learner_bytes(load_shape(source), adapters, ranks=2)
    shape = load_shape(source)
    room = (
        share + 2 * shape.parameters + 4 * adapters.lora.rank * shape.fans
    )  # weights in BF16, the gradient of adapters in FP32
    for free, holds in ((room, True), (room - 1, False)):
        assert has_room_for_whole(source, adapters, ranks=2, gpu=GpuMemory(total=GIB, free=free)) is holds


@pytest.mark.parametrize(
    ("ranks", "sharding", "full"), [(1, "full", False), (2, "full", True), (2, "none", False), (2, "auto", False)]
)
def test_ranks_share_the_model_where_asked_and_never_alone(
    ranks: int, sharding: str, full: bool, monkeypatch: pytest.MonkeyPatch, tiny_qwen: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_sharding(str(tiny_qwen), msgspec.structs.replace(TRAIN, sharding=sharding)).full is full


def test_one_rank_cannot_keep_its_state_in_host_memory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded = msgspec.structs.replace(TRAIN, sharding="full", cpu_offload=True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(LearnerError, match=r"train\.cpu_offload: a single rank .*--num-gpus"):
        choose_sharding("m", offloaded)
    assert learner_bytes(MIDDLE, offloaded) == learner_bytes(MIDDLE, TRAIN)
    assert learner_bytes(MIDDLE, offloaded, ranks=2) < learner_bytes(MIDDLE, TRAIN, ranks=2) / 2
    assert not choose_sharding("m", adapt_to_single_rank(offloaded)).full, (
        "what goes over its batches afterwards may be alone"
    )


def test_ranks_without_gpus_have_no_state_to_keep_elsewhere_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    offloaded = msgspec.structs.replace(TRAIN, sharding="full", cpu_offload=True)
    for there_is_one in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there_is_one: there)
        with (
            contextlib.nullcontext()
            if there_is_one
            else pytest.raises(
                LearnerError, match=r"train\.cpu_offload: torch finds no GPU .* leave train\.cpu_offload out"
            )
        ):
            assert choose_sharding("m", offloaded).full


def test_ranks_share_passes_in_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    three = msgspec.structs.replace(TRAIN, context_parallel=3)
    for count in (1, 2, 4):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        with pytest.raises(
            LearnerError,
            match=rf"train\.context_parallel: 3 ranks .* the learner has {count_of(count, 'rank')}: .*--num-gpus",
        ):
            make_accelerator(three, "m")
    monkeypatch.setenv("WORLD_SIZE", "6")
    check_rank_count(three, num_ranks())
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_rank_count(adapt_to_single_rank(three), num_ranks())


def test_ranks_that_share_a_pass_have_room_for_longer_ones() -> None:
    def taken(tokens: int, ranks: int) -> int:
        train = msgspec.structs.replace(TRAIN, micro_batch_tokens=tokens, context_parallel=ranks)
        return learner_bytes(MIDDLE, train, ranks=ranks, full=False) - learner_bytes(
            MIDDLE, msgspec.structs.replace(train, micro_batch_tokens=1), ranks=ranks, full=False
        )

    assert taken(65536, 4) < taken(65536, 2) < taken(65536, 1)
    assert taken(65536, 2) > taken(65536, 1) / 2, "each has the keys and values of all"


def test_advice_is_advice_that_the_settings_take() -> None:
    with pytest.raises(LearnerError, match="train.sharding = 'full' with train.cpu_offload on two GPUs or more"):
        check_shape(MIDDLE, TRAIN, ranks=1, gpu=GPU)
    with pytest.raises(
        LearnerError, match="or set train.sharding = 'full' with train.cpu_offload on two GPUs or more$"
    ):
        check_shape(MIDDLE, msgspec.structs.replace(TRAIN, lora=Lora()), ranks=1, gpu=GpuMemory(total=GIB, free=GIB))
    Train(sharding="full", cpu_offload=True, lora=Lora())
