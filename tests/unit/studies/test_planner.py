"""The planner behind an endpoint: it proposes, and rules decide."""

import json

import msgspec
import pytest
import tomli_w
from click.testing import CliRunner

from support.chat_server import serve_chat
from support.studies import Story, make_trial, study_of
from swarmq.cli import main
from swarmq.rewards import Sandbox
from swarmq.studies import planner
from swarmq.studies.analysis import compare
from swarmq.studies.design import plan_next
from swarmq.studies.ledger import LedgerFile, StudyFolder, read_ledger
from swarmq.studies.records import NoteWritten, PlannerAnswered, PlannerAsked, PlannerDecided, Spending
from swarmq.studies.report import compose, render_markdown
from swarmq.studies.state import StudyState

CODE = "def advantage(x):\n    return x\n"
TEST = "from advantage import advantage\nassert advantage(2) > 0, 'not positive'\n"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "advantage.py").write_text(CODE)
    (tmp_path / "secret.py").write_text("KEY = 1\n")
    (tmp_path / "test_advantage.py").write_text(TEST)
    return tmp_path


def story(max_arms=3, budget=None, approval="none", **changes):
    """A study whose own arms have their results."""
    table = {
        "kind": "endpoint",
        "model": "m",
        "max_arms": max_arms,
        "files": ["advantage.py"],
        "tests": ["test_advantage.py"],
        "approval": approval,
    }
    told = Story(study_of(planner=table | changes, budget=budget or {"gpu_seconds": 1000}))
    for arm in ("a", "b"):
        for seed in (0, 1, 2):
            told.finish(told.plan(arm, seed), seed + (arm == "b"))
    return told


def judge(told, root, *proposals, notes="", text=None):
    answer = text if text is not None else json.dumps({"proposals": proposals, "notes": notes})
    told.add(PlannerAsked(prompt="?"), PlannerAnswered(answer=answer, cost=Spending(calls=1)))
    facts = planner.judge(told.state, make_trial(told.study), root)
    told.add(*facts)
    return facts


def propose(name="c", arm=3, **more):
    return {"name": name, "hypothesis": "more is more", "settings": {"arm": arm}, **more}


def edit(new="return 2 * x", old="return x", file="advantage.py"):
    return {"file": file, "old": old, "new": new}


def reasons(facts):
    return [fact.reason for fact in facts if fact.decision == "refused"]


def test_an_accepted_arm_gets_all_seeds_and_is_compared(root):
    told = story()
    (accepted,) = judge(told, root, propose())
    assert (accepted.decision, accepted.reason, accepted.by) == ("accepted", "more is more", "rule")
    planned = [fact.trial for fact in plan_next(told.state, make_trial(told.study))]
    assert [(trial.arm, trial.seed, trial.settings) for trial in planned] == [("c", n, {"arm": 3}) for n in (0, 1, 2)]


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (propose("b"), "an arm of this name"),
        (propose("../x"), "lower-case letters"),
        (propose(arm=2), "a near duplicate of b"),
        (propose(arm=2.1), "a near duplicate of b"),
        (propose(edits=[edit(file="secret.py", old="1", new="2")]), "'secret.py' may not be changed"),
        (propose(edits=[edit(file="../advantage.py")]), "may not be changed"),
        (propose(edits=[edit(old="nothing like it")]), "occurs 0 times, not once"),
        (propose(edits=[edit(old="x")]), "occurs 2 times, not once"),
    ],
)
def test_a_wrong_proposal_is_refused_with_the_reason(root, proposal, why):
    told = story()
    (reason,) = reasons(judge(told, root, proposal))
    assert why in reason
    assert told.state.added_arms == {}
    assert (root / "secret.py").read_text() == "KEY = 1\n"


def test_a_refusal_names_no_path_of_this_machine(root):
    (root / "advantage.py").unlink()
    (reason,) = reasons(judge(story(), root, propose(edits=[edit()])))
    assert reason == "[Errno 2] No such file or directory: 'STUDY/advantage.py'"


def test_what_was_proposed_before_is_refused_and_stays_accepted(root):
    told = story()
    judge(told, root, propose())
    assert reasons(judge(told, root, propose())) == ["there is an arm of this name already"]
    assert reasons(judge(told, root, propose("d"))) == ["a near duplicate of c"]
    assert [*told.state.added_arms] == ["c"]


def test_more_than_the_budget_is_refused(root):
    told = story(budget={"trials": 10})
    facts = judge(told, root, propose(), propose("d", 4))
    assert [fact.decision for fact in facts] == ["accepted", "refused"]
    assert "6 trials may need 6 of budget.trials, and 4 are left" in facts[1].reason


def test_more_arms_than_allowed_are_refused(root):
    facts = judge(story(max_arms=1), root, propose(), propose("d", 4))
    assert reasons(facts) == ["the planner may add 1 arm (planner.max_arms)"]


@pytest.mark.parametrize("text", ["", "I would try more.", "[1]", '{"proposals": [{"name": 3}]}', '{"proposals": []}'])
def test_an_answer_without_proposals_is_refused_and_after_three_nobody_asks(root, text):
    told = story()
    for _ in range(planner.MAX_IDLE_ROUNDS):
        assert planner.may_ask(told.state)
        (fact,) = judge(told, root, text=text)
        assert fact.decision == "refused"
    assert not planner.may_ask(told.state)


def test_a_planner_that_repeats_itself_is_not_asked_for_ever(root):
    told = story()
    judge(told, root, propose())
    for _ in range(planner.MAX_IDLE_ROUNDS):
        judge(told, root, propose("d", 3.0001))
    assert not planner.may_ask(told.state)


@pytest.fixture
def sandboxed():
    try:
        Sandbox.detect()
    except Exception as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("sandboxed")
def test_a_change_of_code_runs_its_tests_first(root):
    told = story()
    good, bad = propose(edits=[edit()]), propose("d", edits=[edit("return -x")])
    broken = propose("e", edits=[edit("return (")])
    facts = judge(told, root, good, bad, broken)
    assert [fact.decision for fact in facts] == ["accepted", "refused", "refused"]
    assert "-    return x\n+    return 2 * x" in facts[0].diff
    assert "test_advantage.py fails with the change: exit code 1: AssertionError: not positive" in facts[1].reason
    assert "advantage.py fails with the change" in facts[2].reason
    assert told.state.added_arms["c"].files == {"advantage.py": CODE.replace("return x", "return 2 * x")}
    assert (root / "advantage.py").read_text() == CODE, "a trial runs in a copy"


def test_an_arm_that_needs_approval_waits_for_a_person(root):
    told = story(approval="arm")
    judge(told, root, propose())
    assert told.state.waiting == ["c"]
    assert plan_next(told.state, make_trial(told.study)) == []
    told.add(PlannerDecided(arm="c", settings={"arm": 3}, decision="accepted", reason="", by="ada"))
    assert [*told.state.added_arms] == ["c"]


def test_each_step_of_the_budget_waits_for_a_person(root):
    """Three trials of 10 s are 3 % of the budget, and a step is 5 %: the second arm waits."""
    told = story(approval="budget", budget_step=0.05)
    facts = judge(told, root, propose(), propose("d", 4))
    assert [fact.decision for fact in facts] == ["accepted", "waiting"]
    told.add(PlannerDecided(arm="d", settings={"arm": 4}, decision="accepted", reason="", by="ada"))
    (next_one,) = judge(told, root, propose("e", 5))
    assert next_one.decision == "accepted"


def test_the_prompt_tells_results_and_tries_but_no_held_out_task(root):
    told = story()
    judge(told, root, propose(arm=2))
    prompt = planner.make_prompt(told.state, root)
    facts = json.loads(prompt.partition("\n{\n")[2].join(["{", ""]))
    assert facts["arms"][1]["results"] == [1, 2, 3]
    assert facts["refused"][0]["why"] == "a near duplicate of b"
    assert facts["files"] == {"advantage.py": CODE}
    assert "KEY" not in prompt
    assert prompt == planner.make_prompt(told.state, root)
    assert "\nAnswer with one JSON object and nothing else:\n" in prompt


def test_the_endpoint_is_asked_once_and_its_calls_count(root, monkeypatch):
    answer = json.dumps({"proposals": [propose()], "notes": "b is better by 9.87"})
    with serve_chat(lambda _: answer) as server:
        told = story(base_url=server.url, budget={"calls": 10})
        prompt = planner.make_prompt(told.state, root)
        asked = planner.prepare(told.state, root)
        answered = planner.ask(told.study, asked)
        assert asked.prompt == prompt
        assert server.asked[0]["messages"] == [{"role": "user", "content": prompt}]
    assert (answered.answer, answered.cost.calls) == (answer, 1)
    told.add(asked, answered)
    assert told.state.spent.calls == 1
    told.add(*planner.judge(told.state, make_trial(told.study), root))
    assert "b is better by 9.87 \\[not in the ledger\\]" in render_markdown(compose(told.entries))
    assert any(isinstance(entry.fact, NoteWritten) for entry in told.entries)
    results = [(one.trial, one.result) for one in told.state.trials.values() if one.result]
    assert compare(told.study, results)[0].mean == 1


def test_an_endpoint_that_refuses_is_an_answer_without_proposals(root):
    with serve_chat(lambda _: 401) as server:
        told = story(base_url=server.url)
        asked = PlannerAsked(prompt="?", reserved=planner.reserve(told.state, "?"))
        answered = planner.ask(told.study, asked)
    assert "no answer" in answered.answer
    told.add(asked, answered)
    assert planner.judge(told.state, make_trial(told.study), root)[0].decision == "refused"


def test_the_calls_of_a_leader_that_died_before_it_had_the_answer_are_spent():
    told = story(budget={"calls": 8})
    told.add(PlannerAsked(prompt="?", reserved=planner.reserve(told.state, "?")))
    assert planner.reserve(told.state, "?") == Spending(calls=3)
    told.add(PlannerAsked(prompt="?", reserved=planner.reserve(told.state, "?")))
    assert (told.state.spent.calls, told.state.reserved.calls) == (5, 3)
    assert not planner.may_ask(told.state)
    told.add(PlannerAnswered(answer="{}", cost=Spending(calls=1)))
    assert (told.state.spent.calls, told.state.reserved.calls) == (6, 0)


PRICES = {"prompt_price": 1.0, "answer_price": 4.0, "max_tokens": 250_000}
"""A call of a prompt of one byte costs at most one."""


@pytest.mark.parametrize(
    ("usage", "money"),
    [({"total_tokens": 300, "completion_tokens": 100}, (200 * 1.0 + 100 * 4.0) / 1e6), (None, 1.000001)],
)
def test_the_money_of_an_answer_is_reserved_before_and_settled_after_it(root, usage, money):
    with serve_chat(lambda _: "{}", usage=usage) as server:
        told = story(base_url=server.url, budget={"money": 3.5}, **PRICES)
        asked = PlannerAsked(prompt="?", reserved=planner.reserve(told.state, "?"))
        assert (asked.reserved.calls, asked.reserved.money) == (3, pytest.approx(3.000003))
        told.add(asked)
        assert planner.reserve(told.state, "?").calls == 0, "the rest does not pay for another call"
        told.add(planner.ask(told.study, asked))
        assert server.asked[0]["max_tokens"] == 250_000
    assert (told.state.spent.money, told.state.reserved.money) == (pytest.approx(money), 0)


def test_a_planner_that_the_money_does_not_pay_for_is_not_asked(root):
    assert planner.prepare(story(budget={"money": 1.0}, **PRICES).state, root) is None
    assert planner.prepare(story(budget={"money": 9.0}, **PRICES).state, root) is not None


def test_a_spent_budget_asks_nobody():
    assert not planner.may_ask(story(budget={"calls": 0}).state)
    assert not planner.may_ask(story(budget={"trials": 6}).state)


def test_the_command_records_who_approved_and_refuses_an_arm_that_does_not_wait(tmp_path, root):
    told = story(approval="arm")
    judge(told, root, propose(), propose("d", 4))
    (tmp_path / "study.toml").write_text(
        tomli_w.dumps(msgspec.to_builtins(told.study) | {"budget": {"gpu_seconds": 1000}})
    )
    folder = StudyFolder(tmp_path / "study.toml", "first")
    ledger = LedgerFile(folder.ledger)
    ledger.append([entry.fact for entry in told.entries])
    ledger.close()
    command = ["study", "approve", str(tmp_path / "study.toml")]
    for more in (["c", "--by", "ada"], ["d", "--refuse", "--by", "ada", "--reason", "too slow"]):
        result = CliRunner().invoke(main, [*command, *more])
        assert result.exit_code == 0, result.output
    state = StudyState(read_ledger(folder.ledger))
    assert state.added_arms["c"].settings == {"arm": 3}
    assert (state.proposed["d"].decision, state.proposed["d"].reason, state.proposed["d"].by) == (
        "refused",
        "too slow",
        "ada",
    )
    again = CliRunner().invoke(main, [*command, "c", "--by", "ada"])
    assert "'c' is no arm that waits for approval" in str(again.exception) + again.output


def test_an_answer_that_was_not_judged_before_a_crash_is_judged_without_asking_again(root):
    told = story()
    told.add(
        PlannerAsked(prompt="?"), PlannerAnswered(answer=json.dumps({"proposals": [propose()]}), cost=Spending(calls=1))
    )
    again = StudyState(told.entries)
    assert again.answer is not None
    (fact,) = planner.judge(again, make_trial(told.study), root)
    assert fact.decision == "accepted"
