"""A job is checked whole before anything starts, and every mistake is named by its path."""

import functools

import pytest
import structlog.testing

from swarmq import config
from swarmq.config import BrokerSettings, Lora, SwarmJob, resolve_amqp_url
from swarmq.errors import ConfigError

TREE = {"run": "r", "policies": {"main": {"model": "m"}}}


def build(*sets, **changes):
    return SwarmJob.build(TREE | changes, sets=sets)


def test_a_job_survives_toml(tmp_path):
    job = build("groups.group_size=4", mix={"math": 0.5, "code": 0.5})
    path = tmp_path / "job.toml"
    path.write_text(job.to_toml())
    assert SwarmJob.load(path) == job


def test_set_overrides_one_value_and_leaves_the_rest():
    job = build("policies.main.train.learning_rate=0.001", "policies.main.train.loss.name=reinforce")
    assert job.policies["main"].train.learning_rate == 0.001
    assert job.policies["main"].train.loss.name == "reinforce"
    assert job.groups == build().groups


def test_a_part_of_a_section_that_is_off_switches_it_on():
    """As in the demo's settings, which name it all the same."""
    off = {"policies": {"main": {"model": "m", "train": {"lora": None}}}}
    for tree in ({}, off):
        job = build("policies.main.train.lora.rank=8", "policies.main.train.lora.alpha=24", **tree)
        assert job.policies["main"].train.lora == Lora(rank=8, alpha=24)


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        (["policies.main.train.lr=1"], ["policies.main.train", "lr"]),
        (["groups.group_size=0"], ["groups.group_size"]),
        (["groups.group_size='four'"], ["groups.group_size"]),
        (["policies.main.train.loss.name=magic"], ["policies.main.train.loss.name", "magic"]),
        (["grops.group_size=4"], ["grops"]),
        (["run=Has Capitals"], ["run", "Has Capitals"]),
        (["mix.math=0.4"], ["mix", "0.4"]),
        (["groups.min_group=9"], ["groups.min_group"]),
        (
            ["policies.main.train.steps_per_batch=9"],
            ["policies.main.train.steps_per_batch: 9", "groups_per_batch is 8"],
        ),
        (["policies.main.model.name=x"], ["policies.main.model is a value"]),
        (["policies.main.train.ratio_band=[2.0,0.5]"], ["policies.main.train", "ratio_band", "[2, 0.5]"]),
        (["policies.main.train.betas=[0.9,3]"], ["policies.main.train.betas[1]", "< 1"]),
        (["policies.main.train.loss.clip_low=2"], ["policies.main.train.loss.clip_low", "<= 1"]),
        (["policies.main.train.loss.dual_clip=0.5"], ["policies.main.train.loss.dual_clip", "> 1"]),
        (["nonsense"], ["section.key=value"]),
        (
            ["policies.main.train.lora.rnk=4"],
            ["policies.main.train.lora.rnk: unknown field; did you mean rank?"],
        ),
        (["eval.zzz=4"], ["eval.zzz: unknown field; there are every, k, deadline_s"]),
        (["groups.max_staleness=99999999999999999999"], ["groups.max_staleness", "more than 64 bits"]),
        (["mix_schedule.points=[{step=99999999999999999999}]"], ["mix_schedule.points", "more than 64 bits"]),
        (["policies.main.sampling.temperature=inf"], ["policies.main.sampling.temperature"]),
        (["policies.main.train.learning_rate=inf"], ["policies.main.train.learning_rate"]),
        (["policies.main.train.seed=-1"], ["policies.main.train.seed", ">= 0"]),
        (["policies.main.train.loss.name=distill"], ["policies.main.train.teacher: ", "needs a teacher"]),
        (
            [
                "policies.main.train={loss={name='distill'}, teacher='http://t'}",
                "policies.main.sampling.temperature=0.7",
            ],
            ["policies.main.sampling.temperature: a served teacher", "temperature 1, not at 0.7"],
        ),
        (
            ["policies.main.train={loss={name='distill'}, teacher='policies.main'}"],
            ["policies.main.train.teacher: policies.main is no policy of this job with trained = false"],
        ),
        (
            ["policies.main.train={loss={name='distill'}, teacher='policies.tutor'}"],
            ["policies.main.train.teacher: policies.tutor is no policy"],
        ),
        (["policies.main.train.teacher=m"], ["policies.main.train.teacher: ", "not with 'tis_mask'"]),
        (
            ["policies.main.train.critic.gamma=0.9"],
            ["policies.main.train.critic.gamma: unknown field; did you mean discount?"],
        ),
        (["zzz=4"], ["--set 'zzz=4': zzz: unknown field; there are run, folder, "]),
        (["groups.when_dry=never"], ["groups.when_dry: 'never' is none of lend, wait"]),
        (
            ["kinds.math.advantage=vtrace"],
            [
                "kinds.math.advantage: 'vtrace' is none of batch_norm, centered, ema, gae, grpo, reinforce_plus_plus, rloo"
            ],
        ),
        (["policies.main.train.trackers=['comet']"], ["policies.main.train.trackers[0]: 'comet' is none of mlflow, "]),
        (["mix_schedule.points=[{step=1, mx={}}]"], ["mix_schedule.points[0].mx: unknown field; did you mean mix?"]),
        (["policies.main.train.betas=['a',3]"], ["policies.main.train.betas[0]: Expected `float`"]),
    ],
)
def test_a_wrong_setting_is_refused_and_its_path_named(sets, names):
    with pytest.raises(ConfigError) as refusal:
        build(*sets)
    for name in names:
        assert name in str(refusal.value)


def test_a_teacher_that_is_a_policy_is_found_at_its_engine():
    student = {"model": "m", "train": {"loss": {"name": "distill"}, "teacher": "policies.tutor"}}
    urls = ["http://here:8001", "http://here:8002"]
    for engine in ({}, {"urls": urls}):
        job = build(policies={"main": student, "tutor": {"model": "t", "trained": False, "engine": engine}})
        train = job.policies["main"].train
        assert (train.teacher_policy, train.teacher_url, train.has_served_teacher) == ("tutor", None, True)
        if not engine:
            with pytest.raises(ConfigError, match=r"policies\.tutor\.engine\.urls: the teacher of main has no engine"):
                job.find_teacher("main")
        else:
            assert job.find_teacher("main").policies["main"].train.teacher_url == urls[0]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (
            ["policies.man.train.learning_rate=1"],
            "--set 'policies.man.train.learning_rate=1': there is no policy 'man'; the job has main, other",
        ),
        (
            ["run=x", "policies.other.train.lora=true"],
            "--set 'policies.other.train.lora=true': policies.other.train.lora: Expected a table, got `bool` True",
        ),
        (["eval=3", "run=x"], "--set 'eval=3': eval: Expected a table, got `int` 3"),
        (
            ["mix.a=0.5", "mix.b=0.25"],
            "--set 'mix.a=0.5', --set 'mix.b=0.25': mix: the shares sum to 1.75, not 1",
        ),
        (
            ["groups.min_group=9", "run=x"],
            "--set 'groups.min_group=9', --set 'run=x': groups.min_group: 9 is more than groups.group_size 8: lower it, or raise groups.group_size",
        ),
    ],
)
def test_what_is_wrong_on_the_command_line_is_not_laid_to_the_file(sets, says):
    policies = {name: {"model": "m"} for name in ("main", "other")}
    with pytest.raises(ConfigError) as told:
        build(*sets, policies=policies, mix={"default": 1.0})
    assert str(told.value) == says


def test_what_is_wrong_in_the_file_is_not_laid_to_the_command_line():
    with pytest.raises(ConfigError, match=r"^settings: policies.main.model: missing"):
        build("policies.main.train.seed=3", policies={"main": {}})


def test_a_policy_may_be_added_on_the_command_line():
    assert build("policies.judge.model=j", "policies.judge.trained=false").frozen == ("judge",)


def test_a_number_in_a_file_that_cannot_travel_is_refused():
    with pytest.raises(ConfigError, match=r"groups\.max_staleness: Expected `int` <="):
        build(groups={"max_staleness": 2**64})


def test_a_limit_may_be_taken_away():
    assert build("policies.main.train.grad_clip=inf").policies["main"].train.grad_clip == float("inf")


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.toml"):
        SwarmJob.load(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("run = ")
    with pytest.raises(ConfigError, match="bad.toml: not TOML"):
        SwarmJob.load(tmp_path / "bad.toml")


def test_the_setting_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("SWARMQ_AMQP_URL", "amqp://env/")
    assert resolve_amqp_url(BrokerSettings(url="amqp://job/")) == "amqp://job/"
    assert resolve_amqp_url(BrokerSettings()) == "amqp://env/"
    monkeypatch.delenv("SWARMQ_AMQP_URL")
    assert resolve_amqp_url(BrokerSettings()) is None


FORMER = [
    ("groups.silence_s", "groups.idle_timeout_s", 45.0),
    ("groups.flat_after", "groups.uninformative_groups", 3),
    ("policies.main.train.loss.pull", "policies.main.train.loss.logratio_penalty", 0.25),
]


@pytest.mark.parametrize(("former", "present", "value"), FORMER)
def test_a_former_name_of_a_setting_works_and_a_warning_names_the_present_one(former, present, value):
    config._warn_of_former.cache_clear()
    with structlog.testing.capture_logs() as lines:
        by_set = build(f"{former}={value}")
    assert by_set == build(f"{present}={value}") != build()
    (line,) = lines
    assert (line["event"], line["setting"]) == ("setting_renamed", former)
    assert present in line["action"]

    *sections, key = former.split(".")
    in_file = functools.reduce(lambda inner, name: {name: inner}, reversed(sections), {key: value})
    if "policies" in in_file:
        in_file["policies"]["main"]["model"] = "m"
    assert build(**in_file) == by_set


def test_a_present_name_on_the_command_line_overrides_a_former_one_in_the_file():
    assert build("groups.idle_timeout_s=7", groups={"silence_s": 45.0}).groups.idle_timeout_s == 7


def test_a_setting_under_both_of_its_names_is_refused():
    with pytest.raises(ConfigError, match="groups: silence_s is the former name of idle_timeout_s"):
        build(groups={"silence_s": 1.0, "idle_timeout_s": 2.0})
