"""Anthropic's Claude Code: one task, in which it runs one command. Its own event stream has what it was answered."""

import json
import os
import subprocess
import sys
import tempfile

from answers import ANTHROPIC_URL, KEY, MODEL, tell

with tempfile.TemporaryDirectory() as home:
    command = [
        *(os.environ["AGENT_PROGRAM"], "--print", "--verbose", "--output-format", "stream-json", "--model", MODEL),
        *("--allowedTools", "Bash", "--max-turns", "4"),
        "Run one command, then say what it printed.",
    ]
    environment = os.environ | {
        "HOME": home,
        "ANTHROPIC_BASE_URL": ANTHROPIC_URL,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    done = subprocess.run(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr[-4000:] + done.stdout[-4000:])
    answers: dict[str, tuple[str, list]] = {}
    for line in done.stdout.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("type") != "assistant":
            continue
        text, calls = answers.get(event["message"]["id"], ("", []))
        for block in event["message"]["content"]:
            if block["type"] == "text":
                text += block["text"]
            elif block["type"] == "tool_use":
                calls = [*calls, (block["name"], block["input"])]
        answers[event["message"]["id"]] = text, calls
    for text, calls in answers.values():
        tell(text, calls)
sys.exit(done.returncode)
