"""A run as a Python object, for notebooks and scripts.

    run = swarmq.open_run("runs/math")
    run.steps().to_pandas().plot(x="step", y="reward")
    for episode in run.episodes(state="dropped", kind="math"):
        print(episode.id, episode.reason)
    print(run.episode("5d0c19e7").why)

Tables read the folder when they are iterated; those of episodes bring the index up to date before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from swarmq import live_settings
from swarmq.collector import ledger
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError
from swarmq.messages import Event
from swarmq.observe.clients import ClientView, read_clients
from swarmq.observe.curves import read_events
from swarmq.observe.episodes import (
    Cause,
    EpisodeDetail,
    GroupView,
    TurnView,
    read_all_tokens,
    read_detail,
    read_group,
)
from swarmq.observe.followed_files import EventFile, SampleFile
from swarmq.observe.frames import Table
from swarmq.observe.index import EpisodeFilter, EpisodeRow, LedgerView, RunIndex, parse_filter
from swarmq.observe.inspect.read import Decoders
from swarmq.observe.live_runs import load_stored_run
from swarmq.observe.reasons import explain

FRESH_S = 1.0
"""Seconds for which the index counts as up to date."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    policy: str
    step: int
    at: float
    values: dict[str, Any]
    """Everything that the learner reported."""


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    episode: str
    kind: str
    state: str
    values: TurnView


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One token of one timeline."""

    timeline: int
    position: int
    policy: str
    text: str
    id: int
    cause: Cause
    cause_detail: str
    logprob: float | None
    logprob_trained: float | None
    advantage: float | None
    ratio: float | None
    entropy: float | None
    version: int | None
    turn: int | None


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one kind in one round of evaluation."""

    at: float
    version: int
    kind: str
    tasks: int
    episodes: int
    reward: float | None
    seconds: float | None
    missing: int
    """Attempts of the whole round without a result at its deadline (`given_up`: attempts that were given up before)."""
    given_up: int
    values: dict[str, Any]
    """All other results, such as pass@k with its interval under `pass`."""


class DropRow(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes of one kind that were not trained for one reason."""

    state: str
    """`dropped`, or `failed` for episodes without a usable end."""
    reason: str
    kind: str
    episodes: int
    mean_reward: float | None
    newest: str
    """Id of the newest such episode."""
    explanation: str


class Run:
    """A run folder, opened for reading."""

    def __init__(self, path: Path, *, cache: Path | None = None) -> None:
        """`cache`: folder of the index, by default the user's cache. Raises ConfigError if the folder is not that of a run
        that was up."""
        self.folder = RunFolder(path)
        self.job: SwarmJob = load_stored_run(self.folder.path)
        self._cache = cache
        self._read_at = float("-inf")

    def __repr__(self) -> str:
        return f"Run({str(self.folder.path)!r}, policies={self.policies})"

    @property
    def policies(self) -> list[str]:
        """Names of the trained policies."""
        return list(self.job.trained)

    @cached_property
    def index(self) -> RunIndex:
        """Index of all episodes of the run."""
        return RunIndex(self.folder, cache=self._cache)

    @cached_property
    def _events(self) -> EventFile:
        return EventFile(self.folder.events)

    @cached_property
    def samples(self) -> SampleFile:
        """File with samples of queue depths, counts and loads."""
        return SampleFile(self.folder.samples)

    @cached_property
    def decoders(self) -> Decoders:
        """Decoders of token ids into text."""
        return Decoders(self.job, self.folder)

    def refresh(self) -> RunIndex:
        """Bring the index up to date, unless that has just been done, and return it."""
        if time.monotonic() - self._read_at >= FRESH_S:
            self.index.update()
            self._read_at = time.monotonic()
        return self.index

    @property
    def notes(self) -> list[str]:
        """Messages about what could not be read in the folder."""
        return list(self.refresh().progress.notes)

    def check_policy(self, policy: str) -> None:
        """Raise ConfigError unless the run trains this policy."""
        if policy not in self.policies:
            raise ConfigError(f"policy {policy!r}: not a trained policy of the run; it has {', '.join(self.policies)}")

    def live_job(self) -> SwarmJob:
        """Return the settings with the changes that were made while the run was up."""
        control = ledger.read_control(self.folder.inbox)
        return live_settings.apply_changes(self.job, control.changes if control else ())

    def steps(self, policy: str | None = None) -> Table[StepRow]:
        """Return the optimizer steps of a policy, by default of all."""
        if policy is not None:
            self.check_policy(policy)
        return Table(StepRow, lambda: iter(read_steps(self.events("step"), policy)), usual=("reward",))

    def episodes(self, **chosen: Any) -> Table[EpisodeRow]:
        """Return episodes, newest first, by the fields of `EpisodeFilter`: `state`, `reason`, `kind`, `client`, `reward_max`, ..."""
        wanted = parse_filter(chosen)
        return Table(
            EpisodeRow, lambda: self._choose(wanted).iterate(wanted), count=lambda: self._choose(wanted).count(wanted)
        )

    def episode(self, part: str) -> EpisodeDetail:
        """Return the episode whose id begins or ends with `part`, with its conversation."""
        return read_detail(self.refresh(), part)

    def group(self, group: str) -> GroupView:
        """Return the attempts of a group, side by side."""
        return read_group(self.refresh(), group)

    def turns(self, **chosen: Any) -> Table[TurnRow]:
        """Return the turns of episodes, chosen as in `episodes`."""
        episodes = self.episodes(**chosen)
        return Table(
            TurnRow,
            lambda: (
                TurnRow(episode=row.id, kind=row.kind, state=row.state, values=turn)
                for row in episodes
                for turn in read_detail(self.index, row.id).turns
            ),
        )

    def tokens(self, part: str) -> Table[Token]:
        """Return every token of an episode."""
        return Table(Token, lambda: self._tokens(part))

    def ledger(self) -> LedgerView:
        """Return the account of all episodes."""
        return self.refresh().ledger()

    def evaluations(self) -> Table[EvaluationRow]:
        """Return the results of evaluation rounds, one row for each kind."""
        return Table(EvaluationRow, lambda: _evaluations(self.events("evaluated")))

    def drops(self) -> Table[DropRow]:
        """Return how many episodes were not trained, by reason and kind, most first."""
        return Table(DropRow, self._drops)

    def clients(self) -> Table[ClientView]:
        """Return the clients in the order of their first episodes."""
        return Table(ClientView, lambda: read_clients(self.refresh()))

    def events(self, *names: str) -> Iterator[Event]:
        """Yield the events of the run, or those with these names; none if there is no event file.

        With names, events are kept in memory, so that a later call reads only what was appended to the file. Events of single
        episodes are not kept, because there are too many.
        """
        try:
            yield from self._events.read(names) if names else read_events(self.folder.events)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self.folder.events}: cannot be read ({error.strerror})") from error

    def _choose(self, wanted: EpisodeFilter) -> RunIndex:
        """Return the index, up to date. Raises ConfigError if the filter names what the run does not know."""
        index = self.refresh()
        index.check(wanted)
        return index

    def _tokens(self, part: str) -> Iterator[Token]:
        for page in read_all_tokens(self.refresh(), part, decoders=self.decoders):
            columns = zip(
                page.text, page.id, page.cause, page.cause_detail, page.logprob, page.logprob_trained, page.advantage, page.ratio,
                page.entropy, page.version, page.turn, strict=True,
            )  # fmt: skip
            for position, (
                text,
                token,
                cause,
                detail,
                logprob,
                behind,
                advantage,
                ratio,
                entropy,
                version,
                turn,
            ) in enumerate(columns):
                yield Token(
                    timeline=page.timeline,
                    position=position,
                    policy=page.policy,
                    text=text,
                    id=token,
                    cause=cause,
                    cause_detail=detail,
                    logprob=logprob,
                    logprob_trained=behind,
                    advantage=advantage,
                    ratio=ratio,
                    entropy=entropy,
                    version=version,
                    turn=turn,
                )

    def _drops(self) -> Iterator[DropRow]:
        for state, reason, kind, episodes, reward, newest in self.refresh().query(
            "SELECT fate, reason, kind, count(*), avg(reward), max(id) FROM episodes WHERE fate IN ('dropped', 'failed') AND begun "
            "GROUP BY 1, 2, 3 ORDER BY 4 DESC"
        ):
            yield DropRow(
                state=state,
                reason=reason,
                kind=kind,
                episodes=episodes,
                mean_reward=reward,
                newest=newest,
                explanation=explain(reason),
            )


def read_steps(events: Iterable[Event], policy: str | None) -> list[StepRow]:
    """Return the steps in order; of a step that was trained again after a crash, the last report."""
    found: dict[tuple[str, int], StepRow] = {}
    for event in events:
        name = event.source.removeprefix("learner.")
        if event.name == "step" and event.source != name and policy in {None, name} and "version" in event.fields:
            step = int(event.fields["version"])
            found[name, step] = StepRow(policy=name, step=step, at=event.at, values=event.fields)
    return [row for _, row in sorted(found.items())]


def _evaluations(events: Iterator[Event]) -> Iterator[EvaluationRow]:
    for event in events:
        if event.name != "evaluated":
            continue
        fields = event.fields
        for kind, of in fields.get("kinds", {}).items():
            yield EvaluationRow(
                at=event.at,
                version=int(fields.get("version", 0)),
                kind=kind,
                tasks=int(of.get("tasks", 0)),
                episodes=int(of.get("episodes", 0)),
                reward=of.get("reward"),
                seconds=fields.get("seconds"),
                missing=int(fields.get("missing", 0)),
                given_up=int(fields.get("given_up", 0)),
                values={name: value for name, value in of.items() if name not in {"tasks", "episodes", "reward"}},
            )
