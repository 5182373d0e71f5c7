"""What a job allows and nobody can mean is said when it comes up."""

import pytest

from swarmq.config import Critic, EngineSettings, Kind, Loss, Policy, SamplingDefaults, SwarmJob, Train
from swarmq.engine.server.model_check import ModelFacts
from swarmq.up import job_checks
from swarmq.up.job_checks import find_ineffective_settings, find_untrainable_requests, plan_run


@pytest.mark.parametrize(
    ("served", "made_for", "computed", "trained", "warned"),
    [
        (32768, None, 16384, True, True),
        (32768, 131072, 16384, True, True),
        (32768, 8192, 16384, True, False),
        (16384, None, 16384, True, False),
        (32768, None, 16384, False, False),
    ],
)
def test_calls_too_long_to_be_trained_are_warned_of_by_both_settings(
    served: int, made_for: int | None, computed: int, trained: bool, warned: bool
) -> None:
    model = ModelFacts(
        name="m", architecture="Q", hidden_size=1, is_folder=True, tool_call_parser=None, max_length=made_for
    )
    train = Train(micro_batch_tokens=computed)
    solver = Policy(model="m", engine=EngineSettings(max_model_len=served), train=train, trained=trained)
    job = SwarmJob(run="r", policies={"solver": solver, "main": Policy(model="m")})
    told = list(find_untrainable_requests(job, {"solver": model}))
    assert len(told) == warned
    for setting in ("policies.solver.engine.max_model_len", "policies.solver.train.micro_batch_tokens"):
        assert all(setting in line for line in told)


def list_warnings(**settings: object) -> list[str]:
    """Return the warnings about a policy on this host, which has no GPU."""
    job = SwarmJob(run="r", policies={"solver": Policy(model="m", **settings)})
    model = ModelFacts(
        name="m", architecture="Q", hidden_size=1, is_folder=True, tool_call_parser=None, max_length=1024
    )
    return list(find_ineffective_settings(job, {"solver": model}, {}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, None),
        ({"placement": "split"}, "policies.solver.placement = 'split' has no effect: this host has no GPU"),
        (
            {"train": Train(sharding="full")},
            "policies.solver.train.sharding = 'full' has no effect: the learner has one rank",
        ),
        ({"sampling": SamplingDefaults(max_tokens=1024)}, None),
        (
            {"sampling": SamplingDefaults(max_tokens=1025)},
            "policies.solver.sampling.max_tokens = 1025 exceeds the engine's context",
        ),
        (
            {"train": Train(loss=Loss(clip_low=0.1))},
            "policies.solver.train.loss.clip_low has no effect with loss.name = 'tis_mask', only with ppo_clip, gspo",
        ),
        ({"train": Train(loss=Loss(name="gspo", clip_low=0.1))}, None),
        (
            {"train": Train(critic=Critic(warmup_steps=5))},
            "policies.solver.train.critic has no effect: only the advantage 'gae'",
        ),
        ({"train": Train(advantage="gae", critic=Critic(warmup_steps=5))}, None),
    ],
)
def test_a_setting_that_changes_nothing_here_is_named(settings: dict[str, object], told: str | None) -> None:
    lines = list_warnings(**settings)
    assert len(lines) == (told is not None)
    assert all(line.startswith(told or "") for line in lines)


def test_a_served_teacher_that_does_not_answer_is_named() -> None:
    train = Train(loss=Loss(name="distill"), teacher="http://127.0.0.1:9/v1")
    policy = Policy(model="m", engine=EngineSettings(urls=("http://127.0.0.1:9",)), train=train)
    lines: list[str] = []
    plan_run(SwarmJob(run="r", policies={"main": policy}), lines.append)
    (line,) = lines
    assert line.startswith(
        "warning: policies.main.train.teacher: the server at http://127.0.0.1:9/v1 does not answer ("
    )


def test_memory_is_planned_for_the_critic_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_checks, "fetch_num_parameters", len)
    job = SwarmJob(run="r", kinds={"code": Kind(advantage="gae")}, policies={"main": Policy(model="model")})
    model = ModelFacts(name="m", architecture="Q", hidden_size=1, is_folder=True, tool_call_parser=None)
    assert job_checks._reference_model_sizes(job, {"main": model}) == {"main": [len("model")]}
