"""An engine that gives recorded answers, and refuses whatever was not recorded."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from swarmq.engine.client.protocol import Delta, RenderedPrompt
from swarmq.errors import EngineRefusedError
from swarmq.offline.recording import Recording, render_prompt
from swarmq.runtime.wording import count_of
from swarmq.testing.scripted_engine import ScriptedEngine, decode

NO_LIMIT = 2**31
"""Limit for tokens in place of the agent's own, because the scripted tokens are shorter than those of a model."""


class RecordedEngine(ScriptedEngine):
    """Engine that answers a recorded prompt with its answers in turn, or a task's calls by its script."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(template=render_prompt, max_model_len=NO_LIMIT)
        self.has_parsers = True
        self._recording = recording
        self._turns = {prompt: itertools.cycle(answers) for prompt, answers in recording.answers.items()}
        self._script: Iterator[str] | None = None
        self._task_id = ""
        self.refusals: list[str] = []
        """Why calls were refused, since the task began."""

    def begin_task(self, task_id: str) -> None:
        """Use the script of this task, if it has one, until the next task."""
        script = self._recording.scripts.get(task_id)
        self._task_id, self._script, self.refusals = task_id, iter(script) if script is not None else None, []

    async def generate(
        self, rendered: RenderedPrompt, *, stream: bool, detailed: bool = False
    ) -> AsyncGenerator[list[Delta], None]:
        for _ in range(rendered.sampling.get("n", 1)):
            self.say(self._answer(decode(rendered.token_ids)))
        sampling: dict[str, Any] = rendered.sampling | {"max_tokens": NO_LIMIT}
        async for deltas in super().generate(
            msgspec.structs.replace(rendered, sampling=sampling), stream=stream, detailed=detailed
        ):
            yield deltas

    def _answer(self, prompt: str) -> str:
        if self._script is not None:
            if (answer := next(self._script, None)) is not None:
                return answer
            answers = len(self._recording.scripts[self._task_id])
            self._refuse(
                f"{self._recording.source} has {count_of(answers, 'answer')} for task {self._task_id!r}, and the agent asked once more"
            )
        if prompt not in self._turns:
            self._refuse(self._recording.explain_missing(prompt))
        return next(self._turns[prompt])

    def _refuse(self, why: str) -> None:
        self.refusals.append(why)
        raise EngineRefusedError(why, status=404, code="not_recorded")
