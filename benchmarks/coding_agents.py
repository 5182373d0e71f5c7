"""Coding agents, unchanged, by `swarmq run`'s own code: each mends a bug, and summarises its conversation on the way.

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
from support.clients import install_once
from support.commands import call, command_world, offered
from swarmq.black_box.agent import CommandAgent, CommandOptions

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
        command = f"{EDIT}; seq 100000 103500; echo {waiting[0]}"
        more = {"description": "mend it"} if shell != "exec_command" else {}
        return call(shell, **{SHELLS[shell]: command}, **more)

    def _edit(self, prompt: str) -> str:
        """Edit by text, for an agent without tools; any other question of an agent gets a word."""
        if "commit message" in prompt or "SEARCH" not in prompt:
            return "Mended."
        for wrong, right in FIXES:
            if f"return {wrong}" in prompt and f"return {right}" not in prompt:
                return f"main.py\n```\n<<<<<<< SEARCH\n    return {wrong}\n=======\n    return {right}\n>>>>>>> REPLACE\n```\n"
        return "Mended."


class CodingAgent(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    package: str
    protocol: str
    argv: tuple[str, ...]
    context: int
    """Tokens of the scripted tokenizer, which leave no room for all of the conversation."""
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
    shell = '"$0" -m venv --without-pip "$1" && shift && exec "$1" -m pip -q --python "$2" install --no-compile "$3"'

    def command(folder: Path) -> list[str]:
        env = folder / "env"
        return ["sh", "-c", shell, sys.executable, str(env), sys.executable, str(env / "bin/python"), AIDER]

    return install_once("aider", f"{AIDER}{sys.version_info[:2]}", command) / "env/bin"


AIDER = "aider-chat==0.86.2"
AGENTS = (
    CodingAgent(
        name="Claude Code",
        package=_client("claude").packages[0],
        protocol="messages",
        argv=("claude", "-p", "{prompt}", "--dangerously-skip-permissions"),
        context=60_000,
        install=npm("claude"),
    ),
    CodingAgent(
        name="Codex CLI",
        package=_client("codex").packages[0],
        protocol="responses",
        argv=("codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
        context=28_000,
        install=npm("codex"),
    ),
    CodingAgent(
        name="opencode",
        package=_client("opencode").packages[0],
        protocol="chat",
        argv=("opencode", "run", "{prompt}"),
        context=24_000,
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
        with tempfile.TemporaryDirectory(prefix="swarmq-agents-") as folder:
            rows.append(asyncio.run(run_row(agent, Path(folder))))
        print(f"{agent.name}: {rows[-1]['result']}, {rows[-1]['seconds']} s", flush=True)
    heads = ("agent", "version", "protocol", "calls", "turns", "received", "summaries", "branches", "seconds", "result")
    print(report.table(heads, [[row[head] for head in heads] for row in rows]))
    figures = {
        "agents": len(rows),
        "agents_ok": sum(row["result"] == "ok" for row in rows),
        **{name: sum(row[name] for row in rows) for name in ("calls", "turns", "received", "summaries")},
        "branches": sum(sum(row["counted"].values()) for row in rows),
    }
    report.save("coding_agents", figures, detail={"rows": rows}, out=options.out, finished=not options.only)


async def run_row(agent: CodingAgent, folder: Path) -> dict[str, Any]:
    """Run one agent as the agent of one episode."""
    row: dict[str, Any] = {"agent": agent.name, "version": agent.version, "protocol": agent.protocol}
    program = await asyncio.to_thread(agent.install)
    source = folder / "source"
    source.mkdir()
    for name, text in BUGGY.items():
        (source / name).write_text(text)
    options = CommandOptions(
        argv=agent.argv,
        test=f"{sys.executable} check.py",
        folder=source,
        restore=("check.py",),
        timeout_s=TIMEOUT_S,
        context=agent.context,
        environment=(("PATH", f"{program}:{os.environ['PATH']}"), ("IS_SANDBOX", "1")),
        logs=folder / "logs",
    )
    conversation, began = Conversation(), time.monotonic()
    async with command_world(folder, conversation) as world:
        await world.client.run_episodes_until_all_complete(
            [TASK], CommandAgent(options), max_attempts=1, progress=False
        )
        (end,), turns = world.ends, world.stage.turns()
    counted = Counter(turn.branch for turn in turns if turn.branch)
    row |= {
        "calls": int(end.metrics.get("calls", 0)),
        "turns": len(turns),
        "received": len(end.received or ()),
        "summaries": conversation.summaries,
        "branches": ", ".join(f"{count} {reason}" for reason, count in sorted(counted.items())),
        "counted": dict(counted),
        "seconds": round(time.monotonic() - began, 1),
        "output": "".join(path.read_text(errors="replace")[-4000:] for path in (folder / "logs").iterdir()),
    }
    return row | {"result": verdict(row, end)}


def verdict(row: dict[str, Any], end: Any) -> str:
    """`ok`, or what went wrong, in words."""
    if end.status != "finished":
        return f"{end.status}: {end.reason.strip().splitlines()[-1][:200]}"
    if set(end.rewards.values()) != {1.0}:
        return "the bug is still there"
    if not row["calls"] == row["turns"] == row["received"]:
        return f"{row['calls']} calls, {row['turns']} turns recorded, {row['received']} received"
    if not row["summaries"]:
        return "it did not summarise its conversation"
    return "ok" if row["counted"] else "no branch was counted"


if __name__ == "__main__":
    main()
