"""An agent's function that runs a command: one process for every episode.

    task ──> working copy, home ──> relay on a port of its own ──> command (prompt by argument, file or standard input)
                                                                     │ exit, or its time is up: all of its processes are killed
    reward <── test command or function <── files put back <─────────┘

The episode fails, and gets no reward, if the command crashed, ran out of time, could not be started, never got an answer from
the model, or was left by the model's side: its last call failed for a reason that is neither the agent's nor the policy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.black_box import cli_settings, container, scoring, working_copy
from swarmq.black_box.process import Finished, OutputLog, run_command
from swarmq.black_box.relay import EpisodeRelay
from swarmq.client.episodes.episode import AsyncEpisode
from swarmq.client.episodes.event_loops import run_in_thread
from swarmq.client.episodes.identity import hash_source
from swarmq.errors import AgentCommandError, TaskError
from swarmq.outcome import Outcome, to_outcome
from swarmq.runtime.logs import log
from swarmq.runtime.wording import count_of

PROMPT, PROMPT_FILE = "{prompt}", "{prompt_file}"
PLACEHOLDERS = re.compile(r"\{(?:prompt|prompt_file|model|base_url|api_key|folder)\}")
MAX_ARGUMENT_BYTES = 131_071
"""Maximum size of one command-line argument on Linux, in bytes."""
WARNING_INTERVAL_S = 60.0
"""Minimum seconds between two warnings about commands that make no model call."""
KILLED_BY, MAX_SIGNAL = 128, 64
"""A shell whose command was killed exits with KILLED_BY plus the signal's number, which is at most MAX_SIGNAL."""


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a command is run and scored. Raises TaskError for options that contradict each other."""

    argv: tuple[str, ...]
    """The command; `{prompt}`, `{prompt_file}`, `{model}`, `{base_url}`, `{api_key}` and `{folder}` are replaced."""
    test: str | None = None
    """Shell command that tests the working copy."""
    score: str = ""
    """Name of the score function, for messages."""
    folder: Path | None = None
    """Folder to copy for every attempt; a task's own `folder` is relative to it."""
    restore: tuple[str, ...] = ()
    """Paths in the working copy whose original content is put back before the attempt is scored."""
    prompt_field: str = "prompt"
    scored_exits: frozenset[int] | None = frozenset({0})
    """Exit codes of the command after which its work is scored; None: all, except those of commands that were killed or could
    not be run."""
    timeout_s: float = 1800.0
    test_timeout_s: float = 600.0
    first_call_s: float = 30.0
    """Seconds without a model call after which a warning names the settings that the command got."""
    context: int = 32_768
    """Context length, in tokens, that the command is configured with."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further environment variables of the command, each as (name, value)."""
    keep_home: bool = False
    any_key: bool = False
    port: int = 0
    container: str | None = None
    """Image of a container to run command and test in."""
    logs: Path = Path("swarmq-logs")
    log_limit: int = 1_000_000
    """Maximum bytes that are kept of the output of one attempt."""
    copies: Path | None = None
    """Folder for working copies; None: the system's for temporary files."""
    keep_copies: bool = False

    def __post_init__(self) -> None:
        if not self.argv:
            raise TaskError("no command: write it after --, for example `-- claude -p {prompt}`")
        if (self.test is None) == (not self.score):
            raise TaskError("give either --test COMMAND or --score module:function: an episode needs a reward")
        if self.restore and self.folder is None:
            raise TaskError("--restore needs --folder, from which the paths are restored")

    @property
    def attempt_timeout_s(self) -> float:
        """Seconds for a whole attempt, whose parts have limits of their own."""
        return self.timeout_s + self.test_timeout_s + 120.0


def check_command(options: CommandOptions) -> None:
    """Raise TaskError if the command is not installed, or there is no such container image."""
    if options.container:
        container.provide_image(options.container)
        return
    name = options.argv[0]
    path = dict(options.environment).get("PATH", os.environ.get("PATH"))
    if shutil.which(name, path=path) is None:
        hint = cli_settings.INSTALL_HINTS.get(Path(name).name)
        raise TaskError(f"{name}: not installed, or not on PATH" + (f"; to install it: {hint}" if hint else ""))


def hash_code(options: CommandOptions, score: scoring.ScoreFunction | None) -> str:
    """Return a code version: a hash of the command, its score and the code of the score function."""
    facts = (options.argv, options.test, options.score, options.restore, options.context, options.environment)
    source = hash_source(score) if score else ""
    return hashlib.sha256(repr((*facts, options.container, source)).encode()).hexdigest()[:12]


class CommandAgent:
    """An agent's function, for `swarmq.client.runners`, that runs the command of `options` for every episode."""

    def __init__(self, options: CommandOptions, score: scoring.ScoreFunction | None = None) -> None:
        """`score`: the function that `options.score` names."""
        self._options = options
        self._score = score
        self._warn_at = 0.0

    async def __call__(self, ep: AsyncEpisode) -> Outcome:
        options = self._options
        prompt, source, commit = read_task(ep.payload, options)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", ep.task.id)[:60]
        output = OutputLog(options.logs / f"{name}-{ep.episode_id}.log", limit=options.log_limit)
        with contextlib.closing(output):
            async with (
                working_copy.open_copy(
                    source, commit=commit, parent=options.copies, keep=options.keep_copies
                ) as folder,
                EpisodeRelay.open(ep, port=options.port, any_key=options.any_key) as relay,
            ):
                attempt = _Attempt(options, ep, relay, folder, prompt, output)
                done = await attempt.run(self._warn)
                attempt.check(done)
                outcome = await self._score_copy(ep, attempt, source, commit)
            return _add_facts(outcome, done, relay, output.path)

    async def _score_copy(
        self, ep: AsyncEpisode, attempt: _Attempt, source: Path | None, commit: str | None
    ) -> Outcome:
        options, work = self._options, attempt.work
        if options.restore and source is not None:
            await asyncio.to_thread(working_copy.restore, work, options.restore, source, commit=commit)
        if options.test is not None:
            return await attempt.test(options.test)
        assert self._score is not None
        name = f"what {options.score} returned"
        returned = await run_in_thread(self._score, work, ep.payload)
        return to_outcome(await returned if isinstance(returned, Awaitable) else returned, name)

    def _warn(self, text: str, **fields: Any) -> None:
        """Warn at most once a minute: all attempts tend to have the same fault."""
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARNING_INTERVAL_S
            log.warning(text, **fields)


class _Attempt:
    """One attempt: the command and its test in one working copy."""

    def __init__(
        self,
        options: CommandOptions,
        ep: AsyncEpisode,
        relay: EpisodeRelay,
        folder: Path,
        prompt: str,
        output: OutputLog,
    ) -> None:
        self.work, self._home, self._prompt_file = folder / "work", folder / "home", folder / "prompt.txt"
        self._folder, self._options, self._ep, self._relay = folder, options, ep, relay
        self._prompt, self._output = prompt, output
        self._mark = f"{cli_settings.EPISODE_VARIABLE}={ep.episode_id}"
        self._endpoint = cli_settings.Endpoint(
            base_url=relay.base_url, api_key=ep.api_key, model=ep.model, context=options.context
        )
        self.environment = {
            **cli_settings.build_environment(
                self._endpoint, self._home, os.environ, episode_id=ep.episode_id, keep_home=options.keep_home
            ),
            "PWD": str(self.work),
            **dict(options.environment),
        }

    async def run(self, warn: Any) -> Finished:
        """Run the command to its end. Raises AgentCommandError if it cannot be started."""
        options = self._options
        await asyncio.to_thread(cli_settings.write_files, self._endpoint, self._home)
        argv = await asyncio.to_thread(self._fill_in)
        takes_input = not any(PROMPT in part or PROMPT_FILE in part for part in options.argv)
        self._output.note(f"episode {self._ep.episode_id}: {shlex.join(options.argv)}")
        watching = asyncio.create_task(self._watch_for_calls(warn))
        try:
            return await self._run(argv, stdin=self._prompt_file if takes_input else None, timeout_s=options.timeout_s)
        except OSError as error:
            raise AgentCommandError(f"{argv[0]} cannot be started: {error.strerror or error}") from None
        finally:
            watching.cancel()

    async def test(self, command: str) -> Outcome:
        """Run the test command in the working copy and return its reward."""
        self._output.note(f"test: {command}")
        report = self._folder / "report.xml" if scoring.REPORT in command else None
        filled = command.replace(scoring.REPORT, shlex.quote(str(report))) if report else command
        done = await self._run(["sh", "-c", filled], stdin=None, timeout_s=self._options.test_timeout_s)
        return scoring.score_test(done, report)

    def check(self, done: Finished) -> None:
        """Raise AgentCommandError if the command's work must not be scored."""
        code, calls, options = done.exit_code, self._relay.calls, self._options
        output = f"\nits last output:\n{done.tail}" if done.tail else "\nit printed nothing"
        name = Path(options.argv[0]).name
        if code is None:
            raise AgentCommandError(
                f"{name} did not end within {options.timeout_s:g} s (--timeout) and was killed{output}"
            )
        if code in scoring.NOT_RUNNABLE:
            raise AgentCommandError(f"{name} cannot be run (exit code {code}){output}")
        if not self._relay.num_answered:
            raise AgentCommandError(
                f"no turn arrived: {name} ended with exit code {code}; {self._explain_silence()}{output}"
            )
        if code < 0 or KILLED_BY < code <= KILLED_BY + MAX_SIGNAL:
            raise AgentCommandError(f"{name} was killed by signal {-code if code < 0 else code - KILLED_BY}{output}")
        if options.scored_exits is not None and code not in options.scored_exits:
            raise AgentCommandError(
                f"{name} ended with exit code {code}, which is not scored (--scored-exit); {count_of(len(calls), 'call')}{output}"
            )
        if calls and calls[-1].failed_by_infrastructure:
            last = calls[-1]
            raise AgentCommandError(
                f"the last call of {name} failed: {last.path} got {last.status or 'no answer'}: {last.detail[:300]}{output}"
            )

    async def _run(self, argv: Sequence[str], *, stdin: Path | None, timeout_s: float) -> Finished:
        options = self._options

        async def run(argv: Sequence[str], environment: Mapping[str, str]) -> Finished:
            return await run_command(
                argv,
                cwd=self.work,
                environment=environment,
                mark=self._mark,
                stdin=stdin,
                log=self._output,
                timeout_s=timeout_s,
            )

        if options.container is None:
            return await run(argv, self.environment)
        names = [
            *cli_settings.variables(self._endpoint, self._home, keep_home=options.keep_home),
            *(cli_settings.EPISODE_VARIABLE, "NO_PROXY", "no_proxy"),
            *dict(options.environment),
        ]
        variables = {name: self.environment[name] for name in names}
        async with container.open_container(
            options.container, argv, self._folder, self.work, variables, self._ep.episode_id
        ) as outer:
            done = await run(outer, {**self.environment, **container.find_homes()})
        if done.exit_code == container.FAILED:
            raise AgentCommandError(f"no container of {options.container} could be run:\n{done.tail}")
        return done

    def _fill_in(self) -> list[str]:
        """Return the command with its placeholders replaced. Raises AgentCommandError for a prompt that no argument can hold."""
        values = {
            PROMPT: self._prompt,
            PROMPT_FILE: str(self._prompt_file),
            "{model}": self._endpoint.model,
            "{base_url}": self._endpoint.base_url,
            "{api_key}": self._endpoint.api_key,
            "{folder}": str(self.work),
        }
        self._prompt_file.write_text(self._prompt)
        argv = [PLACEHOLDERS.sub(lambda found: values[found[0]], part) for part in self._options.argv]
        longest = max(len(part.encode()) for part in argv)
        if longest > MAX_ARGUMENT_BYTES:
            raise AgentCommandError(
                f"the prompt makes an argument of {longest} bytes, and a process takes {MAX_ARGUMENT_BYTES}: use {PROMPT_FILE}, "
                "or leave the placeholder out, so that the prompt comes by standard input"
            )
        return argv

    async def _watch_for_calls(self, warn: Any) -> None:
        try:
            async with asyncio.timeout(self._options.first_call_s):
                await self._relay.first_call.wait()
        except TimeoutError:
            text = self._explain_silence()
            self._output.note(f"after {self._options.first_call_s:g} s: {text}")
            warn(
                "no_model_call_yet",
                after_s=self._options.first_call_s,
                command=Path(self._options.argv[0]).name,
                episode=self._ep.episode_id,
                seen=text,
                log=str(self._output.path),
            )

    def _explain_silence(self) -> str:
        """Return why no model call was answered, as far as it shows: which requests came instead, and which settings the
        command got."""
        relay = self._relay
        if relay.refused_keys:
            return (
                f"{count_of(relay.refused_keys, 'call')} carried another key than the episode's: is the command logged in, or has it a key of "
                "its own? Remove that, or give --any-key"
            )
        if relay.calls:
            last = relay.calls[-1]
            return f"none of its {count_of(len(relay.calls), 'call')} was answered; the last: {last.path}: {last.status or 'no answer'}: {last.detail[:300]}"
        others = ", ".join(f"{asked} ({status})" for asked, status in list(relay.other_paths.items())[:5])
        asked = f"asked only for {others}" if others else "made no request"
        return (
            f"it {asked} at {relay.base_url}, which was set as OPENAI_BASE_URL, OPENAI_API_BASE, ANTHROPIC_BASE_URL (without /v1) "
            "and in the configuration of codex, opencode and aider: does the command read one of these, or take {base_url}?"
        )


def read_task(payload: Any, options: CommandOptions) -> tuple[str, Path | None, str | None]:
    """Return prompt, folder and commit of a task. Raises TaskError for a task without a prompt."""
    if isinstance(payload, str):
        payload = {options.prompt_field: payload}
    prompt = payload.get(options.prompt_field) if isinstance(payload, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise TaskError(f"the task has no text in its field {options.prompt_field!r} (--prompt-field)")
    folder, commit = payload.get("folder"), payload.get("commit")
    source = options.folder if folder is None else (options.folder or Path()) / str(folder)
    return prompt, source.expanduser().resolve() if source else None, None if commit is None else str(commit)


def _add_facts(outcome: Outcome, done: Finished, relay: EpisodeRelay, path: Path) -> Outcome:
    metrics = {"calls": float(len(relay.calls)), "command_s": done.seconds, **outcome.metrics}
    metadata = {"exit_code": done.exit_code, "log": str(path), **outcome.metadata}
    return msgspec.structs.replace(outcome, metrics=metrics, metadata=metadata)
