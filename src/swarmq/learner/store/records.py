"""What the learner's two processes say to each other, and what they write into the batch log. No torch in here.

trainer --Hello, Next, Stepped, Phase, Kept, Stop-->  I/O process
trainer <--Batch, Save, Halt, Waiting, Stopped, Failed-- I/O process
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from swarmq.config import SwarmJob, Train, rename_former
from swarmq.messages import Rollout

SCHEMA = 1
"""Version of the formats of batch log and checkpoint. A reader accepts its own and older ones."""
ADAPTER_FILE = Path("adapter", "adapter.safetensors")
"""Adapters' file within a checkpoint, in a folder of its own: vLLM takes any safetensors file beside the model's for the model's."""
ADAPTER_SETTINGS_KEY = "train.lora"
"""Key of the LoRA settings in the metadata of the adapters' file."""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose batch log or checkpoint this is."""

    run: str
    policy: str
    model: str

    @classmethod
    def of(cls, job: SwarmJob, policy: str) -> RunIdentity:
        model = job.policies[policy].model
        return cls(run=job.run, policy=policy, model=str(Path(model).resolve()) if Path(model).is_dir() else model)

    def difference(self, other: RunIdentity) -> str:
        """What differs, in words; empty when both are the same."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return ", ".join(
            f"{name} is {theirs!r} there and {ours!r} here" for name, ours, theirs in pairs if ours != theirs
        )


class EpisodeSums(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sums over the scored episodes of one kind that the learner consumed, those dropped for equal rewards included."""

    episodes: int = 0
    reward: float = 0.0
    judged: int = 0
    """Episodes with a success flag."""
    successes: int = 0

    def __add__(self, other: EpisodeSums) -> EpisodeSums:
        return EpisodeSums(
            episodes=self.episodes + other.episodes,
            reward=self.reward + other.reward,
            judged=self.judged + other.judged,
            successes=self.successes + other.successes,
        )


class BatchIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a log record that is read at every start: small, not compressed."""

    record: int
    """1, 2, 3, ... without a gap."""
    version: int
    """Weight version after the step; a record of drops alone repeats the version before it."""
    trained: tuple[str, ...] = ()
    dropped: dict[str, str] = {}
    """episode_id -> reason."""
    carry: dict[str, float] = {}
    """Kind -> groups the task mix still owes it."""
    baselines: dict[str, float] = {}
    """What the `ema` advantage compares with after this record."""
    tally: dict[str, EpisodeSums] = {}
    groups_equal: int = 0
    """Groups dropped because their rewards were equal."""
    at: float = 0.0
    """Unix time, for people."""
    control: int = 0
    """Number of the control state in effect: 0 before anything was changed while the run was up."""
    mix: dict[str, float] = {}
    """Kind -> its share of this batch."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the batch log. `episodes` and `settings` are empty in a record of drops alone."""

    index: BatchIndex
    episodes: tuple[Rollout, ...] = ()
    """The members of a group stand together."""
    settings: Train | None = None
    """In effect for this step, so that a replay repeats it."""
    baselines: dict[str, float] = {}
    """What the `ema` advantage of this step compares with."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First frame: the trainer has the weights of `version` and wants the batches after it."""

    job: SwarmJob
    policy: str
    version: int
    vocab_size: int
    max_length: int | None = None
    again: bool = False
    """An I/O process of this trainer has run before, so a broker that is away is waited for."""


class RequestBatch(msgspec.Struct, frozen=True, kw_only=True, tag="next"):
    """The trainer is free."""


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    """The batch of `version` is trained and its weights are pushed."""

    version: int
    fields: dict[str, Any] = {}


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    phase: str


class Warn(msgspec.Struct, frozen=True, kw_only=True, tag="warn"):
    """Something people should know."""

    text: str


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """A checkpoint was written; the oldest one kept is `oldest`."""

    oldest: int
    asked: int = 0
    """Number of the `Save` that asked for it; 0 where it was due anyway."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Publish what is owed, then end."""


class BatchReady(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    record: bytes
    """A `BatchRecord`, encoded."""
    replayed: bool
    """Read from the log after a restart, not from the queue."""
    figures: dict[str, Any] = {}
    """Of the batch alone, for the trackers."""


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Write a checkpoint now."""

    asked: int


class TrainingDone(msgspec.Struct, frozen=True, kw_only=True, tag="halt"):
    """The last step is done."""


class QueueEmpty(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """Everything logged is replayed, and the next batch is not full yet."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag="stopped"):
    pass


class FeederFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The I/O process cannot go on, for a reason a person must see."""

    text: str
    for_good: bool = False
    """Nor could another one in its place."""


ToIO = Hello | RequestBatch | StepDone | PhaseChange | Warn | CheckpointSaved | Stop
ToTrainer = BatchReady | SaveCheckpoint | TrainingDone | QueueEmpty | Stopped | FeederFailed

_encoder = msgspec.msgpack.Encoder()
_record = msgspec.msgpack.Decoder(BatchRecord)


def encode_record(record: BatchRecord) -> bytes:
    return _encoder.encode(record)


def decode_record(body: bytes) -> BatchRecord:
    """Decode a record of the batch log, also one whose settings have former names."""
    try:
        return _record.decode(body)
    except msgspec.ValidationError:
        tree = msgspec.msgpack.decode(body)
        if isinstance(tree, dict) and isinstance(settings := tree.get("settings"), dict):
            rename_former(settings, "policies.*.train")
        return _record.decode(msgspec.msgpack.encode(tree))
