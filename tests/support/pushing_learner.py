"""A learner's push of a model folder's weights over HTTP, in many small chunks."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from support.engine import SECRET
from swarmq.weights.push.http_transfer import HttpTransfer
from swarmq.weights.push.pusher import WeightPusher
from swarmq.weights.push.transfers import FileTransfer


def main(engine_url: str, model: str, folder: str, version: str) -> None:
    transfer = HttpTransfer(FileTransfer((), Path(folder)), secret=SECRET, chunk_bytes=4096)
    pusher = WeightPusher([engine_url], Path(folder), secret=SECRET, transfers={"http": transfer})
    pusher.push(load_file(Path(model) / "model.safetensors").items(), int(version))


if __name__ == "__main__":
    main(*sys.argv[1:])
