"""Every record that is sent between processes, and its encoding.

Records are frozen msgspec structs, encoded as msgpack and tagged by `type`. Readers ignore unknown fields, so that a newer
writer does not break an older reader. An unknown tag or a newer `schema` is an error, and the message goes to the dead-letter
queue. Token ids and log-probabilities travel as packed little-endian int32 and float32.

    client  --EpisodeBegin, EpisodeEnd-->  in
    proxy   --Turn, Served-->              in
    learner --Consumed-->                  in
    collector --Episode-->  <policy>.ready       collector --Ticket-->  tickets.<kind>
    feeder    --Task-->     tasks.<kind>         everybody --Event-->   swarmq.events
    operator  --Command, eval Task-->  control   collector --Control--> <policy>.control
    engine, proxy on another host --Registration--> control
    collector --Task-->     eval.<kind>           collector --Evaluation--> <policy>.control
    collector --LogEntry--> log (a stream)        all collectors of a run with standbys
    proxy     --Turn-->     turns.<n>             collector --Fence--> turns.<n>: instead of `in`, if the collector has several processes
    study     --TrialOffer--> tasks.trials        worker --TrialReport--> in: of a study, which has queues like those of a run
    everybody --MessageBatch--> in, turns.<n>, <policy>.ready: several of these records from one process (broker/message_batches.py)
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from swarmq.errors import MessageError

SCHEMA = 1
"""Version of the wire format. A reader accepts its own version and older ones."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Maximum size of a published record. RabbitMQ 4 closes the channel on a message above 16 MiB."""

MAX_BATCH = 1000
"""Maximum number of messages in a batch that a reader accepts."""

MAX_IMAGE_BYTES = 6 * 1024 * 1024
"""Maximum size of all images that an episode's turns of one policy carry, compressed, so that its rollout fits a message."""

MAX_LOGPROB = 1e-3
"""Largest log-probability that is accepted: rounding lets an engine report one slightly above 0."""

MIN_LOGPROB = -104.0
"""Smallest log-probability that is accepted, below the logarithm of the smallest positive float32: no sampler draws a less probable
token. vLLM reports -9999 where it has no log-probability."""

USUAL_LOGPROBS = bytes([0x00, *range(0x80, 0xC2)])
"""Last bytes (the sign and seven bits of the exponent) of little-endian float32 in (-32, 1e-37): turns whose log-probabilities all end
with one of them are valid, and this is known a hundred times faster than by comparing each."""

MAX_REWARD = 1e6
"""Largest absolute reward. A larger one would drown the other rewards of its batch, and the learner computes in float32."""

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
"""Pattern of the names of runs, policies and kinds, which become parts of queue names."""

EQUAL_REWARDS = "equal_rewards"
"""Reason with which a learner drops a group of equal rewards. The collector counts these groups."""

RESPONSE_ID_PREFIX = "resp_"
"""Prefix of call ids in objects of the Responses API."""

OBSERVED_HEADER = "x-swarmq-observed"
"""Header of requests whose client will list the call in `EpisodeEnd.received` once its answer has arrived."""

Mode = Literal["train", "eval"]
Status = Literal["finished", "aborted", "failed"]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all records. Every record names its run, so that a record that strayed into another run is recognised."""

    schema: int = SCHEMA
    run: str


class Slot(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The unit that is trained exactly once: one repeat of a task in one epoch."""

    task_id: str
    repeat: int = 0
    epoch: int = 0

    @property
    def id(self) -> str:
        return f"{self.task_id}/{self.repeat}/{self.epoch}"

    @property
    def group_id(self) -> str:
        """Id shared by all repeats of one task in one epoch, whose rewards are each other's baseline."""
        return f"{self.task_id}/{self.epoch}"


class EpisodeBegin(Record, frozen=True, kw_only=True, tag="begin"):
    """client -> in: the begin of an episode, which is one attempt at a slot."""

    episode_id: str
    slot: Slot
    kind: str
    group_size: int
    policies: tuple[str, ...]
    mode: Mode = "train"
    client_id: str
    code_version: str = ""
    attempt: int = 0
    ticket_id: str | None = None
    idle_timeout_s: float | None = msgspec.field(default=None, name="silence_s")
    """Seconds without a sign of life after which the collector expires the episode; None: the run's `groups.idle_timeout_s`."""


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Sampled tokens [start, end) of a turn and the weight version that sampled them."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters that were in effect for a turn, after the run's overrides."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[str, float] = {}
    """Token id -> value added to its logit."""
    stop: tuple[str, ...] = ()
    grammar: str = ""
    """Kind and digest of the grammar that constrained the answer."""
    others: tuple[str, ...] = ()
    """Names of further parameters that changed the distribution."""


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Durations of a turn in seconds, by the proxy's monotonic clock; `began_at` is Unix time, for display."""

    began_at: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


class Image(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An image in a prompt, as the engine's processor prepared it for the model: the learner computes from the same pixels."""

    digest: str
    """SHA-256 of grid and patches; equal for images that are equal to the model."""
    offset: int
    """Index, in the whole prompt, of the first of its placeholder tokens."""
    length: int
    """Number of its placeholder tokens."""
    grid: tuple[int, int, int]
    """Number of patches in time, height and width."""
    patches: bytes
    """zstd of packed uint8 [patches, values of a patch]: pixels before rescaling and normalisation."""


class Turn(Record, frozen=True, kw_only=True, tag="turn"):
    """proxy -> in: one sampled answer with the exact tokens of prompt and answer.

    The prompt is the first `shared` tokens of the parent's full sequence (its prompt followed by its sampled tokens)
    followed by `prompt_ids`. Without a parent, `shared` is 0 and `prompt_ids` is the whole prompt.
    """

    episode_id: str
    policy: str
    call_id: str
    """Id of the turn, unique within the episode."""
    mode: Mode = "train"
    request_id: str
    """Id of the HTTP request, shared by all of its choices."""
    retry: int = 0
    """Number of times that the client library had sent this request before, by its own count."""
    counts_retries: bool = False
    """Whether the client library counts retries in every request, so that an equal request with retry 0 is a new request."""
    receipt: bool = False
    """Whether the proxy will say in a `DeliveryReport` whether the answer was sent; False if the proxy sends no reports."""
    observed: bool = False
    """Whether the client watches its agent's model calls and lists this one in `EpisodeEnd.received` if its answer arrives."""
    request_digest: str = ""
    """Digest of the request, equal for all transmissions of it. It serves to recognise the orphan turn of a request that was
    retried."""
    parent: str | None = None
    """Call id of the turn that holds the first tokens of the prompt: the turn that is continued, another choice or transmission
    of the same request, or a turn whose prompt has the same beginning."""
    shared: int = 0
    begins: bool = False
    """Whether the turn starts a conversation; its parent then only shares first tokens."""
    prompt_ids: bytes
    """Packed int32: the prompt tokens after the shared ones."""
    images: tuple[Image, ...] = ()
    """Images among these prompt tokens, in their order; those among the shared tokens are the parent's."""
    sampled_ids: bytes
    """Packed int32: the sampled tokens."""
    logprobs: bytes
    """Packed float32: natural log-probability of each sampled token under the distribution that was sampled from."""
    routed_experts: bytes = b""
    """Rows of expert ids, layer by layer, as uint8, or little-endian uint16 for more than 256 experts: for each token of `prompt_ids` and
    `sampled_ids` the experts to which the engine routed the token before it; the first token of a conversation has none before it. Empty
    unless `train.routing_replay`."""
    versions: tuple[VersionSpan, ...] = ()
    sampling: Sampling = Sampling()
    finish_reason: str = "stop"
    agent: str | None = None
    client_id: str = ""
    """Client whose API key the request carried."""
    branch: str | None = None
    """Reason why no earlier turn could be continued although a continuation was expected (`history_edited`, `drift`, ...)."""
    repaired: bool = False
    """Whether a fresh rendering would have given other tokens than the recorded ones, which were kept."""
    timings: Timings = Timings()
    messages: bytes = b""
    """JSON list of the chat messages that this turn added, its answer last. Only for display."""

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the whole prompt, including those shared with the parent."""
        return self.shared + len(self.prompt_ids) // 4

    @property
    def num_sampled(self) -> int:
        return len(self.sampled_ids) // 4

    @property
    def num_routed(self) -> int:
        """Number of rows of `routed_experts`, if it has any."""
        return self.num_prompt + self.num_sampled - max(self.shared, 1)

    def first_routed(self, count: int) -> bytes:
        """Return the first `count` rows of `routed_experts`."""
        return self.routed_experts[: count * (len(self.routed_experts) // self.num_routed)] if count else b""


class RefusedTurn(Record, frozen=True, kw_only=True, tag="refused_turn"):
    """Stand-in for an invalid turn, by which the collector learns that its episode is incomplete."""

    episode_id: str
    call_id: str
    reason: str


class DeliveryReport(Record, frozen=True, kw_only=True, tag="served"):
    """proxy -> in: which recorded answers were sent to their agents and which never will be. Published after the answers, so
    that no agent waits for it."""

    served_id: str
    sent: dict[str, tuple[str, ...]] = {}
    """Episode id -> call ids whose answers were sent to the last byte."""
    withdrawn: dict[str, tuple[str, ...]] = {}
    """Episode id -> call ids without an answer, because the agent got an error or had disconnected. Their turns may still be
    in the queue."""


class Fence(Record, frozen=True, kw_only=True, tag="fence"):
    """collector -> turns.<n>: comes back to the collector after all turns that were in the queue before it. Ends travel in another
    queue and would overtake turns."""

    fence_id: str


class EpisodeEnd(Record, frozen=True, kw_only=True, tag="end"):
    """client -> in: the outcome of an episode, for all of its policies at once."""

    episode_id: str
    status: Status
    rewards: dict[str, float] = {}
    """Policy -> reward; empty unless the episode is finished."""
    agent_rewards: dict[str, dict[str, float]] = {}
    """Policy -> agent tag -> reward, where agents of one policy are rewarded separately."""
    call_rewards: dict[str, float] = {}
    """Call id -> reward, where single model calls are rewarded separately."""
    success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, str] = {}
    calls: tuple[str, ...] | None = None
    """All call ids whose answers the agent received, if the sender knows all of them; other turns are then dropped."""
    received: tuple[str, ...] | None = None
    """Call ids whose answers the client saw arrive, among the turns marked `observed`; None if the client did not watch."""
    reason: str = ""
    final: bool = False
    """Whether no further attempt at the slot will come although this one has no reward, so that the group stops waiting for the
    slot."""
    client_id: str = ""


class Rollout(Record, frozen=True, kw_only=True, tag="episode"):
    """collector -> <policy>.ready: a finished episode with its turns and rewards, as a learner trains it.

    The members of a group are published one after another; `group_members` is their number.
    """

    policy: str
    episode_id: str
    slot: Slot
    kind: str
    group_id: str
    group_members: int
    group_size: int
    reward: float
    agent_rewards: dict[str, float] = {}
    call_rewards: dict[str, float] = {}
    success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, str] = {}
    client_id: str = ""
    code_version: str = ""
    attempt: int = 0
    orphan_turns: int = 0
    """Number of recorded answers that the agent did not receive; they are not among the turns."""
    uncredited: dict[str, float] = {}
    """Call id -> reward in the end record, for model calls that are not trained."""
    term: int = 0
    """Term of the collector that published this copy; 0 in a run without standby collectors. A learner refuses rollouts of an
    older term than the newest that it has seen."""
    turns: tuple[Turn, ...]


class StepReport(Record, frozen=True, kw_only=True, tag="consumed"):
    """learner -> in: what the learner did with the rollouts of one batch-log record. A report without rollouts says that the
    learner waits and gets no rollouts, so the collector must publish unreported rollouts again."""

    policy: str
    record: int = 0
    """Serial number of the batch-log record. A version may have several records, because rollouts may be dropped between two
    steps."""
    version: int
    """Weight version after the step."""
    trained: tuple[str, ...]
    dropped: dict[str, str] = {}
    """Episode id -> reason why the learner dropped its rollout."""


class Ticket(Record, frozen=True, kw_only=True, tag="ticket"):
    """collector -> tickets.<kind>: permission to begin one episode of the kind."""

    ticket_id: str
    kind: str
    group_size: int | None = None
    """Present group size of the kind; None: the size in the invite."""
    proxies: tuple[str, ...] = ()
    """Base URLs of the proxies that serve the run at present; empty: those in the invite."""


class Task(Record, frozen=True, kw_only=True, tag="task"):
    """feeder -> tasks.<kind>: one slot to attempt. A worker holds it unacknowledged until the attempt has ended."""

    slot: Slot
    kind: str
    group_size: int
    mode: Mode = "train"
    attempt: int = 0
    payload: msgspec.Raw = msgspec.Raw(b"\xc0")
    """msgpack of the object that the worker's function receives, opaque to swarmq."""
    seal: bytes = b""
    """Proof that the task was fed, checked by the collector when an invited client returns it (`keys.seal_task`)."""


Action = Literal["set", "stop", "pause", "drain", "resume", "checkpoint"]
Pace = Literal["running", "paused", "draining"]


class Command(Record, frozen=True, kw_only=True, tag="command"):
    """operator -> control: a change of the run while it is up. Applied once, however often it is delivered."""

    command_id: str
    action: Action
    settings: dict[str, Any] = {}
    """Path of a setting -> new value; either all are accepted or none. For `stop`: policy -> last step, None for the present step."""
    sender: str = ""


JoiningProcess = Literal["engine", "proxy"]


class Registration(Record, frozen=True, kw_only=True, tag="registration"):
    """engine or proxy on another host -> control: it joins or leaves the run. Applying a registration again changes nothing."""

    registration_id: str
    action: Literal["join", "leave"]
    process: JoiningProcess
    url: str
    """URL at which the run's other processes reach the engine or proxy."""
    policy: str = ""
    """Policy of the engine; empty for a proxy."""
    receiver_url: str = ""
    """URL of the weight receiver beside the engine; empty for a proxy."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that was changed while the run was up."""

    number: int
    """Serial number of the control state that introduced the change."""
    path: str
    before: Any
    value: Any
    base: Any
    """Value in the job file at the time of the change; once the file is edited, its value takes effect again."""
    from_step: dict[str, int] = {}
    """Policy -> first step with the new value; empty: the next step that begins."""
    from_grant: int = 0
    """For a change of the task mix: first batch (from 1) whose tickets are issued under the new mix, in the order in which
    the collector grants batches; 0 for other changes."""


class Control(Record, frozen=True, kw_only=True, tag="control"):
    """collector -> <policy>.control: the complete control state for learners. The state with the highest `number` is in
    effect."""

    number: int
    changes: tuple[Change, ...] = ()
    lent: tuple[str, ...] = ()
    """Dry kinds whose share of the mix goes to the other kinds for the time being."""
    pace: Pace = "running"
    checkpoints: int = 0
    """Number of checkpoints that operators have requested since the run began."""
    command_id: str = ""
    """Id of the command that led to this control state; empty if the collector decided without a command."""


class Evaluation(Record, frozen=True, kw_only=True, tag="evaluation"):
    """collector -> <policy>.control: the results of an evaluation round, for the learner's trackers.

    They travel in a durable queue and not as an event, because listeners miss events while they or the broker are away.
    """

    version: int
    """Newest weight version when the round began."""
    began_at: float
    """Unix time when the round began, unique in the run."""
    results: dict[str, Any]
    """Fields of the `evaluated` event."""


class LogEntry(Record, frozen=True, kw_only=True, tag="log"):
    """collector -> log: an entry of the log that all collectors of a run with standbys read (collector/decide/log.py)."""

    what: Literal["claim", "transaction", "join", "copy"]
    log: str = ""
    """Id of the log, chosen by the sender of its first claim; empty for `join`."""
    term: int = 0
    """Term of the sender's claim."""
    sender: str = ""
    """Id of the collector's process, for `claim` and `join`."""
    number: int = 0
    """Number of the transaction, or of the last transaction in the copy."""
    part: int = 0
    num_parts: int = 1
    """Number of entries among which the body is divided."""
    join: str = ""
    """Id of the request for a copy of the store, in `join` and in the `copy` that answers it."""
    body: bytes = b""
    """This entry's part of the transaction's rows (`store.encode_rows`) or of the copy, an SQLite file."""


class TrialOffer(Record, frozen=True, kw_only=True, tag="trial_offer"):
    """leader of a study -> tasks.trials: a trial to run. A worker holds it unacknowledged until the trial has ended."""

    copy_id: str
    """Id of this message. A leader that cannot know whether a trial was offered offers it again, under another id."""
    body: bytes
    """JSON of the trial (studies/records.py), opaque to the broker."""


class TrialReport(Record, frozen=True, kw_only=True, tag="trial_report"):
    """worker of a study -> in: a claim to a trial, a sign of life, or the trial's end."""

    report_id: str
    body: bytes
    """JSON of the report (studies/reports.py)."""


EventName = Literal[
    "state",
    "step",
    "weights",
    "episode",
    "eval",
    "stage",
    "warning",
    "control",
    "evaluated",
    "refused",
    "members",
    "members_wanted",
    "registration",
    "lease",
    "piece",
]


class Event(Record, frozen=True, kw_only=True, tag="event"):
    """daemon -> swarmq.events: something that happened, for people and monitors. Best effort, not durable."""

    source: str
    """Sender: `collector`, `learner.<policy>`, `proxy.<n>`, `engine.<policy>.<n>`, `client.<id>`, `host.<name>`, or of a
    study `study` and `files-<reader>`."""
    name: EventName
    at: float
    """Unix time at which the event was emitted."""
    fields: dict[str, Any] = {}


class PackedMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message of a batch, as it would be published alone."""

    kind: str
    """AMQP message type: the record's tag."""
    key: str
    """Idempotency key."""
    body: bytes


class MessageBatch(Record, frozen=True, kw_only=True, tag="batch"):
    """everybody -> in, turns.<n>, <policy>.ready: messages that one process published at about the same time, in their order.

    Not a `Message`: consumers get the messages in it. An older version parks it as a dead letter with an unknown type.
    """

    messages: tuple[PackedMessage, ...]


Message = (
    EpisodeBegin
    | Turn
    | RefusedTurn
    | DeliveryReport
    | Fence
    | EpisodeEnd
    | Rollout
    | StepReport
    | Ticket
    | Task
    | Command
    | Registration
    | Control
    | Evaluation
    | LogEntry
    | TrialOffer
    | TrialReport
    | Event
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_batch_decoder = msgspec.msgpack.Decoder(MessageBatch)


def encode(message: Message) -> bytes:
    """Return the record as bytes. Raises MessageError if they are more than MAX_MESSAGE_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"{type(message).__name__} of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}: "
            "shorten the episode's metadata or its turns"
        )
    return body


def decode(body: bytes) -> Message:
    """Decode and check the record in `body`. Raises MessageError with the reason."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{len(body)} bytes are over the limit of {MAX_MESSAGE_BYTES}: no swarmq sent this")
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a swarmq record: {error}") from error
    _check_schema(message)
    check(message)
    return message


def encode_batch(batch: MessageBatch) -> bytes:
    """Return the batch as bytes."""
    return _encoder.encode(batch)


def decode_batch(body: bytes) -> MessageBatch:
    """Decode a batch, but not the messages in it. Raises MessageError."""
    try:
        batch = _batch_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a batch of messages: {error}") from error
    _check_schema(batch)
    if not 0 < len(batch.messages) <= MAX_BATCH:
        raise MessageError(f"a batch of {len(batch.messages)} messages: no swarmq sent this")
    return batch


def _check_schema(record: Record) -> None:
    if record.schema > SCHEMA:
        raise MessageError(f"schema {record.schema} is newer than this reader's {SCHEMA}: upgrade swarmq")


def check(message: Message) -> None:
    """Raise MessageError if fields of the record contradict each other or a number is not finite."""
    match message:
        case Turn():
            _check_turn(message)
        case EpisodeEnd():
            _check_end(message)
        case EpisodeBegin():
            if (
                message.group_size < 1
                or not message.policies
                or not (message.idle_timeout_s is None or message.idle_timeout_s > 0)
            ):
                raise MessageError(
                    f"begin of {message.episode_id}: group_size, policies and idle_timeout_s must be positive"
                )
        case Rollout():
            _check_rewards(
                f"episode {message.episode_id}",
                {"reward": message.reward},
                {f"agent_rewards.{agent}": reward for agent, reward in message.agent_rewards.items()},
                {f"call_rewards.{call}": reward for call, reward in message.call_rewards.items()},
            )
            for turn in message.turns:
                _check_turn(turn)
        case _:
            pass


def _check_turn(turn: Turn) -> None:
    where = f"turn {turn.call_id} of {turn.episode_id}"
    if len(turn.prompt_ids) % 4 or len(turn.sampled_ids) % 4:
        raise MessageError(f"{where}: token ids are not whole int32 values")
    if len(turn.logprobs) != len(turn.sampled_ids):
        raise MessageError(f"{where}: {turn.num_sampled} sampled tokens but {len(turn.logprobs) / 4} log-probabilities")
    if turn.routed_experts and (turn.num_routed < 1 or len(turn.routed_experts) % turn.num_routed):
        raise MessageError(f"{where}: {len(turn.routed_experts)} bytes of routed experts for {turn.num_routed} tokens")
    if turn.shared < 0 or (turn.parent is None and turn.shared):
        raise MessageError(f"{where}: {turn.shared} shared tokens with parent {turn.parent}")
    if _has_negative(turn.prompt_ids) or _has_negative(turn.sampled_ids):
        raise MessageError(f"{where}: negative token id")
    end = turn.shared
    for image in turn.images:
        if image.offset < end or image.length < 1 or min(image.grid) < 1:
            raise MessageError(f"{where}: the images overlap each other or the shared tokens, or one is empty")
        end = image.offset + image.length
    if turn.images and end > turn.num_prompt:
        raise MessageError(f"{where}: an image ends at token {end} of a prompt of {turn.num_prompt}")
    if not math.isfinite(turn.sampling.temperature):
        raise MessageError(f"{where}: temperature {turn.sampling.temperature} is not finite")
    if turn.logprobs[3::4].translate(None, USUAL_LOGPROBS):
        for logprob in unpack_floats(turn.logprobs):
            if not are_valid_logprobs(logprob):
                raise MessageError(
                    f"{where}: a log-probability is {logprob:g}, outside [{MIN_LOGPROB:g}, 0] or not finite"
                )
    if turn.versions:
        starts, ends = [span.start for span in turn.versions], [span.end for span in turn.versions]
        if [*starts, turn.num_sampled] != [0, *ends]:
            raise MessageError(f"{where}: version spans {turn.versions} do not cover {turn.num_sampled} sampled tokens")


def _check_end(end: EpisodeEnd) -> None:
    where = f"end of {end.episode_id}"
    _check_rewards(
        where,
        {f"rewards.{policy}": reward for policy, reward in end.rewards.items()},
        {f"agent_rewards.{p}.{agent}": reward for p, by in end.agent_rewards.items() for agent, reward in by.items()},
        {f"call_rewards.{call}": reward for call, reward in end.call_rewards.items()},
    )
    for name, value in end.metrics.items():
        if not math.isfinite(value):
            raise MessageError(f"{where}: metrics.{name} is {value}, not a finite number")
    if end.status == "finished" and not end.rewards:
        raise MessageError(f"end of {end.episode_id}: finished, but no policy has a reward")


def _check_rewards(where: str, *rewards: dict[str, float]) -> None:
    """Raise MessageError for a reward that cannot be trained on; each of `rewards` maps paths to rewards."""
    for by_path in rewards:
        for path, value in by_path.items():
            if problem := find_reward_error(value):
                raise MessageError(f"{where}: {path} is {value:g}, {problem}")


def find_reward_error(value: float) -> str:
    """Return why a reward cannot be trained on, or "" if it can. Clients, proxies, collector and learner all use this check."""
    if not math.isfinite(value):
        return "not a finite number"
    return f"beyond {MAX_REWARD:g}: scale rewards" if abs(value) > MAX_REWARD else ""


def are_valid_logprobs(*logprobs: float) -> bool:
    """Return whether tokens can have been sampled with these log-probabilities."""
    return all(MIN_LOGPROB <= logprob <= MAX_LOGPROB for logprob in logprobs)


def idempotency_key(message: Message) -> str:
    """Return the idempotency key, which is equal for two transmissions of the same record and differs between records."""
    match message:
        case EpisodeBegin():
            return f"{message.episode_id}:begin"
        case Turn() | RefusedTurn():
            return f"{message.episode_id}:{message.call_id}"
        case DeliveryReport():
            return f"served:{message.served_id}"
        case Fence():
            return message.fence_id
        case EpisodeEnd():
            return f"{message.episode_id}:end"
        case Rollout():
            return f"{message.episode_id}:{message.policy}"
        case StepReport():
            return f"consumed:{message.policy}:{message.record or message.version}"
        case Ticket():
            return message.ticket_id
        case Task():
            return f"{message.slot.id}:{message.attempt}"
        case Command():
            return message.command_id
        case Registration():
            return message.registration_id
        case Control():
            return f"control:{message.number}"
        case Evaluation():
            return f"evaluation:{message.began_at}"
        case LogEntry():
            return f"log:{message.term}:{message.number}:{message.part}:{message.join or message.sender}"
        case TrialOffer():
            return message.copy_id
        case TrialReport():
            return message.report_id
        case Event():
            return f"{message.source}:{message.name}:{message.at}"


def new_id() -> str:
    """Return a new UUIDv7 (RFC 9562), so that ids sort by time of creation."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def created_at(record_id: str) -> float | None:
    """Return the Unix time at which `new_id` created the id, or None if the id is not a UUIDv7."""
    try:
        value = uuid.UUID(record_id)
    except ValueError:
        return None
    return (value.int >> 80) / 1000 if value.version == 7 else None


def digest_image(grid: tuple[int, int, int], patches: bytes) -> str:
    """Return the digest of an image. `patches`: not compressed."""
    return hashlib.sha256(msgspec.json.encode(grid) + patches).hexdigest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack ids as little-endian int32. Raises MessageError for an id that does not fit 32 bits."""
    try:
        return _little_endian(array("i", ids)).tobytes()
    except OverflowError as error:
        raise MessageError(f"a token id does not fit 32 bits: {error}") from error


def unpack_ids(packed: bytes) -> array[int]:
    """Return the ids in `packed` as an array('i')."""
    return _little_endian(array("i", packed))


def _has_negative(packed_ids: bytes) -> bool:
    """Return whether an id is negative: the sign is the top bit of an id's last byte. An array of them would take 50 times as long."""
    return not packed_ids[3::4].isascii()


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack values as little-endian float32."""
    return _little_endian(array("f", values)).tobytes()


def unpack_floats(packed: bytes) -> array[float]:
    """Return the values in `packed` as an array('f')."""
    return _little_endian(array("f", packed))


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
