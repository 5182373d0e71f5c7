"""Where learner and engines go follows from memory, is told with its reason, and what cannot be says what is missing."""

from __future__ import annotations

import msgspec
import pytest

from swarmq.config import Engine, Loss, Policy, Train
from swarmq.engine.gpus import Gpu, chosen
from swarmq.engine.model import Model, count_parameters
from swarmq.errors import ConfigError
from swarmq.learner.memory import GIB, HEADROOM
from swarmq.placement import place, place_all

H200 = Gpu(total=139 * GIB, free=139 * GIB)
TRAIN = Train(mixed_precision="bf16")
QWEN = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def model(billions: float) -> Model:
    return Model(
        name="m",
        architecture="Qwen3ForCausalLM",
        hidden_size=2560,
        layers=36,
        parameters=int(billions * 1e9),
        cached_values=2 * 36 * 8 * 128,
        is_folder=True,
        tool_call_parser=None,
    )


def policy(**settings: object) -> Policy:
    return Policy(**{"model": "m", "train": TRAIN, **settings})


def test_what_fits_together_runs_side_by_side() -> None:
    placement = place(policy(), model(4), [H200])
    assert (placement.kind, placement.sleep) == ("shared", False)
    assert (placement.learner, placement.engines) == ((0,), ((0,),))
    assert "fit together" in str(placement)


def test_the_engine_sleeps_where_both_do_not_fit_but_each_does() -> None:
    large = policy(train=msgspec.structs.replace(TRAIN, micro_batch_tokens=65536))
    placement = place(large, model(5.5), [H200])
    assert (placement.kind, placement.sleep) == ("shared", True)
    assert "sleeps" in str(placement)


def test_a_reference_or_a_teacher_takes_its_room() -> None:
    judged = policy(train=msgspec.structs.replace(TRAIN, loss=Loss(kl=0.1)))
    assert not place(policy(), model(4), [H200]).sleep
    assert place(judged, model(4), [H200], judged_by=[9_500_000_000]).sleep
    with pytest.raises(ConfigError, match="are missing"):
        place(judged, model(4), [H200], judged_by=[40_000_000_000])


def test_a_model_too_large_says_how_much_is_missing_and_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"30\.0 B parameters.* GiB are missing.*train\.lora"):
        place(policy(), model(30), [H200])
    with pytest.raises(ConfigError, match="does not fit as split"):
        place(policy(placement="split"), model(30), [H200, H200])


@pytest.mark.parametrize(("num_gpus", "ranks"), [(2, 1), (4, 2), (8, 4)])
def test_several_gpus_are_split_and_each_is_used_once(num_gpus: int, ranks: int) -> None:
    placement = place(policy(), model(4), [H200] * num_gpus)
    assert placement.kind == "split"
    assert len(placement.learner) == ranks
    used = [*placement.learner, *(gpu for engine in placement.engines for gpu in engine)]
    assert sorted(used) == list(range(num_gpus))


def test_a_learner_that_needs_more_than_half_gets_it() -> None:
    assert len(place(policy(), model(20), [H200] * 4).learner) == 3


def test_an_engine_too_large_for_one_gpu_is_spread() -> None:
    placement = place(policy(), model(70), [H200] * 16)
    own, gpus = placement.applied(policy())
    assert {len(group) for group in gpus} == {2}
    assert own.engine.arguments[:2] == ("--tensor-parallel-size", "2")


def test_what_the_user_chose_is_kept() -> None:
    asked = policy(engine=Engine(gpu_memory_utilization=0.3, count=2), placement="shared")
    placement = place(asked, model(2), [H200] * 2)
    assert placement.kind == "shared"
    own, gpus = placement.applied(asked)
    assert own.engine.gpu_memory_utilization == 0.3
    assert gpus == ((0,), (1,))


def test_a_learner_leaves_its_engine_the_room_to_start_again() -> None:
    beside = place(policy(placement="shared"), model(1), [H200])
    assert not beside.sleep
    assert beside.learner_share + beside.gpu_memory_utilization == pytest.approx(HEADROOM)
    asleep = place(policy(engine=Engine(sleep=True), placement="shared"), model(1), [H200])
    assert asleep.learner_share == place(policy(), model(1), [H200] * 2).learner_share == HEADROOM


def test_a_policy_that_is_not_trained_leaves_no_learner_room() -> None:
    placement = place(policy(trained=False), model(4), [H200] * 2)
    assert (placement.kind, placement.learner, placement.engines) == ("engines", (), ((0,), (1,)))


def test_policies_share_what_gpus_there_are() -> None:
    models = {"a": model(1), "b": model(1)}
    policies = {name: policy() for name in models}
    apart = place_all(policies, models, [H200] * 2)
    assert [placement.learner for placement in apart.values()] == [(0,), (1,)]
    together = place_all(policies, models, [H200])
    assert sum(placement.gpu_memory_utilization for placement in together.values()) <= 0.5
    assert place_all(policies, models, []) == {}


def test_a_models_size_is_read_off_its_config() -> None:
    assert count_parameters(QWEN) == pytest.approx(4.02e9, rel=0.01)
    assert count_parameters({"text_config": QWEN}) == count_parameters(QWEN)
    experts = QWEN | {"num_experts": 128, "moe_intermediate_size": 768}
    assert count_parameters(experts) > 5 * count_parameters(QWEN)


SAID = "0, GPU-a, 143771, 143000\n1, GPU-b, 143771, 99\n"


@pytest.mark.parametrize(
    ("visible", "free"), [(None, [143000, 99]), ("1", [99]), ("GPU-b,0", [99, 143000]), ("", []), ("7", [])]
)
def test_only_visible_gpus_count_in_their_order(visible: str | None, free: list[int]) -> None:
    assert [gpu.free >> 20 for gpu in chosen(SAID, visible)] == free
