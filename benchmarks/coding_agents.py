"""Coding agents, unchanged, by `swarmq run`'s own code: each mends a bug, and summarises its conversation on the way. Those that
have skills also find ours, load it, and run its commands until a job is set up.

    python -m benchmarks.coding_agents
    python -m benchmarks.coding_agents --only codex aider --out /tmp/out

Every agent is installed in an environment of its own (pinned version, kept in `.cache`) and run as the agent of one episode, in
a copy of a small folder, on a real proxy. The model is scripted: it calls the agent's own tools until the file is edited and the
conversation is too long for the context that the agent was told of, and then says what a summary says. Needs the registries
of pip and npm at the first run.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.clients.programs import CLIENTS
from support.clients import install_into, install_once
from support.commands import CONTEXT, CommandWorld, call, command_world, offered
from swarmq.black_box.agent import CommandAgent, CommandOptions
from swarmq.engine.client.protocol import Json

BUGGY = {
    "main.py": "def add(a, b):\n    return a - b\n",
    "check.py": "from main import add\nassert add(1, 2) == 3\n",
}
TASK = {"id": "add", "prompt": "Mend add in main.py", "folder": "."}
EDIT = "sed -i 's/a - b/a + b/' main.py"
SUMMARY = "MENDED: main.py is right now."
SHELLS = {"exec_command": "cmd", "Bash": "command", "bash": "command"}
"""Tool that runs a command -> its argument."""
STEPS = ("ONE", "TWO", "THREE")
"""Marks that the model's commands print, beside thousands of numbers that fill the context."""
ASKS_FOR_SUMMARY = (
    "CONTEXT CHECKPOINT COMPACTION",  # Codex
    "Your task is to create a detailed summary of the conversation",  # Claude Code
    "Output exactly the Markdown structure shown inside <template>",  # opencode
    "ummarize this partial conversation",  # aider
)
FIXES = (("a - b", "a * b"), ("a * b", "a + b"))
"""What aider is told to edit; the first leaves the test failing, so that there is a second round."""
SKILL = Path(__file__).parents[1] / "skills/swarmq"
HEAD = re.compile(r"^name: (?P<name>.*)\ndescription: (?P<description>.*)$", re.MULTILINE)
SET_UP_TASK = {"id": "set-up", "prompt": "Set up a training with swarmq", "folder": "."}
SET_UP = re.compile(r"^## 2\. .*?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""The commands of the skill that write a job and check it, which need neither GPU nor broker."""
SKILL_TOOLS = {"Skill": "skill", "skill": "name"}
"""Tool that loads a skill -> its argument. opencode's needs ripgrep; where it fails, and in Codex, the model reads the file."""
EXIT = re.compile(r"EXIT CODE \d+")
TIMEOUT_S = 300.0


class Conversation:
    """The scripted model of one episode."""

    def __init__(self) -> None:
        self.summaries = 0

    def __call__(self, prompt: str) -> str:
        last = prompt.rpartition("<|start|>user")[2]
        if any(words in last for words in ASKS_FOR_SUMMARY) or ASKS_FOR_SUMMARY[-1] in prompt:
            self.summaries += 1
            return SUMMARY
        tools = offered(prompt)
        shell = next((name for name in tools if name in SHELLS), None)
        if shell is None:
            return self._edit(prompt)
        waiting = [mark for mark in STEPS if mark not in prompt]
        if SUMMARY in prompt or not waiting:
            return "It is mended."
        return _run_in(shell, f"{EDIT}; seq 100000 103500; echo {waiting[0]}")

    def _edit(self, prompt: str) -> str:
        """Edit by text, for an agent without tools; any other question of an agent gets a word."""
        if "commit message" in prompt or "SEARCH" not in prompt:
            return "Mended."
        for wrong, right in FIXES:
            if f"return {wrong}" in prompt and f"return {right}" not in prompt:
                return f"main.py\n```\n<<<<<<< SEARCH\n    return {wrong}\n=======\n    return {right}\n>>>>>>> REPLACE\n```\n"
        return "Mended."


class SkillReader:
    """The scripted model of an episode in which a job is set up as the skill says."""

    def __init__(self, folder: str) -> None:
        """`folder`: where the agent looks for skills."""
        self.commands = ""
        """What the skill told it to run."""
        self._path = f"{folder}/{SKILL.name}/SKILL.md"
        self._has_asked = False

    def __call__(self, prompt: str) -> str:
        tools = offered(prompt)
        shell = next((name for name in tools if name in SHELLS), None)
        if shell is None or EXIT.search(prompt):
            return "It is done."
        if found := SET_UP.search(prompt):
            self.commands = found[1]
            return _run_in(
                shell, f"(set -e; PATH={Path(sys.executable).parent}:$PATH\n{self.commands}); echo EXIT CODE $?"
            )
        tool = next((name for name in tools if name in SKILL_TOOLS), None)
        if tool and not self._has_asked:
            self._has_asked = True
            return call(tool, **{SKILL_TOOLS[tool]: SKILL.name})
        return _run_in(shell, f"cat {self._path} || echo EXIT CODE $?")


def _run_in(shell: str, command: str) -> str:
    more = {"description": "one step"} if shell != "exec_command" else {}
    return call(shell, **{SHELLS[shell]: command}, **more)


class CodingAgent(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    package: str
    protocol: str
    argv: tuple[str, ...]
    context: int
    """Tokens of the scripted tokenizer, which leave no room for all of the conversation."""
    skills: str | None = None
    """Folder in which it looks for the skills of a project; None if it has none."""
    install: Callable[[], Path]
    """Returns the folder of its program; installs it at the first call."""

    @property
    def version(self) -> str:
        return self.package.rpartition("@" if "@" in self.package[1:] else "==")[2].lstrip("=")


def npm(name: str) -> Callable[[], Path]:
    return lambda: _client(name).install() / "node_modules/.bin"


def _client(name: str) -> Any:
    return next(client for client in CLIENTS if client.program == name)


def _install_aider() -> Path:
    shell = '"$0" -m venv --without-pip "$1" && shift && exec "$@"'

    def command(folder: Path) -> list[str]:
        env = folder / "env"
        return ["sh", "-c", shell, sys.executable, str(env), *install_into(env / "bin/python"), AIDER]

    return install_once("aider", f"{AIDER}{sys.version_info[:2]}", command) / "env/bin"


AIDER = "aider-chat==0.86.2"
AGENTS = (
    CodingAgent(
        name="Claude Code",
        package=_client("claude").packages[0],
        protocol="messages",
        argv=("claude", "-p", "{prompt}", "--dangerously-skip-permissions"),
        context=60_000,
        skills=".claude/skills",
        install=npm("claude"),
    ),
    CodingAgent(
        name="Codex CLI",
        package=_client("codex").packages[0],
        protocol="responses",
        argv=("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
        context=28_000,
        skills=".agents/skills",
        install=npm("codex"),
    ),
    CodingAgent(
        name="opencode",
        package=_client("opencode").packages[0],
        protocol="chat",
        argv=("opencode", "run", "{prompt}"),
        context=24_000,
        skills=".claude/skills",
        install=npm("opencode"),
    ),
    CodingAgent(
        name="aider",
        package=AIDER,
        protocol="chat",
        argv=(
            *(
                "python",
                "-m",
                "aider",
                "--yes-always",
                "--edit-format",
                "diff",
                "--auto-test",
                "--test-cmd",
                "python3 check.py",
            ),
            *("--max-chat-history-tokens", "30", "--message", "{prompt}", "main.py"),
        ),
        context=60_000,
        install=_install_aider,
    ),
)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="agents whose name contains one of these words")
    options = parser.parse_args()
    chosen = [a for a in AGENTS if not options.only or any(word.lower() in a.name.lower() for word in options.only)]
    rows = []
    for agent in chosen:
        for attempt in (mend_bug, set_up_training) if agent.skills else (mend_bug,):
            with tempfile.TemporaryDirectory(prefix="swarmq-agents-") as folder:
                rows.append(asyncio.run(attempt(agent, Path(folder))))
            print(f"{agent.name}, {rows[-1]['task']}: {rows[-1]['result']}, {rows[-1]['seconds']} s", flush=True)
    heads = (
        "agent",
        "task",
        "version",
        "protocol",
        "calls",
        "turns",
        "received",
        "summaries",
        "branches",
        "seconds",
        "result",
    )
    print(report.table(heads, [[row[head] for head in heads] for row in rows]))
    figures = {
        "attempts": len(rows),
        "attempts_ok": sum(row["result"] == "ok" for row in rows),
        **{name: sum(row[name] for row in rows) for name in ("calls", "turns", "received", "summaries")},
        "branches": sum(sum(row["counted"].values()) for row in rows),
    }
    report.save(
        "coding_agents",
        figures,
        detail={"rows": [{name: row[name] for name in row if name != "output"} for row in rows]},
        out=options.out,
        finished=not options.only,
    )


async def mend_bug(agent: CodingAgent, folder: Path) -> dict[str, Any]:
    """Run one agent as the agent of an episode in which it mends a bug."""
    source = folder / "source"
    source.mkdir()
    for name, text in BUGGY.items():
        (source / name).write_text(text)
    conversation = Conversation()
    options = await _options(agent, folder, test=f"{sys.executable} check.py", context=agent.context)
    options = msgspec.structs.replace(options, restore=("check.py",))
    async with command_world(folder, conversation) as world:
        row, end = await _run(agent, options, TASK, world)
    row["summaries"] = conversation.summaries
    return row | {"task": "mend a bug", "result": find_fault(row, end) or find_fault_of_summary(row) or "ok"}


async def set_up_training(agent: CodingAgent, folder: Path) -> dict[str, Any]:
    """Run one agent as the agent of an episode in which it follows the skill of swarmq."""
    assert agent.skills
    shutil.copytree(SKILL, folder / "source" / agent.skills / SKILL.name)
    reader = SkillReader(agent.skills)
    test = f"cd math && test -f agent.py && {sys.executable} -m swarmq up job.toml --show"
    options = await _options(agent, folder, test=test, context=CONTEXT)
    async with command_world(folder, reader) as world:
        row, end = await _run(agent, options, SET_UP_TASK, world)
        prompts = world.engine.prompts
    row |= {"summaries": 0, "commands": reader.commands}
    head = HEAD.search((SKILL / "SKILL.md").read_text())
    assert head
    unread = [prompt for prompt in prompts if not SET_UP.search(prompt)]
    is_offered = any(all(field in prompt for field in head.groups()) for prompt in unread)
    fault = find_fault(row, end) or ("" if is_offered else "it did not tell the model of the skill")
    return row | {"task": "set up a training", "result": fault or "ok"}


async def _options(agent: CodingAgent, folder: Path, *, test: str, context: int) -> CommandOptions:
    program = await asyncio.to_thread(agent.install)
    return CommandOptions(
        argv=agent.argv,
        test=test,
        folder=folder / "source",
        timeout_s=TIMEOUT_S,
        context=context,
        environment=(("PATH", f"{program}:{os.environ['PATH']}"), ("IS_SANDBOX", "1")),
        logs=folder / "logs",
    )


async def _run(
    agent: CodingAgent, options: CommandOptions, task: Json, world: CommandWorld
) -> tuple[dict[str, Any], Any]:
    """Run one episode; returns what there is to count, and the episode's end."""
    began = time.monotonic()
    await world.client.run_episodes_until_all_complete([task], CommandAgent(options), max_attempts=1, progress=False)
    (end,), turns = world.ends, world.stage.turns()
    counted = Counter(turn.branch for turn in turns if turn.branch)
    row = {
        "agent": agent.name,
        "version": agent.version,
        "protocol": agent.protocol,
        "calls": int(end.metrics.get("calls", 0)),
        "turns": len(turns),
        "received": len(end.received or ()),
        "branches": ", ".join(f"{count} {reason}" for reason, count in sorted(counted.items())),
        "counted": dict(counted),
        "seconds": round(time.monotonic() - began, 1),
        "output": "".join(path.read_text(errors="replace")[-4000:] for path in options.logs.iterdir()),
    }
    return row, end


def find_fault(row: dict[str, Any], end: Any) -> str:
    """Return what went wrong in an episode, or "" if its work is done and every call was recorded and received."""
    if end.status != "finished":
        return f"{end.status}: {end.reason.strip().splitlines()[-1][:200]}"
    if set(end.rewards.values()) != {1.0}:
        return "its work does not pass the test"
    if not row["calls"] == row["turns"] == row["received"]:
        return f"{row['calls']} calls, {row['turns']} turns recorded, {row['received']} received"
    return ""


def find_fault_of_summary(row: dict[str, Any]) -> str:
    if not row["summaries"]:
        return "it did not summarise its conversation"
    return "" if row["counted"] else "no branch was counted"


if __name__ == "__main__":
    main()
