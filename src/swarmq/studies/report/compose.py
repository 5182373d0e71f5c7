"""The chapters of a report, from the entries of a ledger. Pure."""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any, TypeVar

import msgspec
import numpy as np
from scipy import stats

from swarmq.errors import StudyError
from swarmq.runtime.wording import count_of
from swarmq.studies.analysis import Results, announce_power, collect_scores, compare, main_effects, measure_noise
from swarmq.studies.records import (
    Entry,
    Fact,
    Looked,
    NoteWritten,
    PlannerAnswered,
    PlannerDecided,
    Promoted,
    StudyAmended,
    StudyOpened,
    StudyResumed,
    TrialFailed,
    TrialResult,
    TrialStarted,
)
from swarmq.studies.report.blocks import (
    Block,
    Bullets,
    Code,
    Curves,
    Estimate,
    Figure,
    Forest,
    Heading,
    Line,
    ReportTable,
    Text,
    number,
    p_value,
    span,
)
from swarmq.studies.report.claims import mark_unknown_numbers
from swarmq.studies.state import StudyState
from swarmq.studies.statistics import ArmComparison, Noise, t_interval
from swarmq.studies.study import Study, hash_json

MAX_CURVES = 6
"""Largest number of metrics whose curves are drawn; the primary one comes first."""
WORK = ("trained_episodes", "trained_calls", "trained_tokens", "dropped_episodes")
"""Metrics of trainings that are summed beside the costs."""
MAX_CHANGE_CHARS = 80
"""Largest length of the old and new value of an amended setting; longer ones, such as changed files, are named only."""
FEW_SEEDS = 6
"""Number of seeds below which no permutation bounds a mean at 5 %."""

AnyKind = TypeVar("AnyKind", bound=Fact)


class ReportData:
    """What the chapters need of a ledger, in an order that does not depend on time. `study_file`: name for the commands of the report."""

    def __init__(self, entries: Sequence[Entry], *, study_file: str = "study.toml") -> None:
        self.entries, self.study_file = entries, shlex.quote(study_file)
        self.made_by = f"Made by: swarmq study report {self.study_file}"
        opened = self.all(StudyOpened)
        if not opened:
            raise StudyError("the ledger holds no study; start it with `swarmq study run`")
        self.opened = opened[0]
        self.amendments = self.all(StudyAmended)
        self.study: Study = self.amendments[-1].study if self.amendments else self.opened.study
        state = StudyState(entries)
        self.stopped = state.stopped
        trials = [one.trial for one in state.newest]
        order = {arm: place for place, arm in enumerate(self.study.arms)}
        trials.sort(key=lambda t: (t.purpose, order.get(t.arm, len(order)), t.arm, t.seed, t.rung))
        self.trials = {trial.id: trial for trial in trials}
        self.results: Results = [(trial, found) for trial in trials if (found := state.trials[trial.id].result)]
        # a resumed study starts parked trials again
        self.parked = [(trial, fact) for trial in trials if (fact := state.trials[trial.id].parked)]
        self.comparisons = compare(self.study, self.results)
        self.noise: Noise | None = measure_noise(self.study, self.results)

    def all(self, kind: type[AnyKind]) -> list[AnyKind]:
        return [entry.fact for entry in self.entries if isinstance(entry.fact, kind)]


def compose(entries: Sequence[Entry], *, study_file: str = "study.toml", operation: bool = True) -> list[Block]:
    """Return the blocks of a report. `study_file`: name of the file, which the ledger does not hold. `operation`: whether the report also
    says when, where and after which failures trials ran.

    Raises StudyError for a ledger without a study.
    """
    ledger = ReportData(entries, study_file=study_file)
    chapters = [_summary, _design, _deviations, _outcomes, _curves, _rungs, _looks, _planner, _failures, _costs]
    chapters += [_negative, _threats, _reproduction]
    if operation:
        chapters.append(_operation)
    return [block for chapter in chapters for block in chapter(ledger)]


def read_comparisons(entries: Sequence[Entry]) -> list[ArmComparison]:
    """Return the comparisons of a report."""
    return ReportData(entries).comparisons


def sentence(found: ArmComparison, study: Study) -> str:
    """Say what is claimed of an arm, with its interval and n."""
    if found.mean is None:
        return f"{found.arm}: undecided, since no seed has results of both arms."
    corrected = f"p = {p_value(found.p_holm)}".replace("= <", "<")
    tasks = f", {count_of(found.tasks, 'task')}" if found.tasks > 1 else ""  # one: a score of the whole trial
    return (
        f"{found.arm}: {found.verdict}. Difference of {study.metric.name} {number(found.mean)} ({_level(study)} interval "
        f"{span(found.interval.low, found.interval.high)}; n = {count_of(len(found.seeds), 'seed')}{tasks}; "
        f"{corrected} after Holm's correction)."
    )


def _summary(ledger: ReportData) -> Iterator[Block]:
    study = ledger.study
    yield Heading(study.name, 1)
    yield Text(study.question)
    if ledger.comparisons:
        first = _baseline(ledger)
        yield Text(f"Against {first}, with {number(study.smallest_effect)} as the smallest difference that matters:")
        yield Bullets([sentence(found, study) for found in ledger.comparisons])
    else:
        yield Text("There is nothing to compare yet.")
    if stopped := ledger.stopped:
        yield Text(f"The study is over ({stopped.kind}): {stopped.reason}")
    else:
        yield Text("The study goes on; this report holds what it knows so far.")


def _design(ledger: ReportData) -> Iterator[Block]:
    study = ledger.opened.study
    yield Heading("Design")
    yield Text(f"Written down before the first trial; SHA-256 of the study file: {ledger.opened.digest}")
    budget = [f"{name} {value:,g}" for name, value in msgspec.structs.asdict(study.budget).items() if value is not None]
    stopping = study.stopping
    once = "once, after all planned trials, by paired t-tests"
    looks = f"after every {count_of(stopping.look_every, 'whole seed')}, by anytime-valid e-values"
    yield ReportTable(
        ["", "as planned"],
        [
            ["primary metric", f"{study.metric.name} ({study.metric.direction})"],
            ["smallest effect of interest", number(study.smallest_effect)],
            ["trial", study.trial.function or f"swarmq train {study.trial.job}"],
            ["seeds", ", ".join(map(str, study.seeds))],
            ["A/A trials", str(study.noise_trials)],
            ["design", study.design.kind],
            ["decides", looks if stopping.kind == "anytime" else once],
            ["level, power", f"{stopping.alpha:g}, {stopping.power:g}"],
            ["budget", ", ".join(budget)],
            *([["planner", "an OpenAI endpoint"]] if study.planner.kind == "endpoint" else []),
            *([["forked from", study.parent]] if study.parent else []),
        ],
    )
    if study.arms:
        rows = [[name, _settings(arm.settings, arm.agent, arm.tasks)] for name, arm in study.arms.items()]
        yield ReportTable(["arm", "differs in"], rows, "Arms. The first one is the baseline.")
    if study.space:
        space = [[path, ", ".join(map(str, p.values)) or f"{p.low:g} to {p.high:g}"] for path, p in study.space.items()]
        yield ReportTable(["setting", "values"], space, "Search space.")
    yield Text(f"Power, before any trial: {announce_power(study)}")
    if ledger.noise is not None:
        yield Text(
            f"Power, after {count_of(ledger.noise.dof + 1, 'A/A trial')}: {announce_power(study, ledger.results)}"
        )


def _deviations(ledger: ReportData) -> Iterator[Block]:
    yield Heading("Deviations")
    study, items = ledger.opened.study, []
    for amendment in ledger.amendments:
        changed = ", ".join(_changes(msgspec.to_builtins(study), msgspec.to_builtins(amendment.study))) or "inputs"
        items.append(f"Amendment ({changed}): {amendment.reason}")
        study = amendment.study
    amended = {amendment.reason for amendment in ledger.amendments}
    items += [f"Resumed after a stop: {f.reason}" for f in ledger.all(StudyResumed) if f.reason not in amended]
    missing = [trial for trial in ledger.trials.values() if trial.id not in {t.id for t, _ in ledger.results}]
    if missing:
        named = ", ".join(f"{trial.arm} seed {trial.seed}" for trial in missing[:12])
        more = f" and {len(missing) - 12} more" if len(missing) > 12 else ""
        items.append(f"{count_of(len(missing), 'planned trial')} without a result: {named}{more}")
    yield (
        Bullets(items) if items else Text("None: every planned trial has a result, and the study file was not changed.")
    )


def _outcomes(ledger: ReportData) -> Iterator[Block]:
    study = ledger.study
    scores = collect_scores(study, ledger.results)
    yield Heading("Results")
    rows = []
    for arm, by_seed in scores.items():
        values = [fmean(tasks.values()) for tasks in by_seed.values()]
        mean = fmean(values) if values else None
        interval = t_interval(values, alpha=study.stopping.alpha)
        spread = stdev(values) if len(values) > 1 else None
        rows.append([arm, str(len(values)), number(mean), span(interval.low, interval.high), number(spread)])
    yield ReportTable(
        ["arm", "n", study.metric.name, f"{_level(study)} interval", "SD"],
        rows,
        f"{study.metric.name} of each arm: mean over n seeds, Student's interval, SD between seeds. {ledger.made_by}",
    )
    if ledger.noise:
        noise = ledger.noise
        yield Text(
            f"Noise of seeds: an SD of {number(noise.sd)} for the difference of two trials of the same arm (95 % interval "
            f"{span(noise.interval.low, noise.interval.high)}; n = {noise.dof + 1} A/A trials). {ledger.made_by}"
        )
    effects = main_effects(study, ledger.results)
    if effects:
        yield ReportTable(
            ["setting", "from", "to", "n", "effect", f"{_level(study)} interval", "p (Holm)"],
            [
                [
                    effect.factor,
                    str(effect.low),
                    str(effect.high),
                    str(effect.seeds),
                    number(effect.mean),
                    span(effect.interval.low, effect.interval.high),
                    p_value(effect.p_holm),
                ]
                for effect in effects
            ],
            "Main effects: mean difference between the two values of a setting, over all arms, seed by seed (n), Student's "
            f"interval. {ledger.made_by}",
        )
    if not ledger.comparisons:
        return
    yield ReportTable(
        ["arm", "n", "difference", f"{_level(study)} interval", "bootstrap", "permutation", "p", "p (Holm)", "verdict"],
        [
            [
                found.arm,
                str(len(found.seeds)),
                number(found.mean),
                span(found.interval.low, found.interval.high),
                span(found.bootstrap.low, found.bootstrap.high),
                span(found.permutation.low, found.permutation.high),
                p_value(found.p),
                p_value(found.p_holm),
                found.verdict,
            ]
            for found in ledger.comparisons
        ],
        f"Difference to {_baseline(ledger)}, seed by seed over n pairs. The first interval and p decide: "
        + ("a confidence sequence and an e-process" if study.stopping.kind == "anytime" else "Student's t")
        + f"; beside them the BCa bootstrap and sign-flip permutations. {ledger.made_by}",
    )
    shown = [found for found in ledger.comparisons if found.mean is not None and math.isfinite(found.interval.low)]
    if shown:
        yield Figure(
            name="differences",
            caption=f"Differences to {_baseline(ledger)} with {_level(study)} intervals; each dot is a seed. Shaded: smaller "
            f"than the smallest effect of interest. {ledger.made_by}",
            chart=Forest(
                x=f"difference of {study.metric.name}",
                margin=study.smallest_effect,
                estimates=[
                    Estimate(
                        label=found.arm,
                        mean=found.mean or 0.0,
                        low=found.interval.low,
                        high=found.interval.high,
                        points=found.differences,
                    )
                    for found in shown
                ],
            ),
        )
    mixed = [(found, found.mixed) for found in ledger.comparisons if found.mixed]
    if mixed:
        yield ReportTable(
            ["arm", "seeds x tasks", "difference", f"{_level(study)} interval", "p", "SD seeds", "SD tasks", "residual"],
            [
                [
                    found.arm,
                    f"{len(found.seeds)} x {found.tasks}",
                    number(model.mean),
                    span(model.interval.low, model.interval.high),
                    p_value(model.p),
                    number(model.sd_seed),
                    number(model.sd_task),
                    number(model.sd_residual),
                ]
                for found, model in mixed
            ],
            "Mixed model, with tasks drawn at random as well as seeds: what may be expected on new tasks. "
            f"{ledger.made_by}",
        )  # fmt: skip


def _curves(ledger: ReportData) -> Iterator[Block]:
    compared = [(trial, result) for trial, result in ledger.results if trial.purpose == "compare"]
    top = max((trial.rung for trial, _ in compared), default=0)
    curves: dict[str, dict[str, list[Sequence[float]]]] = defaultdict(lambda: defaultdict(list))
    for trial, result in compared:
        for metric, values in result.curves.items():
            if trial.rung == top and values:
                curves[metric][trial.arm].append(values)
    if not curves:
        return
    study = ledger.study
    yield Heading("Curves")
    first = study.metric.name
    for metric in sorted(curves, key=lambda name: (name != first, name))[:MAX_CURVES]:
        counts = ", ".join(f"{arm} {len(runs)}" for arm, runs in curves[metric].items())
        yield Figure(
            name=f"curve-{''.join(c if c.isalnum() else '-' for c in metric)}",
            caption=f"{metric} over steps: mean over seeds with {_level(study)} band, each step by itself. "
            f"n: {counts}. {ledger.made_by}",
            chart=Curves(
                x="step", y=metric, lines=[_band(arm, runs, study) for arm, runs in curves[metric].items()]
            ),
        )  # fmt: skip


def _band(arm: str, runs: list[Sequence[float]], study: Study) -> Line:
    length = min(map(len, runs))
    values = np.array([run[:length] for run in runs])
    mean, n = values.mean(0), len(values)
    if n == 1:
        return Line(label=arm, values=mean.tolist(), low=[], high=[])
    half = stats.t.ppf(1 - study.stopping.alpha / 2, n - 1) * values.std(0, ddof=1) / math.sqrt(n)
    return Line(label=arm, values=mean.tolist(), low=(mean - half).tolist(), high=(mean + half).tolist())


def _rungs(ledger: ReportData) -> Iterator[Block]:
    promoted = ledger.all(Promoted)
    if not promoted:
        return
    study = ledger.study
    by_place: dict[tuple[str, int], list[float]] = defaultdict(list)
    for trial, result in ledger.results:
        if trial.purpose == "compare":
            by_place[trial.arm, trial.rung].append(result.metrics[study.metric.name])
    steps = study.design.rungs
    arms = dict.fromkeys(arm for arm, _ in by_place)
    yield Heading("Rungs")
    yield ReportTable(
        ["arm", *(f"step {step}" for step in steps)],
        [
            [arm, *(_mean_n(by_place[arm, rung]) if (arm, rung) in by_place else "-" for rung in range(len(steps)))]
            for arm in arms
        ],
        f"Mean {study.metric.name} at each rung (n). Arms that were not promoted were not trained further: a mean of a lower "
        f"rung is no estimate of the last. {ledger.made_by}",
    )


def _looks(ledger: ReportData) -> Iterator[Block]:
    looks = ledger.all(Looked)
    if not looks:
        return
    yield Heading("Early looks")
    yield ReportTable(
        ["look", "results", "decision", "reason"],
        [[str(look.look), str(look.num_results), look.decision, look.reason] for look in looks],
        "Looks at the results while the study ran; the intervals of this report hold for all looks together.",
    )


def _planner(ledger: ReportData) -> Iterator[Block]:
    decided, notes = ledger.all(PlannerDecided), ledger.all(NoteWritten)
    if not (decided or notes):
        return
    yield Heading("Planner")
    answers = ledger.all(PlannerAnswered)
    if answers:
        cost = [answer.cost for answer in answers]
        yield Text(
            f"{count_of(len(answers), 'answer')} of the model; {count_of(sum(one.calls for one in cost), 'call')}, "
            f"{number(sum(one.money for one in cost))} of money. Prompts and answers are in the ledger, word for word."
        )
    if decided:
        yield ReportTable(
            ["arm", "changes", "decision", "by", "reason"],
            [
                [
                    fact.arm,
                    _settings(fact.settings) + (" and code" if fact.diff else ""),
                    fact.decision,
                    fact.by,
                    mark_unknown_numbers(fact.reason, ledger.results, ledger.comparisons),
                ]
                for fact in decided
            ],
            "Proposals, in the order in which they were made.",
        )
    if notes:
        yield Text("Notes. A number that the ledger does not hold is marked.")
        yield Bullets(
            [f"{note.by}: {mark_unknown_numbers(note.text, ledger.results, ledger.comparisons)}" for note in notes]
        )


def _failures(ledger: ReportData) -> Iterator[Block]:
    yield Heading("Failures")
    if not ledger.parked:
        yield Text("No trial was given up.")
        return
    yield Text(f"{count_of(len(ledger.parked), 'trial')} given up. A failure is never a result: its pair is left out.")
    for trial, fact in ledger.parked:
        yield Text(f"{trial}: {fact.reason}")
        if fact.log.strip():
            yield Code("\n".join(fact.log.strip().splitlines()[-12:]))


def _costs(ledger: ReportData) -> Iterator[Block]:
    yield Heading("Costs")
    work = [name for name in WORK if any(name in result.metrics for _, result in ledger.results)]
    rows = [
        [
            name,
            str(len(results)),
            str(sum(result.cost.calls for result in results)),
            number(math.fsum(result.cost.money for result in results)),
            *(f"{math.fsum(result.metrics.get(metric, 0) for result in results):,.0f}" for metric in work),
        ]
        for name, results in _cost_groups(ledger).items()
    ]
    yield ReportTable(
        ["arm", "results", "calls", "money", *(metric.replace("_", " ") for metric in work)],
        rows,
        f"Costs of the trials that have a result. GPU seconds: last chapter. {ledger.made_by}",
    )


def _cost_groups(ledger: ReportData) -> dict[str, list[TrialResult]]:
    groups: dict[str, list[TrialResult]] = defaultdict(list)
    for trial, result in ledger.results:
        groups["A/A trials" if trial.purpose == "noise" else trial.arm].append(result)
    groups["all"] = [result for _, result in ledger.results]
    return groups


def _negative(ledger: ReportData) -> Iterator[Block]:
    yield Heading("Negative results")
    items = [sentence(found, ledger.study) for found in ledger.comparisons if found.verdict != "better"]
    yield Bullets(items) if items else Text("None.")


def _threats(ledger: ReportData) -> Iterator[Block]:
    study, items = ledger.study, []
    pairs = [len(found.seeds) for found in ledger.comparisons]
    if pairs and min(pairs) < FEW_SEEDS:
        items.append(
            f"Only {count_of(min(pairs), 'pair')} of seeds: the interval relies on normal noise; fewer than {FEW_SEEDS} pairs leave "
            "permutations unbounded, and the bootstrap too narrow."
        )
    if study.noise_trials < 2:
        items.append("No A/A trials: neither the noise of seeds nor the power was known before the study.")
    elif ledger.noise:
        worst = [
            f
            for f in ledger.comparisons
            if len(f.differences) > 1 and stdev(f.differences) > ledger.noise.interval.high
        ]
        items += [
            f"{found.arm}: its differences vary more (SD {number(stdev(found.differences))}) than A/A trials did; the power was less "
            "than announced."
            for found in worst
        ]
    for found in ledger.comparisons:
        is_found = found.verdict in ("better", "worse")
        if is_found and len(found.seeds) >= FEW_SEEDS and found.p_permutation > study.stopping.alpha:
            items.append(
                f"{found.arm}: permutations do not confirm the difference (p = {p_value(found.p_permutation)})."
            )
        if is_found and found.mixed and found.mixed.interval.low < 0 < found.mixed.interval.high:
            items.append(f"{found.arm}: the mixed model does not expect the difference on new tasks.")
        if found.tasks == 1 and found.mean is not None:
            items.append(f"{found.arm}: one score for each trial, so nothing is known of how tasks differ.")
    if ledger.study.stopping.kind == "fixed" and (ledger.stopped is None or ledger.stopped.kind == "asked"):
        when = "has not ended" if ledger.stopped is None else "was ended by a person"
        items.append(
            f"The study {when}: its intervals and p hold for a study that ends after all planned trials, not for one that ends when its "
            'results please. A study that may end early needs stopping.kind = "anytime".'
        )
    if ledger.amendments:
        items.append("The study was amended after it had begun; the amendments may depend on results.")
    if ledger.parked:
        items.append("Trials that were given up are missing; if their arm makes them fail, the rest flatters it.")
    if study.space:
        items.append(
            f"Arms were drawn from a search space, and {_baseline(ledger)} is only the first of them, not a baseline by choice."
        )
    items.append("What holds for this model, these tasks and this budget may not hold for others.")
    yield Heading("Threats to validity")
    yield Bullets(items)


def _reproduction(ledger: ReportData) -> Iterator[Block]:
    body = [(trial.id, result.metrics, result.scores, result.curves) for trial, result in ledger.results]
    yield Heading("How to make this again")
    yield Text(
        f"In the folder of the study file; all figures of this report come from the ledger, by the second command. SHA-256 of the inputs: "
        f"{ledger.opened.inputs}; of the results: {hash_json(body)}"
    )
    yield Code(f"swarmq study run {ledger.study_file}\nswarmq study report {ledger.study_file}")


def _operation(ledger: ReportData) -> Iterator[Block]:
    entries = ledger.entries
    yield Heading("Operation")
    failures = ledger.all(TrialFailed)
    kinds = Counter(fact.kind for fact in failures)
    yield ReportTable(
        ["", "so far"],
        [
            ["first entry", _date(entries[0].at)],
            ["last entry", _date(entries[-1].at)],
            ["seconds with a leader", number(entries[-1].elapsed_s)],
            ["starts of trials", str(len(ledger.all(TrialStarted)))],
            ["results", str(len(ledger.results))],
            ["starts that failed", ", ".join(f"{kind} {times}" for kind, times in sorted(kinds.items())) or "none"],
            ["workers", str(len({fact.worker for fact in ledger.all(TrialStarted)}))],
            ["GPU seconds of failed starts", number(math.fsum(fact.cost.gpu_seconds for fact in failures))],
        ],
        "When, where and after which failures the trials ran. This chapter alone depends on time.",
    )
    yield ReportTable(
        ["arm", "results", "GPU seconds", "of which the longest"],
        [
            [name, str(len(results)), number(math.fsum(seconds)), number(max(seconds, default=0.0))]
            for name, results in _cost_groups(ledger).items()
            for seconds in [[result.cost.gpu_seconds for result in results]]
        ],
        f"GPU seconds of the trials that have a result. {ledger.made_by}",
    )
    for entry in entries:
        if isinstance(entry.fact, StudyAmended):
            yield Text(f"Amended {_date(entry.at)}: {entry.fact.reason}")


def _changes(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from _changes(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        values = f" from {old} to {new}"
        yield path + (values if len(values) <= MAX_CHANGE_CHARS else "")


def _settings(settings: dict[str, Any], agent: str = "", tasks: str = "") -> str:
    parts = [f"{path} = {value}" for path, value in settings.items()]
    parts += [f"{name} {value}" for name, value in (("agent", agent), ("tasks", tasks)) if value]
    return ", ".join(parts) or "nothing"


def _baseline(ledger: ReportData) -> str:
    return next(iter(collect_scores(ledger.study, ledger.results)), "the first arm")


def _mean_n(values: Iterable[float]) -> str:
    found = [*values]
    return f"{number(fmean(found))} ({len(found)})"


def _level(study: Study) -> str:
    return f"{100 * (1 - study.stopping.alpha):g} %"


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
