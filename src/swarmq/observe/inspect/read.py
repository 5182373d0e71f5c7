"""Reading a batch log: which batches there were, and every token of an episode as it was sampled and trained.

Needs no broker, no engine and no running learner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from swarmq.config import RunFolder
from swarmq.errors import EpisodeError
from swarmq.learner.algorithms.loss_effects import Effect
from swarmq.learner.store import batch_log, token_trace
from swarmq.learner.store.records import Index
from swarmq.learner.store.token_trace import EpisodeTokens, TurnTokens
from swarmq.messages import Rollout, unpack_floats, unpack_ids
from swarmq.timeline import fold, resolve
from swarmq.token_drift import Drift

Decode = Callable[[Sequence[int]], str]

INCOMPLETE = "\ufffd"
MOST_BYTES = 4
"""Of one character, so a character is spread over at most so many tokens."""


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token of one timeline."""

    timeline: int
    position: int
    token_id: int
    text: str
    """A character that is spread over several tokens stands at its last one."""
    trained: bool
    """Sampled by the policy, and trained in this timeline."""
    logprob: float | None = None
    """Natural log under the weights that sampled; None where the policy did not sample the token."""
    logprob_trained: float | None = None
    """The same under the weights that the step began with; None where that was not recorded."""
    advantage: float | None = None
    """That the loss used; None where it uses none (`sft`), or where that was not recorded."""
    left_out: bool = False
    """A filter took the token out of the loss."""
    effect: Effect = Effect.WHOLE
    """What the loss did to the token's policy gradient."""
    version: int | None = None
    """Of the weights that sampled."""
    turn: int | None = None

    @property
    def contribution(self) -> float | None:
        """What the token brought to the policy gradient: advantage x mask, the filters' and the loss's own. A loss
        without advantages makes every token likelier, by 1. None if not recorded."""
        if self.logprob_trained is None:
            return None
        advantage = 1.0 if self.advantage is None else self.advantage
        return advantage * (not self.left_out and not self.effect.cuts)


class EpisodeView(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of the batch log, token by token."""

    episode_id: str
    step: int
    """Weight version after the optimizer step that trained it."""
    slot: str
    kind: str
    reward: float
    client_id: str
    agent_rewards: dict[str, float]
    """By agent tag."""
    call_rewards: dict[str, float]
    """By call id."""
    orphan_turns: int
    """Recorded answers that its agent did not receive: not trained, and not shown."""
    uncredited: dict[str, float]
    """Rewards by call for calls that are not trained."""
    calls: tuple[str, ...]
    """Call ids, turn by turn."""
    finish_reasons: tuple[str, ...]
    drift: Drift
    drift_rate: float
    training_recorded: bool
    """Whether log-probabilities under training and advantages are known; `train.token_log` switches that."""
    tokens: tuple[TokenRow, ...]


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the log."""

    step: int | None
    """None in a record of drops alone."""
    episodes: int
    groups: int
    dropped: dict[str, int]
    reward_trained: float | None
    """Mean over its episodes, which those with equal rewards are not among; `reward` of `step` events counts them."""
    drift: Drift
    at: float
    first_episode: str


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode of a step. Of one that was dropped nothing but its id and the reason is in the log."""

    episode_id: str
    step: int
    dropped: str = ""
    """Why it was not trained."""
    slot: str = ""
    kind: str = ""
    group: str = ""
    reward: float | None = None
    turns: int = 0
    orphan_turns: int = 0
    """Recorded answers that its agent did not receive: not among the turns."""
    sampled_tokens: int = 0


def read_batches(log: Path) -> Iterator[BatchRow]:
    """In order."""
    for record in batch_log.records(log):
        index, episodes = record.index, record.episodes
        yield BatchRow(
            step=index.version if index.trained else None,
            episodes=len(index.trained),
            groups=len({episode.group_id for episode in episodes}),
            dropped=dict(Counter(index.dropped.values())),
            reward_trained=sum(episode.reward for episode in episodes) / len(episodes) if episodes else None,
            drift=Drift.of(turn for episode in episodes for turn in episode.turns),
            at=index.at,
            first_episode=episodes[0].episode_id if episodes else "",
        )


def read_step(log: Path, step: int) -> list[EpisodeRow]:
    """What a step trained, group by group, and what was dropped on the way to it. Raises EpisodeError without any."""
    places = batch_log.scan(log)
    rows, dropped = list[EpisodeRow](), list[EpisodeRow]()
    for place in places:
        if _step_of(place.index) != step:
            continue
        dropped += [EpisodeRow(episode_id=one, step=step, dropped=why) for one, why in place.index.dropped.items()]
        rows += [
            EpisodeRow(
                episode_id=episode.episode_id,
                step=step,
                slot=episode.slot.id,
                kind=episode.kind,
                group=episode.group_id,
                reward=episode.reward,
                turns=len(episode.turns),
                orphan_turns=episode.orphan_turns,
                sampled_tokens=sum(len(unpack_ids(turn.sampled_ids)) for turn in episode.turns),
            )
            for episode in batch_log.read(place).episodes
        ]
    if not rows and not dropped:
        there = sorted({_step_of(place.index) for place in places})
        raise EpisodeError(
            f"{log}: nothing of step {step}; " + (f"it has {there[0]} to {there[-1]}" if there else "it is empty")
        )
    return rows + dropped


def find_episode(folder: RunFolder, policy: str, part: str, decode: Decode) -> EpisodeView:
    """The trained episode whose id begins or ends so: ids made at about one time begin alike, their ends are random.

    Raises EpisodeError when there is none or more than one, or when it was dropped: in which step and why.
    """
    places = {
        episode_id: place
        for place in batch_log.scan(folder.batch_log(policy))
        for episode_id in (*place.index.trained, *place.index.dropped)
        if episode_id.startswith(part) or episode_id.endswith(part)
    }
    if not places:
        raise EpisodeError(
            f"no episode of the batch log begins or ends with {part!r}: `swarmq inspect RUN` lists the batches, "
            "`swarmq inspect RUN --step N` the episodes of one"
        )
    if len(places) > 1 and part not in places:
        raise EpisodeError(
            f"{len(places)} episodes begin or end with {part!r}, e.g. {', '.join(sorted(places)[:3])}: give more of it"
        )
    episode_id = part if part in places else next(iter(places))
    place = places[episode_id]
    step = _step_of(place.index)
    if reason := place.index.dropped.get(episode_id):
        raise EpisodeError(f"{episode_id}: dropped in step {step}: {reason}; tokens are kept of trained episodes alone")
    episode = next(one for one in batch_log.read(place).episodes if one.episode_id == episode_id)
    return view_of(episode, step, token_trace.find(folder.token_log(policy), step, episode_id), decode)


def view_of(episode: Rollout, step: int, seen: EpisodeTokens | None, decode: Decode) -> EpisodeView:
    """`seen` is what training recorded of the episode, if it did."""
    drift = Drift.of(episode.turns)
    return EpisodeView(
        episode_id=episode.episode_id,
        step=step,
        slot=episode.slot.id,
        kind=episode.kind,
        reward=episode.reward,
        client_id=episode.client_id,
        agent_rewards=episode.agent_rewards,
        call_rewards=episode.call_rewards,
        orphan_turns=episode.orphan_turns,
        uncredited=episode.uncredited,
        calls=tuple(turn.call_id for turn in episode.turns),
        finish_reasons=tuple(turn.finish_reason for turn in episode.turns),
        drift=drift,
        drift_rate=drift.rate,
        training_recorded=seen is not None,
        tokens=tuple(_tokens(episode, {turn.call_id: turn for turn in seen.turns} if seen else {}, decode)),
    )


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text of each token where it stands; of a character that is spread over several, the last one has it.

    Some tokenizers drop a space at the beginning of whatever they decode, so a token is decoded behind the one before.
    """
    texts: list[str] = []
    before, known, open_ids = list[int](), "", list[int]()
    for token in ids:
        open_ids.append(token)
        both = decode([*before, *open_ids])
        text = both[len(known) :] if both.startswith(known) else decode(open_ids)
        if text.endswith(INCOMPLETE) and len(open_ids) < MOST_BYTES:
            texts.append("")
        else:
            texts.append(text)
            before, known, open_ids = open_ids, decode(open_ids), []
    if open_ids:
        texts[-1] = text
    return texts


def decoder_of(model: str) -> Decode:
    """Token ids to text by the model's tokenizer. Raises EpisodeError when it cannot be loaded."""
    try:
        if Path(model).is_dir():
            tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        else:
            tokenizer = Tokenizer.from_pretrained(model)
    except Exception as error:  # tokenizers raises Exception itself
        raise EpisodeError(f"{model}: no tokenizer.json to show text with ({error})") from error

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def _step_of(index: Index) -> int:
    """The step that a record's episodes were trained in, or on the way to which they were dropped."""
    return index.version if index.trained else index.version + 1


def _tokens(episode: Rollout, seen: dict[str, TurnTokens], decode: Decode) -> Iterator[TokenRow]:
    turns = resolve(episode.turns)
    for number, timeline in enumerate(fold(turns)):
        ids = timeline.token_ids.tolist()
        for position, (token_id, text) in enumerate(zip(ids, pieces(ids, decode), strict=True)):
            row = TokenRow(timeline=number, position=position, token_id=token_id, text=text, trained=False)
            if timeline.trained[position]:
                turn = int(timeline.turns[position])
                row = msgspec.structs.replace(
                    row,
                    trained=True,
                    logprob=float(timeline.logprobs[position]),
                    version=int(timeline.versions[position]),
                    turn=turn,
                    **_training(seen.get(episode.turns[turn].call_id), position - turns[turn].prompt_length),
                )
            yield row


def _training(seen: TurnTokens | None, offset: int) -> dict[str, float | bool | Effect | None]:
    """What training recorded of the sampled token at `offset` of a turn."""
    if seen is None:
        return {}
    return {
        "logprob_trained": _float_at(seen.logprobs, offset),
        "advantage": _float_at(seen.advantages, offset) if seen.advantages else seen.advantage,
        "left_out": bool(seen.left_out and seen.left_out[offset]),
        "effect": Effect(seen.effects[offset]) if seen.effects else Effect.WHOLE,
    }


def _float_at(packed: bytes, offset: int) -> float:
    return float(unpack_floats(packed[4 * offset : 4 * offset + 4])[0])


def narrower_rewards(view: EpisodeView) -> dict[str, str]:
    """Rewards by agent tag and by call, where the episode has any, in words; a call is named by its turn. And what was not received."""
    by_call = ((number, view.call_rewards.get(call)) for number, call in enumerate(view.calls))
    told = {
        "reward by agent": ", ".join(f"{agent} {reward:g}" for agent, reward in view.agent_rewards.items()),
        "reward by call": ", ".join(f"turn {number}: {reward:g}" for number, reward in by_call if reward is not None),
        "not received, not trained": f"{view.orphan_turns} turns" if view.orphan_turns else "",
        "reward for no trained call": ", ".join(f"{call}: {reward:g}" for call, reward in view.uncredited.items()),
    }
    return {name: words for name, words in told.items() if words}


def strongest(view: EpisodeView) -> float:
    """The largest finite contribution of a token, without its sign; 1 where there is none."""
    sizes = np.abs([row.contribution or 0.0 for row in view.tokens])
    return float(sizes.max(initial=0.0, where=np.isfinite(sizes))) or 1.0
