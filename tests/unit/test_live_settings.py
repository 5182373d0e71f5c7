"""Settings that change while a run is up: all or none, with a clear reason, and the job file has the last word."""

from __future__ import annotations

import msgspec
import pytest

from swarmq import live_settings
from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Change

RATE = "policies.main.train.learning_rate"


def job(**fields) -> SwarmJob:
    tree = {
        "run": "r",
        "mix": {"math": 0.5, "code": 0.5},
        "kinds": {"spare": {}},
        "policies": {
            "main": {"model": "m", "train": {"sft": {"demonstrations": "chats.jsonl"}}},
            "judge": {"model": "j", "trained": False},
        },
    }
    return SwarmJob.build(tree | fields)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "nothing to set"),
        ({"policies.main.train.lr": 1}, "lr"),
        ({"policies.main.train.learning_rat": 1}, "did you mean learning_rate"),
        ({"policies.other.train.learning_rate": 1}, "there is no policy 'other'"),
        ({RATE: -1}, "learning_rate"),
        ({RATE: "fast"}, "learning_rate"),
        ({"policies.main.model": "n"}, "policies.main.model: cannot change while the run is up"),
        ({"groups.groups_per_batch": 3}, "cannot change while the run is up"),
        ({"policies.judge.train.learning_rate": 1e-5}, "policy 'judge' is frozen"),
        ({"policies.main.train.max_steps": 5}, "5 is not after the present step 7"),
        ({"mix": {"math": 0.5}}, "sum to 0.5"),
        ({"mix": {"math": 0.5, "poems": 0.5}}, "kind 'poems' is unknown"),
        ({"mix.math": 0.5}, "set all of them at once"),
        ({"kinds.poems.group_size": 4}, "kind 'poems' is unknown"),
        ({"mix_schedule": {"points": [{"step": 9, "mix": {"poems": 1.0}}]}}, "kind 'poems' is unknown"),
        ({"groups.min_group": 9}, "min_group"),
        ({"run": "other"}, "run: cannot change"),
        ({"policies.main.train.length_penalty.free": 3}, "length_penalty is not set: give all of it at once"),
        ({"policies.main.model.name": "m"}, "policies.main.model is a value, not a section"),
        ({"policies.main.train.advantage": "gae"}, "the learner of 'main' plans memory for the critic"),
        ({"kinds.code.advantage": "gae"}, "kinds.code.advantage: the learner of 'main' plans memory for the critic"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_reason_and_nothing_changes(settings, words):
    with pytest.raises(ConfigError) as refused:
        live_settings.validate_changes(job(), {"groups.max_staleness": 1, **settings} if settings else {}, {"main": 7})
    assert words in str(refused.value)


def test_a_critic_that_the_job_file_has_can_be_left_out_and_taken_again():
    path = "policies.main.train.advantage"
    file = live_settings.change_job(job(), {path: "gae"})
    without = live_settings.validate_changes(file, {path: "rloo"}, {}, file=file)
    assert live_settings.validate_changes(without, {path: "gae"}, {}, file=file) == file


def test_every_live_path_is_a_setting_that_exists():
    tree = msgspec.to_builtins(job())
    for pattern in live_settings.LIVE:
        node = tree
        path = (
            pattern.replace("policies.*", "policies.main")
            .replace("kinds.*", "kinds.spare")
            .replace("loss.*", "loss.name")
        )
        for part in path.split("."):
            assert part in node, pattern
            node = node[part]


def test_changes_add_up_and_the_newest_counts():
    changes = [
        Change(number=1, path=RATE, before=1e-6, value=1e-5, base=1e-6),
        Change(number=2, path=RATE, before=1e-5, value=1e-4, base=1e-6),
        Change(number=2, path="groups.group_size", before=8, value=4, base=8),
    ]
    after = live_settings.apply_changes(job(), changes)
    assert (after.policies["main"].train.learning_rate, after.groups.group_size) == (1e-4, 4)


def test_once_the_job_file_is_edited_at_that_place_it_counts_again():
    changes = [Change(number=1, path="groups.group_size", before=8, value=4, base=8)]
    assert live_settings.apply_changes(job(groups={"max_staleness": 1}), changes).groups.group_size == 4
    assert live_settings.apply_changes(job(groups={"group_size": 6}), changes).groups.group_size == 6


def test_a_change_of_the_mix_holds_from_its_step_on():
    before, after = {"math": 0.5, "code": 0.5}, {"math": 0.9, "code": 0.1}
    change = Change(number=1, path="mix", before=before, value=after, base=before, from_step={"main": 12})
    first, second = live_settings.mix_stretches(job(), [change], lambda one: one.from_step["main"])
    assert (first.from_step, first.mix, second.from_step, second.mix) == (0, before, 12, after)


def test_a_stored_change_under_a_former_name_stays_in_effect():
    stored = Change(number=1, path="groups.silence_s", before=600.0, value=60.0, base=600.0)
    assert live_settings.apply_changes(job(), [stored]).groups.idle_timeout_s == 60.0
    assert live_settings.is_live("policies.main.train.loss.pull")
    assert live_settings.validate_changes(job(), {"groups.flat_after": 3}, {}).groups.uninformative_groups == 3
