"""Where learner and engines go follows from memory, is told with its reason, and what cannot be says what is missing."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from swarmq.config import EngineSettings, Lora, Loss, Policy, SwarmJob, Train
from swarmq.engine.server.gpus import GpuCapacity, find_visible_gpus, parse_nvidia_smi
from swarmq.engine.server.model_check import ModelFacts, count_parameters
from swarmq.errors import ConfigError
from swarmq.learner.memory import plan
from swarmq.learner.memory.estimate import GIB, HEADROOM, state_bytes
from swarmq.up.deployment import _resolve_job
from swarmq.up.placement import (
    MIN_CONTEXT,
    SHARE_DIGITS,
    SLEEPING_ENGINE_BYTES,
    Placement,
    PolicyNeeds,
    choose_context_limits,
    place,
    place_all,
    to_learner_shape,
)

H200 = GpuCapacity(total=139 * GIB, free=139 * GIB)
BUSY = GpuCapacity(total=139 * GIB, free=79 * GIB)
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


def model(billions: float) -> ModelFacts:
    return ModelFacts(
        name="m",
        architecture="Qwen3ForCausalLM",
        hidden_size=2560,
        layers=36,
        parameters=int(billions * 1e9),
        fans=2_500_000,
        kv_values_per_token=2 * 36 * 8 * 128,
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
    assert place(judged, model(4), [H200], judge_sizes=[9_500_000_000]).sleep
    with pytest.raises(ConfigError, match="are missing"):
        place(judged, model(4), [H200], judge_sizes=[40_000_000_000])


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
    own, gpus = placement.apply_to_engines(policy())
    assert {len(group) for group in gpus} == {2}
    assert own.engine.arguments[:2] == ("--tensor-parallel-size", "2")


def test_what_the_user_chose_is_kept() -> None:
    asked = policy(engine=EngineSettings(gpu_memory_utilization=0.3, count=2), placement="shared")
    placement = place(asked, model(2), [H200] * 2)
    assert placement.kind == "shared"
    own, gpus = placement.apply_to_engines(asked)
    assert own.engine.gpu_memory_utilization == 0.3
    assert gpus == ((0,), (1,))


def test_a_learner_leaves_its_engine_the_room_to_start_again() -> None:
    beside = place(policy(placement="shared"), model(1), [H200])
    assert not beside.sleep
    assert beside.learner_share + beside.gpu_memory_utilization == pytest.approx(HEADROOM)
    asleep = place(policy(engine=EngineSettings(sleep=True), placement="shared"), model(1), [H200])
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


def test_adapters_of_a_high_rank_are_planned_for() -> None:
    def taken(rank: int) -> int:
        train = msgspec.structs.replace(TRAIN, lora=Lora(rank=rank))
        return PolicyNeeds.of(policy(train=train), model(8), num_gpus=1).learners[0].state

    assert taken(128) - taken(8) == 16 * 120 * model(8).fans


WAYS = {
    "auto": Train(),
    "fp32": Train(mixed_precision="no"),
    "none": Train(sharding="none"),
    "full": Train(sharding="full"),
    "offload": Train(sharding="full", cpu_offload=True),
    "lora": Train(lora=Lora()),
    "judged": Train(loss=Loss(kl=0.1)),
    "long": Train(micro_batch_tokens=65536),
    "cut": Train(micro_batch_tokens=131072, context_parallel=2),
}


def test_every_plan_passes_what_its_learner_and_its_engines_ask_of_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=H200.total))
    chosen_by_hand = [(None, None), (True, None), (False, None), (None, 0.2), (None, 0.6)]
    table = itertools.product(
        (1.7, 4, 5.5, 6, 6.5, 14), (1, 2, 4), (H200, BUSY), WAYS.items(), ("auto", "shared", "split"), chosen_by_hand
    )
    seen = set()
    for billions, num_gpus, gpu, (way, train), kind, (sleep, utilization) in table:
        engine = EngineSettings(sleep=sleep, gpu_memory_utilization=utilization)
        asked = policy(train=train, placement=kind, engine=engine)
        try:
            placement = place(asked, model(billions), [gpu] * num_gpus)
        except ConfigError:
            continue
        assert kind in {"auto", placement.kind}
        own, _ = placement.apply_to_engines(asked)
        assert sleep in {None, own.engine.sleep} or placement.kind == "split"
        runs(monkeypatch, placement, own, model(billions), gpu)
        seen |= {(placement.kind, placement.sleep, placement.sharding), way, (gpu is BUSY, placement.kind)}
    kinds = {("shared", False), ("shared", True), ("split", False)}
    assert seen >= {(*each, sharding) for each in kinds for sharding in ("none", "full")} | set(WAYS)
    assert seen >= {(True, "shared"), (True, "split")}


def runs(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, own: Policy, model: ModelFacts, gpu: GpuCapacity
) -> None:
    """As the processes of this plan do: the engine starts, the learner checks its GPU and loads, the engine wakes."""
    shape = to_learner_shape(model)
    monkeypatch.setenv("WORLD_SIZE", str(len(placement.learner)))
    monkeypatch.setattr(plan, "load_shape", lambda _: shape)
    assert own.engine.gpu_memory_utilization
    engine = int(own.engine.gpu_memory_utilization * gpu.total)
    assert engine <= gpu.free, "vLLM starts only where it finds its share"
    beside = engine if placement.kind == "shared" else 0
    ranks, full = len(placement.learner), plan.choose_sharding("m", own.train).full
    free = gpu.free - (SLEEPING_ENGINE_BYTES if placement.sleep else beside)
    plan.check_shape(shape, own.train, ranks=ranks, full=full, gpu=plan.GpuMemory(total=gpu.total, free=free))
    assert state_bytes(shape, own.train, ranks=ranks, full=full) + beside <= gpu.free


def test_the_plan_decides_whether_ranks_share_the_model_out_and_their_learner_is_told() -> None:
    beside = policy(placement="shared")
    for billions, sharding in ((3, "none"), (6, "full")):
        placement = place(beside, model(billions), [H200] * 2)
        assert (placement.sleep, placement.sharding) == (False, sharding)
        assert ("sharding the model" if sharding == "full" else "a full copy of the model on each") in str(placement)
        job = SwarmJob(run="r", policies={"main": beside})
        resolved = _resolve_job(job, "amqp://", {}, {"proxy": 1}, {"main": placement}).policies["main"]
        assert (resolved.train.sharding, resolved.engine.sleep) == (sharding, False)
    asked = policy(train=msgspec.structs.replace(TRAIN, sharding="full"), placement="shared")
    assert place(asked, model(1), [H200] * 2).apply_to_policy(asked).train.sharding == "full"


def test_a_learner_with_its_state_in_host_memory_gets_two_gpus_or_says_why_not() -> None:
    offloaded = policy(train=WAYS["offload"])
    with pytest.raises(ConfigError, match=r"train\.cpu_offload: m gets one GPU"):
        place(offloaded, model(8), [H200])
    assert place(offloaded, model(8), [H200] * 2).kind == "shared"
    assert len(place(offloaded, model(8), [H200] * 4).learner) == 2
    with pytest.raises(ConfigError, match="there are too few GPUs for both"):
        place(msgspec.structs.replace(offloaded, placement="split"), model(8), [H200] * 2)


def test_ranks_that_share_passes_get_whole_groups_of_gpus_or_it_is_said_why_not() -> None:
    cut = policy(train=WAYS["cut"])
    assert len(place(cut, model(1), [H200] * 3).learner) == 2
    assert len(place(cut, model(1), [H200] * 6).learner) == 4
    for count, kind in ((1, "auto"), (3, "shared")):
        with pytest.raises(
            ConfigError, match=rf"train\.context_parallel: 2 ranks .* of m together, but its learner gets {count} GPU"
        ):
            place(msgspec.structs.replace(cut, placement=kind), model(1), [H200] * count)
    with pytest.raises(ConfigError, match="does not fit as split on 3 GPU"):
        place(cut, model(14), [H200] * 3)


def test_what_others_hold_of_a_gpu_is_not_planned_with() -> None:
    full = GpuCapacity(total=139 * GIB, free=5 * GIB)
    with pytest.raises(
        ConfigError, match=r"134\.0 GiB of them held by other processes.*free memory held by other processes"
    ):
        place(policy(), model(1.7), [full])
    with pytest.raises(ConfigError, match="held by other processes"):
        place(policy(trained=False), model(1.7), [full])
    assert not place(policy(), model(3), [H200]).sleep
    assert place(policy(), model(3), [BUSY]).sleep
    assert place(policy(trained=False), model(3), [BUSY]).gpu_memory_utilization < 79 / 139


@pytest.mark.parametrize(
    ("engine", "trained", "says"),
    [
        (EngineSettings(gpu_memory_utilization=0.9), True, "lower or remove engine.gpu_memory_utilization"),
        (EngineSettings(sleep=False, gpu_memory_utilization=0.5), True, "leave engine.sleep out"),
        (EngineSettings(gpu_memory_utilization=0.6, count=2), False, "2 engine.s. on it is more than the 1.00"),
        (EngineSettings(gpu_memory_utilization=0.6, count=2), True, "does not fit as shared"),
    ],
)
def test_what_the_user_chose_and_does_not_fit_is_refused_by_name(
    engine: EngineSettings, trained: bool, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        place(policy(engine=engine, trained=trained), model(4), [H200])


def test_a_policy_that_has_half_of_a_gpu_is_refused_more_of_it() -> None:
    served = policy(engine=EngineSettings(gpu_memory_utilization=0.9), trained=False)
    with pytest.raises(
        ConfigError, match=r"0\.9 of a GPU with 1 engine.s. on it is more than the 0\.50 that other processes leave"
    ):
        place_all({"a": served, "b": served}, {"a": model(1), "b": model(1)}, [H200])


ANY_POLICY = st.builds(
    policy,
    trained=st.booleans(),
    placement=st.sampled_from(["auto", "shared", "split"]),
    engine=st.builds(
        EngineSettings,
        count=st.integers(1, 3),
        gpu_memory_utilization=st.sampled_from([None, 0.3, 0.6, 0.9]),
        sleep=st.sampled_from([None, True, False]),
    ),
)
ANY_GPU = st.sampled_from([H200, H200, BUSY])


@settings(max_examples=500)
@given(
    st.lists(st.tuples(ANY_POLICY, st.sampled_from([0.5, 1.7, 8])), min_size=1, max_size=4),
    st.lists(ANY_GPU, min_size=1, max_size=4),
)
def test_no_plan_gives_more_of_a_gpu_than_is_free(wanted: list[tuple[Policy, float]], gpus: list[GpuCapacity]) -> None:
    policies = {str(number): one for number, (one, _) in enumerate(wanted)}
    try:
        placements = place_all(policies, {str(n): model(size) for n, (_, size) in enumerate(wanted)}, gpus)
    except ConfigError:
        return
    given_away = [0.0] * len(gpus)
    for name, placement in placements.items():
        own, engines = placement.apply_to_engines(policies[name])
        assert own.engine.gpu_memory_utilization
        for number in range(len(gpus)):
            engine = sum(number in group for group in engines) * own.engine.gpu_memory_utilization
            learner = placement.learner_share if number in placement.learner else 0.0
            given_away[number] += max(engine, learner) if placement.sleep else engine + learner
    for gpu, share in zip(gpus, given_away, strict=True):
        assert share <= gpu.free / gpu.total + len(wanted) * 10.0**-SHARE_DIGITS


SAID = "0, GPU-a, 143771, 143000\n1, GPU-b, 143771, 99\n"


@pytest.mark.parametrize(
    ("visible", "free"), [(None, [143000, 99]), ("1", [99]), ("GPU-b,0", [99, 143000]), ("", []), ("7", [])]
)
def test_only_visible_gpus_count_in_their_order(visible: str | None, free: list[int]) -> None:
    assert [gpu.free >> 20 for gpu in parse_nvidia_smi(SAID, visible).values() if gpu] == free


@pytest.mark.parametrize(
    ("visible", "left", "named"),
    [(None, [99, 70], "0,2"), ("2,GPU-b,0", [70, 99], "2,0"), ("0", [99], "0"), ("1", [], "1")],
)
def test_a_gpu_that_does_not_tell_its_memory_is_left_out_aloud_and_the_others_keep_their_numbers(
    visible: str | None, left: list[int], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho '0, GPU-a, 143771, 99'\necho '1, GPU-b, [N/A], [N/A]'\necho '2, GPU-c, 143771, 70'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    with capture_logs() as told:
        assert [gpu.free >> 20 for gpu in find_visible_gpus()] == left
    assert os.environ["CUDA_VISIBLE_DEVICES"] == named
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "CUDA would count unlike GPUs otherwise than nvidia-smi"
    assert [line["gpu"] for line in told] == ([] if visible == "0" else ["1" if visible in {None, "1"} else "GPU-b"])


@pytest.mark.parametrize(("said", "has_fp8"), [("9.0", True), ("8.9", True), ("8.6", False), ("[N/A]", True)])
def test_a_gpu_tells_whether_it_computes_in_fp8(said: str, has_fp8: bool) -> None:
    (gpu,) = (gpu for name, gpu in parse_nvidia_smi(f"0, GPU-a, 80000, 80000, {said}", None).items() if name == "0")
    assert gpu is not None
    assert gpu.has_fp8 == has_fp8


def context_of(
    own: Policy, size: float, gpus: list[GpuCapacity], *, made_for: int | None, host_cache: int = 1 << 40
) -> tuple[int, str]:
    made = msgspec.structs.replace(model(size), max_length=made_for)
    found = choose_context_limits({"main": own}, {"main": made}, gpus, host_cache=host_cache)["main"]
    return found.tokens, found.reason


@pytest.mark.parametrize(
    ("own", "size", "gpus", "made_for", "tokens", "reason"),
    [
        (policy(), 1.7, [H200], 40960, 16384, "as many as the learner computes in one pass"),
        (policy(), 4, [H200], 262144, 16384, "the model's maximum is 262,144"),
        (policy(), 1.7, [H200], 8192, 8192, "equal to the model's maximum"),
        (policy(), 1.7, [H200], None, MIN_CONTEXT, "config states no maximum"),
        (policy(trained=False), 1.7, [H200], 40960, 40960, "equal to the model's maximum"),
        (policy(), 5.5, [H200], 40960, 5120, "GPU memory holds the KV cache of 8 such calls beside the learner"),
        (policy(trained=False), 1.7, [BUSY], 262144, 54272, "GPU memory holds the KV cache of 8 such calls"),
        (policy(engine=EngineSettings(gpu_memory_utilization=0.1)), 1.7, [H200], 40960, 5120, "GPU memory"),
        (policy(), 1.7, [], 40960, 4096, "the default without a GPU; the model's maximum is 40,960"),
        (policy(), 1.7, [], 512, 512, "equal to the model's maximum"),
    ],
)
def test_the_longest_call_follows_from_the_model_the_learner_and_memory_and_says_which(
    own: Policy, size: float, gpus: list[GpuCapacity], made_for: int | None, tokens: int, reason: str
) -> None:
    found, why = context_of(own, size, gpus, made_for=made_for)
    assert (found, reason in why) == (tokens, True), (found, why)


def test_without_a_gpu_the_longest_call_fits_the_cache_in_host_memory() -> None:
    assert context_of(policy(), 4, [], made_for=40960, host_cache=GIB)[0] == 3072


def test_a_context_that_was_chosen_stays() -> None:
    chosen = policy(engine=EngineSettings(max_model_len=30000))
    assert choose_context_limits({"main": chosen}, {"main": model(1.7)}, [H200], host_cache=GIB) == {}


@settings(deadline=None)
@given(
    st.lists(st.tuples(ANY_POLICY, st.sampled_from([0.6, 1.7, 4, 9])), min_size=1, max_size=3),
    st.lists(ANY_GPU, min_size=1, max_size=4),
    st.sampled_from([None, 1024, 8192, 40960, 262144]),
)
def test_longer_calls_never_cost_a_policy_its_place(
    wanted: list[tuple[Policy, float]], gpus: list[GpuCapacity], made_for: int | None
) -> None:
    """Whatever fits with short calls fits in the same way with those that it gets."""
    models = {str(n): msgspec.structs.replace(model(size), max_length=made_for) for n, (_, size) in enumerate(wanted)}
    short = {str(n): own for n, (own, _) in enumerate(wanted)}
    try:
        before = place_all(short, models, gpus)
    except ConfigError:
        return
    found = choose_context_limits(short, models, gpus, host_cache=GIB)
    after = place_all({n: found[n].apply_to(own) if n in found else own for n, own in short.items()}, models, gpus)
    assert [(p.kind, p.learner, p.engines, p.sleep, p.sharding) for p in after.values()] == [
        (p.kind, p.learner, p.engines, p.sleep, p.sharding) for p in before.values()
    ]
