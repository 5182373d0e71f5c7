"""verl's side of the work: the agent, and replay buffers that look for finished episodes more often than every two seconds."""

from __future__ import annotations

import random
import time
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from benchmarks.peers.work import SAMPLED, TURNS, next_turn, observation

POLL_S = 0.05


class Agent(AgentLoopBase):
    """An agent that gets an observation after every answer, and a reward that varies."""

    async def run(self, sampling_params: dict[str, Any], **task: Any) -> AgentLoopOutput:
        dice, conversation = random.Random(), uuid4().hex
        prompt = self._encode(self._render(list(task["raw_prompt"])))
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        began = time.monotonic()
        for turn in range(TURNS):
            if turn:
                rendered = self._render([{"role": "user", "content": observation(dice)}])
                seen = self._encode(next_turn(rendered, self.tokenizer.eos_token))
                response += seen
                mask += [0] * len(seen)
                logprobs += [0.0] * len(seen)
            answer = await self.server_manager.generate(
                request_id=conversation,
                prompt_ids=prompt + response,
                sampling_params=sampling_params | {"max_tokens": SAMPLED, "ignore_eos": True},
            )
            response += answer.token_ids
            mask += [1] * len(answer.token_ids)
            logprobs += answer.log_probs
            versions += [answer.extra_fields["min_global_steps"], answer.extra_fields["max_global_steps"]]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask,
            response_logprobs=logprobs,
            reward_score=dice.random(),
            num_turns=2 * TURNS,
            metrics=AgentLoopMetrics(generate_sequences=time.monotonic() - began),
            extra_fields={
                "min_global_steps": versions[0],
                "max_global_steps": versions[-1],
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


class Buffer(ReplayBuffer):
    """verl's buffer of synchronous trainers, with a shorter wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"poll_interval": POLL_S})


class AsyncBuffer(ReplayBufferAsync):
    """verl's buffer of asynchronous trainers, with a shorter wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"poll_interval": POLL_S})
