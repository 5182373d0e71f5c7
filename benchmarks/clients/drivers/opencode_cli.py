"""opencode: one task, in which it runs one command. Its own event stream has what it was answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from answers import BASE_URL, KEY, MODEL, tell

with tempfile.TemporaryDirectory() as home:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": BASE_URL, "apiKey": KEY},
        "models": {MODEL: {"limit": {"context": 60000, "output": 300}}},
    }
    Path(home, "opencode.json").write_text(
        json.dumps({"provider": {"swarmq": provider}, "autoupdate": False, "permission": "allow"})
    )
    # Without a title it asks for one, and its event stream does not say what it was answered.
    options = ["--format", "json", "--title", "one command", "--model", f"swarmq/{MODEL}"]
    command = [os.environ["AGENT_PROGRAM"], "run", *options, "Run one command, then say what it printed."]
    folders = {"HOME": home, "PWD": home, "XDG_DATA_HOME": f"{home}/data", "XDG_CONFIG_HOME": f"{home}/config"}
    environment = os.environ | folders
    done = subprocess.run(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr[-4000:] + done.stdout[-4000:])
    for line in done.stdout.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        part = event.get("part", {})
        if event.get("type") == "text":
            tell(part["text"])
        elif event.get("type") == "tool_use":
            tell(calls=[(part["tool"], part["state"]["input"])])
sys.exit(done.returncode)
