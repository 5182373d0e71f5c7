"""Every record that crosses a process, and the one way to encode it.

Records are frozen msgspec structs, msgpack on the wire, tagged by `type`. Unknown fields are ignored on read so
that a newer writer does not break an older reader; an unknown tag or a newer `schema` is an error, and its message
goes to the dead-letter queue. Token ids and log-probabilities travel as packed little-endian int32 and float32.

    client  --EpisodeBegin, EpisodeEnd-->  in
    proxy   --Turn, Served-->              in
    learner --Consumed-->                  in
    collector --Episode-->  <policy>.ready       collector --Ticket-->  tickets.<kind>
    feeder    --Task-->     tasks.<kind>         everybody --Event-->   swarmq.events
    operator  --Command, eval Task-->  control   collector --Control--> <policy>.control
    collector --Task-->     eval.<kind>
"""

from __future__ import annotations

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
"""Version of the wire format. A reader accepts its own and older ones."""

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Largest record we publish. RabbitMQ 4 closes the channel above 16 MiB."""

MAX_LOGPROB = 1e-3
"""Rounding lets an engine report a log-probability a little above 0, not more."""

MIN_LOGPROB = -104.0
"""Below the logarithm of the smallest positive float32: no sampler draws a token of such a probability. vLLM writes -9999 for none."""

MAX_REWARD = 1e6
"""Largest reward, either way. The others of its batch would drown in a larger one, and the learner computes in float32."""

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
"""Runs, policies and kinds name queues: lower case, digits and dashes, at most 40."""

EQUAL_REWARDS = "equal_rewards"
"""Why a learner drops a group whose members it cannot tell apart; the collector counts these."""

RESPONSE_ID_PREFIX = "resp_"
"""What a call id is told with as the id of a response, by which clients know such ids."""

OBSERVED_HEADER = "x-swarmq-observed"
"""Header of a request whose client will name the call in `EpisodeEnd.received` if its answer arrives."""

Mode = Literal["train", "eval"]
Status = Literal["finished", "aborted", "failed"]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of what is sent. `run` is in every record so that a stray one is recognised."""

    schema: int = SCHEMA
    run: str


class Slot(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The thing that is to be trained once: one repeat of a task in one epoch."""

    task_id: str
    repeat: int = 0
    epoch: int = 0

    @property
    def id(self) -> str:
        return f"{self.task_id}/{self.repeat}/{self.epoch}"

    @property
    def group_id(self) -> str:
        """Slots that share a baseline: all repeats of one task in one epoch."""
        return f"{self.task_id}/{self.epoch}"


class EpisodeBegin(Record, frozen=True, kw_only=True, tag="begin"):
    """client -> in: one attempt at a slot starts."""

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
    """Sampled tokens [start, end) of a turn came from weight version `version`."""

    version: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    start: int
    end: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters that were in effect, after overrides."""

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
    """Token id -> what was added to its logit."""
    stop: tuple[str, ...] = ()
    grammar: str = ""
    """Kind and digest of what the answer was held to."""
    others: tuple[str, ...] = ()
    """Names of what else changed the distribution."""


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds, measured by the proxy's monotonic clock; `began_at` is Unix time for people."""

    began_at: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


class Turn(Record, frozen=True, kw_only=True, tag="turn"):
    """proxy -> in: one model call and exactly the tokens that were sampled.

    The prompt is the first `shared` tokens of the parent's full sequence (its prompt and its sampled tokens)
    followed by `prompt_ids`; without a parent `shared` is 0 and `prompt_ids` is the whole prompt.
    """

    episode_id: str
    policy: str
    call_id: str
    """Unique within the episode, one per sampled choice."""
    mode: Mode = "train"
    request_id: str
    """The same for all choices of one HTTP request."""
    retry: int = 0
    """How often the client library had sent this request before."""
    counts_retries: bool = False
    """The client library says so with every request: at 0, an equal request is meant and no repeat."""
    receipt: bool = False
    """The proxy will say in a `Served` whether the answer was sent. False before proxies did: nobody will."""
    observed: bool = False
    """The client watches its agent's calls: its end names this one in `received` if the agent got the answer."""
    request_digest: str = ""
    """Equal for two sendings of the same request: how a retry's orphan is recognised."""
    parent: str | None = None
    """Where the first tokens of the prompt are: what it continues, an equal request, or one that begins alike."""
    shared: int = 0
    begins: bool = False
    """No earlier turn was to be continued: it only has the parent's first tokens."""
    prompt_ids: bytes
    """Packed int32, the tokens after the shared ones."""
    sampled_ids: bytes
    """Packed int32."""
    logprobs: bytes
    """Packed float32, natural log, one per sampled token, of the distribution that was sampled."""
    versions: tuple[VersionSpan, ...] = ()
    sampling: Sampling = Sampling()
    finish_reason: str = "stop"
    agent: str | None = None
    client_id: str = ""
    """Whose key it was called with."""
    branch: str | None = None
    """Why no earlier turn could be continued, when one was expected (`history_edited`, `drift`, ...)."""
    repaired: bool = False
    """A fresh rendering would have given other tokens; the recorded ones were kept."""
    timings: Timings = Timings()
    messages: bytes = b""
    """JSON list of the chat messages this turn added, its answer last. For people; nothing computes with it."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the whole prompt, the shared ones included."""
        return self.shared + len(self.prompt_ids) // 4

    @property
    def num_sampled(self) -> int:
        return len(self.sampled_ids) // 4


class RefusedTurn(Record, frozen=True, kw_only=True, tag="refused_turn"):
    """What a reader of `in` gets in place of a turn that cannot be used: its episode is not whole."""

    episode_id: str
    call_id: str
    reason: str


class DeliveryReport(Record, frozen=True, kw_only=True, tag="served"):
    """proxy -> in: which recorded answers were sent to their agents, and which never will be. Behind the answers, so that
    no agent waits for it."""

    served_id: str
    sent: dict[str, tuple[str, ...]] = {}
    """Episode -> ids of calls whose answers left to the last byte."""
    withdrawn: dict[str, tuple[str, ...]] = {}
    """Episode -> ids of calls whose agents got an error or had gone; their turns may be in the queue all the same."""


class EpisodeEnd(Record, frozen=True, kw_only=True, tag="end"):
    """client -> in: how an attempt ended, for all of its policies at once."""

    episode_id: str
    status: Status
    rewards: dict[str, float] = {}
    """Policy -> reward. Empty unless finished."""
    agent_rewards: dict[str, dict[str, float]] = {}
    """Policy -> agent tag -> reward, where agents of one policy are credited apart."""
    call_rewards: dict[str, float] = {}
    """call_id -> reward."""
    success: bool | None = None
    metrics: dict[str, float] = {}
    metadata: dict[str, str] = {}
    calls: tuple[str, ...] | None = None
    """The call ids whose answers the agent received, where whoever ends the episode knows all of them: no other is kept."""
    received: tuple[str, ...] | None = None
    """The call ids of which the client saw its agent receive the answer; it speaks for the calls that are `observed`.
    None: the client did not look."""
    reason: str = ""
    final: bool = False
    """No further attempt at the slot will come, though this one has no reward: neither its group nor its evaluation round need wait for it."""
    client_id: str = ""


class Rollout(Record, frozen=True, kw_only=True, tag="episode"):
    """collector -> <policy>.ready: all that a learner needs of one finished episode.

    The members of a group are published one after another; `group_members` says how many there are.
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
    """Recorded answers that its agent did not receive: they are not among the turns."""
    uncredited: dict[str, float] = {}
    """Rewards of the end for calls that no policy is trained on."""
    turns: tuple[Turn, ...]


class StepReport(Record, frozen=True, kw_only=True, tag="consumed"):
    """learner -> in: one optimizer step was logged, and what became of the episodes it took. Of no episode at all: the
    learner waits and nothing comes; what it has not reported is to be sent once more."""

    policy: str
    record: int = 0
    """Number of the batch-log record; episodes may be dropped between two steps, so one version has several."""
    version: int
    """Weight version after the step."""
    trained: tuple[str, ...]
    dropped: dict[str, str] = {}
    """episode_id -> reason."""


class Ticket(Record, frozen=True, kw_only=True, tag="ticket"):
    """collector -> tickets.<kind>: permission to begin one episode of this kind."""

    ticket_id: str
    kind: str
    group_size: int | None = None
    """Attempts that make a group of this kind now; None leaves it to the invite."""
    proxies: tuple[str, ...] = ()
    """Base urls of the run's proxies now; empty leaves them to the invite."""


class Task(Record, frozen=True, kw_only=True, tag="task"):
    """feeder -> tasks.<kind>: one slot to attempt, held unacknowledged by a worker until it has ended."""

    slot: Slot
    kind: str
    group_size: int
    mode: Mode = "train"
    attempt: int = 0
    payload: msgspec.Raw = msgspec.Raw(b"\xc0")
    """msgpack of what the worker's function gets; nothing of swarmq looks inside."""
    seal: bytes = b""
    """Proves to the collector that it was fed, when an invited client gives it back (`keys.seal_task`)."""


Action = Literal["set", "stop", "pause", "drain", "resume", "checkpoint"]
Pace = Literal["running", "paused", "draining"]


class Command(Record, frozen=True, kw_only=True, tag="command"):
    """operator -> control: change the run while it is up. Obeyed once however often it is sent."""

    command_id: str
    action: Action
    settings: dict[str, Any] = {}
    """Path in the job -> new value; all of them are accepted or none. Of `stop`: policy -> its last step, None for the present one."""
    sender: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that was changed while the run was up."""

    number: int
    """Of the control state that it came with."""
    path: str
    before: Any
    value: Any
    base: Any
    """What the job file says; once that is edited, the file counts again."""
    from_step: dict[str, int] = {}
    """Policy -> first step with the new value; empty: the next that begins."""
    from_grant: int = 0
    """The first batch whose tickets are granted by it, counted by the collector."""


class Control(Record, frozen=True, kw_only=True, tag="control"):
    """collector -> <policy>.control: the whole of what is asked of a learner now. The highest number counts."""

    number: int
    changes: tuple[Change, ...] = ()
    lent: tuple[str, ...] = ()
    """Kinds that have run dry and whose share the others have."""
    pace: Pace = "running"
    checkpoints: int = 0
    """How many checkpoints were asked for since the run began."""
    command_id: str = ""
    """The command that brought this number; empty where the collector decided by itself."""


EventName = Literal[
    "state", "step", "weights", "episode", "eval", "stage", "warning", "control", "evaluated", "refused"
]


class Event(Record, frozen=True, kw_only=True, tag="event"):
    """daemon -> swarmq.events: something a person or a monitor may want to know. Best effort, not durable."""

    source: str
    """Who says so: `collector`, `learner.<policy>`, `proxy.<n>`, `engine.<policy>.<n>`, `client.<id>`."""
    name: EventName
    at: float
    """Unix time."""
    fields: dict[str, Any] = {}


Message = (
    EpisodeBegin
    | Turn
    | RefusedTurn
    | DeliveryReport
    | EpisodeEnd
    | Rollout
    | StepReport
    | Ticket
    | Task
    | Command
    | Control
    | Event
)
InboxMessage = EpisodeBegin | Turn | RefusedTurn | DeliveryReport | EpisodeEnd | StepReport
"""What the collector reads from `in`."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a record. Raises MessageError if it is larger than MAX_MESSAGE_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"{type(message).__name__} of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}: "
            "shorten the episode's metadata or its turns"
        )
    return body


def decode(body: bytes) -> Message:
    """The record in `body`, checked. Raises MessageError with the reason."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{len(body)} bytes are over the limit of {MAX_MESSAGE_BYTES}: no swarmq sent this")
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a swarmq record: {error}") from error
    if message.schema > SCHEMA:
        raise MessageError(f"schema {message.schema} is newer than this reader's {SCHEMA}: upgrade swarmq")
    check(message)
    return message


def check(message: Message) -> None:
    """Raise MessageError where fields of a record contradict each other or hold no finite number."""
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
    if turn.shared < 0 or (turn.parent is None and turn.shared):
        raise MessageError(f"{where}: {turn.shared} shared tokens with parent {turn.parent}")
    if min(unpack_ids(turn.prompt_ids), default=0) < 0 or min(unpack_ids(turn.sampled_ids), default=0) < 0:
        raise MessageError(f"{where}: negative token id")
    if not math.isfinite(turn.sampling.temperature):
        raise MessageError(f"{where}: temperature {turn.sampling.temperature} is not finite")
    logprobs = unpack_floats(turn.logprobs)
    if not math.isfinite(sum(logprobs)) or not are_valid_logprobs(
        min(logprobs, default=0.0), max(logprobs, default=0.0)
    ):
        wrong = next(logprob for logprob in logprobs if not are_valid_logprobs(logprob))
        raise MessageError(f"{where}: a log-probability is {wrong:g}, outside [{MIN_LOGPROB:g}, 0] or not finite")
    if turn.versions:
        edges = [0, *(span.end for span in turn.versions)]
        if [span.start for span in turn.versions] != edges[:-1] or edges[-1] != turn.num_sampled:
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
    """`rewards`: path -> reward."""
    for of in rewards:
        for path, value in of.items():
            if said := find_reward_error(value):
                raise MessageError(f"{where}: {path} is {value:g}, {said}")


def find_reward_error(value: float) -> str:
    """Why nothing can be learned from a reward; empty where something can. The same for clients, proxies, collector and learner."""
    if not math.isfinite(value):
        return "not a finite number"
    return f"beyond {MAX_REWARD:g}: scale rewards" if abs(value) > MAX_REWARD else ""


def are_valid_logprobs(*logprobs: float) -> bool:
    """Whether a token can have been sampled with such log-probabilities."""
    return all(MIN_LOGPROB <= logprob <= MAX_LOGPROB for logprob in logprobs)


def idempotency_key(message: Message) -> str:
    """The idempotency key: equal for two sendings of the same fact, different for different facts."""
    match message:
        case EpisodeBegin():
            return f"{message.episode_id}:begin"
        case Turn() | RefusedTurn():
            return f"{message.episode_id}:{message.call_id}"
        case DeliveryReport():
            return f"served:{message.served_id}"
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
        case Control():
            return f"control:{message.number}"
        case Event():
            return f"{message.source}:{message.name}:{message.at}"


def new_id() -> str:
    """A UUIDv7: sorts by time of making (RFC 9562), so logs and ids agree about order."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def created_at(made_id: str) -> float | None:
    """Unix time at which `new_id` made it; None for an id that something else made."""
    try:
        value = uuid.UUID(made_id)
    except ValueError:
        return None
    return (value.int >> 80) / 1000 if value.version == 7 else None


def pack_ids(ids: Sequence[int]) -> bytes:
    """Packed little-endian int32. Raises MessageError for an id that does not fit."""
    try:
        return _little_endian(array("i", ids)).tobytes()
    except OverflowError as error:
        raise MessageError(f"a token id does not fit 32 bits: {error}") from error


def unpack_ids(packed: bytes) -> array[int]:
    """The ids in `packed`, an array('i')."""
    return _little_endian(array("i", packed))


def pack_floats(values: Sequence[float]) -> bytes:
    """Packed little-endian float32."""
    return _little_endian(array("f", values)).tobytes()


def unpack_floats(packed: bytes) -> array[float]:
    """The numbers in `packed`, an array('f')."""
    return _little_endian(array("f", packed))


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
