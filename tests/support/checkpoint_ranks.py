"""Run on every rank: checkpoints for which rank 0's disk has no room, and the last one, which all make together. The other
ranks can write nothing at all, as on hosts without the run folder.

python checkpoint_ranks.py MODEL FOLDER SHARDING
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch

from swarmq.config import Policy, SwarmJob, Train
from swarmq.learner.distributed.rendezvous import leave_group
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.store.records import CheckpointSaved, ToIO, Warn
from swarmq.learner.train.loop import Learner

FOR_ALL_BUT_WEIGHTS, FOR_NOTHING = 20_000, 4_000


class RecordingLink:
    """A link to the batch feeder that keeps the messages it is sent."""

    def __init__(self) -> None:
        self.messages: list[ToIO] = []

    def send(self, message: ToIO) -> None:
        self.messages.append(message)


@contextlib.contextmanager
def room_for_files(num_bytes: int) -> Iterator[None]:
    """None of this rank may become larger, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def main(model: str, folder: str, sharding: Any) -> None:
    train = Train(sharding=sharding, gradient_checkpointing=False, token_log=False, trackers=())
    job = SwarmJob(run="r", folder=folder, policies={"main": Policy(model=model, train=train)})
    learner, told = Learner(job, "main", pusher=None, stop=StopSignal()), RecordingLink()
    link = told if learner.is_main else None
    for version, room in ((1, FOR_NOTHING), (2, FOR_ALL_BUT_WEIGHTS)):
        learner.trainer.version = version
        with room_for_files(room if learner.is_main else 0):
            learner._save(link)  # type: ignore[arg-type]
            if link:
                learner._report_finished_checkpoint(link, wait=True)  # type: ignore[arg-type]
        assert not list(learner.folder.glob("step-*"))
    with contextlib.nullcontext() if learner.is_main else room_for_files(0):
        for _ in range(2):
            learner._save_last(link)  # type: ignore[arg-type]
        learner._save(link, asked=3)  # type: ignore[arg-type]
    if link:
        learner._report_finished_checkpoint(link)  # type: ignore[arg-type]
        assert [type(message) for message in told.messages[:2]] == [Warn, Warn], told.messages
        assert told.messages[2:] == [CheckpointSaved(oldest=2), CheckpointSaved(oldest=2, asked=3)]
        assert [path.name for path in learner.folder.iterdir()] == ["step-00000002"]
    learner.trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    leave_group()
