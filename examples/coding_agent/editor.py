"""A tiny coding agent for the toy model, to be run by `swarmq run`: it reads the folder's file and replaces its last line.

    python editor.py PROMPT

Only the standard library is used, because every attempt starts it anew.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

SYSTEM = "Mend the file. Say read, or the right last line."
READ = "read"
FILE = "main.py"
MAX_TURNS = 3
MAX_TOKENS = 16

Message = dict[str, str]


def open_conversation(prompt: str) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]


def work(prompt: str, folder: Path) -> None:
    """Do what the model says, until it has replaced the last line or has had its turns."""
    messages = open_conversation(prompt)
    file = folder / FILE
    for _ in range(MAX_TURNS):
        said = ask(messages).strip()
        print(said)
        if said.startswith("return "):
            file.write_text(replace_last_line(file.read_text(), said))
            return
        answer = file.read_text() if said == READ else "There are read and return."
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answer}]


def replace_last_line(text: str, line: str) -> str:
    kept = text.rstrip().splitlines()[:-1]
    return "\n".join([*kept, f"    {line}", ""])


def ask(messages: list[Message]) -> str:
    """Return the model's next message, from the endpoint that `swarmq run` names in the environment."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname or "", url.port)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": MAX_TOKENS}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(request), headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != http.client.OK:
        sys.exit(f"{response.status}: {body.decode(errors='replace')}")
    return str(json.loads(body)["choices"][0]["message"]["content"] or "")


if __name__ == "__main__":
    work(sys.argv[1], Path())
