"""Reading of a batch log: batches, and every token of an episode as it was sampled and trained.

Needs no broker, no engine and no running learner.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import EpisodeError
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.store import batch_log, token_trace
from swarmq.learner.store.token_trace import EpisodeTrace, TurnTrace
from swarmq.messages import Rollout, unpack_floats, unpack_ids
from swarmq.runtime.wording import count_of
from swarmq.timeline import fold, resolve
from swarmq.token_drift import Drift

Decode = Callable[[Sequence[int]], str]

PATIENCE_S = 3.0
"""Seconds to wait for a tokenizer from the hub."""
INCOMPLETE = "\ufffd"
MAX_BYTES = 4
"""Maximum bytes of a UTF-8 character, and so the maximum number of tokens over which one character is spread."""


class TokenRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token of one timeline."""

    timeline: int
    position: int
    token_id: int
    text: str
    """Text of the token; a character that is spread over several tokens appears at the last of them."""
    trained: bool
    """Whether the policy sampled the token and it is trained in this timeline."""
    logprob: float | None = None
    """Natural log-probability under the weights that sampled the token; None if the policy did not sample it."""
    logprob_trained: float | None = None
    """Natural log-probability under the weights at the beginning of the step; None if it was not recorded."""
    advantage: float | None = None
    """Advantage in the loss; None if the loss uses none (`sft`) or it was not recorded."""
    left_out: bool = False
    """Whether a filter removed the token from the loss."""
    effect: LossEffect = LossEffect.WHOLE
    """Effect of the loss on the token's policy gradient."""
    version: int | None = None
    """Version of the weights that sampled the token."""
    turn: int | None = None

    @property
    def contribution(self) -> float | None:
        """Contribution of the token to the policy gradient: the advantage, times 0 if a filter or the loss masks the token. A
        loss without advantages contributes 1 per token. None if not recorded."""
        if self.logprob_trained is None:
            return None
        advantage = 1.0 if self.advantage is None else self.advantage
        return advantage * (not self.left_out and not self.effect.cuts)


class EpisodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A trained episode, token by token."""

    episode_id: str
    step: int
    """Weight version after the optimizer step that trained the episode."""
    slot: str
    kind: str
    reward: float
    client_id: str
    agent_rewards: dict[str, float]
    """Agent tag -> reward."""
    call_rewards: dict[str, float]
    """Call id -> reward."""
    orphan_turns: int
    """Number of recorded answers that the agent did not receive; they are neither trained nor shown."""
    uncredited: dict[str, float]
    """Call id -> reward, for calls that are not trained."""
    calls: tuple[str, ...]
    """Call ids, turn by turn."""
    finish_reasons: tuple[str, ...]
    drift: Drift
    drift_rate: float
    training_recorded: bool
    """Whether training log-probabilities and advantages were recorded (`train.token_log`)."""
    tokens: tuple[TokenRow, ...]


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the batch log."""

    step: int | None
    """Weight version after the step; None for a record of dropped episodes alone."""
    episodes: int
    groups: int
    dropped: dict[str, int]
    reward_trained: float | None
    """Mean reward of the trained episodes. `reward` in `step` events also counts episodes of groups with equal rewards."""
    drift: Drift
    at: float
    first_episode: str


class StepEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One episode of a step. For a dropped episode, the log has only id and reason."""

    episode_id: str
    step: int
    dropped: str = ""
    """Reason for which the episode was not trained."""
    slot: str = ""
    kind: str = ""
    group: str = ""
    reward: float | None = None
    turns: int = 0
    orphan_turns: int = 0
    """Number of recorded answers that the agent did not receive; they are not among the turns."""
    sampled_tokens: int = 0


def read_batches(log: Path) -> Iterator[BatchRow]:
    """Yield the records of the log in order."""
    for record in batch_log.read_records(log):
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


def read_step(log: Path, step: int) -> list[StepEpisode]:
    """Return the episodes that a step trained, group by group, and those dropped before it. Raises EpisodeError if there are
    none."""
    places = batch_log.scan_log(log)
    rows, dropped = list[StepEpisode](), list[StepEpisode]()
    for of, place in batch_log.number_steps(places):
        if of != step:
            continue
        dropped += [StepEpisode(episode_id=one, step=step, dropped=why) for one, why in place.index.dropped.items()]
        rows += [
            StepEpisode(
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
            for episode in batch_log.read_record(place).episodes
        ]
    if not rows and not dropped:
        there = sorted({of for of, _ in batch_log.number_steps(places)})
        raise EpisodeError(
            f"{log}: no record of step {step}; "
            + (f"it has steps {there[0]} to {there[-1]}" if there else "it is empty")
        )
    return rows + dropped


def find_episode(folder: RunFolder, policy: str, part: str, decode: Decode) -> EpisodeView:
    """Return the trained episode whose id begins or ends with `part`; the ends of ids are random, their beginnings are
    timestamps.

    Raises EpisodeError if no or several episodes match, or if the episode was dropped, with step and reason.
    """
    places = {
        episode_id: (step, place)
        for step, place in batch_log.number_steps(batch_log.scan_log(folder.batch_log(policy)))
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
            f"{len(places)} episodes begin or end with {part!r}, e.g. {', '.join(sorted(places)[:3])}: give a longer part"
        )
    episode_id = part if part in places else next(iter(places))
    step, place = places[episode_id]
    if reason := place.index.dropped.get(episode_id):
        raise EpisodeError(
            f"{episode_id}: dropped in step {step}: {reason}; tokens are stored for trained episodes only"
        )
    episode = next(one for one in batch_log.read_record(place).episodes if one.episode_id == episode_id)
    return build_view(episode, step, token_trace.find_trace(folder.token_log(policy), step, episode_id), decode)


def build_view(episode: Rollout, step: int, seen: EpisodeTrace | None, decode: Decode) -> EpisodeView:
    """Build the view of an episode. `seen`: what training recorded of its tokens, if anything."""
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


def decode_tokens(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token; a character that is spread over several tokens goes to the last of them.

    Each token is decoded together with its predecessor, because some tokenizers drop a space at the beginning of a text.
    """
    texts: list[str] = []
    before, known, open_ids = list[int](), "", list[int]()
    for token in ids:
        open_ids.append(token)
        both = decode([*before, *open_ids])
        text = both[len(known) :] if both.startswith(known) else decode(open_ids)
        if text.endswith(INCOMPLETE) and len(open_ids) < MAX_BYTES:
            texts.append("")
        else:
            texts.append(text)
            before, known, open_ids = open_ids, decode(open_ids), []
    if open_ids:
        texts[-1] = text
    return texts


def load_decoder(model: str) -> Decode:
    """Return a function that decodes token ids with the model's tokenizer. Raises EpisodeError if the tokenizer cannot be
    loaded."""
    try:
        if Path(model).is_dir():
            tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        else:
            tokenizer = Tokenizer.from_pretrained(model)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise EpisodeError(f"{model}: no tokenizer.json to decode tokens with ({error})") from error
    return _decoder_of(tokenizer)


def _decoder_of(tokenizer: Tokenizer) -> Decode:
    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


class Decoders:
    """The tokenizers of a run's policies: that of the model on this machine, else of the newest checkpoint in the folder,
    else from the hub.

    A download that takes longer than `patience_s` goes on in the background, so that a reader without a network does not wait
    for it.
    """

    def __init__(
        self,
        job: SwarmJob,
        folder: RunFolder,
        *,
        fetch: Callable[[str], Decode] = load_decoder,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._job, self._folder = job, folder
        self._fetch, self._patience_s = fetch, patience_s
        self._known: dict[str, Decode | str] = {}
        self._fetching: dict[str, Future[Decode]] = {}
        self._lock = threading.Lock()

    def __call__(self, policy: str) -> Decode | str:
        """Return a function that decodes token ids of a policy, or a sentence that says why there is none."""
        with self._lock:
            if policy in self._known:
                return self._known[policy]
            model = self._job.policies[policy].model if policy in self._job.policies else ""
            if local := self._find(model, policy):
                found = self._known[policy] = _load_file(local)
                return found
            if not model or Path(model).is_absolute():
                return f"{model or policy}: there is no tokenizer of the model on this machine"
            future = self._fetching.get(policy) or self._start(model)
            self._fetching[policy] = future
        try:
            return future.result(self._patience_s)
        except TimeoutError:
            self._patience_s = 0.0  # the download goes on in the background, and later calls do not wait for it
            return f"{model}: its tokenizer is not on this machine, and the hub has not sent it yet"
        except EpisodeError:
            return f"{model}: its tokenizer is not on this machine, and the hub cannot be reached or does not have it"

    def _find(self, model: str, policy: str) -> Path | None:
        """Return the tokenizer's file on this machine."""
        checkpoints = sorted(self._folder.checkpoints(policy).glob("step-*"), reverse=True)
        for folder in (Path(model), *checkpoints):
            if model and (folder / "tokenizer.json").is_file():
                return folder / "tokenizer.json"
        if not model or Path(model).is_absolute():
            return None
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - slow to import
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

        try:
            cached = try_to_load_from_cache(model, "tokenizer.json")
        except HFValidationError:  # a folder that is not on this machine
            return None
        return Path(cached) if isinstance(cached, str) else None

    def _start(self, model: str) -> Future[Decode]:
        future: Future[Decode] = Future()

        def fetch() -> None:
            try:
                future.set_result(self._fetch(model))
            except EpisodeError as error:
                future.set_exception(error)

        threading.Thread(target=fetch, name=f"tokenizer of {model}", daemon=True).start()
        return future


def _load_file(path: Path) -> Decode | str:
    try:
        return _decoder_of(Tokenizer.from_file(str(path)))
    except Exception as error:
        return f"{path.name} of the model cannot be read ({error})"


def _tokens(episode: Rollout, seen: dict[str, TurnTrace], decode: Decode) -> Iterator[TokenRow]:
    turns = resolve(episode.turns)
    for number, timeline in enumerate(fold(turns)):
        ids = timeline.token_ids.tolist()
        for position, (token_id, text) in enumerate(zip(ids, decode_tokens(ids, decode), strict=True)):
            row = TokenRow(timeline=number, position=position, token_id=token_id, text=text, trained=False)
            if timeline.trained[position]:
                turn = int(timeline.turns[position])
                row = msgspec.structs.replace(
                    row,
                    trained=True,
                    logprob=float(timeline.logprobs[position]),
                    version=int(timeline.versions[position]),
                    turn=turn,
                    **_read_training(seen.get(episode.turns[turn].call_id), position - turns[turn].prompt_length),
                )
            yield row


def _read_training(seen: TurnTrace | None, offset: int) -> dict[str, float | bool | LossEffect | None]:
    """Return what training recorded of the sampled token at `offset` of a turn, as fields of TokenRow."""
    if seen is None:
        return {}
    return {
        "logprob_trained": _float_at(seen.logprobs, offset),
        "advantage": _float_at(seen.advantages, offset) if seen.advantages else seen.advantage,
        "left_out": bool(seen.left_out and seen.left_out[offset]),
        "effect": LossEffect(seen.effects[offset]) if seen.effects else LossEffect.WHOLE,
    }


def _float_at(packed: bytes, offset: int) -> float:
    return float(unpack_floats(packed[4 * offset : 4 * offset + 4])[0])


def describe_narrow_rewards(view: EpisodeView) -> dict[str, str]:
    """Describe an episode's rewards by agent tag and by call (named by its turn), and its undelivered answers."""
    by_call = ((number, view.call_rewards.get(call)) for number, call in enumerate(view.calls))
    texts = {
        "reward by agent": ", ".join(f"{agent} {reward:g}" for agent, reward in view.agent_rewards.items()),
        "reward by call": ", ".join(f"turn {number}: {reward:g}" for number, reward in by_call if reward is not None),
        "not received, not trained": count_of(view.orphan_turns, "turn") if view.orphan_turns else "",
        "reward for a call that is not trained": ", ".join(
            f"{call}: {reward:g}" for call, reward in view.uncredited.items()
        ),
    }
    return {name: words for name, words in texts.items() if words}


def max_contribution(view: EpisodeView) -> float:
    """Return the largest finite absolute contribution of a token, or 1 if there is none."""
    sizes = np.abs([row.contribution or 0.0 for row in view.tokens])
    return float(sizes.max(initial=0.0, where=np.isfinite(sizes))) or 1.0
