"""Bytes on the queue per sampled token: only new tokens travel, against sending whole prompts.

Every turn goes through the proxy's own graph and recorder and is measured as it is published, with all it carries: names,
log-probabilities, and the messages for people, four characters of text for a token. Sent whole, the prompt of turn n holds
all n - 1 turns before it, in tokens and in messages. Without messages is what learners compute with. Example:

    python -m benchmarks.wire
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from benchmarks import report
from swarmq.keys import Claims
from swarmq.messages import Event, Message, Sampling, Timings, Turn, VersionSpan, encode, new_id, pack_ids, unpack_ids
from swarmq.proxy.completions.recorder import Recorder
from swarmq.proxy.counters import Counters
from swarmq.proxy.episodes.conversation_graph import Graph, Stitched, history_of
from swarmq.proxy.episodes.prompt_stitching import stitch
from swarmq.proxy.requests import ChoiceResult, RequestContext
from swarmq.testing.scripted_engine import ScriptedEngine

TURNS = (1, 10, 20, 50)
CHOICES = 8
SUB_AGENTS, SUB_TURNS = 8, 3
VOCABULARY = 151_936


class Sizes(msgspec.Struct, kw_only=True):
    """Bytes of turns."""

    sampled: int = 0
    """Tokens."""
    sent: int = 0
    sent_messages: int = 0
    whole: int = 0
    """If every turn carried its whole prompt and all messages."""
    whole_messages: int = 0

    def figures(self, name: str) -> dict[str, float]:
        return {
            f"bytes_per_sampled_token_{name}": self.sent / self.sampled,
            f"whole_prompt_bytes_per_sampled_token_{name}": self.whole / self.sampled,
            f"whole_prompt_ratio_{name}": self.whole / self.sent,
            f"bytes_per_sampled_token_{name}_without_messages": (self.sent - self.sent_messages) / self.sampled,
            f"whole_prompt_bytes_per_sampled_token_{name}_without_messages": (self.whole - self.whole_messages)
            / self.sampled,
        }


class Wire:
    """A broker that keeps what is published."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def publish(self, _queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        assert isinstance(message, Turn), deadline_s
        self.turns.append(message)

    async def emit(self, event: Event) -> None:
        raise NotImplementedError(event)


class Episode:
    """One episode behind a proxy, with an engine whose template only adds."""

    def __init__(self, *, sampled: int, observed: int) -> None:
        self.sampled, self.observed = sampled, observed
        self.sizes = Sizes()
        self.episode_id = new_id()
        self._rng = np.random.default_rng(0)
        self._graph, self._wire = Graph(), Wire()
        self._recorder = Recorder(self._wire, Counters(), confirm_timeout_s=1.0)

    @property
    def turns(self) -> list[Turn]:
        """What was published so far."""
        return self._wire.turns

    def said(self, role: str, count: int) -> tuple[list[int], dict[str, Any]]:
        """Tokens of a message, and its text."""
        letters = self._rng.integers(ord("a"), ord("z") + 1, 4 * count).astype(np.uint8)
        tokens = self._rng.integers(0, VOCABULARY, count).tolist()
        return tokens, {"role": role, "content": letters.tobytes().decode()}

    async def converse(
        self, turns: int, system: tuple[list[int], dict[str, Any]], agent: str, choices: int = 1
    ) -> None:
        """A chat that only grows; of several choices the agent goes on from the first."""
        tokens, messages = [*system[0]], [system[1]]
        for _ in range(turns):
            added, observation = self.said("user", self.observed)
            tokens, messages = [*tokens, *added], [*messages, observation]
            answers = [self.said("assistant", self.sampled) for _ in range(choices)]
            await self._call(tokens, messages, answers, agent)
            tokens, messages = [*tokens, *answers[0][0]], [*messages, answers[0][1]]

    async def _call(
        self,
        prompt: list[int],
        messages: list[dict[str, Any]],
        answers: list[tuple[list[int], dict[str, Any]]],
        agent: str,
    ) -> None:
        history, request_id = history_of({"messages": messages}), new_id()
        stitched: Stitched = await stitch(self._graph, history, prompt, ScriptedEngine(), request_id=request_id)
        assert unpack_ids(stitched.prompt).tolist() == prompt
        claims = Claims(
            run="benchmark",
            client="agents-on-gpu-host-3",
            episode_id=self.episode_id,
            policies=("main",),
            kind="math",
            expires_at=0.0,
        )
        request = RequestContext(
            claims=claims,
            policy="main",
            request_id=request_id,
            chat={"messages": messages},
            stream=False,
            retry=0,
            request_digest="0" * 32,
            agent=agent,
            began_at=1.7e9,
            began=0.0,
            history=history,
            stitched=stitched,
            fresh=stitched.prompt,
            sampling=Sampling(max_tokens=512),
        )
        for index, (tokens, message) in enumerate(answers):
            answer = ChoiceResult(
                index=index,
                token_ids=tokens,
                logprobs=(-np.abs(self._rng.normal(1.0, 0.5, len(tokens)))).tolist(),
                versions=(VersionSpan(version=17, start=0, end=len(tokens)),),
                finish_reason="stop",
                message=message,
                timings=Timings(began_at=1.7e9, first_token_s=0.05, total_s=1.25),
            )
            await self._recorder.record(request, answer, self._graph, kind="math")
            self._measure(self._wire.turns[-1], prompt, [*messages, message])

    def _measure(self, turn: Turn, prompt: list[int], messages: list[dict[str, Any]]) -> None:
        alone = msgspec.structs.replace(
            turn, parent=None, shared=0, prompt_ids=pack_ids(prompt), messages=msgspec.json.encode(messages)
        )
        self.sizes.sampled += len(turn.sampled_ids) // 4
        self.sizes.sent += len(encode(turn))
        self.sizes.sent_messages += len(turn.messages)
        self.sizes.whole += len(encode(alone))
        self.sizes.whole_messages += len(alone.messages)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the system prompt")
    parser.add_argument("--sampled", type=int, default=128, help="tokens sampled per turn")
    parser.add_argument("--observed", type=int, default=128, help="tokens read before each turn")
    arguments = parser.parse_args()
    measured = asyncio.run(measure(arguments.prompt, arguments.sampled, arguments.observed))
    figures: dict[str, float] = {}
    for name, sizes in measured.items():
        figures |= sizes.figures(name)
    heads = [
        "episode",
        "bytes",
        "whole prompts",
        "per sampled token",
        "whole prompts",
        "ratio",
        "without messages",
        "whole",
    ]
    rows = [[name, sizes.sent, sizes.whole, *sizes.figures(name).values()] for name, sizes in measured.items()]
    print(report.table(heads, rows))
    detail = {
        "tokens": {"prompt": arguments.prompt, "sampled": arguments.sampled, "observed": arguments.observed},
        "choices": CHOICES,
        "sub_agents": {"agents": SUB_AGENTS, "turns": SUB_TURNS},
        "bytes": {name: msgspec.to_builtins(sizes) for name, sizes in measured.items()},
    }
    report.save("wire", figures, detail=detail, out=arguments.out)


async def measure(prompt: int, sampled: int, observed: int) -> dict[str, Sizes]:
    """Chats of 1 to 50 turns; one call of several choices; sub-agents that have their system prompt in common."""
    measured = {}
    for turns in TURNS:
        episode = Episode(sampled=sampled, observed=observed)
        await episode.converse(turns, episode.said("system", prompt), "solver")
        measured[str(turns)] = episode.sizes
    episode = Episode(sampled=sampled, observed=observed)
    await episode.converse(1, episode.said("system", prompt), "solver", choices=CHOICES)
    measured[f"choices_{CHOICES}"] = episode.sizes
    episode = Episode(sampled=sampled, observed=observed)
    system = episode.said("system", prompt)
    for number in range(SUB_AGENTS):
        await episode.converse(SUB_TURNS, system, f"sub-agent-{number}")
    measured[f"sub_agents_{SUB_AGENTS}"] = episode.sizes
    return measured


if __name__ == "__main__":
    main()
