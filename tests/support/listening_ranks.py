"""Run on two ranks: each prints the addresses on which its process listens while both are in their group."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from swarmq.config import Train
from swarmq.learner.distributed.accelerator import make_accelerator
from swarmq.learner.distributed.rendezvous import leave_group

LISTEN = "0A"


def listening() -> list[str]:
    """Local addresses, as the kernel writes them in hex, of this process's own listening sockets."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == LISTEN and row[9] in own]


def main(target: str) -> None:
    accelerator = make_accelerator(Train())
    assert accelerator.gather(torch.ones(1)).sum() == 2
    Path(f"{target}.{accelerator.process_index}").write_text(json.dumps(listening()))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_group()
