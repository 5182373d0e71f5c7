"""OpenAI's Codex CLI: one task, in which it runs one command. Its own event stream has what it was answered."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from answers import BASE_URL, MODEL, tell

PROVIDER = f'{{name = "swarmq", base_url = "{BASE_URL}", env_key = "AGENT_KEY", wire_api = "responses"}}'

with tempfile.TemporaryDirectory() as home:
    command = [
        *(os.environ["AGENT_PROGRAM"], "exec", "--json", "--skip-git-repo-check"),
        *("--dangerously-bypass-approvals-and-sandbox", "--cd", home),
        *("-c", f"model_providers.swarmq={PROVIDER}", "-c", "model_provider=swarmq", "-c", f"model={MODEL}"),
        "Run one command, then say what it printed.",
    ]
    environment = os.environ | {"CODEX_HOME": home, "HOME": home}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr[-4000:] + done.stdout[-4000:])
    # The session file has the calls as the model made them; the event stream shows commands after a shell wrapped them.
    for path in sorted(Path(home).glob("sessions/**/*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            item = entry.get("payload", {}) if entry.get("type") == "response_item" else {}
            if item.get("type") == "function_call":
                tell(calls=[(item["name"], item["arguments"])])
            elif item.get("type") == "message" and item.get("role") == "assistant":
                tell("".join(part["text"] for part in item["content"]))
sys.exit(done.returncode)
