"""Who misspells a setting, or writes it where another library has it, is told which one was probably meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.config import SwarmJob
from swarmq.config_errors import ELSEWHERE, edit_distance, list_setting_paths
from swarmq.errors import ConfigError

TREE = {"run": "r", "policies": {"main": {"model": "m"}}, "kinds": {"math": {}}}
EVERY = list_setting_paths(SwarmJob)
FIELDS = [path for path in EVERY if not path.endswith(("*", "[*]"))]
NAMED = {"policies.*": "policies.main", "kinds.*": "kinds.math"}


def filled(pattern: str) -> str:
    for star, name in NAMED.items():
        pattern = pattern.replace(star, name, 1) if pattern.startswith(star) else pattern
    return pattern.replace("[*]", "[0]")


def refusal(path: str, value: object = 1) -> str:
    """What is said of a setting at `path`, whose sections are made for it."""
    tree: dict[str, object] = {**TREE, "policies": {"main": {"model": "m"}}, "kinds": {"math": {}}}
    node: object = tree
    *sections, name = filled(path).split(".")
    for section in sections:
        key, listed, _ = section.partition("[0]")
        node = node.setdefault(key, [{}] if listed else {})  # type: ignore[attr-defined]
        node = node[0] if listed else node  # type: ignore[index]
    node[name] = value  # type: ignore[index]
    with pytest.raises(ConfigError) as told:
        SwarmJob.build(tree, origin="job.toml")
    return str(told.value)


def test_every_setting_is_known_by_its_path() -> None:
    assert {"run", "policies.*.train.loss.name", "kinds.*.max_tokens", "mix_schedule.points[*].step"} <= set(EVERY)
    assert set(ELSEWHERE.values()) <= set(EVERY)


@st.composite
def slipped(draw: st.DrawFn) -> tuple[str, str]:
    """A setting, and its path with one slip in the name."""
    path = draw(st.sampled_from([path for path in FIELDS if len(path.rpartition(".")[2]) > 3]))
    section, dot, name = path.rpartition(".")
    at = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz"))
    wrong = draw(
        st.sampled_from(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            ]
        )
    )
    return path, f"{section}{dot}{wrong}"


@given(slipped())
def test_one_slip_in_any_setting_names_the_setting_and_its_whole_path(case: tuple[str, str]) -> None:
    path, wrong = case
    section, _, name = wrong.rpartition(".")
    siblings = [other.rpartition(".")[2] for other in EVERY if other.rpartition(".")[0] == section]
    right = path.rpartition(".")[2]
    if name in siblings or name in ELSEWHERE or any(edit_distance(name, one) == 1 for one in siblings if one != right):
        return  # another setting is as near
    said = refusal(wrong)
    assert f"job.toml: {filled(wrong)}: unknown field; did you mean {right}?" in said


@given(st.sampled_from(FIELDS), st.sampled_from(["", "groups", "policies.*", "policies.*.train", "policies.*.engine"]))
def test_a_setting_in_the_wrong_section_is_told_its_right_one(path: str, section: str) -> None:
    name = path.rpartition(".")[2]
    wrong = f"{section}.{name}".lstrip(".")
    if wrong in EVERY or name in ELSEWHERE or len(name) < 4:
        return
    said = refusal(wrong)
    homes = [filled(one).replace("[0]", "[*]") for one in FIELDS if one.rpartition(".")[2] == name]
    own = [one.rpartition(".")[2] for one in EVERY if one.rpartition(".")[0] == section]
    near = any(edit_distance(name, one) <= 1 for one in own)
    assert near or any(home in said for home in homes), said


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("policies.*.train.lr", "learning_rate"),
        ("lr", "policies.main.train.learning_rate"),
        ("policies.*.train.learningRate", "learning_rate"),
        ("policies.*.train.temperature", "policies.main.sampling.temperature"),
        ("temperature", "policies.main.sampling.temperature"),
        ("policies.*.sampling.max_new_tokens", "max_tokens"),
        ("policies.*.sampling.max_completion_tokens", "max_tokens"),
        ("policies.*.train.kl", "policies.main.train.loss.kl"),
        ("policies.*.train.grad_norm_clip", "grad_clip"),
        ("groups.num_generations", "group_size"),
        ("group_size", "groups.group_size"),
        ("policies.*.lora", "policies.main.train.lora"),
        ("policies.*.train.lora_rank", "policies.main.train.lora.rank"),
        ("proxy.tls_port", "broker.tls_port"),
        ("grops", "groups"),
        ("policy", "policies"),
    ],
)
def test_the_likeliest_setting_is_named(path: str, meant: str) -> None:
    said = refusal(path)
    assert f"{filled(path)}: unknown field; did you mean {meant}" in said


def test_where_nothing_is_near_the_names_of_the_section_are_listed() -> None:
    assert refusal("eval.zzz") == "job.toml: eval.zzz: unknown field; there are every, k, deadline_s"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "policies.*.train.loss.name",
            "grpo",
            "is none of cispo, distill, gspo, ppo_clip, reinforce, sft, tis_mask, module:function; grpo is a value of policies.main.train.advantage",
        ),
        ("policies.*.train.advantage", "gspo", "gspo is a value of policies.main.train.loss.name"),
        ("policies.*.train.loss.name", "reinforc", "; did you mean reinforce?"),
        ("policies.*.train.loss.name", "ppo", "; did you mean ppo_clip?"),
        ("policies.*.train.loss.name", "zzz", "'zzz' is none of cispo"),
        ("groups.group_size", "four", "groups.group_size: Expected `int`, got `str` 'four'"),
        ("groups.group_size", 0, "groups.group_size: Expected `int` >= 1, got 0"),
        ("policies.*.train.betas", [0.9, 3.0], "policies.main.train.betas[1]: Expected `float` < 1.0, got 3.0"),
        ("eval", 3, "eval: Expected a table, got `int` 3"),
        ("run", ["x" * 100], "run: Expected `str`, got `array` ['xxx"),
    ],
)
def test_a_wrong_value_is_shown_with_what_could_stand_there(path: str, value: object, says: str) -> None:
    assert says in refusal(path, value)


@given(st.sampled_from(FIELDS), st.sampled_from([[[1]], {"a": {}}, "?", -1.5, float("nan"), True]))
def test_any_wrong_value_of_any_setting_names_its_path(path: str, value: object) -> None:
    try:
        said = refusal(path, value)
    except pytest.fail.Exception:
        return  # a value that may stand there
    first = filled(path).partition("[0]")[0]
    assert first.rpartition(".")[0] in said
    assert len(said) < 600


def test_of_several_policies_the_one_with_the_flaw_is_named() -> None:
    policies = {"good": {"model": "m"}, "bad": {"model": "m", "train": {"lr": 1}}}
    with pytest.raises(ConfigError, match=r"policies\.bad\.train\.lr: unknown field; did you mean learning_rate\?"):
        SwarmJob.build({"run": "r", "policies": policies})
    with pytest.raises(ConfigError, match=r"^settings: top_k: unknown field"):
        SwarmJob.build({"run": "r", "policies": {"a": {"model": "m"}, "b": {"model": "m"}}, "top_k": 1})
    with pytest.raises(ConfigError, match=r"did you mean policies\.NAME\.sampling\.temperature\?"):
        SwarmJob.build({"run": "r", "policies": {"a": {"model": "m"}, "b": {"model": "m"}}, "temperature": 1})
