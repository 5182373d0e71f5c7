"""The settings of a run: one typed object, TOML in and out, `--set a.b=v`, and where things lie in the run folder.

Every default has its home here. Unknown keys and values out of range are errors that name their path.
"""

from __future__ import annotations

import copy
import errno
import fnmatch
import functools
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli_w
from msgspec import Meta, field

from swarmq.config_errors import explain, parse_error_path
from swarmq.errors import ConfigError
from swarmq.messages import NAME
from swarmq.runtime.logs import log

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""What is multiplied with: `inf`, which takes a limit away elsewhere, would make everything infinite."""
Weight = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
MIX_TOLERANCE = 1e-6
RENAMED = {
    "groups.silence_s": "groups.idle_timeout_s",
    "groups.flat_after": "groups.uninformative_groups",
    "policies.*.train.loss.pull": "policies.*.train.loss.logratio_penalty",
}
"""Former path of a setting -> its present path. Former names are still read, with a warning."""

Advantage = Literal["rloo", "centered", "grpo", "batch_norm", "ema"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section."""


class BrokerSettings(Settings, frozen=True, kw_only=True):
    """Which RabbitMQ. Without a url, `$SWARMQ_AMQP_URL`; without that, a private node in the run folder."""

    url: str | None = None
    port: Port = 0
    """AMQP port of the private node; 0 picks a free one."""
    tls_port: Port = 0
    """amqps port of the private node, open to other machines; 0 opens none. Needs `certificate` and `key`."""
    certificate: str | None = None
    """PEM file."""
    key: str | None = None
    """PEM file."""

    def __post_init__(self) -> None:
        if self.tls_port and not (self.certificate and self.key):
            raise ValueError("tls_port needs certificate and key, two PEM files")


class ProxySettings(Settings, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 0
    """The first proxy's; 0 picks free ones. A fixed port of several proxies is followed by the next ones."""
    certificate: str | None = None
    """PEM file; with it and `key` the proxy speaks https, and `host` is to be the name in the certificate."""
    key: str | None = None
    """PEM file."""
    count: Count = 1
    """Proxies side by side; each is one process on one core. An episode stays with one of them."""
    key_lifetime_s: Positive = 7200.0
    request_timeout_s: Positive = 600.0
    """Deadline of a call, from its arrival to its last byte; later it is answered 504."""
    receive_timeout_s: Positive = 60.0
    """How long the head of a request may take to arrive, and how long its body; later it is answered 408."""
    max_body_bytes: Count = 10 * 1024 * 1024
    confirm_timeout_s: Positive = 15.0
    """How long an answer waits for the broker's confirm before the agent gets a 503."""
    max_open_calls: Count = 4096
    """Calls of one proxy that are rendered or sampled at a time; what is beyond waits its turn."""
    max_waiting_calls: Whole = 4096
    """Calls that wait; what is beyond is answered 429 with `Retry-After`."""
    max_memory_bytes: Count = 512 * 1024 * 1024
    """For the conversations of open episodes in one proxy; beyond it the least recently used are forgotten."""
    max_episode_calls: Count = 256
    """Calls of one episode at a time, so that no key takes all places; what is beyond is answered 429."""
    remote_images: bool = False
    """Engines fetch images from https urls that agents name, with the rights of the engine's host in its network."""
    server_tools: Literal["leave_out", "refuse"] = "leave_out"
    """Tools that a provider would run (web search, code interpreter, remote MCP servers): left out of the request and named in
    the header `x-swarmq-overridden`, or answered 400."""
    unknown_parameters: Literal["refuse", "leave_out"] = "refuse"
    """Parameters of OpenAI's dialects that neither OpenAI nor vLLM has: answered 400, as OpenAI does, or left out of the request and
    named in the header `x-swarmq-overridden`."""
    special_tokens: Literal["keep", "escape"] = "keep"
    """What becomes of the text of a special token (`<|im_end|>`) in the messages of agents: the token, as in vLLM, or text that forges
    no turn. Escape where agents read what strangers wrote."""
    probe_every_s: Positive = 2.0
    """How often engines are asked for their health and weight version."""
    traces: bool = False
    """A span for each call, sent where OpenTelemetry's environment variables say; needs `swarmq[traces]`."""
    drift_alert: Share = 0.05
    """Warn when more than this share of turns cannot continue their conversation token by token, though its history was
    not edited: the template writes it anew, or drift that could not be repaired. Of turns whose history the agent edited,
    more than half warn. 1 never warns."""
    drift_window: Count = 100
    """The newest turns of a policy that `drift_alert` looks at."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key belong together: give both PEM files, or neither")

    def url(self, port: int) -> str:
        """What agents of the proxy at this port get."""
        return f"{'https' if self.certificate else 'http'}://{self.host}:{port}/v1"


class GroupSettings(Settings, frozen=True, kw_only=True):
    """What makes an optimizer batch, and how far rollouts may run ahead of it."""

    group_size: Count = 8
    groups_per_batch: Count = 8
    min_group: Count = 2
    """A group that is not whole goes on with at least this many members."""
    deadline_s: Positive = 600.0
    """How long a group waits for members that may still come after the first has finished."""
    max_staleness: Whole = 4
    """Optimizer steps between the sampling of an episode's oldest token and its training."""
    idle_timeout_s: Positive = 600.0
    """An episode without a sign of life for this long expires."""
    when_dry: Literal["wait", "lend"] = "wait"
    """What batches do when a kind of the mix has nothing for them: wait for it, or lend its share to the others until it
    is back. What was lent is not paid back."""
    dry_after_s: Positive = 120.0
    """A kind has run dry when its tickets have lain untouched for this long with none of its episodes running, ..."""
    uninformative_groups: Count = 16
    """... or when so many of its groups in a row, for each that a batch wants, taught nothing: their rewards were equal."""


class EngineSettings(Settings, frozen=True, kw_only=True):
    """The vLLM servers of one policy."""

    urls: tuple[str, ...] = ()
    """Engines that run elsewhere; empty starts `count` of our own."""
    count: Count = 1
    max_model_len: Count | None = None
    """Tokens of prompt and answer together; a model made for fewer is served with its own limit. Without it `swarmq up`
    takes as many as the model, the learner's passes and the GPU's memory allow, and says which of them decided."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    gpu_memory_utilization: Share | None = None
    """Share of a GPU's memory that one engine takes; chosen by `placement` without it."""
    sleep: bool | None = None
    """Engines give their memory back while the learner computes; chosen by `placement` without it."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the vLLM server, as on its command line."""
    start_timeout_s: Positive = 600.0


TEACHER_TEMPERATURE = 1.0
"""The temperature of the log-probabilities that a server tells of a prompt."""


class SamplingDefaults(Settings, frozen=True, kw_only=True):
    """Training episodes are sampled like this; evaluation keeps the agent's wishes."""

    temperature: Factor = 1.0
    max_tokens: Count | None = None
    """Longest answer of one call; without it as long as the agent asks for, and no longer than the engine has room for."""
    conflicts: Literal["override", "refuse"] = "override"
    """A call of a training episode that asks for other sampling is answered as the run samples, with a header that
    names what was overridden, or refused with 400."""


LOSSES_BY_CONSTANT = {
    "mask_delta": ("tis_mask",),
    "logratio_penalty": ("tis_mask",),
    "clip_low": ("ppo_clip", "gspo"),
    "clip_high": ("ppo_clip", "cispo", "gspo"),
    "dual_clip": ("ppo_clip",),
}
"""Constant -> the losses that have it."""


class Loss(Settings, frozen=True, kw_only=True):
    """The policy loss and its constants (docs/learning.md)."""

    name: Literal["tis_mask", "ppo_clip", "cispo", "gspo", "reinforce", "sft", "distill"] = "tis_mask"
    ratio_cap: Positive = 20.0
    mask_delta: Positive = 0.2
    logratio_penalty: Weight = 1e-3
    """Weight of the squared log-ratio (logprobs - behavior_logprobs)^2 in `tis_mask`."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] | None = None
    """How far a ratio may fall; without it the loss's own: 0.2 in `ppo_clip`, 3e-4 in `gspo`."""
    clip_high: NonNegative | None = None
    """How far a ratio may rise; without it the loss's own: 0.28 in `ppo_clip`, 4e-4 in `gspo`, 4 in `cispo`."""
    dual_clip: Annotated[float, Meta(gt=1)] = 3.0
    kl: Weight = 0.0
    """beta, the weight of the KL divergence from `train.reference`; 0 loads no reference."""

    def find_unused_constants(self) -> dict[str, tuple[str, ...]]:
        """Constants that were chosen and that this loss does not have -> the losses that do."""
        plain = Loss()
        return {
            constant: losses
            for constant, losses in LOSSES_BY_CONSTANT.items()
            if self.name not in losses and getattr(self, constant) != getattr(plain, constant)
        }


class LengthPenalty(Settings, frozen=True, kw_only=True):
    """Taken from an episode's reward: nothing up to `free` sampled tokens, `weight` from `full` on, linear between."""

    free: Whole
    full: Count
    weight: Factor = 1.0

    def __post_init__(self) -> None:
        if self.full <= self.free:
            raise ValueError(f"full: {self.full} tokens are not more than the {self.free} that are free")


class Lora(Settings, frozen=True, kw_only=True):
    """Train low-rank adapters instead of all parameters."""

    rank: Count = 16
    alpha: Factor = 32.0
    modules: tuple[str, ...] | None = None
    """Names of the linear layers that get adapters; all but the head without it."""


class Train(Settings, frozen=True, kw_only=True):
    """How one policy learns."""

    advantage: Advantage = "rloo"
    advantages: dict[str, Advantage] = field(default_factory=dict)
    """Task kind -> its advantage, where that is another; filled in from `kinds.X.advantage`."""
    ema_decay: Decay = 0.95
    """alpha of the `ema` baseline: what it keeps of itself at every episode."""
    call_discount: Annotated[float, Meta(ge=0, le=1)] | None = None
    """gamma: calls of a group with rewards by call are credited with G_k = r_k + gamma G_(k+1); none: with r_k."""
    length_penalty: LengthPenalty | None = None
    overlong: Literal["keep", "drop"] = "keep"
    """An episode with a call that was cut off by a token limit: trained with its reward, or dropped and counted."""
    loss: Loss = field(default_factory=Loss)
    reference: str | None = None
    """Model folder or name that `loss.kl` holds the policy to; the policy's initial model without it, which is there already
    where adapters are trained."""
    teacher: str | None = None
    """Model folder or name, of the policy's vocabulary, that the `distill` loss learns from; or the url of a vLLM server
    that has it, for policies sampled at temperature 1."""
    steps_per_batch: Count = 1
    """Optimizer steps of one batch: its groups are shared out among them, and from the second on the loss is corrected
    for what the ones before have moved."""
    normalisation: Literal["token", "episode", "constant"] = "token"
    constant_length: Count = 1024
    """L_max of the `constant` normalisation."""
    row_k3_max: NonNegative = 0.0
    """Model calls whose mean k3 mismatch with the engine is larger are left out; 0 keeps all."""
    ratio_band: tuple[Positive, Positive] | None = None
    """Tokens whose probability ratio to the engine's is outside are left out, e.g. [0.5, 2.0]."""
    engine_gap_max: NonNegative | None = None
    """Nats by which engine and learner, with the same weights, may differ about sampled tokens on average; beyond, the learner stops
    before it trains on them. 0.005 without it where both compute in FP32, else 0.1; 0 never stops."""
    learning_rate: Factor = 1e-6
    warmup_steps: Whole = 10
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: Weight = 0.0
    grad_clip: Positive = 1.0
    max_steps: Whole = 0
    """0 trains until stopped."""
    micro_batch_tokens: Count = 16384
    """Most tokens of one forward and backward pass. An episode with a longer call is dropped and counted."""
    layout: Literal["auto", "rows", "tree"] = "auto"
    """Packed rows, or trees that compute shared beginnings once; `auto` takes what is less work. The result is the same."""
    gradient_checkpointing: bool = True
    """The backward pass computes layers again, as many as GPU memory does not hold (without a GPU: all of them)."""
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """What layers compute in: BF16 beside FP32 master weights, or FP32 alone (`no`); `auto` is BF16 on a GPU, else FP32."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """Of several ranks: each holds the whole model, or its share of parameters, gradients and optimizer state (FSDP2);
    `auto` shares where the whole does not fit a GPU."""
    cpu_offload: bool = False
    """With full sharding: keep parameters and optimizer state in host memory between uses."""
    context_parallel: Count = 1
    """So many ranks share each pass, token by token, for calls that are longer than one GPU has memory for; `micro_batch_tokens`
    are those of the whole pass. The number of ranks must be a multiple."""
    lora: Lora | None = None
    checkpoint_every: Count = 20
    keep_checkpoints: Count = 3
    keep_batches: bool = True
    """Keep the whole batch log; false removes what no kept checkpoint needs."""
    token_log: bool = True
    """Record what every step saw of every token, for `swarmq inspect`: 4 bytes a sampled token before compression."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"], ...] = ("tensorboard",)
    """Where the figures of every step go besides the run's events; their files lie in `<run>/<policy>/trackers`."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    deterministic: bool = False
    """A step that is made again, on the same kind of machine, comes out the same to the bit. Slower on a GPU."""

    def __post_init__(self) -> None:
        if self.cpu_offload and self.sharding != "full":
            raise ValueError("cpu_offload: only has an effect with sharding = 'full'")
        if self.loss.name == "distill" and self.teacher is None:
            raise ValueError("teacher: loss.name = 'distill' needs one: a model folder or name, or the url of a server")
        if self.loss.name != "distill" and self.teacher is not None:
            raise ValueError(f"teacher: only has an effect with loss.name = 'distill', not with {self.loss.name!r}")
        if self.ratio_band is not None and not self.ratio_band[0] <= 1 <= self.ratio_band[1]:
            low, high = self.ratio_band
            raise ValueError(f"ratio_band: 1, where engine and learner agree, is not within [{low:g}, {high:g}]")
        if self.reference is not None and not self.loss.kl:
            raise ValueError("reference: has no effect while loss.kl is 0")

    def of_kind(self, kind: str) -> Train:
        """As it is for tasks of this kind."""
        own = self.advantages.get(kind, self.advantage)
        return self if own == self.advantage else msgspec.structs.replace(self, advantage=own)

    def precision(self, *, cuda: bool) -> Literal["no", "bf16"]:
        """`mixed_precision`, resolved for ranks on GPUs or on processors."""
        if self.mixed_precision == "auto":
            return "bf16" if cuda else "no"
        return self.mixed_precision

    @property
    def teacher_url(self) -> str | None:
        """The url of the engine that has the teacher, if one has."""
        return self.teacher if self.teacher and self.teacher.startswith(("http://", "https://")) else None

    @property
    def needs_baseline(self) -> bool:
        """Whether an episode is judged by the others of its group, so that equal rewards teach nothing."""
        return self.advantage != "ema" and self.loss.name not in {"sft", "distill"}


class MixPoint(Settings, frozen=True, kw_only=True):
    """The mix from one step on, or on the way to it."""

    step: Count
    mix: dict[str, Share]


class MixSchedule(Settings, frozen=True, kw_only=True):
    """How the mix goes on from `mix`, which holds at step 0. A kind that a point leaves out has no share there."""

    shape: Literal["linear", "cosine", "table"] = "linear"
    """Between two points: a straight line, half a cosine, or the earlier one until the later one's step."""
    points: tuple[MixPoint, ...]


class Kind(Settings, frozen=True, kw_only=True):
    """What is different for one task kind."""

    group_size: Count | None = None
    """In place of `groups.group_size`."""
    advantage: Advantage | None = None
    """In place of `policies.X.train.advantage`."""
    max_tokens: Count | None = None
    """Longest answer of one model call, where it is less than `policies.X.sampling.max_tokens` allows."""
    episode_tokens: Count | None = None
    """Most tokens that the calls of one episode may sample together: the last one is cut, later ones are refused."""
    episode_calls: Count | None = None
    """Most model calls of one episode; later ones are refused."""


class Eval(Settings, frozen=True, kw_only=True):
    """Evaluation while training, of the tasks that `swarmq feed --eval` brought."""

    every: Whole = 0
    """Steps between two rounds; 0 holds none."""
    k: tuple[Count, ...] = (1,)
    """pass@k is told for each of these that the number of attempts allows."""
    deadline_s: Positive = 1800.0
    """A round that is not complete by then is closed with what it has."""


class Policy(Settings, frozen=True, kw_only=True):
    """A model being trained, or served frozen."""

    model: str
    """A Hugging Face model folder or name."""
    aliases: tuple[str, ...] = ()
    """Other names that agents may ask for it by, for those whose model name cannot be changed; e.g. ["gpt-4o", "claude-*"]."""
    trained: bool = True
    placement: Literal["auto", "shared", "split"] = "auto"
    """Of learner and engines on this host's GPUs: on the same ones, or on some each; chosen from memory by `auto`."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        if self.train.teacher_url and self.sampling.temperature != TEACHER_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature: a teacher that a server has (train.teacher) judges what was sampled at temperature "
                f"{TEACHER_TEMPERATURE:g} alone, not at {self.sampling.temperature:g}; or name the teacher's model folder, for the learner to load"
            )


class SwarmJob(Settings, frozen=True, kw_only=True):
    """Everything about a run that can be chosen. `SwarmJob.load("job.toml", sets=["groups.group_size=4"])`."""

    run: str
    folder: str = "runs"
    """The run folder is `<folder>/<run>`."""
    mix: dict[str, Share] = field(default_factory=lambda: {"default": 1.0})
    """Task kind -> its share of the groups of every batch; the shares sum to 1."""
    mix_schedule: MixSchedule | None = None
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Settings of single kinds; kinds outside the mix may be named, to be mixed in later."""
    eval: Eval = field(default_factory=Eval)
    policies: dict[str, Policy]
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    groups: GroupSettings = field(default_factory=GroupSettings)

    def __post_init__(self) -> None:
        for where, names in (
            ("run", [self.run]),
            ("policies", self.policies),
            ("mix", self.mix),
            ("kinds", self.kinds),
        ):
            for name in names:
                if not NAME.fullmatch(name):
                    raise ValueError(
                        f"{where}: {name!r} must be 1 to 40 lower-case letters, digits or dashes, because it names queues"
                    )
        if not self.policies:
            raise ValueError("policies: at least one is needed, e.g. [policies.main] with model = '...'")
        for name, policy in self.policies.items():
            if other := next((other for other in self.policies if other in policy.aliases), None):
                raise ValueError(f"policies.{name}.aliases: {other!r} is a policy's own name")
        if not any(policy.trained for policy in self.policies.values()):
            raise ValueError("policies: none is trained; leave `trained` out of at least one")
        _check_shares("mix", self.mix)
        if self.mix_schedule:
            _check_points(self.mix_schedule.points)
        sizes = {"groups.group_size": self.groups.group_size}
        sizes |= {f"kinds.{name}.group_size": kind.group_size for name, kind in self.kinds.items() if kind.group_size}
        for where, size in sizes.items():
            if self.groups.min_group > size:
                raise ValueError(f"groups.min_group: {self.groups.min_group} is more than {where} {size}")
        for name, policy in self.policies.items():
            if policy.train.steps_per_batch > self.groups.groups_per_batch:
                raise ValueError(
                    f"policies.{name}.train.steps_per_batch: {policy.train.steps_per_batch} steps share out the groups of a batch, and "
                    f"groups.groups_per_batch is {self.groups.groups_per_batch}"
                )

    @property
    def task_kinds(self) -> tuple[str, ...]:
        """Every kind that has queues: of the mix at any step, or with settings of its own."""
        points = self.mix_schedule.points if self.mix_schedule else ()
        return tuple(dict.fromkeys([*self.mix, *(kind for point in points for kind in point.mix), *self.kinds]))

    @property
    def trained(self) -> tuple[str, ...]:
        """Policies that have a learner."""
        return tuple(name for name, policy in self.policies.items() if policy.trained)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Policies that are served and never trained."""
        return tuple(name for name, policy in self.policies.items() if not policy.trained)

    def group_size(self, kind: str) -> int:
        own = self.kinds.get(kind)
        return (own.group_size if own else None) or self.groups.group_size

    def train_of(self, policy: str) -> Train:
        """How the policy learns, the kinds' own advantages included."""
        train = self.policies[policy].train
        own = {name: kind.advantage for name, kind in self.kinds.items() if kind.advantage}
        return msgspec.structs.replace(train, advantages={**own, **train.advantages})

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(Path(self.folder) / self.run)

    @classmethod
    def load(cls, path: str | Path, *, sets: Sequence[str] = ()) -> SwarmJob:
        """Read TOML and apply `a.b=v` overrides. Raises ConfigError naming file and key."""
        try:
            tree = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a job file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
        return cls.build(tree, sets=sets, origin=str(path))

    @classmethod
    def build(cls, tree: dict[str, Any], *, sets: Sequence[str] = (), origin: str = "settings") -> SwarmJob:
        """A job from plain data and `a.b=v` overrides. Raises ConfigError naming the key."""
        whole = copy.deepcopy(tree)
        _rename_former(whole)
        for assignment in sets:
            _assign(whole, assignment)
        _check_policies(whole, tree, sets)
        try:
            return msgspec.convert(whole, cls)
        except msgspec.ValidationError as error:
            blamed = _blamed(str(error), tree, sets)
            where = ", ".join(f"--set {text!r}" for text in blamed) or origin
            raise ConfigError(f"{where}: {explain(str(error), whole, cls)}") from error

    def to_toml(self) -> str:
        """Every resolved value, readable by `load`."""
        return tomli_w.dumps(_without_none(msgspec.to_builtins(self)))


class RunFolder:
    """Where the parts of a run keep their files; nothing else knows these names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def resolved(self) -> Path:
        """The job with every address filled in."""
        return self.path / "resolved.toml"

    @property
    def root_secret(self) -> Path:
        return self.path / "secret"

    @property
    def invite(self) -> Path:
        return self.path / "invite"

    @property
    def clients(self) -> Path:
        """JSON of everybody who was invited with `swarmq client add`."""
        return self.path / "clients.json"

    @property
    def endpoints(self) -> Path:
        """JSON that `swarmq up` writes: urls of broker, management UI, proxies and engines."""
        return self.path / "endpoints.json"

    @property
    def roster(self) -> Path:
        """JSON: engines of each policy, where they have changed since the start (registries/engines.py)."""
        return self.path / "engines.json"

    @property
    def proxies(self) -> Path:
        """JSON: the proxies that serve now (proxies.py)."""
        return self.path / "proxies.json"

    @property
    def lock(self) -> Path:
        """Held by whoever keeps the run up."""
        return self.path / "up.lock"

    @property
    def broker(self) -> Path:
        return self.path / "broker"

    @property
    def inbox(self) -> Path:
        return self.path / "collector.sqlite"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """JSON lines of every event of the run, for plots."""
        return self.path / "events.jsonl"

    def batch_log(self, policy: str) -> Path:
        return self.path / policy / "batches"

    def token_log(self, policy: str) -> Path:
        return self.path / policy / "tokens"

    def trackers(self, policy: str) -> Path:
        return self.path / policy / "trackers"

    def checkpoints(self, policy: str) -> Path:
        return self.path / policy / "checkpoints"

    def newest_checkpoint(self, policy: str) -> int:
        """The weight version of the newest one; 0 without any."""
        versions = (path.name.removeprefix("step-") for path in self.checkpoints(policy).glob("step-*"))
        return max((int(version) for version in versions if version.isdecimal()), default=0)


def make_folder(path: Path) -> None:
    """Raises ConfigError where there can be none, or nothing can be written there."""
    reason = os.strerror(errno.EACCES)
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        writable, reason = False, error.strerror or str(error)
    if not writable:
        raise ConfigError(f"{path}: nothing can be written there ({reason}): choose another `folder`")


def _check_shares(where: str, mix: dict[str, float]) -> None:
    if abs(sum(mix.values()) - 1) > MIX_TOLERANCE:
        raise ValueError(f"{where}: the shares sum to {sum(mix.values()):g}, not 1")


def _check_points(points: Sequence[MixPoint]) -> None:
    if not points:
        raise ValueError("mix_schedule.points: at least one is needed")
    steps = [point.step for point in points]
    if steps != sorted(set(steps)):
        raise ValueError(f"mix_schedule.points: their steps must rise, these are {', '.join(map(str, steps))}")
    for number, point in enumerate(points):
        _check_shares(f"mix_schedule.points[{number}].mix", point.mix)


def resolve_amqp_url(broker: BrokerSettings) -> str | None:
    """The RabbitMQ the user chose, if any: the setting first, then `$SWARMQ_AMQP_URL`."""
    return broker.url or os.environ.get("SWARMQ_AMQP_URL")


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """`section.key=value` texts as path -> value. Raises ConfigError."""
    return dict(_assignment(text, f"{text!r}") for text in texts)


def _assignment(text: str, where: str) -> tuple[str, Any]:
    path, equals, given = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"{where}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {given}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), given.strip()
    try:
        msgspec.msgpack.encode(value)  # as it is sent
    except OverflowError as error:
        raise ConfigError(f"{where}: a whole number of more than 64 bits") from error
    return path.strip(), value


def _assign(tree: dict[str, Any], assignment: str) -> None:
    path, value = _assignment(assignment, f"--set {assignment!r}")
    if (present := present_path(path)) != path:
        _warn_of_former(path, present)
    *sections, key = present.split(".")
    node = tree
    for depth, section in enumerate(sections):
        if node.get(section) is None:  # so that a section which is off can be set, too
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {assignment!r}: {'.'.join(sections[: depth + 1])} is a value, not a section")
    node[key] = value


def present_path(path: str) -> str:
    """Return the present path of a setting that `path` may call by a former name."""
    steps = path.split(".")
    for former, present in RENAMED.items():
        if len(steps) == former.count(".") + 1 and fnmatch.fnmatchcase(path, former):
            return ".".join([*steps[:-1], present.rpartition(".")[2]])
    return path


def _rename_former(tree: dict[str, Any]) -> None:
    """Give settings in `tree` that have a former name their present one. Raises ConfigError where both names are given."""
    for former, present in RENAMED.items():
        *sections, old = former.split(".")
        new = present.rpartition(".")[2]
        for where, node in _sections(tree, sections):
            if old not in node:
                continue
            if new in node:
                raise ConfigError(f"{where}: {old} is the former name of {new}, and both are set; remove {old}")
            node[new] = node.pop(old)
            _warn_of_former(f"{where}.{old}", f"{where}.{new}")


def _sections(tree: Any, pattern: Sequence[str], where: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return path and content of every section of `tree` that `pattern` names; `*` is any name."""
    if not isinstance(tree, dict):
        return []
    if not pattern:
        return [(where, tree)]
    names = list(tree) if pattern[0] == "*" else [name for name in pattern[:1] if name in tree]
    return [
        found for name in names for found in _sections(tree[name], pattern[1:], f"{where}.{name}" if where else name)
    ]


@functools.cache
def _warn_of_former(former: str, present: str) -> None:
    log.warning("setting_renamed", setting=former, action=f"write {present} in its place; the value is used")


def _check_policies(whole: dict[str, Any], tree: dict[str, Any], sets: Sequence[str]) -> None:
    """Raises ConfigError for a setting of a policy that is neither in the file nor given a model."""
    known = tree.get("policies")
    for text in sets:
        sections = _path(text)
        name = sections[1] if sections[0] == "policies" and len(sections) > 2 else None
        if name and isinstance(known, dict) and name not in known and "model" not in whole["policies"][name]:
            raise ConfigError(f"--set {text!r}: there is no policy {name!r}; the job has {', '.join(known)}")


def _blamed(complaint: str, tree: dict[str, Any], sets: Sequence[str]) -> list[str]:
    """Of `sets` those that a complaint is about; none where the settings without them are as wrong."""
    try:
        msgspec.convert(tree, SwarmJob)
    except msgspec.ValidationError as error:
        if str(error) == complaint:
            return []
    place = parse_error_path(complaint).replace("[...]", ".*")
    steps = re.sub(r"\[\d+\]", "", place).split(".")
    near = [
        text
        for text in sets
        if place and all(fnmatch.fnmatchcase(own, step) for step, own in zip(steps, _path(text), strict=False))
    ]
    return near or list(sets)


def _path(assignment: str) -> list[str]:
    return assignment.partition("=")[0].strip().split(".")


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return tree
