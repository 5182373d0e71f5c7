"""The planner behind an OpenAI endpoint: what it is told, what it may propose, and what becomes of its proposals.

    state ──make_prompt──> prompt ──ask──> answer ──judge──> decisions and notes      each in the ledger before the next

The model decides nothing. A proposal becomes an arm if it names only settings that a trial accepts and files that it may change, is no
near duplicate of what was tried, fits the budget, passes its tests in a sandbox, and is approved where the study asks for that.
It never sees held-out tasks or their scores.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from swarmq.errors import ConfigError, EndpointError, SandboxError, StudyError
from swarmq.rewards import Budget, ChatEndpoint, Sandbox, extract_json
from swarmq.runtime.wording import count_of
from swarmq.studies.changed_files import Edit, apply_edits, show_diff
from swarmq.studies.design import MakeTrial, choose_arms
from swarmq.studies.ledger import redact
from swarmq.studies.records import AnyFact, NoteWritten, PlannerAnswered, PlannerAsked, PlannerDecided, Spending
from swarmq.studies.state import StudyState, add, list_caps
from swarmq.studies.study import NAME, Arm, Study

MAX_IDLE_ROUNDS = 3
"""Answers in a row without an accepted arm after which the planner is not asked again."""
MAX_CALLS = 5
"""Largest number of requests for one answer, repeated ones included."""
MAX_TEXT = 4_000
"""Characters of a hypothesis or notes that are kept."""
NEAR = 0.1
"""Relative difference up to which two numbers of a setting count as the same value."""
TEST_SECONDS = 60.0

TASK = """\
You plan experiments. Propose further arms for the study below; each is run with all seeds and compared with the baseline.
Answer with one JSON object and nothing else:
{"proposals": [{"name": "short-name", "hypothesis": "why it may be better", "settings": {"path": value},
  "edits": [{"file": "path", "old": "text that occurs once", "new": "its replacement"}]}],
 "notes": "what the results say so far"}
Settings are those that the arms below have, or others that the trial accepts; edits may be left out, and may change only the files below.
Do not repeat what was tried. State no number that is not given here. An empty list of proposals ends the study.
"""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    hypothesis: str = ""
    settings: dict[str, Any] = {}
    edits: list[Edit] = []


class Proposals(msgspec.Struct, frozen=True, kw_only=True):
    proposals: list[Proposal] = []
    notes: str = ""


def may_ask(state: StudyState) -> bool:
    """Return whether the planner may be asked again: arms, budget and patience are left."""
    study = _study(state)
    return (
        len(state.added_arms) < study.planner.max_arms
        and state.idle_rounds < MAX_IDLE_ROUNDS
        and _calls_left(state) > 0
        and not _find_shortage(state, 1)
    )


def make_prompt(state: StudyState, root: Path) -> str:
    """Return what the model is told: the design, results by arm, what was tried, and files that it may change."""
    from swarmq.studies.analysis import collect_scores, compare  # noqa: PLC0415 - slow

    study = _study(state)
    results = state.results
    means = {
        arm: [round(math.fsum(tasks.values()) / len(tasks), 6) for tasks in by_seed.values()]
        for arm, by_seed in collect_scores(study, results).items()
    }
    arms = choose_arms(study) | state.added_arms
    facts = {
        "question": study.question,
        "metric": f"{study.metric.name}, {study.metric.direction}",
        "smallest_effect_of_interest": study.smallest_effect,
        "baseline": next(iter(arms)),
        "shared_settings": study.settings,
        "arms": [
            {"name": name, "settings": arm.settings, "changed_files": sorted(arm.files), "results": means.get(name, [])}
            for name, arm in arms.items()
        ],
        "against_the_baseline": [
            {"arm": found.arm, "difference": found.mean, "p": found.p_holm, "verdict": found.verdict}
            for found in compare(study, results)
        ],
        "refused": [
            {"name": name, "settings": fact.settings, "why": fact.reason}
            for name, fact in state.proposed.items()
            if fact.decision == "refused"
        ],
        "arms_left": study.planner.max_arms - len(state.added_arms),
        "files": {name: (root / name).read_text() for name in study.planner.files},
    }
    return f"{TASK}\n{json.dumps(facts, indent=1, ensure_ascii=False)}"


def prepare(state: StudyState, root: Path) -> PlannerAsked | None:
    """Return the next question, with the most that its answer may cost; None if the planner may not be asked again."""
    if not may_ask(state):
        return None
    asked = PlannerAsked(prompt=(prompt := make_prompt(state, root)), reserved=reserve(state, prompt))
    return asked if asked.reserved.calls else None


def reserve(state: StudyState, prompt: str) -> Spending:
    """Return the most that the answer may cost; no calls if the money that is left does not pay for one."""
    study = _study(state)
    calls, price, cap = min(MAX_CALLS, _calls_left(state)), _price(study, prompt), study.budget.money
    if price and cap is not None:
        left = cap - add(state.spent, state.reserved).money
        calls = min(calls, max(math.floor(left / price), 0))
    return Spending(calls=calls, money=calls * price)


def _price(study: Study, prompt: str) -> float:
    """Return the most that one call costs: a token of the prompt is at least one byte."""
    planner = study.planner
    return (len(prompt.encode()) * planner.prompt_price + planner.max_tokens * planner.answer_price) / 1e6


def ask(study: Study, asked: PlannerAsked) -> PlannerAnswered:
    """Ask the model; an endpoint that does not answer is an empty answer."""
    planner = study.planner
    budget = Budget(calls=asked.reserved.calls)
    endpoint = ChatEndpoint(
        planner.model,
        base_url=planner.base_url or None,
        api_key=os.environ.get(planner.api_key_env),
        budget=budget,
        options={"max_tokens": planner.max_tokens} if planner.answer_price else {},
    )
    try:
        answer = endpoint.ask(asked.prompt, str)
    except EndpointError as error:
        answer = f"(no answer: {error})"
    prompt_tokens = budget.spent_tokens - budget.answer_tokens
    money = (prompt_tokens * planner.prompt_price + budget.answer_tokens * planner.answer_price) / 1e6
    money += budget.uncounted_calls * _price(study, asked.prompt)
    return PlannerAnswered(answer=answer, cost=Spending(calls=budget.spent_calls, money=money))


def judge(state: StudyState, make: MakeTrial, root: Path) -> list[AnyFact]:
    """Decide on every proposal of the answer that was not judged yet. Returns at least one decision."""
    assert state.answer is not None
    try:
        answer = msgspec.convert(extract_json(state.answer), Proposals)
    except (ValueError, msgspec.ValidationError) as error:
        return [_refuse("", f"the answer is no list of proposals: {error}")]
    facts: list[AnyFact] = []
    if answer.notes.strip():
        facts.append(NoteWritten(by="planner", text=answer.notes.strip()[:MAX_TEXT]))
    taken: dict[str, PlannerDecided] = {}
    for proposal in answer.proposals:
        decided = _decide(state, proposal, taken, make, root)
        if decided.decision != "refused":
            taken[proposal.name] = decided
        facts.append(decided)
    if not answer.proposals:
        facts.append(_refuse("", "the answer has no proposals"))
    return facts


def _decide(
    state: StudyState, proposal: Proposal, taken: Mapping[str, PlannerDecided], make: MakeTrial, root: Path
) -> PlannerDecided:
    study, changed = _study(state), dict[str, str]()
    try:
        if not NAME.fullmatch(proposal.name):
            raise StudyError("a name must be lower-case letters, digits and hyphens, at most 32")
        if proposal.name in {**choose_arms(study), **state.proposed, **taken}:
            raise StudyError("there is an arm of this name already")
        if len(state.added_arms) + len(taken) >= study.planner.max_arms:
            raise StudyError(f"the planner may add {count_of(study.planner.max_arms, 'arm')} (planner.max_arms)")
        changed = apply_edits(root, proposal.edits, study.planner.files)
        arm = Arm(settings=proposal.settings, files=changed)
        new = Arm(settings=study.settings | arm.settings, files=changed)
        tried = (
            choose_arms(study)
            | state.added_arms
            | {n: Arm(settings=f.settings, files=f.files) for n, f in taken.items()}
        )
        for name, other in tried.items():
            if _is_near(new, Arm(settings=study.settings | other.settings, files=other.files)):
                raise StudyError(f"a near duplicate of {name}")
            seed = study.seeds[0]
            if make(proposal.name, arm, seed).id == make(name, other, seed).id:
                raise StudyError(f"the same trial as {name}")
        if shortage := _find_shortage(state, len(study.seeds) * (1 + len(taken))):
            raise StudyError(shortage)
        if changed:
            _test(study, root, changed)
    except (ConfigError, StudyError, SandboxError, OSError, UnicodeDecodeError) as error:
        return _refuse(proposal.name, redact(str(error), root), proposal.settings)
    return PlannerDecided(
        arm=proposal.name,
        settings=proposal.settings,
        files=changed,
        diff=show_diff(root, changed),
        decision=_gate(state, len(taken)),
        reason=proposal.hypothesis[:MAX_TEXT],
    )


def _gate(state: StudyState, num_taken: int) -> Literal["accepted", "waiting"]:
    """Return whether an arm runs, or waits for a person: each arm, or the first one beyond each step of the budget."""
    study = _study(state)
    if study.planner.approval == "none":
        return "accepted"
    if study.planner.approval == "arm":
        return "waiting"
    since = 0
    for fact in state.proposed.values():
        since = 0 if fact.by != "rule" else since + (fact.decision == "accepted")
    share = _share(study, len(study.seeds) * (since + num_taken + 1))
    return "waiting" if share > study.planner.budget_step else "accepted"


def _share(study: Study, num_trials: int) -> float:
    """Return the largest share of a cap that so many trials may need."""
    return max((need * num_trials / cap for _, need, _, cap in list_caps(study, Spending(), 0) if cap), default=0.0)


def _find_shortage(state: StudyState, num_trials: int) -> str:
    """Return which cap does not hold so many more trials, or ""."""
    for name, need, used, cap in list_caps(_study(state), add(state.spent, state.reserved), state.num_starts):
        if used + need * num_trials > cap:
            return f"asks for more than the budget: {count_of(num_trials, 'trial')} may need {need * num_trials:g} of budget.{name}, and {cap - used:g} are left"
    return ""


def _calls_left(state: StudyState) -> int:
    cap = _study(state).budget.calls
    return MAX_CALLS if cap is None else cap - add(state.spent, state.reserved).calls


def _is_near(one: Arm, other: Arm) -> bool:
    """Return whether two arms differ in numbers only, and in these by little."""
    if one.files != other.files or one.settings.keys() != other.settings.keys():
        return False
    return all(_is_near_value(value, other.settings[path]) for path, value in one.settings.items())


def _is_near_value(one: Any, other: Any) -> bool:
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other)]
    if all(numbers) and not (isinstance(one, int) and isinstance(other, int)):
        return math.isclose(one, other, rel_tol=NEAR)
    return bool(one == other)


def _test(study: Study, root: Path, changed: Mapping[str, str]) -> None:
    """Run the study's tests on changed files in a sandbox. Raises StudyError if one fails, SandboxError."""
    named = [
        *study.planner.files,
        *study.planner.tests,
        *(name for name in study.trial.code if (root / name).is_file()),
    ]
    files = {name: (root / name).read_text() for name in named} | dict(changed)
    sandbox = Sandbox.detect().with_limits(wall_s=TEST_SECONDS)
    commands = [("-m", "py_compile", name) for name in changed if name.endswith(".py")] + [
        (name,) for name in study.planner.tests
    ]
    for command in commands:
        ran = sandbox.run(["python", *command], files=files)
        if ran.problem:
            raise StudyError(f"{command[-1]} fails with the change: {ran.problem}")


def _refuse(name: str, reason: str, settings: dict[str, Any] | None = None) -> PlannerDecided:
    return PlannerDecided(arm=name, settings=settings or {}, decision="refused", reason=reason[:MAX_TEXT])


def _study(state: StudyState) -> Study:
    assert state.study is not None
    return state.study
