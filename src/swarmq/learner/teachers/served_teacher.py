"""Client of a teacher that a vLLM engine serves: requests the log-probability of every sampled token, one request per timeline.

Any vLLM server with OpenAI's completions works. It reports its distribution at temperature 1, so only tokens sampled at that
temperature can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import aiohttp
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmq.config import TEACHER_TEMPERATURE
from swarmq.engine.auth import make_auth_headers
from swarmq.errors import LearnerError
from swarmq.learner.batching.micro_batches import MicroBatch, RankBatch
from swarmq.learner.model.layout_attention import to_device
from swarmq.learner.model.logprob_head import TopTokens
from swarmq.learner.teachers.availability import server_base_url, teacher_key
from swarmq.learner.teachers.token_alignment import TokenAligner
from swarmq.learner.teachers.tokenizer_checks import check_served_judge
from swarmq.messages import Rollout
from swarmq.timeline import fold, resolve

FloatArray = NDArray[np.float32]

T = TypeVar("T")


class ServedModel(msgspec.Struct, frozen=True):
    id: str


class Models(msgspec.Struct, frozen=True):
    """Fields of the response to `/v1/models` that are used."""

    data: Annotated[tuple[ServedModel, ...], msgspec.Meta(min_length=1)]


class Likelihood(msgspec.Struct, frozen=True):
    logprob: float


class CompletionChoice(msgspec.Struct, frozen=True):
    prompt_logprobs: tuple[dict[int, Likelihood] | None, ...] | None = None
    """Token id -> likelihood, for each token of the prompt; None for the first token."""


class Completion(msgspec.Struct, frozen=True):
    """Fields of the response to `/v1/completions` that are used."""

    choices: Annotated[tuple[CompletionChoice, ...], msgspec.Meta(min_length=1)]


MAX_CONCURRENT = 32
"""Maximum number of timelines that the teacher is asked to score at the same time."""
ASK_S = 600.0


class RowScores(NamedTuple):
    """Scores of a timeline's tokens under a teacher, each token given those before it. Nothing is known of the first token."""

    logprobs: FloatArray  # [T] float32; 0 for the first token
    top_ids: NDArray[np.int64]  # [T, K] the likeliest tokens
    top_logprobs: FloatArray  # [T, K] float32; -inf where the teacher names fewer


class TurnScores(NamedTuple):
    """Scores of a model call's sampled tokens."""

    row: RowScores
    spans: NDArray[np.int64] | None = None  # [A] span of each token, from 0 on, if only sums over spans count


class ServedTeacher:
    """Client of the teacher at `url`. `policy`: model of the policy that the teacher teaches. `top_k`: number of likeliest tokens to ask
    for at each position. `tokenizer`: model with the teacher's tokenizer, if it is not the policy's."""

    def __init__(self, url: str, policy: str, *, top_k: int = 0, tokenizer: str | None = None) -> None:
        self._tokenizer, self._top_k = tokenizer or policy, top_k
        self._aligner = TokenAligner(policy, tokenizer) if tokenizer else None
        self._url = server_base_url(url)

    def scores(self, episodes: Sequence[Rollout], work: RankBatch) -> TeacherScores:
        """Return the scores of all sampled tokens in `work`, which was built from `episodes`. Raises LearnerError if the server
        fails."""
        wanted = sorted({int(index) for one in work.passes for index in np.unique(one.layout.episodes) if index >= 0})
        for index in wanted:
            if any(turn.sampling.temperature != TEACHER_TEMPERATURE for turn in episodes[index].turns):
                raise LearnerError(
                    "train.teacher: a served teacher can only score tokens sampled at temperature 1; set "
                    "sampling.temperature to 1, or set train.teacher to the teacher's model folder, which the learner then loads"
                )
        # the server may have been restarted with another model since the last step
        check_served_judge(self._tokenizer, self._url, role="teacher")
        return asyncio.run(self._scores({index: episodes[index] for index in wanted}))

    async def _scores(self, episodes: dict[int, Rollout]) -> TeacherScores:
        limits, gate = aiohttp.ClientTimeout(total=ASK_S), asyncio.Semaphore(MAX_CONCURRENT)
        async with aiohttp.ClientSession(timeout=limits, headers=make_auth_headers(teacher_key())) as http:
            model = (await self._call(http, "GET", "/v1/models", None, Models)).data[0].id

            async def score(ids: list[int]) -> RowScores:
                async with gate:
                    return await self._score_ids(http, model, ids)

            if self._aligner:
                return TeacherScores(await self._score_aligned(episodes, score), self._top_k)
            rows = [(index, row) for index, episode in episodes.items() for row in fold(resolve(episode.turns))]
            scored = await asyncio.gather(*(score(row.token_ids.tolist()) for _, row in rows))
        turns = {}
        for (episode, row), scores in zip(rows, scored, strict=True):
            for turn in np.unique(row.turns[row.trained]):
                turns[episode, int(turn)] = TurnScores(RowScores(*(values[row.turns == turn] for values in scores)))
        return TeacherScores(turns, self._top_k)

    async def _score_aligned(
        self, episodes: dict[int, Rollout], score: Callable[[list[int]], Awaitable[RowScores]]
    ) -> dict[tuple[int, int], TurnScores]:
        """Return the scores of every turn in the teacher's own tokens: each token of the policy gets an equal part of its span's
        log-probability."""
        assert self._aligner
        turns = {
            (index, number): self._aligner.align(turn)
            for index, episode in episodes.items()
            for number, turn in enumerate(resolve(episode.turns))
        }
        scored = await asyncio.gather(*(score(turn.teacher_ids) for turn in turns.values()))
        found = {}
        for (key, turn), scores in zip(turns.items(), scored, strict=True):
            sums = np.bincount(
                turn.teacher_spans, scores.logprobs[turn.start :], minlength=int(turn.spans.max(initial=-1)) + 1
            )
            parts = (sums / np.bincount(turn.spans).clip(min=1))[turn.spans]
            found[key] = TurnScores(
                RowScores(parts.astype(np.float32), scores.top_ids[:0], scores.top_logprobs[:0]), turn.spans
            )
        return found

    async def _score_ids(self, http: aiohttp.ClientSession, model: str, ids: list[int]) -> RowScores:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self._top_k, "temperature": 0.0}
        scored = (await self._call(http, "POST", "/v1/completions", body, Completion)).choices[0].prompt_logprobs or ()
        values = [
            entry[token].logprob for token, entry in zip(ids[1:], scored[1:], strict=False) if entry and token in entry
        ]
        if len(scored) != len(ids) or len(values) != len(ids) - 1:
            raise LearnerError(
                f"train.teacher: {self._url} does not return prompt_logprobs for all tokens ({len(values)} of {len(ids)}): "
                "serve the teacher with a vLLM that supports prompt_logprobs"
            )
        shape = len(ids), self._top_k
        top_ids, top_logprobs = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
        for at, entry in enumerate(scored):
            # besides the likeliest tokens, vLLM names the token of the prompt
            top = sorted((entry or {}).items(), key=lambda item: (-item[1].logprob, item[0]))[: self._top_k]
            top_ids[at, : len(top)] = [token for token, _ in top]
            top_logprobs[at, : len(top)] = [likelihood.logprob for _, likelihood in top]
        return RowScores(np.array([0.0, *values], np.float32), top_ids, top_logprobs)

    async def _call(
        self, http: aiohttp.ClientSession, method: str, path: str, body: dict[str, Any] | None, answer: type[T]
    ) -> T:
        try:
            async with http.request(method, self._url + path, json=body) as response:
                if response.status != 200:
                    raise LearnerError(
                        f"train.teacher: {self._url}{path} answered {response.status}: {(await response.text())[:300]}; "
                        "the teacher needs the policy's vocabulary, a context for the longest episode, and --max-logprobs of at least "
                        "train.loss.top_k"
                    )
                return msgspec.json.decode(await response.read(), type=answer)
        except msgspec.MsgspecError as error:
            raise LearnerError(f"train.teacher: {self._url}{path} does not answer as vLLM does: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LearnerError(
                f"train.teacher: the engine at {self._url} does not answer ({str(error) or f'within {ASK_S:.0f} s'}): start it, "
                "then start the learner again, which waits for it; nothing is lost"
            ) from error


class TeacherScores:
    """Log-probabilities of a teacher for several episodes."""

    def __init__(self, turns: Mapping[tuple[int, int], TurnScores], top_k: int) -> None:
        """`turns`: scores by the indices of episode and turn."""
        self._turns, self._top_k = turns, top_k

    def of(self, one: MicroBatch, device: torch.device) -> Tensor:
        """Return the natural log-probabilities [S] float32 of the layout's targets; 0 in a micro-batch that trains nothing."""
        if one.idle:
            return torch.zeros(one.layout.num_trained, device=device)
        return to_device(np.concatenate([turn.row.logprobs for turn in self._list_turns(one)]), device)

    def top_of(self, one: MicroBatch, device: torch.device) -> TopTokens:
        """Return the teacher's likeliest tokens at the layout's targets; no tokens in a micro-batch that trains nothing."""
        if one.idle:
            shape = one.layout.num_trained, self._top_k
            none = torch.zeros(shape, dtype=torch.int64, device=device)
            return TopTokens(none, torch.full(shape, -torch.inf, device=device))
        turns = self._list_turns(one)
        ids, logprobs = ([getattr(turn.row, name) for turn in turns] for name in ("top_ids", "top_logprobs"))
        return TopTokens(to_device(np.concatenate(ids), device), to_device(np.concatenate(logprobs), device))

    def spans_of(self, one: MicroBatch, device: torch.device) -> Tensor | None:
        """Return the span [S] of each of the layout's targets; None if each token counts for itself."""
        turns = [] if one.idle else self._list_turns(one)
        if not turns or turns[0].spans is None:
            return None
        first, spans = 0, []
        for turn in turns:
            assert turn.spans is not None
            spans.append(turn.spans + first)
            first += len(turn.spans)
        return to_device(np.concatenate(spans), device)

    def _list_turns(self, one: MicroBatch) -> list[TurnScores]:
        layout = one.layout
        first = np.flatnonzero(layout.offsets == 0)  # a micro-batch holds whole turns, one after another
        turns = zip(layout.episodes[first].tolist(), layout.turns[first].tolist(), strict=True)
        return [self._turns[turn] for turn in turns]
