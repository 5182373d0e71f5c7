"""Records that the trainer and the batch feeder exchange, and the records of the batch log. Without torch.

trainer --Hello, RequestBatch, StepDone, PhaseChange, Warn, CheckpointSaved, EvaluationLogged, Stop-->  batch feeder
trainer <--BatchReady, EvaluationReady, SaveCheckpoint, TrainingDone, QueueEmpty, Stopped, FeederFailed-- batch feeder
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarmq.config import SwarmJob, Train, rename_former
from swarmq.estimates import MetricSum, add_metrics
from swarmq.learner.store.routing_shape import RoutingShape
from swarmq.messages import Evaluation, Rollout, Turn

SCHEMA = 1
"""Version of the formats of batch log and checkpoint. A reader accepts its own version and older ones."""
ADAPTER_FILE = Path("adapter", "adapter.safetensors")
"""Adapter file within a checkpoint. It has a folder of its own, because vLLM would load any safetensors file beside the model's
as model weights."""
ADAPTER_SETTINGS_KEY = "train.lora"
"""Key of the LoRA settings in the metadata of the adapters' file."""


class RunIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The run and policy to which a batch log or checkpoint belongs."""

    run: str
    policy: str
    model: str

    @classmethod
    def of(cls, job: SwarmJob, policy: str) -> RunIdentity:
        model = job.policies[policy].model
        return cls(run=job.run, policy=policy, model=str(Path(model).resolve()) if Path(model).is_dir() else model)

    def difference(self, other: RunIdentity) -> str:
        """Return the differences in words, or "" if there are none."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return ", ".join(
            f"{name} is {theirs!r} there and {ours!r} here" for name, ours, theirs in pairs if ours != theirs
        )


class EpisodeSums(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sums over the scored episodes of one kind that the learner took, including those dropped for equal rewards."""

    episodes: int = 0
    reward: float = 0.0
    judged: int = 0
    """Number of episodes with a success flag."""
    successes: int = 0
    metrics: dict[str, MetricSum] = {}
    """Sums of the metrics that the agents reported, which may differ from episode to episode; empty in records of earlier
    versions."""

    def __add__(self, other: EpisodeSums) -> EpisodeSums:
        return EpisodeSums(
            episodes=self.episodes + other.episodes,
            reward=self.reward + other.reward,
            judged=self.judged + other.judged,
            successes=self.successes + other.successes,
            metrics=add_metrics(self.metrics, other.metrics),
        )


class BatchIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Small, uncompressed part of a log record, which is read at every start."""

    record: int
    """Number of the record: 1, 2, 3, ... without gaps."""
    version: int
    """Weight version after the step; a record that only holds drops repeats the previous version."""
    trained: tuple[str, ...] = ()
    dropped: dict[str, str] = {}
    """Episode id -> reason."""
    carry: dict[str, float] = {}
    """Kind -> fraction of a group that the task mix still owes it."""
    baselines: dict[str, float] = {}
    """Baselines of the `ema` advantage after this record."""
    tally: dict[str, EpisodeSums] = {}
    groups_equal: int = 0
    """Number of groups dropped for equal rewards."""
    at: float = 0.0
    """Unix time, for display."""
    control: int = 0
    """Sequence number of the control state in effect; 0 before the first change of a setting during the run."""
    mix: dict[str, float] = {}
    """Kind -> share of this batch."""
    term: int = 0
    """Newest term of a rollout until this batch; 0 in a run without standby collectors."""


class MethodCode(msgspec.Struct, frozen=True, kw_only=True):
    """Code of a method of training."""

    kind: str
    """`loss`, `advantage`, `grouping`, `schedule`, `optimizer`, `filter` or `reward`."""
    name: str
    sha256: str
    """Hash of the source of its module."""
    source: str = ""
    """Source of its module; empty for a built-in method."""


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the batch log. `episodes` and `settings` are empty in a record that only holds drops."""

    index: BatchIndex
    episodes: tuple[Rollout, ...] = ()
    """Rollouts of the batch; members of a group are adjacent."""
    settings: Train | None = None
    """Settings of this step, with which a replay repeats it."""
    baselines: dict[str, float] = {}
    """Baselines of the `ema` advantage for this step."""
    methods: tuple[MethodCode, ...] = ()
    """Code of the methods that `settings` name; empty in records of earlier versions."""
    demonstrations: tuple[Rollout, ...] = ()
    """Demonstrations that were drawn for this step; their ids name file and line."""
    patches: dict[str, bytes] = {}
    """Digest of an image -> its patches, in an encoded record: there, images are without them, because a group shares images."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message: the trainer has the weights of `version` and wants the batches after it."""

    job: SwarmJob
    policy: str
    version: int
    vocab_size: int
    max_length: int | None = None
    routing: RoutingShape | None = None
    """Size of the routed experts that turns must have; None if they need none."""
    methods: tuple[MethodCode, ...] = ()
    """Code of the own methods that the settings name."""
    demonstrations: tuple[Rollout, ...] = ()
    """Demonstrations from which every step draws."""
    again: bool = False
    """Whether this trainer had a batch feeder before; the new one then waits for an unreachable broker instead of failing."""


class RequestBatch(msgspec.Struct, frozen=True, kw_only=True, tag="next"):
    """The trainer is ready for the next batch."""


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    """The batch of `version` is trained and its weights are pushed."""

    version: int
    fields: dict[str, Any] = {}


class PhaseChange(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    phase: str


class Warn(msgspec.Struct, frozen=True, kw_only=True, tag="warn"):
    """A warning to publish."""

    text: str


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """A checkpoint was written; `oldest` is the version of the oldest checkpoint kept."""

    oldest: int
    asked: int = 0
    """Sequence number of the `SaveCheckpoint` request; 0 for a regular checkpoint."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Request to publish all reports, then end."""


class BatchReady(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    record: bytes
    """An encoded `BatchRecord`."""
    replayed: bool
    """Whether the batch was read from the log after a restart, not from the queue."""
    figures: dict[str, Any] = {}
    """Metrics of the batch that need no model, for trackers."""


class EvaluationReady(msgspec.Struct, frozen=True, kw_only=True, tag="evaluated"):
    """Results of an evaluation round, for the trackers. The results of the next round follow after `EvaluationLogged`."""

    evaluation: Evaluation


class EvaluationLogged(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_logged"):
    """Trackers have the results of the round that began at this Unix time."""

    began_at: float


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Request to write a checkpoint now."""

    asked: int


class TrainingDone(msgspec.Struct, frozen=True, kw_only=True, tag="halt"):
    """The last step is done."""


class QueueEmpty(msgspec.Struct, frozen=True, kw_only=True, tag="waiting"):
    """All logged batches are replayed, and the next batch is not full yet."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag="stopped"):
    pass


class FeederFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The batch feeder cannot go on; `text` says why."""

    text: str
    for_good: bool = False
    """Whether a restarted batch feeder would fail, too."""


ToIO = Hello | RequestBatch | StepDone | PhaseChange | Warn | CheckpointSaved | EvaluationLogged | Stop
ToTrainer = BatchReady | EvaluationReady | SaveCheckpoint | TrainingDone | QueueEmpty | Stopped | FeederFailed

_encoder = msgspec.msgpack.Encoder()
_record = msgspec.msgpack.Decoder(BatchRecord)


def encode_record(record: BatchRecord) -> bytes:
    """Encode a record, with each distinct image once."""
    images = [image for episode in record.episodes for turn in episode.turns for image in turn.images]
    if images:
        patches = {image.digest: image.patches for image in images}
        record = msgspec.structs.replace(_set_patches(record, dict.fromkeys(patches, b"")), patches=patches)
    return _encoder.encode(record)


def decode_record(body: bytes) -> BatchRecord:
    """Decode a record of the batch log, also one with former names of settings."""
    try:
        record = _record.decode(body)
    except msgspec.ValidationError:
        tree = msgspec.msgpack.decode(body)
        if isinstance(tree, dict) and isinstance(settings := tree.get("settings"), dict):
            rename_former(settings, "policies.*.train")
        record = _record.decode(msgspec.msgpack.encode(tree))
    if record.patches:
        record = msgspec.structs.replace(_set_patches(record, record.patches), patches={})
    return record


def _set_patches(record: BatchRecord, patches: Mapping[str, bytes]) -> BatchRecord:
    """Return the record with these patches in its images, by digest."""
    replace = msgspec.structs.replace

    def change(turn: Turn) -> Turn:
        return replace(turn, images=tuple(replace(image, patches=patches[image.digest]) for image in turn.images))

    episodes = (replace(episode, turns=tuple(map(change, episode.turns))) for episode in record.episodes)
    return replace(record, episodes=tuple(episodes))
