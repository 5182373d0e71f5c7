"""One episode of a run in full, trained or not: its conversation, its tokens with what happened to each, and its group.

Trained episodes come from the batch log, whose turns are those that were trained, and from their transcripts, which also have the
answers that no agent received. All others come from transcripts, and those that are not settled from the collector's store, read-only.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from swarmq.config import Train
from swarmq.errors import EpisodeError, LearnerError, SetUpError, TimelineError
from swarmq.learner.methods.credit import compute_advantages, group_by_slot
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.store import batch_log, token_trace
from swarmq.learner.store.batch_log import RecordPlace
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.store.token_trace import TurnTrace
from swarmq.messages import EpisodeBegin, EpisodeEnd, Rollout, Turn
from swarmq.observe.index import LIVE, EpisodeRow, Indexed, RunIndex, decode_message, open_ledger
from swarmq.observe.inspect.read import MAX_BYTES, Decode, decode_tokens
from swarmq.observe.reasons import explain
from swarmq.timeline import Timeline, fold, resolve
from swarmq.timeline.turns import ResolvedTurn
from swarmq.transcripts import read as transcripts

Cause = Literal["given", "trained", "clipped", "masked", "filtered", "no_advantage", "not_trained"]
CONTEXT = 8
"""Number of tokens before a page that are decoded with it, because a character may be spread over several."""
NOT_DECODED = "the tokens are not decoded"
MAX_TOKENS = 20_000
"""Maximum number of tokens in one page."""


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    row: EpisodeRow
    advantage: float | None
    """Mean advantage over the episode's turns; None if it was not trained."""
    why: str


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of one task, whose rewards are each other's baseline."""

    group: str
    kind: str
    task: str
    state: str
    """State of most members."""
    size: int
    """Number of slots in the group."""
    mean_reward: float | None
    members: list[MemberView]


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    call_id: str
    agent: str
    policy: str
    number: int
    """Position in the order of arrival, from 0."""
    began_at: float
    first_token_s: float | None
    total_s: float | None
    finish_reason: str
    parent: str | None
    begins: bool
    """Whether it starts a conversation."""
    branch: str | None
    repaired: bool
    received: bool
    """Whether the agent is known to have received the answer; true as long as that is not decided."""
    prompt_tokens: int
    sampled_tokens: int
    versions: tuple[int, int] | None
    """Oldest and newest weight version that sampled a token."""
    reward: float | None
    """Reward for this turn alone; None if there is none."""
    advantage: float | None
    messages: list[dict[str, Any]]
    """The messages that this turn added, its answer last."""


class EpisodeDetail(msgspec.Struct, frozen=True, kw_only=True):
    row: EpisodeRow
    rewards: dict[str, float]
    agent_rewards: dict[str, dict[str, float]]
    """Policy -> agent tag -> reward."""
    call_rewards: dict[str, float]
    metrics: dict[str, float]
    metadata: dict[str, str]
    detail: str
    """The client's own reason for the end, such as the last line of a traceback."""
    why: str
    """One sentence: why the episode was or was not trained."""
    timelines: int
    """Number of token sequences."""
    turns: list[TurnView]
    notes: list[str] = []
    """Messages about parts of the episode that could not be read."""


class TokenPage(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of one token sequence; each column has one entry per token."""

    timeline: int
    timelines: int
    policy: str
    positions: tuple[int, int]
    """(first position, position after the last)"""
    total: int
    text: list[str]
    id: list[int]
    cause: list[Cause]
    cause_detail: list[str]
    """Reason of the cause in a few words; empty if the cause needs none."""
    logprob: list[float | None]
    """Natural log-probability under the weights that sampled the token; None for a token that was not sampled."""
    logprob_trained: list[float | None]
    """Natural log-probability under the weights at the beginning of the step."""
    advantage: list[float | None]
    ratio: list[float | None]
    entropy: list[float | None]
    """Entropy in nats, under the weights at the beginning of the step."""
    version: list[int | None]
    turn: list[int | None]
    """Index of the token's turn in `EpisodeDetail.turns`; None for a token of no turn."""
    notes: list[str] = []


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is stored of one episode."""

    begin: EpisodeBegin | None = None
    end: EpisodeEnd | None = None
    turns: tuple[Turn, ...] = ()
    received: frozenset[str] | None = None
    """Call ids whose answers the agent received; None if that is not decided or not known."""
    rollouts: dict[str, Rollout] = {}
    """Policy -> what its learner trained."""
    records: dict[str, BatchRecord] = {}
    notes: tuple[str, ...] = ()


class TrainedTurns(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner recorded of the turns of one policy."""

    train: Train | None
    traces: dict[str, TurnTrace] | None
    """Call id -> trace; None if none was recorded."""
    advantages: dict[str, float | None]


def read_detail(index: RunIndex, part: str) -> EpisodeDetail:
    """Return the episode whose id begins or ends with `part`. Raises EpisodeError if no or several episodes match."""
    known = index.find(part)
    found = _read_conversation(index, known)
    trained = {policy: _trained_turns(index, known, found, policy) for policy in found.rollouts}
    credited = {call: value for one in trained.values() for call, value in one.advantages.items()}
    end = found.end
    rollouts = found.rollouts
    any_rollout = next(iter(rollouts.values()), None)
    return EpisodeDetail(
        row=known.row,
        rewards=dict(end.rewards) if end else {policy: one.reward for policy, one in rollouts.items()},
        agent_rewards=dict(end.agent_rewards)
        if end
        else {policy: one.agent_rewards for policy, one in rollouts.items() if one.agent_rewards},
        call_rewards=dict(end.call_rewards)
        if end
        else {call: r for one in rollouts.values() for call, r in (one.call_rewards | one.uncredited).items()},
        metrics=end.metrics if end else any_rollout.metrics if any_rollout else {},
        metadata=end.metadata if end else any_rollout.metadata if any_rollout else {},
        detail=(end.reason if end else "") or known.detail,
        why=explain_fate(index, known),
        timelines=len(_timelines(found)[0]),
        turns=[_view_turn(n, turn, found, credited) for n, turn in enumerate(found.turns)],
        notes=list(found.notes),
    )


def read_tokens(
    index: RunIndex,
    part: str,
    *,
    timeline: int = 0,
    start: int = 0,
    limit: int = 2000,
    decoders: Callable[[str], Decode | str] = lambda _: NOT_DECODED,
) -> TokenPage:
    """Return tokens of one timeline of an episode. `decoders`: policy -> function that decodes its token ids
    (`inspect.read.Decoders`), or a text that says why there is none; the tokens' texts are then empty.

    Raises EpisodeError if the episode has no such timeline.
    """
    known = index.find(part)
    found = _read_conversation(index, known)
    rows, notes = _timelines(found)
    if not 0 <= timeline < len(rows):
        raise EpisodeError(
            f"{known.row.id}: no timeline {timeline}; "
            + (f"it has 0 to {len(rows) - 1}" if rows else "no tokens of it are stored")
        )
    policy = rows[timeline][0]
    trained = _trained_turns(index, known, found, policy) if policy in found.rollouts else None
    stretch = (start, start + min(limit, MAX_TOKENS))
    return _page_of(known, rows, timeline, stretch, trained, decoders(policy), notes=[*found.notes, *notes])


def read_all_tokens(
    index: RunIndex, part: str, *, decoders: Callable[[str], Decode | str] = lambda _: NOT_DECODED
) -> list[TokenPage]:
    """Return every token of an episode, one page for each timeline; none if no tokens are stored."""
    known = index.find(part)
    found = _read_conversation(index, known)
    rows, notes = _timelines(found)
    trained = {policy: _trained_turns(index, known, found, policy) for policy in found.rollouts}
    return [
        _page_of(known, rows, n, (0, len(row)), trained.get(policy), decoders(policy), notes=[*found.notes, *notes])
        for n, (policy, _, row, _) in enumerate(rows)
    ]


def read_group(index: RunIndex, group: str) -> GroupView:
    """Return the attempts of a group. Raises EpisodeError if there are none."""
    ids = [
        row[0]
        for row in index.query("SELECT id FROM episodes WHERE grp = ? ORDER BY slot, attempt, began_at", (group,))
    ]
    if not ids:
        raise EpisodeError(f"no episode of the run belongs to group {group!r}")
    members = []
    records: dict[tuple[str, int], BatchRecord | None] = {}
    values: dict[tuple[str, int], dict[str, list[float | None]]] = {}
    known = [index.find(episode) for episode in ids]
    for one in known:
        credited: list[float] = []
        for place in one.places:
            key = (place.segment, place.at)
            if not place.reason and key not in records:
                records[key] = record = _read_record(index, place.policy, place.segment, place.at, place.size)[0]
                values[key] = _advantages(record) if record else {}
            credited += [value for value in values.get(key, {}).get(one.row.id, ()) if value is not None]
        members.append(
            MemberView(
                row=one.row,
                advantage=sum(credited) / len(credited) if credited else None,
                why=explain_fate(index, one),
            )
        )
    states = [member.row.state for member in members]
    rewards = [member.row.reward for member in members if member.row.reward is not None]
    first = members[0].row
    return GroupView(
        group=group,
        kind=first.kind,
        task=first.task,
        state=max(states, key=states.count),
        size=max([one.size for one in known] + [len({member.row.slot for member in members})]),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        members=members,
    )


def explain_fate(index: RunIndex, known: Indexed) -> str:
    """Return one plain sentence that says why an episode was or was not trained."""
    row = known.row
    steps = [f"step {place.step} of {place.policy}" for place in known.places if not place.reason]
    match row.state:
        case "open":
            return "It is running: its end, or an answer that the end names, has not arrived yet."
        case "waiting":
            (siblings,) = index.query(
                "SELECT count(*) FROM episodes WHERE grp = ? AND state = 'waiting'", (row.group,)
            )[0]
            of = f" of {known.size}" if known.size else ""
            return f"It has finished and waits for its group, of which {siblings}{of} have finished."
        case "published":
            done = f" It was trained in {' and '.join(steps)}." if steps else ""
            return f"Its group was sent to the learner, which has not reported on it yet.{done}"
        case "trained":
            when = " and ".join(steps) or (f"step {row.step}" if row.step is not None else "a step that is not known")
            late = "" if row.staleness is None else f", with staleness {row.staleness}"
            others = [f"{place.policy} dropped it: {explain(place.reason)}" for place in known.places if place.reason]
            return " ".join([f"Trained in {when}{late}.", *others])
        case "stray":
            return "Its begin has not arrived." if not row.reason else explain("no_begin")
        case "eval":
            ended = "" if row.reason in {"", "finished"} else f" {explain(row.reason)}"
            return f"It was for evaluation, which is never trained.{ended}"
        case _:
            return explain(row.reason) if row.reason else "It was dropped, and no reason is recorded."


def _read_conversation(index: RunIndex, known: Indexed) -> Conversation:
    """Return everything that is stored of an episode."""
    notes: list[str] = []
    rollouts, records = dict[str, Rollout](), dict[str, BatchRecord]()
    for place in known.places:
        if place.reason:
            continue
        record, flaw = _read_record(index, place.policy, place.segment, place.at, place.size)
        if record is None:
            notes.append(flaw)
            continue
        rollout = next((one for one in record.episodes if one.episode_id == known.row.id), None)
        if rollout is not None:
            rollouts[place.policy], records[place.policy] = rollout, record
    if known.row.state in {*LIVE, "stray"}:
        found = _read_live(index, known.row.id)
        if found is not None:
            return msgspec.structs.replace(found, rollouts=rollouts, records=records, notes=tuple(notes))
    if (
        known.transcript is not None
        and (one := transcripts.read(index.folder.transcripts, known.transcript)) is not None
    ):
        return Conversation(
            begin=one.begin,
            end=one.end,
            turns=one.turns,
            received=one.received,
            rollouts=rollouts,
            records=records,
            notes=tuple(notes),
        )
    turns = tuple(turn for rollout in rollouts.values() for turn in rollout.turns)
    if not turns:
        notes.append(
            "its conversation is not stored: the run kept no transcripts, this one was removed to keep within [transcripts] size_gb, or "
            "its file cannot be read"
        )
    return Conversation(
        turns=tuple(sorted(turns, key=lambda turn: turn.timings.began_at)) if len(rollouts) > 1 else turns,
        received=frozenset(turn.call_id for turn in turns),
        rollouts=rollouts,
        records=records,
        notes=tuple(notes),
    )


def _read_live(index: RunIndex, episode: str) -> Conversation | None:
    """Return an episode that is not settled from the collector's store; None if it was settled meanwhile."""
    try:
        with open_ledger(index.folder) as ledger:
            row = ledger.execute("SELECT begin, end FROM episodes WHERE id = ?", (episode,)).fetchone()
            bodies = ledger.execute("SELECT body FROM turns WHERE episode = ? ORDER BY seq", (episode,)).fetchall()
    except (EpisodeError, sqlite3.Error):
        return None
    if row is None or not (row[0] or bodies):
        return None
    begin, end = (decode_message(body) if body else None for body in row)
    end = end if isinstance(end, EpisodeEnd) else None
    return Conversation(
        begin=begin if isinstance(begin, EpisodeBegin) else None,
        end=end,
        turns=tuple(turn for (body,) in bodies if isinstance(turn := decode_message(body), Turn)),
        received=None if end is None or end.calls is None else frozenset(end.calls),
    )


def _read_record(index: RunIndex, policy: str, segment: str, at: int, size: int) -> tuple[BatchRecord | None, str]:
    """Read a record of the batch log. Return (record, "") or, if it cannot be read, (None, why)."""
    path: Path = index.folder.batch_log(policy) / segment
    if not path.exists():
        return None, f"{path}: was removed (train.keep_batches) or not copied; the trained tokens are not shown"
    try:
        return batch_log.read_record(RecordPlace(path, at, size, BatchIndex(record=0, version=0))), ""
    except LearnerError as error:
        return None, str(error)


def _advantages(record: BatchRecord) -> dict[str, list[float | None]]:
    """Return episode id -> advantage of each turn, computed as the learner did; None for those that a critic estimated for each
    token."""
    if record.settings is None:
        return {}
    try:  # an own method's code, which the record keeps, is not executed to show an episode
        found = compute_advantages(group_by_slot(record.episodes), record.settings, record.baselines)
    except (ArithmeticError, ValueError, KeyError, SetUpError):
        return {}
    by_critic = {each.episode_id for each in record.episodes if record.settings.of_kind(each.kind).advantage == "gae"}
    return {episode: [None] * len(values) if episode in by_critic else values for episode, values in found.items()}


def _trained_turns(index: RunIndex, known: Indexed, found: Conversation, policy: str) -> TrainedTurns:
    rollout, record = found.rollouts[policy], found.records[policy]
    trace = token_trace.find_trace(index.folder.token_log(policy), record.index.version, known.row.id)
    traces = {turn.call_id: turn for turn in trace.turns} if trace else None
    computed = _advantages(record).get(known.row.id, [None] * len(rollout.turns))
    advantages = dict(zip((turn.call_id for turn in rollout.turns), computed, strict=True))
    for call, one in (traces or {}).items():
        if one.advantage is not None:
            advantages[call] = one.advantage
    train = record.settings.of_kind(rollout.kind) if record.settings else None
    return TrainedTurns(train=train, traces=traces, advantages=advantages)


def _view_turn(number: int, turn: Turn, found: Conversation, advantages: dict[str, float | None]) -> TurnView:
    versions = [span.version for span in turn.versions]
    call_rewards = found.end.call_rewards if found.end else {
        call: r for one in found.rollouts.values() for call, r in one.call_rewards.items()
    }  # fmt: skip
    timings = turn.timings
    return TurnView(
        call_id=turn.call_id,
        agent=turn.agent or "",
        policy=turn.policy,
        number=number,
        began_at=timings.began_at,
        first_token_s=timings.first_token_s or None,
        total_s=timings.total_s or None,
        finish_reason=turn.finish_reason,
        parent=turn.parent,
        begins=turn.begins or turn.parent is None,
        branch=turn.branch,
        repaired=turn.repaired,
        received=found.received is None or turn.call_id in found.received,
        prompt_tokens=turn.num_prompt,
        sampled_tokens=turn.num_sampled,
        versions=(min(versions), max(versions)) if versions else None,
        reward=call_rewards.get(turn.call_id),
        advantage=advantages.get(turn.call_id),
        messages=_messages_of(turn),
    )


def _messages_of(turn: Turn) -> list[dict[str, Any]]:
    if not turn.messages:
        return []
    try:
        found = msgspec.json.decode(turn.messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [{"role": "unknown", "content": turn.messages.decode(errors="replace")}]
    return (
        [one if isinstance(one, dict) else {"role": "unknown", "content": one} for one in found]
        if isinstance(found, list)
        else []
    )


Row = tuple[str, Sequence[Turn], Timeline, list[int]]
"""Policy, its turns, one of their timelines, and for each turn its index in the conversation."""


def _timelines(found: Conversation) -> tuple[list[Row], list[str]]:
    """Return the timelines of all policies: those of trained episodes as the learner folded them, others folded in the same
    way. Also return messages about what could not be read."""
    numbers = {turn.call_id: n for n, turn in enumerate(found.turns)}
    rows: list[Row] = []
    notes: list[str] = []
    for policy in dict.fromkeys([*found.rollouts, *(turn.policy for turn in found.turns)]):
        rollout = found.rollouts.get(policy)
        turns: Sequence[Turn] = rollout.turns if rollout else [turn for turn in found.turns if turn.policy == policy]
        try:
            sequences = fold(resolve(turns))
        except TimelineError as error:
            sequences, flaws = _fold_loosely(turns, found.turns)
            if flaws:
                notes.append(f"{error}; shown as far as it was recorded")
        rows += [
            (policy, turns, one, [numbers.get(turn.call_id, n) for n, turn in enumerate(turns)]) for one in sequences
        ]
    return rows, notes


def _fold_loosely(turns: Sequence[Turn], known: Iterable[Turn]) -> tuple[list[Timeline], bool]:
    """Fold turns that cannot be trained: their parents may belong to another policy, and parents, tokens or
    log-probabilities may be missing. Also return whether any of these are."""
    by_id = {turn.call_id: turn for turn in known}
    whole: dict[str, np.ndarray] = {}
    missing = False

    def sequence(call: str) -> np.ndarray:
        chain: list[Turn] = []
        at: str | None = call
        while at is not None and at in by_id and at not in whole and len(chain) <= len(by_id):
            chain.append(by_id[at])
            at = by_id[at].parent
        for turn in reversed(chain):
            before = whole.get(turn.parent or "", np.empty(0, np.int32))[: turn.shared]
            own = np.frombuffer(turn.prompt_ids + turn.sampled_ids, "<i4")
            whole[turn.call_id] = np.concatenate([before, own]).astype(np.int32)
        return whole[call]

    resolved = []
    for turn in {turn.call_id: turn for turn in turns}.values():
        tokens, size = sequence(turn.call_id), turn.num_sampled
        logprobs = np.full(size, np.nan, np.float32)
        given = np.frombuffer(turn.logprobs[: len(turn.logprobs) // 4 * 4], "<f4")[:size]
        logprobs[: len(given)] = given
        versions = np.full(size, -1, np.int32)
        for span in turn.versions:
            versions[span.start : span.end] = span.version
        missing = missing or len(tokens) < turn.num_prompt + size or len(given) < size
        resolved.append(
            ResolvedTurn(token_ids=tokens, prompt_length=len(tokens) - size, logprobs=logprobs, versions=versions)
        )
    return fold([turn for turn in resolved if len(turn)]) if resolved else [], missing


def _page_of(
    known: Indexed,
    rows: Sequence[Row],
    timeline: int,
    stretch: tuple[int, int],
    trained: TrainedTurns | None,
    decode: Decode | str,
    *,
    notes: list[str],
) -> TokenPage:
    """Return the page with the positions `stretch` of one timeline, or with those of them that it has."""
    policy, turns, row, numbers = rows[timeline]
    low = min(max(stretch[0], 0), len(row))
    high = min(max(stretch[1], low), len(row))
    if trained is not None and trained.traces is None:
        notes.append("what training made of each token was not recorded (train.token_log), or was removed")
    if isinstance(decode, str):
        notes.append(f"{decode}; only ids are shown")
    seen = [_explain_token(known, row, at, turns, trained) for at in range(low, high)]
    return TokenPage(
        timeline=timeline,
        timelines=len(rows),
        policy=policy,
        positions=(low, high),
        total=len(row),
        text=_decode_page(row.token_ids.tolist(), low, high, None if isinstance(decode, str) else decode),
        id=row.token_ids[low:high].tolist(),
        cause=[one.cause for one in seen],
        cause_detail=[one.detail for one in seen],
        logprob=[one.logprob for one in seen],
        logprob_trained=[one.logprob_trained for one in seen],
        advantage=[one.advantage for one in seen],
        ratio=[one.ratio for one in seen],
        entropy=[one.entropy for one in seen],
        version=[None if v < 0 else v for v in row.versions[low:high].tolist()],
        turn=[None if t < 0 else numbers[t] for t in row.turns[low:high].tolist()],
        notes=notes,
    )


class ExplainedToken(NamedTuple):
    """What is known about one token, and why it was or was not trained."""

    cause: Cause
    detail: str = ""
    logprob: float | None = None
    logprob_trained: float | None = None
    advantage: float | None = None
    entropy: float | None = None

    @property
    def ratio(self) -> float | None:
        if self.logprob is None or self.logprob_trained is None:
            return None
        return _finite(math.exp(min(self.logprob_trained - self.logprob, 80.0)))


def _explain_token(
    known: Indexed, row: Timeline, at: int, turns: Sequence[Turn], trained: TrainedTurns | None
) -> ExplainedToken:
    if not row.trained[at]:
        return ExplainedToken("given")
    logprob = _finite(float(row.logprobs[at]))
    if trained is None:
        reason = known.row.reason if known.row.state not in {*LIVE, "trained"} else known.row.state
        return ExplainedToken(
            "not_trained", "not trained by this policy" if reason == "trained" else reason, logprob=logprob
        )
    turn = turns[int(row.turns[at])]
    advantage = trained.advantages.get(turn.call_id)
    needs_advantage = trained.train is None or trained.train.needs_baseline
    trace = (trained.traces or {}).get(turn.call_id)
    if trace is None:
        is_flat = needs_advantage and not advantage
        cause: Cause = "no_advantage" if is_flat else "trained"
        return ExplainedToken(cause, _flat(advantage) if is_flat else "", logprob=logprob, advantage=advantage)
    offset = int(np.count_nonzero(row.turns[:at] == row.turns[at]))
    behind = _float_at(trace.logprobs, offset)
    advantage = _float_at(trace.advantages, offset) if trace.advantages else trace.advantage
    effect = _effect_at(trace.effects, offset)
    loss = trained.train.loss.name if trained.train else ""
    cause, detail = "trained", ""
    if trace.left_out[offset : offset + 1] == b"\1":
        cause, detail = "filtered", _filter_name(trained.train, logprob, behind)
    elif effect is LossEffect.MASKED:
        cause, detail = "masked", f"{loss}: its probability has moved far enough"
    elif effect is LossEffect.CLIPPED:
        cause, detail = "clipped", f"{loss}: its ratio is beyond the bound"
    elif needs_advantage and not advantage and not trace.advantages:
        cause, detail = "no_advantage", _flat(advantage)
    elif effect is LossEffect.TRUNCATED:
        detail = f"{loss}: weighted with the bound of the ratio"
    return ExplainedToken(cause, detail, logprob, behind, advantage, entropy=_float_at(trace.entropies, offset, "<f2"))


def _flat(advantage: float | None) -> str:
    return "no other attempt to compare it with" if advantage is None else "its reward equals the baseline"


def _filter_name(train: Train | None, logprob: float | None, behind: float | None) -> str:
    if train is None or logprob is None or behind is None:
        return ""
    if train.ratio_band is not None and not train.row_k3_max:
        return "train.ratio_band"
    if train.ratio_band is not None:
        low, high = train.ratio_band
        if not low <= math.exp(min(behind - logprob, 80.0)) <= high:
            return "train.ratio_band"
    return "train.row_k3_max"


def _effect_at(effects: bytes, offset: int) -> LossEffect:
    try:
        return LossEffect(effects[offset])
    except (IndexError, ValueError):
        return LossEffect.WHOLE


def _float_at(packed: bytes, offset: int, dtype: str = "<f4") -> float | None:
    size = np.dtype(dtype).itemsize
    piece = packed[size * offset : size * (offset + 1)]
    return _finite(float(np.frombuffer(piece, dtype)[0])) if len(piece) == size else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _decode_page(ids: Sequence[int], low: int, high: int, decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    if decode is None:
        return [""] * (high - low)
    first = max(low - CONTEXT, 0)
    return decode_tokens(ids[first : high + MAX_BYTES], decode)[low - first : high - first]
