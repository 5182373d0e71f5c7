"""What swarmq 0.1.0 wrote: tests/data/README.md says how it was made."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from swarmq.config import RunFolder, SwarmJob

STORED = Path(__file__).parent.parent / "data" / "stored-0.1.0"


def stored_wire() -> dict[str, Any]:
    """Records as bytes, an invite and an api key."""
    return json.loads((STORED / "wire.json").read_text())


def unpack_run(to: Path) -> tuple[SwarmJob, RunFolder]:
    """Unpack the stored run folder into `to`."""
    with tarfile.open(STORED / "run.tar.gz") as archive:
        archive.extractall(to, filter="data")
    folder = RunFolder(to / "faults")
    return SwarmJob.load(folder.resolved), folder
