"""A learner whose broker is a folder of files, which dies by SIGKILL at points that a test names.

    python learner_process.py trainer ROOT        runs the loop to max_steps
    python learner_process.py io ROOT FD          is started by it

A file `ROOT/die/<event>-<n>` kills the process at the n-th such event of the run (acks of message n, publishes of
record n, emitted steps, pushes of version n, drafts of its checkpoint, `rank1-<n>`: step n on rank 1); it is removed first, so every point kills once.
`ROOT/slow/draft-<n>`: that checkpoint is not made whole before the next step is trained and pushed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swarmq.broker import Depth
from swarmq.broker.deliveries import KEY_HEADER, Arrival, Deliveries, Delivery
from swarmq.cli.common import errors_as_lines
from swarmq.config import SwarmJob
from swarmq.messages import Event, Message, StepReport, encode


def die_at(root: Path, event: str) -> None:
    point = root / "die" / event
    if point.exists():
        point.unlink()
        with (root / "died").open("a") as file:
            file.write(f"{event}\n")
        os.kill(os.getpid(), signal.SIGKILL)


def put(root: Path, queue: str, message: Message) -> None:
    """Append a message to a queue's folder."""
    folder = root / "queues" / queue
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.stem) for path in folder.glob("*.msg")), default=0)
    (folder / f"{number:06d}.new").write_bytes(encode(message))
    (folder / f"{number:06d}.new").rename(folder / f"{number:06d}.msg")


def freeze_at(root: Path, event: str) -> None:
    """Stand still where `ROOT/freeze/<event>-<n>` says so, once, until somebody sends SIGCONT."""
    point = root / "freeze" / event
    if point.exists():
        point.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


class FolderQueue:
    """What a consumer has open of a queue."""

    def __init__(self, root: Path, queue: str) -> None:
        self.root = root
        self.queue = queue

    async def ack(self, tag: int, *, through: bool) -> None:
        die_at(self.root, f"ack-{tag}")
        (self.root / "queues" / self.queue / f"{tag:06d}.msg").unlink(missing_ok=True)


class FolderBroker:
    """One file per message; acknowledged ones are removed. Enough of a broker for one learner."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FolderBroker]:
        yield self

    async def declare(
        self, run: str, *, policies: Iterable[str], kinds: Iterable[str], replicas: int | None = None
    ) -> None:
        pass

    async def publish(self, queue: str, message: Message, *, deadline_s: float | None = None) -> None:
        if isinstance(message, StepReport):
            die_at(self.root, f"publish-{message.record}")
        put(self.root, queue, message)

    @asynccontextmanager
    async def consume(self, queue: str, *, prefetch: int) -> AsyncIterator[Deliveries]:
        deliveries = Deliveries(self._bury)
        for path in sorted((self.root / "queues" / queue).glob("*.msg")):
            opened = FolderQueue(self.root, queue)
            deliveries.put(Arrival(opened, int(path.stem), path.read_bytes(), {KEY_HEADER: path.stem}, False, queue))
        yield deliveries

    async def depths(self, queues: Iterable[str]) -> dict[str, Depth]:
        ready = {queue: len(list((self.root / "queues" / queue).glob("*.msg"))) for queue in queues}
        return {queue: Depth(ready=count, consumers=0) for queue, count in ready.items()}

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        await delivery.ack()

    async def emit(self, event: Event) -> bool:
        if event.name == "step":
            die_at(self.root, f"step-{event.fields['version']}")
            with (self.root / "steps.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(event.fields) + b"\n")
        return True

    async def _bury(self, arrival: Arrival, reason: str) -> None:
        raise AssertionError(reason)


class Report(NamedTuple):
    pause_s: float = 0.0
    total_s: float = 0.0
    pauses: dict[str, float] = {}  # noqa: RUF012
    methods: dict[str, str] = {}  # noqa: RUF012
    replaced: tuple[str, ...] = ()


class Recorder:
    """Pushes nowhere."""

    def __init__(self, root: Path) -> None:
        self.root, self.failing = root, dict[str, str]()

    def push(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> Report:
        die_at(self.root, f"push-{version}")
        with (self.root / "pushed").open("a") as file:
            file.write(f"{version}\n")
        freeze_at(self.root, f"pushed-{version}")
        return Report()

    def ensure(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> Report:
        return Report()

    def repair(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        pass


def die_in_drafts(root: Path) -> None:
    """A draft has its files then, and nothing yet says that they are whole."""
    from swarmq.learner.checkpoint import save_load

    seal = save_load._seal

    def seal_or_die(draft: save_load.CheckpointDraft) -> None:
        if (root / "slow" / f"draft-{draft.version}").exists():
            while str(draft.version + 1) not in (root / "pushed").read_text().split():
                time.sleep(0.01)
        die_at(root, f"draft-{draft.version}")
        seal(draft)

    save_load._seal = seal_or_die


def die_in_steps(root: Path, trainer: Any) -> None:
    """Rank 0 waits for this one's gradient then."""
    accumulate = trainer.accumulate

    def accumulate_or_die(*args: Any, **kwargs: Any) -> Any:
        die_at(root, f"rank{os.environ['RANK']}-{trainer.version + 1}")
        return accumulate(*args, **kwargs)

    trainer.accumulate = accumulate_or_die


def trainer(root: Path) -> None:
    from swarmq.learner.distributed.processes import is_main
    from swarmq.learner.distributed.rendezvous import leave_group
    from swarmq.learner.feed.ipc import FeederLink, StopSignal
    from swarmq.learner.main import join_ranks
    from swarmq.learner.store.writer_lock import hold_lock
    from swarmq.learner.train.gpu_errors import map_gpu_errors
    from swarmq.learner.train.loop import Learner

    die_in_drafts(root)
    own, stop = (SwarmJob.load(root / "job.toml"), "main") if is_main() else None, StopSignal()
    with stop.handle_signals(), join_ranks(own) as (job, policy), map_gpu_errors("the learner"):
        if not is_main():
            learner = Learner(job, policy, pusher=None, stop=stop)
            die_in_steps(root, learner.trainer)
            learner.run(None)
        else:
            with hold_lock(job.run_folder.path / "main" / "lock"):
                learner = Learner(job, policy, pusher=Recorder(root), stop=stop)
                with FeederLink(learner.hello, stop, command=[sys.executable, __file__, "io", str(root)]) as link:
                    learner.run(link)
        train = job.policies[policy].train
        assert train.lora or train.advantage == "gae" or "peft" not in sys.modules, (
            "seconds of each start, for a learner of all weights"
        )
        del learner
        leave_group()


def io(root: Path) -> None:
    from swarmq.learner.feed import process

    process.main(lambda _: FolderBroker(root).open())


if __name__ == "__main__":
    with errors_as_lines():
        {"trainer": trainer, "io": io}[sys.argv[1]](Path(sys.argv[2]))
