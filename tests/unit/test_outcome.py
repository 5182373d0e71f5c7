import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from swarmq.errors import OutcomeError
from swarmq.messages import EpisodeBegin, Slot, check
from swarmq.outcome import MAX_REASON, Outcome, make_finished_end, make_unfinished_end, to_outcome


def begin(*policies):
    return EpisodeBegin(
        run="r",
        episode_id="e",
        slot=Slot(task_id="t"),
        kind="math",
        group_size=2,
        policies=policies or ("main",),
        client_id="alice-1",
    )


@pytest.mark.parametrize("name", ["r.0", "resp_r.0"], ids=["of a call", "of a response"])
def test_a_call_is_credited_by_the_id_of_its_answer(name):
    assert make_finished_end(begin(), Outcome(1.0, call_rewards={name: 0.5})).call_rewards == {"r.0": 0.5}


@pytest.mark.parametrize(
    "reward", [1, 0.5, True, np.float32(0.5), np.int64(3), np.array(0.25), Decimal("0.1"), Fraction(1, 2)]
)
def test_every_kind_of_number_is_a_reward(reward):
    end = make_finished_end(begin(), to_outcome(reward))
    assert end.rewards == {"main": float(reward)}
    check(end)


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (None, "reward is None"),
        (math.nan, "reward is nan"),
        (math.inf, "reward is inf"),
        (-math.inf, "must be finite"),
        ("1.0", "not a number"),
        (b"1", "not a number"),
        ([1.0], "not a number"),
        (1j, "not a number"),
        (np.array([1.0, 2.0]), "not a single number"),
        (10**400, "not a single number"),
        (object(), "not a number"),
        (-1e300, r"reward is -1e\+300, beyond 1e\+06: scale rewards"),
        (1e30, r"reward is 1e\+30, beyond 1e\+06: scale rewards"),
    ],
)
def test_what_is_no_finite_number_is_no_reward(reward, says):
    with pytest.raises(OutcomeError, match=says):
        to_outcome(reward)
    with pytest.raises(OutcomeError, match=says):
        make_finished_end(begin(), Outcome(reward=reward))


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (Outcome(), "reward is None"),
        (Outcome(1.0, metrics={"length": math.nan}), r"metrics\.length is nan"),
        (Outcome(1.0, metrics={"length": None}), r"metrics\.length is None: leave out a metric"),
        (Outcome(1.0, metrics={"length": "3"}), r"metrics\.length is '3' of type str, not a number"),
        (Outcome(1.0, metrics={"length": [1, 2]}), r"metrics\.length is \[1, 2\] of type list"),
        (Outcome("a" * 9000), r"reward is '.{99}\.\.\. of type str, not a number$"),
        (Outcome(1.0, metrics=[1]), r"metrics is \[1\]"),
        (Outcome(1.0, call_rewards={"c1": None}), r"call_rewards\.c1 is None"),
        (Outcome(1.0, agent_rewards={"main": {"critic": "x"}}), r"agent_rewards\.main\.critic"),
        (Outcome(1.0, agent_rewards={"other": {}}), "agent_rewards names 'other'"),
        (Outcome(1.0, success="yes"), "success is 'yes'"),
        (Outcome(1.0, success=1), "success is 1"),
        (Outcome(1.0, {"main": 1.0}), "both reward and rewards"),
        (Outcome(rewards={}), "nothing for main"),
        (Outcome(rewards={"main": 1.0, "other": 0.0}), "rewards names 'other'"),
    ],
)
def test_an_outcome_that_is_wrong_names_the_field(outcome, says):
    with pytest.raises(OutcomeError, match=says):
        make_finished_end(begin(), outcome)


def test_one_reward_is_shared_and_several_are_told_apart():
    two = begin("planner", "executor")
    assert make_finished_end(two, Outcome(1.0)).rewards == {"planner": 1.0, "executor": 1.0}
    assert make_finished_end(two, Outcome(rewards={"planner": 0.0, "executor": 1})).rewards == {
        "planner": 0.0,
        "executor": 1.0,
    }
    with pytest.raises(OutcomeError, match="nothing for executor"):
        make_finished_end(two, Outcome(rewards={"planner": 0.0}))


def test_success_of_numpy_is_a_plain_bool_and_metadata_is_text():
    end = make_finished_end(begin(), Outcome(0.0, success=np.bool_(True), metadata={"seed": 3}))
    assert end.success is True
    assert end.metadata == {"seed": "3"}


def test_an_unfinished_end_has_no_reward_and_keeps_the_last_lines_of_its_reason():
    end = make_unfinished_end(begin(), "failed", "x" * MAX_REASON + "ValueError: no")
    assert end.rewards == {}
    assert len(end.reason) == MAX_REASON
    assert end.reason.endswith("ValueError: no")


def test_metrics_of_any_number_type_become_floats_and_names_become_text():
    end = make_finished_end(
        begin(), Outcome(1.0, metrics={"ok": True, 3: 2, "np": np.float32(0.5), "np_bool": np.True_})
    )
    assert end.metrics == {"ok": 1.0, "3": 2.0, "np": 0.5, "np_bool": 1.0}
    assert {type(value) for value in end.metrics.values()} == {float}


def test_a_metric_may_be_beyond_what_the_learner_computes_in():
    end = make_finished_end(begin(), Outcome(1e6, metrics={"size": 1e300}))
    assert (end.rewards, end.metrics) == ({"main": 1e6}, {"size": 1e300})
