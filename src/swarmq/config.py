"""The settings of a run as typed records, read from TOML and `--set a.b=v`, and the layout of the run folder.

Every default is defined here. Unknown keys and values out of range are errors that name the path of the setting.
"""

from __future__ import annotations

import copy
import errno
import fnmatch
import functools
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import tomli_w
from msgspec import Meta, field

from swarmq.config_errors import explain, list_file_settings, parse_error_path
from swarmq.errors import ConfigError
from swarmq.messages import NAME
from swarmq.runtime.logs import log

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
"""A positive, finite number. Limits may be `inf`, but a factor of `inf` would make every product infinite."""
Weight = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
FileName = Annotated[str, Meta(extra={"names_a": "file"})]
"""Path of a file or folder."""
ModelName = Annotated[str, Meta(extra={"names_a": "model"})]
"""Path of a model's folder, or the name of a model on the hub; where the setting says so, also of a served one."""
MIX_TOLERANCE = 1e-6
RENAMED = {
    "groups.silence_s": "groups.idle_timeout_s",
    "groups.flat_after": "groups.uninformative_groups",
    "policies.*.train.loss.pull": "policies.*.train.loss.logratio_penalty",
}
"""Former path of a setting -> its present path. Former names are still read, with a warning."""

LOSSES = ("tis_mask", "ppo_clip", "cispo", "gspo", "reinforce", "sft", "distill")
LOSSES_WITHOUT_RATIO = {"sft"}
"""Losses without importance ratios."""
LOSSES_WITHOUT_REWARD = {"sft", "distill"}
ADVANTAGES = ("rloo", "centered", "grpo", "batch_norm", "reinforce_plus_plus", "ema", "gae")
ADVANTAGES_WITHOUT_GROUP = {"ema", "reinforce_plus_plus", "gae"}
"""Advantage estimators that do not compare within the group alone, so that groups of one and of equal rewards are trained."""
SCHEDULES = ("constant", "linear", "cosine", "wsd")
GROUPINGS = ("slot",)
OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
OPTIMIZERS_OF_WHOLE_PARAMETERS = {"adamw_8bit": "quantises", "muon": "orthogonalises"}
"""Optimizers that cannot work on shards -> what they do with whole parameters."""
OWN_METHOD = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


def _method(names: Sequence[str]) -> Meta:
    """Return the constraint of a setting that names one of the built-in methods `names`, or an own one."""
    return Meta(pattern=rf"^({'|'.join([*names, OWN_METHOD])})$", extra={"names": names})


LossName = Annotated[str, _method(LOSSES)]
AdvantageName = Annotated[str, _method(ADVANTAGES)]
ScheduleName = Annotated[str, _method(SCHEDULES)]
GroupingName = Annotated[str, _method(GROUPINGS)]
OwnMethodName = Annotated[str, _method(())]
OptimizerName = Annotated[str, _method(OPTIMIZERS)]


def is_model_path(model: str) -> bool:
    """Return whether a `ModelName` can only be the path of a folder, whether or not there is one."""
    return model.startswith((".", "/", "~")) or (model.count("/") > 1 and "://" not in model)


def is_own_method(name: str) -> bool:
    """Return whether a method's name is `module:function`."""
    return ":" in name


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings section."""


class BrokerSettings(Settings, frozen=True, kw_only=True):
    """The RabbitMQ of the run: `url`, else `$SWARMQ_AMQP_URL`, else a private node in the run folder."""

    url: str | None = None
    """AMQP URL of a RabbitMQ of your own, with user and password; the URLs of a cluster's nodes are separated by commas. None:
    `$SWARMQ_AMQP_URL`, or a private node."""
    replicas: Count | None = None
    """Number of a cluster's nodes that hold each queue of the run (`x-quorum-initial-group-size`), fixed when the queue is
    declared; None: RabbitMQ's default, all nodes up to 3."""
    nodes: Count = 1
    """Number of nodes of the private RabbitMQ: 1, or an odd number for a cluster on this host, to try clusters out."""
    port: Port = 0
    """AMQP port of the private node; further nodes take the ports after it. 0 picks free ports."""
    tls_port: Port = 0
    """TLS port (amqps) of the private node, open to other machines; further nodes take the ports after it. 0 opens none. Needs
    `certificate` and `key`."""
    certificate: FileName | None = None
    """PEM file with the node's certificate."""
    key: FileName | None = None
    """PEM file with the node's private key."""

    def __post_init__(self) -> None:
        if self.tls_port and not (self.certificate and self.key):
            raise ValueError("tls_port needs certificate and key, two PEM files")
        if self.nodes % 2 == 0:
            raise ValueError(
                f"nodes must be odd (got {self.nodes}): {self.nodes} nodes survive no more failures than {self.nodes - 1}"
            )


class ProxySettings(Settings, frozen=True, kw_only=True):
    """The proxies of the run: address, limits, timeouts and how requests are treated."""

    host: str = "127.0.0.1"
    """Address on which the proxies listen, and host name by which clients reach them."""
    port: Port = 0
    """Port of the first proxy, further proxies take the following ports; 0 picks free ports."""
    certificate: FileName | None = None
    """PEM file with a certificate for the name `host`; with it and `key` the proxy serves https."""
    key: FileName | None = None
    """PEM file with the certificate's private key."""
    count: Count = 1
    """Number of proxy processes, each of which uses one core. All requests of an episode go to the same process."""
    key_lifetime_s: Positive = 7200.0
    """Seconds after which an episode's API key expires."""
    request_timeout_s: Positive = 600.0
    """Seconds after a request's arrival by which its answer must be complete; otherwise it is answered 504."""
    receive_timeout_s: Positive = 60.0
    """Seconds within which the head of a request must arrive, and then its body; otherwise it is answered 408."""
    max_body_bytes: Count = 10 * 1024 * 1024
    """Size of the largest accepted request body in bytes; larger ones are answered 413."""
    confirm_timeout_s: Positive = 15.0
    """Seconds that an answer waits for the broker's confirmation before the agent gets a 503."""
    max_open_calls: Count = 4096
    """Maximum number of model calls that one proxy renders or samples at the same time; further calls wait."""
    max_waiting_calls: Whole = 4096
    """Maximum number of model calls that may wait in one proxy; further calls are answered 429 with `Retry-After`."""
    max_memory_bytes: Count = 512 * 1024 * 1024
    """Memory of one proxy in bytes for the conversations of open episodes; beyond it, the least recently used conversations are
    forgotten."""
    max_episode_calls: Count = 256
    """Maximum number of open model calls of one episode, so that no episode uses up a proxy; further calls are answered 429."""
    remote_images: bool = False
    """Fetch images that requests name by an https URL, if it leads to a public address."""
    server_tools: Literal["leave_out", "refuse"] = "leave_out"
    """Treatment of tools that a provider would run (web search, code interpreter, remote MCP servers): left out of the request and
    named in the header `x-swarmq-overridden`, or answered 400."""
    unknown_parameters: Literal["refuse", "leave_out"] = "refuse"
    """Treatment of request parameters that neither OpenAI nor vLLM has: answered 400, as OpenAI does, or left out of the request and
    named in the header `x-swarmq-overridden`."""
    special_tokens: Literal["keep", "escape"] = "keep"
    """Treatment of a special token's text (`<|im_end|>`) in agents' messages: kept as the token, as in vLLM, or escaped to plain
    text that cannot forge a turn. Use `escape` if agents read text from strangers."""
    probe_every_s: Positive = 2.0
    """Seconds between two probes of an engine's health and weight version."""
    traces: bool = False
    """Send an OpenTelemetry span for each model call, configured by OpenTelemetry's environment variables; needs `swarmq[traces]`."""
    drift_alert: Share = 0.05
    """Warn if more than this share of turns cannot continue their conversation token by token. Turns with a history that the
    agent edited are not counted; they cause a separate warning if they are more than half of all turns. 1 never warns."""
    drift_window: Count = 100
    """Number of a policy's newest turns to which `drift_alert` applies."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key belong together: give both PEM files, or neither")

    def url(self, port: int) -> str:
        """Return the base URL of the proxy at this port."""
        return f"{'https' if self.certificate else 'http'}://{self.host}:{port}/v1"


class GroupSettings(Settings, frozen=True, kw_only=True):
    """The composition of optimizer batches, and how far rollouts may run ahead of training."""

    group_size: Count = 8
    """Number of attempts at a task that form a group."""
    groups_per_batch: Count = 8
    """Number of groups in an optimizer batch."""
    min_group: Count = 2
    """Minimum number of members with which an incomplete group is trained."""
    deadline_s: Positive = 600.0
    """Seconds that a group waits for its other members after the first member has finished."""
    max_staleness: Whole = 4
    """Maximum number of weight versions between the sampling of a rollout's oldest token and its training."""
    idle_timeout_s: Positive = 600.0
    """Seconds without a sign of life after which an episode expires."""
    when_dry: Literal["wait", "lend"] = "wait"
    """What happens if a kind of the mix runs dry: batches wait for it, or its share goes to the other kinds until it is back
    (`lend`). Lent shares are not paid back."""
    dry_after_s: Positive = 120.0
    """Seconds after which a kind counts as dry, if nobody takes its tickets and none of its episodes runs."""
    uninformative_groups: Count = 16
    """Number of consecutive groups with equal rewards, for each group that the kind has in a batch, after which the kind also
    counts as dry."""


class CollectorSettings(Settings, frozen=True, kw_only=True):
    """The collector of the run."""

    processes: Annotated[int, Meta(ge=1, le=33)] = 1
    """Number of processes of the collector, each on a core of its own. The first one decides and stores. Further ones exchange messages
    with RabbitMQ for it, and proxies divide the turns of episodes among them. Needed only if one process is full."""
    standby: bool = False
    """Whether further collectors stand by on other hosts. The leading collector then also appends every transaction to a RabbitMQ
    stream. Standbys read it to keep a copy of `collector.sqlite`, and one takes over when the leader is gone."""

    @property
    def turn_queues(self) -> int:
        """Number of queues of turns; without any, turns go to the inbox."""
        return self.processes - 1


class TranscriptSettings(Settings, frozen=True, kw_only=True):
    """Transcripts: every closed episode, kept readable in the run folder. Losing them loses no training."""

    size_gb: Annotated[float, Meta(ge=0, le=1e6)] = 2.0
    """Maximum size of a run's transcripts in gigabytes, beyond which the oldest, least interesting conversations are removed; 0
    keeps no transcripts. The newest 32 of every kind and reason are always kept."""
    age_days: Factor = 30.0
    """Days after which a conversation is removed, except for the newest 32 of every kind and reason."""


class EngineSettings(Settings, frozen=True, kw_only=True):
    """The vLLM servers of one policy."""

    urls: tuple[str, ...] = ()
    """URLs of engines that are started elsewhere; empty: `swarmq up` starts `count` engines."""
    count: Count = 1
    """Number of engines that `swarmq up` starts."""
    max_model_len: Count | None = None
    """Maximum number of tokens of prompt and answer together; a model with a smaller limit keeps its own. None: the largest
    number that the model, the learner's micro-batches and GPU memory allow, which `swarmq up` reports with its cause."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the served weights, as vLLM's `--dtype`."""
    quantization: Literal["none", "fp8"] = "none"
    """Precision in which engines multiply matrices: `fp8` quantises the weights of every push (one scale per output channel) and
    the activations (one scale per token), while the learner's weights stay as they are. Needs a GPU with FP8."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of cached keys and values: `fp8` doubles the number of tokens that the cache holds. Needs a GPU with FP8."""
    speculation: Literal["none", "ngram"] = "none"
    """Speculative decoding without a draft model: `ngram` proposes the tokens that followed the newest tokens earlier in any
    conversation of the engine, as many as pay. Tokens are sampled from the same distribution; text that repeats itself is sampled faster.
    Needs vLLM 0.32 on a GPU."""
    keep_cache: bool = False
    """Whether an engine keeps its cached keys and values when it gets new weights. If not, it computes the contexts of all open
    conversations again. If so, tokens may be sampled from keys of weights as old as the episode's first call, and never older; the
    log-probabilities recorded are still those that they were sampled with."""
    gpu_memory_utilization: Share | None = None
    """Share of a GPU's memory that one engine takes; None: chosen from the policy's `placement`."""
    sleep: bool | None = None
    """Whether engines release their GPU memory while the learner computes; None: chosen from the policy's `placement`."""
    arguments: tuple[str, ...] = ()
    """Further command-line arguments of the vLLM server."""
    start_timeout_s: Positive = 600.0
    """Seconds within which an engine must have started."""

    @property
    def uses_fp8(self) -> bool:
        """Whether engines compute with FP8 weights or keys and values, so that they differ from the learner by more than BF16."""
        return self.quantization == "fp8" or self.kv_cache_dtype == "fp8"


TEACHER_TEMPERATURE = 1.0
"""Temperature at which a vLLM server reports the log-probabilities of a prompt."""
TEACHER_POLICY = "policies."
"""Prefix of `train.teacher` if the teacher is a policy of the job."""


class SamplingDefaults(Settings, frozen=True, kw_only=True):
    """Sampling parameters of training episodes. Evaluation episodes are sampled as their agents ask."""

    temperature: Factor = 1.0
    """Sampling temperature."""
    max_tokens: Count | None = None
    """Maximum number of tokens of one answer; None: as many as the agent asks for and the engine's context allows."""
    conflicts: Literal["override", "refuse"] = "override"
    """Treatment of a training episode's model call that asks for other sampling parameters: sampled with the
    run's parameters, with a header that names the overridden ones, or refused with 400."""


LOSSES_BY_CONSTANT = {
    "mask_delta": ("tis_mask",),
    "logratio_penalty": ("tis_mask",),
    "clip_low": ("ppo_clip", "gspo"),
    "clip_high": ("ppo_clip", "cispo", "gspo"),
    "dual_clip": ("ppo_clip",),
    "top_k": ("distill",),
    "distill_beta": ("distill",),
}
"""Constant of `Loss` -> names of the losses that use it."""


class Loss(Settings, frozen=True, kw_only=True):
    """The policy loss and its constants (docs/explanation/learning/losses.md)."""

    name: LossName = "tis_mask"
    """Name of the policy loss, or `module:function` for a loss of your own, which can use all constants below."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further constants of a loss of your own."""
    ratio_cap: Positive = 20.0
    """Upper bound of the importance ratio that weights a token."""
    mask_delta: Positive = 0.2
    """Change of a token's probability, in the direction of its advantage, beyond which `tis_mask` masks it."""
    logratio_penalty: Weight = 1e-3
    """Weight of the squared log-ratio (logprobs - behavior_logprobs)^2 in `tis_mask`."""
    clip_low: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Clip range of the ratio below 1; None: 0.2 in `ppo_clip`, 3e-4 in `gspo`."""
    clip_high: NonNegative | None = None
    """Clip range of the ratio above 1; None: 0.28 in `ppo_clip`, 4e-4 in `gspo`, 4 in `cispo`."""
    dual_clip: Annotated[float, Meta(gt=1)] = 3.0
    """Upper bound of the ratio in `ppo_clip` for negative advantages (dual-clip PPO)."""
    kl: Weight = 0.0
    """Weight (beta) of the KL divergence from `train.reference`; 0 loads no reference."""
    reward_kl: Weight = 0.0
    """Weight (beta) of the KL divergence from `train.reference` in the reward: each token's advantage is lowered by that of the rest
    of its model call; 0 loads no reference."""
    top_k: Whole = 0
    """Number of the teacher's likeliest tokens that `distill` compares at each position, besides the rest as one; 0: only the sampled
    token. vLLM serves at most 20, or its `--max-logprobs`."""
    distill_beta: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Divergence that `distill` lowers with `top_k`: 0 is the forward KL from teacher to policy, 1 the reverse KL, in between the generalized
    Jensen-Shannon divergence."""
    entropy_bonus: Weight = 0.0
    """Weight of the entropy of each token's distribution, which the loss raises."""

    def __post_init__(self) -> None:
        if self.reward_kl and self.name in LOSSES_WITHOUT_REWARD:
            raise ValueError(f"reward_kl: has no effect with name = {self.name!r}, which uses no rewards")

    @property
    def needs_reference(self) -> bool:
        return bool(self.kl or self.reward_kl)

    def find_unused_constants(self) -> dict[str, tuple[str, ...]]:
        """Return constants that were set although this loss does not use them -> losses that do."""
        if is_own_method(self.name):
            return {}
        plain = Loss()
        return {
            constant: losses
            for constant, losses in LOSSES_BY_CONSTANT.items()
            if self.name not in losses and getattr(self, constant) != getattr(plain, constant)
        }


class LengthPenalty(Settings, frozen=True, kw_only=True):
    """Penalty subtracted from an episode's reward: 0 up to `free` sampled tokens, `weight` from `full` on, linear in between."""

    free: Whole
    """Number of sampled tokens up to which there is no penalty."""
    full: Count
    """Number of sampled tokens from which on the whole penalty is subtracted."""
    weight: Factor = 1.0
    """Size of the whole penalty."""

    def __post_init__(self) -> None:
        if self.full <= self.free:
            raise ValueError(f"full: must be more than free ({self.free} tokens), but is {self.full}")


class Lora(Settings, frozen=True, kw_only=True):
    """Low-rank adapters (LoRA), trained in place of all parameters."""

    rank: Count = 16
    """Rank of the adapters."""
    alpha: Factor = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    modules: tuple[str, ...] | None = None
    """Names of the linear layers that get adapters; None: all but the language-model head."""


class Sft(Settings, frozen=True, kw_only=True):
    """Demonstrations that are trained with every batch, by cross-entropy."""

    demonstrations: FileName
    """JSON lines, each with `messages` (and `tools`), or with `prompt` and `completion`; the assistant's messages or the completion are
    trained."""
    share: Factor = 0.25
    """Number of demonstrations in a step, as a share of the batch's episodes, rounded up."""
    weight: Weight = 0.1
    """Weight of the cross-entropy in the loss, as its mean over the trained tokens of the step's demonstrations."""


class Critic(Settings, frozen=True, kw_only=True):
    """The critic of the advantage `gae`: adapters and a linear head on a frozen model, trained beside the policy."""

    model: ModelName | None = None
    """Model folder or name, which must have the policy's vocabulary; None: the policy's initial model."""
    lora: Lora = field(default_factory=Lora)
    """Low-rank adapters, which are trained."""
    discount: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Discount (gamma) of what follows a sampled token."""
    gae_lambda: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Lambda of generalized advantage estimation, for each sampled token. 1 compares what an episode got with the values; less
    relies more on the values of later tokens, which lowers the variance and adds the critic's bias."""
    learning_rate: Factor = 1e-4
    """Learning rate of the critic, which is constant. Its optimizer is AdamW with `betas` and without weight decay."""
    value_clip: Positive = 0.2
    """Change of a value within a batch beyond which a further change does not lower the loss. It matters with `steps_per_batch`
    above 1; `inf`: no clipping."""
    warmup_steps: Whole = 0
    """Number of steps, from the critic's first one on, in which only the critic is trained."""


class Train(Settings, frozen=True, kw_only=True):
    """Training settings of one policy."""

    advantage: AdvantageName = "rloo"
    """Name of the advantage estimator, or `module:function` for one of your own."""
    grouping: GroupingName = "slot"
    """Which episodes of a batch the advantage compares: `slot`, the attempts at one task that the collector put into a group, or
    `module:function` for groups of your own, which may join slots; then slots with equal rewards are trained, too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Constants of methods of your own, except for the loss, which has `loss.options`."""
    advantages: dict[str, AdvantageName] = field(default_factory=dict)
    """Task kind -> advantage estimator, for kinds that use another one; filled in from `kinds.X.advantage`."""
    ema_decay: Decay = 0.95
    """Decay (alpha) of the `ema` baseline b at every reward R: b <- alpha b + (1 - alpha) R."""
    critic: Critic = field(default_factory=Critic)
    """The critic of the advantage `gae`."""
    call_discount: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Discount (gamma) of the rewards of model calls: call k is credited with the return G_k = r_k + gamma G_(k+1); None: with
    its own reward r_k."""
    length_penalty: LengthPenalty | None = None
    """Penalty for long episodes; None: no penalty."""
    reward_transform: OwnMethodName | None = None
    """`module:function` of a function of your own that changes each episode's reward before it is compared with others, after
    `length_penalty`; None: unchanged."""
    overlong: Literal["keep", "drop"] = "keep"
    """Treatment of an episode with a model call that a token limit cut off: trained with its reward, or dropped and counted."""
    loss: Loss = field(default_factory=Loss)
    """The policy loss."""
    reference: ModelName | None = None
    """Model folder or name of the reference policy of `loss.kl` and `loss.reward_kl`; None: the policy's initial model, which takes no further memory
    in LoRA training."""
    teacher: ModelName | None = None
    """Teacher of the `distill` loss, which must have the policy's vocabulary: a model folder or name, which the learner loads; or, for
    policies sampled at temperature 1, a served teacher: the URL of a vLLM server, or `policies.X`, a policy of this job with
    `trained = false`."""
    teacher_tokenizer: ModelName | None = None
    """Model folder or name with the tokenizer of a served teacher that has another one than the policy: both are then compared by spans of
    text. None: the policy's."""
    sft: Sft | None = None
    """Demonstrations that are trained with every batch; None: none."""
    steps_per_batch: Count = 1
    """Optimizer steps per batch. A batch's groups are divided among the steps, and from the second step on the loss is corrected
    for the previous steps."""
    normalisation: Literal["token", "episode", "constant"] = "token"
    """Denominator of the loss: trained tokens, episodes, or episodes times `constant_length`."""
    constant_length: Count = 1024
    """Length L_max of the `constant` normalisation, in tokens."""
    row_k3_max: NonNegative = 0.0
    """Largest mean k3 mismatch between engine and learner at which a model call is trained; 0 trains all calls."""
    ratio_band: tuple[Positive, Positive] | None = None
    """Range of the ratio of learner to engine probability within which a token is trained, e.g. [0.5, 2.0]; None: any ratio."""
    token_filter: OwnMethodName | None = None
    """`module:function` of a filter of your own, which chooses the tokens that are trained among those that `row_k3_max` and
    `ratio_band` leave; None: all of these."""
    engine_gap_max: NonNegative | None = None
    """Largest mean difference, in nats, between engine and learner log-probabilities of sampled tokens under the same weights. Above
    it, the learner stops before it trains. None: 0.005 if both compute in FP32, 0.4 if either uses FP8, else 0.1. 0 never stops."""
    optimizer: OptimizerName = "adamw"
    """Name of the optimizer, or `module:function` for one of your own. `muon` is Muon for the matrices inside the layers and AdamW
    for all other parameters; `adamw_8bit` is AdamW with moments of eight bits, and needs `pip install 'swarmq[optimizers]'`. Both need ranks
    that hold the whole model."""
    learning_rate: Factor = 1e-6
    """Learning rate of the optimizer, after warm-up and before the schedule."""
    warmup_steps: Whole = 10
    """Steps over which the learning rate rises linearly."""
    schedule: ScheduleName = "constant"
    """Name of the learning rate's schedule after warm-up, or `module:function` for one of your own."""
    schedule_steps: Count | None = None
    """Step at which the schedule ends; the learning rate then stays as it is. None: `max_steps`."""
    schedule_end: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Learning rate at the end of the schedule, as a share of `learning_rate`."""
    decay_steps: Count | None = None
    """Number of steps at the end of the `wsd` schedule in which the learning rate falls; before, it is constant."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decays of AdamW's two moments."""
    weight_decay: Weight = 0.0
    """Weight decay of the optimizer, decoupled from the gradient."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    max_steps: Whole = 0
    """Last step; 0: train until stopped."""
    micro_batch_tokens: Count = 16384
    """Maximum number of tokens of one forward and backward pass. An episode with a longer model call is dropped and counted."""
    layout: Literal["auto", "rows", "tree"] = "auto"
    """Layout of micro-batches: packed rows, or trees that compute shared beginnings once; `auto` takes the cheaper one. The
    gradient is the same."""
    gradient_checkpointing: bool = True
    """In the backward pass, recompute the layers whose activations GPU memory does not hold (without a GPU: all layers)."""
    mixed_precision: Literal["auto", "no", "bf16", "fp8"] = "auto"
    """Precision of the layers: BF16 with FP32 master weights, or FP32 (`no`); `auto`: BF16 on a GPU, else FP32. `fp8` is BF16 with FP8
    matrix products in the decoder's linear layers, on GPUs from compute capability 8.9 on, without adapters and mixtures of experts."""
    sharding: Literal["auto", "none", "full", "hybrid"] = "auto"
    """Whether ranks shard parameters, gradients and optimizer state (FSDP2, `full`), shard them within each host and keep a replica on
    every host (`hybrid`), or each hold the whole model (`none`); `auto` shards if the whole model does not fit a GPU."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory while they are not used; needs sharding = 'full' or 'hybrid'."""
    launcher: tuple[str, ...] = ()
    """Command that starts the ranks on several hosts, e.g. ["srun", "bash", "ranks.sh"] with `torchrun ... "$@"` in ranks.sh.
    `swarmq up` adds the arguments `-m swarmq learner ...`. Empty: a rank for each of the learner's GPUs on the run's host."""
    context_parallel: Count = 1
    """Number of ranks that share the tokens of each micro-batch, for model calls too long for one GPU; `micro_batch_tokens` counts
    the tokens of the whole micro-batch. The number of ranks must be a multiple of it."""
    lora: Lora | None = None
    """Low-rank adapters; None: train all parameters."""
    routing_replay: bool = False
    """Compute every token of a mixture of experts with the experts to which the engine routed it, weighted by the learner's own
    router. Turns then record the experts: layers x experts per token bytes for each token."""
    checkpoint_every: Count = 20
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 3
    """Number of newest checkpoints to keep."""
    keep_batches: bool = True
    """Keep the whole batch log; false removes batches that no kept checkpoint needs."""
    token_log: bool = True
    """Record log-probability, entropy and advantage of every trained token for `swarmq inspect`; takes 6 bytes per sampled token
    before compression."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "swanlab", "trackio"], ...] = ("tensorboard",)
    """Trackers that get the metrics of every step; their files are in `<run>/<policy>/trackers`."""
    tracker_samples: Whole = 8
    """Number of trained episodes whose conversations go to a table every ten steps, in trackers that have tables (W&B); 0: none."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Seed of the learner's random numbers, and of the order in which `swarmq train` feeds the tasks."""
    deterministic: bool = False
    """Make a step that is repeated on the same kind of machine equal bit for bit. Slower on a GPU."""

    def __post_init__(self) -> None:
        if self.cpu_offload and self.sharding not in ("full", "hybrid"):
            raise ValueError("cpu_offload: only has an effect with sharding = 'full' or 'hybrid'")
        if (what := OPTIMIZERS_OF_WHOLE_PARAMETERS.get(self.optimizer)) and self.sharding in ("full", "hybrid"):
            raise ValueError(
                f"optimizer: {self.optimizer!r} {what} whole parameters, which sharding = {self.sharding!r} divides"
            )
        if self.uses_fp8 and self.lora:
            raise ValueError(
                "mixed_precision: layers with adapters cannot multiply in FP8; set it to 'bf16', or leave lora out"
            )
        if self.loss.name == "distill" and self.teacher is None:
            raise ValueError(
                "teacher: loss.name = 'distill' needs a teacher: a model folder or name, the url of a server, or policies.X"
            )
        if self.loss.name != "distill" and not is_own_method(self.loss.name) and self.teacher is not None:
            raise ValueError(f"teacher: only has an effect with loss.name = 'distill', not with {self.loss.name!r}")
        if self.teacher_tokenizer and not self.has_served_teacher:
            raise ValueError(
                "teacher_tokenizer: only has an effect with a served teacher: the url of a server, or policies.X"
            )
        if self.teacher_tokenizer and self.loss.top_k:
            raise ValueError(
                "teacher_tokenizer: a teacher with another tokenizer has other likeliest tokens; set loss.top_k to 0"
            )
        if self.loss.top_k and self.teacher is None:
            raise ValueError("loss.top_k: only has an effect with a teacher")
        if self.loss.top_k and self.context_parallel > 1:
            raise ValueError("loss.top_k: not available with context_parallel > 1")
        if self.schedule in {"linear", "cosine", "wsd"} and not self.last_scheduled_step:
            raise ValueError(f"schedule: {self.schedule!r} needs schedule_steps or max_steps, or it would never end")
        if self.schedule == "wsd" and self.decay_steps is None:
            raise ValueError("schedule: 'wsd' needs decay_steps, the number of steps in which the learning rate falls")
        if self.loss.options and not is_own_method(self.loss.name):
            raise ValueError(f"loss.options: only a loss of your own has options, not {self.loss.name!r}")
        if self.ratio_band is not None and not self.ratio_band[0] <= 1 <= self.ratio_band[1]:
            low, high = self.ratio_band
            raise ValueError(f"ratio_band: 1, where engine and learner agree, is not within [{low:g}, {high:g}]")
        if self.reference is not None and not self.loss.needs_reference:
            raise ValueError("reference: has no effect while loss.kl and loss.reward_kl are 0")

        if self.needs_critic and self.call_discount is not None:
            raise ValueError("call_discount: the advantage 'gae' discounts by critic.discount; set that one")

    def of_kind(self, kind: str) -> Train:
        """Return the settings that apply to tasks of a kind."""
        own = self.advantages.get(kind, self.advantage)
        return self if own == self.advantage else msgspec.structs.replace(self, advantage=own)

    def precision(self, *, cuda: bool) -> Literal["no", "bf16"]:
        """Return the precision of everything but FP8 products, with `auto` resolved for GPU or CPU ranks."""
        if self.mixed_precision == "auto":
            return "bf16" if cuda else "no"
        return "no" if self.mixed_precision == "no" else "bf16"

    @property
    def uses_fp8(self) -> bool:
        """Whether the decoder's linear layers multiply in FP8."""
        return self.mixed_precision == "fp8"

    @property
    def teacher_url(self) -> str | None:
        """URL of the vLLM server with the teacher; None if the learner loads the teacher itself, or if the
        teacher is a policy of the job."""
        return self.teacher if self.teacher and self.teacher.startswith(("http://", "https://")) else None

    @property
    def teacher_policy(self) -> str | None:
        """Name of the teacher, if it is a policy of the job; else None."""
        name = (self.teacher or "").removeprefix(TEACHER_POLICY)
        return name if name != (self.teacher or "") else None

    @property
    def has_served_teacher(self) -> bool:
        """Whether an engine scores the tokens for the `distill` loss."""
        return bool(self.teacher_url or self.teacher_policy)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of all methods, built-in ones and own ones."""
        named = (
            self.loss.name,
            self.advantage,
            *self.advantages.values(),
            self.grouping,
            self.schedule,
            self.optimizer,
        )
        return (*named, *filter(None, (self.token_filter, self.reward_transform)))

    @property
    def last_scheduled_step(self) -> int:
        """Step at which the schedule of the learning rate ends; 0 if it has no end."""
        return self.schedule_steps or self.max_steps

    @property
    def needs_critic(self) -> bool:
        """Whether the values of a critic are in the advantages of at least one kind."""
        return "gae" in (self.advantage, *self.advantages.values()) and self.loss.name not in LOSSES_WITHOUT_REWARD

    @property
    def compares_slots(self) -> bool:
        """Whether a slot alone shows that its episodes give no gradient, by equal rewards or too few attempts."""
        return self.needs_baseline and not is_own_method(self.grouping)

    @property
    def needs_baseline(self) -> bool:
        """Whether advantages compare the episodes of a group, so that equal rewards give no gradient."""
        return self.advantage not in ADVANTAGES_WITHOUT_GROUP and self.loss.name not in LOSSES_WITHOUT_REWARD


class MixPoint(Settings, frozen=True, kw_only=True):
    """The mix at one step of a schedule."""

    step: Count
    """Step at which this mix applies."""
    mix: dict[str, Share]
    """Task kind -> share of the groups of a batch; the shares sum to 1."""


class MixSchedule(Settings, frozen=True, kw_only=True):
    """Schedule of the mix, starting from `mix` at step 0. A kind that a point leaves out has share 0 there."""

    shape: Literal["linear", "cosine", "table"] = "linear"
    """Interpolation between two points: linear, half a cosine, or the earlier point's mix until the later point (`table`)."""
    points: tuple[MixPoint, ...]
    """Points of the schedule, in order of rising steps."""


class Kind(Settings, frozen=True, kw_only=True):
    """Settings of one task kind, in place of the run's."""

    group_size: Count | None = None
    """Group size in place of `groups.group_size`."""
    advantage: AdvantageName | None = None
    """Advantage estimator in place of `policies.X.train.advantage`."""
    max_tokens: Count | None = None
    """Maximum number of tokens of one answer, if smaller than `policies.X.sampling.max_tokens`."""
    episode_tokens: Count | None = None
    """Maximum number of tokens that all model calls of one episode may sample: the last call is cut off there, and later calls are
    refused."""
    episode_calls: Count | None = None
    """Maximum number of model calls of one episode; later calls are refused."""


class Eval(Settings, frozen=True, kw_only=True):
    """Evaluation during training, on the tasks of `swarmq feed --eval`."""

    every: Whole = 0
    """Steps between two evaluation rounds; 0: no evaluation."""
    k: tuple[Count, ...] = (1,)
    """Values of k for which pass@k is reported, if there are enough attempts."""
    deadline_s: Positive = 1800.0
    """Seconds after which an incomplete round is closed with the results so far."""


class MetricsSettings(Settings, frozen=True, kw_only=True):
    """Metrics of collector and learners for Prometheus (docs/how-to/monitoring.md); the proxy serves its own."""

    host: str = "127.0.0.1"
    """Address on which collector and learners serve `/metrics`, without any password."""
    collector_port: Port = 0
    """Port of the collector's metrics; 0: a free port under `swarmq up`, otherwise no metrics."""
    learner_ports: dict[str, Port] = field(default_factory=dict)
    """Policy -> port of its learner's metrics; a policy without a port: a free port under `swarmq up`, otherwise no metrics."""


class AlertSettings(Settings, frozen=True, kw_only=True):
    """Alerts on warnings, standstills and the end of training (docs/how-to/monitoring.md)."""

    command: str = ""
    """Program with arguments that is run for each alert, with the alert as JSON on its standard input; it is run without a
    shell."""
    url: str = ""
    """http(s) URL to which each alert is posted as JSON."""
    interval_s: Factor = 600.0
    """Minimum number of seconds between two alerts with the same wording."""

    def __post_init__(self) -> None:
        try:
            if self.command and not shlex.split(self.command):
                raise ValueError("no program is named")
        except ValueError as error:
            raise ValueError(f"command: {error}, in {self.command!r}") from error
        if self.url and (urlsplit(self.url).scheme not in {"http", "https"} or not urlsplit(self.url).hostname):
            raise ValueError("url: an http:// or https:// URL is needed")


class Policy(Settings, frozen=True, kw_only=True):
    """A model that is trained, or served frozen."""

    model: ModelName
    """Hugging Face model folder or name."""
    aliases: tuple[str, ...] = ()
    """Further model names by which agents may request the policy, e.g. ["gpt-4o", "claude-*"], for agents with a fixed model name."""
    trained: bool = True
    """Whether the policy has a learner; if false, it is served frozen."""
    placement: Literal["auto", "shared", "split"] = "auto"
    """Whether learner and engines share the host's GPUs (`shared`) or get separate ones (`split`); `auto` decides by memory."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """The policy's vLLM servers."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Sampling parameters of training episodes."""
    train: Train = field(default_factory=Train)
    """Training settings."""

    @property
    def replays_routing(self) -> bool:
        """Whether turns record the experts to which the engine routed their tokens."""
        return self.trained and self.train.routing_replay

    def __post_init__(self) -> None:
        if self.train.has_served_teacher and self.sampling.temperature != TEACHER_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature: a served teacher (train.teacher) can only score tokens sampled at temperature "
                f"{TEACHER_TEMPERATURE:g}, not at {self.sampling.temperature:g}; or set train.teacher to a model folder, which the learner loads"
            )


class SwarmJob(Settings, frozen=True, kw_only=True):
    """All settings of a run, e.g. `SwarmJob.load("job.toml", sets=["groups.group_size=4"])`."""

    run: str
    """Name of the run, used in queue names."""
    folder: str = "runs"
    """Parent of the run folder, which is `<folder>/<run>`."""
    methods_folder: FileName | None = None
    """Folder in which the modules of methods of your own are looked for before the installed packages; None: the job file's."""
    mix: dict[str, Share] = field(default_factory=lambda: {"default": 1.0})
    """Task kind -> share of the groups of every batch; the shares sum to 1."""
    mix_schedule: MixSchedule | None = None
    """Change of the mix over the steps; None: the mix is constant."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Kind -> its own settings. Kinds that are not in the mix also get queues, and can be added to the mix later."""
    eval: Eval = field(default_factory=Eval)
    """Evaluation during training."""
    policies: dict[str, Policy]
    """Name -> policy."""
    broker: BrokerSettings = field(default_factory=BrokerSettings)
    """The RabbitMQ of the run."""
    proxy: ProxySettings = field(default_factory=ProxySettings)
    """The proxies of the run."""
    groups: GroupSettings = field(default_factory=GroupSettings)
    """Groups and batches."""
    collector: CollectorSettings = field(default_factory=CollectorSettings)
    """The collector of the run."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    """Metrics of collector and learners for Prometheus."""
    alerts: AlertSettings = field(default_factory=AlertSettings)
    """Alerts to a command or a URL."""
    transcripts: TranscriptSettings = field(default_factory=TranscriptSettings)
    """Transcripts of all closed episodes."""

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
            raise ValueError("policies: no policy is trained; remove trained = false from at least one")
        for name in self.metrics.learner_ports:
            if name not in self.trained:
                raise ValueError(f"metrics.learner_ports: {name!r} is not a trained policy of this job")
        _check_shares("mix", self.mix)
        if self.mix_schedule:
            _check_points(self.mix_schedule.points)
        sizes = {"groups.group_size": self.groups.group_size}
        sizes |= {f"kinds.{name}.group_size": kind.group_size for name, kind in self.kinds.items() if kind.group_size}
        for where, size in sizes.items():
            if self.groups.min_group > size:
                raise ValueError(
                    f"groups.min_group: {self.groups.min_group} is more than {where} {size}: lower it, or raise {where}"
                )
        for name, policy in self.policies.items():
            if policy.train.steps_per_batch > self.groups.groups_per_batch:
                raise ValueError(
                    f"policies.{name}.train.steps_per_batch: {policy.train.steps_per_batch} steps need as many groups in a batch, but "
                    f"groups.groups_per_batch is {self.groups.groups_per_batch}"
                )
            try:
                self.train_of(name)
            except ValueError as error:  # with the advantages of kinds
                raise ValueError(f"policies.{name}.train.{error}") from error
            if (teacher := policy.train.teacher_policy) is not None and teacher not in self.frozen:
                raise ValueError(
                    f"policies.{name}.train.teacher: {policy.train.teacher} is no policy of this job with trained = false"
                )

    @property
    def task_kinds(self) -> tuple[str, ...]:
        """Kinds that have queues: those in the mix at any step, and those in `kinds`."""
        points = self.mix_schedule.points if self.mix_schedule else ()
        return tuple(dict.fromkeys([*self.mix, *(kind for point in points for kind in point.mix), *self.kinds]))

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the policies that have a learner."""
        return tuple(name for name, policy in self.policies.items() if policy.trained)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the policies that are served and never trained."""
        return tuple(name for name, policy in self.policies.items() if not policy.trained)

    def group_size(self, kind: str) -> int:
        """Return the group size of a kind: its own, or that of the run."""
        own = self.kinds.get(kind)
        return (own.group_size if own else None) or self.groups.group_size

    def find_teacher(self, policy: str) -> SwarmJob:
        """Return a job in which the policy's teacher is given by URL, if the teacher is a policy of this job; else this job.

        Raises ConfigError if the teacher has no engine.
        """
        student = self.policies[policy]
        if (teacher := student.train.teacher_policy) is None:
            return self
        if not (urls := self.policies[teacher].engine.urls):
            raise ConfigError(f"policies.{teacher}.engine.urls: the teacher of {policy} has no engine; name its URL")
        train = msgspec.structs.replace(student.train, teacher=urls[0])
        taught = msgspec.structs.replace(student, train=train)
        return msgspec.structs.replace(self, policies={**self.policies, policy: taught})

    def train_of(self, policy: str) -> Train:
        """Return the policy's training settings, with the kinds' own advantage estimators filled in."""
        train = self.policies[policy].train
        own = {name: kind.advantage for name, kind in self.kinds.items() if kind.advantage}
        return msgspec.structs.replace(train, advantages={**own, **train.advantages})

    @property
    def own_methods(self) -> set[str]:
        """Methods of the user's own with which policies are trained."""
        return {name for train in map(self.train_of, self.trained) for name in train.methods if is_own_method(name)}

    def list_files(self) -> Iterator[tuple[str, str]]:
        """Yield path and value of every setting that names a file or folder; names of hub models are none."""
        tree = msgspec.to_builtins(self)
        for pattern, kind in list_file_settings(SwarmJob):
            *sections, key = pattern.split(".")
            for where, section in _sections(tree, sections):
                value = section[key]
                if value and (kind == "file" or is_model_path(value) or Path(value).exists()):
                    yield f"{where}.{key}".lstrip("."), value

    @property
    def run_folder(self) -> RunFolder:
        """The paths in the run's folder."""
        return RunFolder(Path(self.folder) / self.run)

    @classmethod
    def load(cls, path: str | Path, *, sets: Sequence[str] = ()) -> SwarmJob:
        """Read a TOML file and apply `a.b=v` overrides. Raises ConfigError that names file and setting."""
        try:
            tree = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a job file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
        job = cls.build(tree, sets=sets, origin=str(path))
        own, file = RunFolder(Path(path).resolve().parent), Path(path).name
        is_stored = file == own.job.name and own.path.name == job.run and own.resolved.exists()
        if is_stored and ["folder"] not in map(_path, sets):  # of a run, wherever `folder` leads from here
            job = msgspec.structs.replace(job, folder=str(own.path.parent))
        if job.methods_folder is None and job.own_methods:
            return msgspec.structs.replace(job, methods_folder=str(Path(path).resolve().parent))
        return job

    @classmethod
    def build(cls, tree: dict[str, Any], *, sets: Sequence[str] = (), origin: str = "settings") -> SwarmJob:
        """Build a job from plain data and `a.b=v` overrides. Raises ConfigError that names the setting."""
        whole = copy.deepcopy(tree)
        rename_former(whole)
        for assignment in sets:
            _assign(whole, assignment)
        _check_policies(whole, tree, sets)
        try:
            return msgspec.convert(whole, cls)
        except msgspec.ValidationError as error:
            blamed = _find_blamed(str(error), tree, sets)
            where = ", ".join(f"--set {text!r}" for text in blamed) or origin
            raise ConfigError(f"{where}: {explain(str(error), whole, cls)}") from error

    def to_toml(self) -> str:
        """Return all settings as TOML that `load` reads."""
        return tomli_w.dumps(_without_none(msgspec.to_builtins(self)))


class RunFolder:
    """Paths of a run's files. No other module knows these names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def resolved(self) -> Path:
        """TOML of the job with every address filled in."""
        return self.path / "resolved.toml"

    @property
    def root_secret(self) -> Path:
        return self.path / "secret"

    @property
    def invite(self) -> Path:
        return self.path / "invite"

    @property
    def clients(self) -> Path:
        """JSON of all clients invited with `swarmq client add`."""
        return self.path / "clients.json"

    @property
    def hosts(self) -> Path:
        """JSON of the hosts invited with `swarmq host add` (registries/hosts.py)."""
        return self.path / "hosts.json"

    @property
    def endpoints(self) -> Path:
        """JSON written by `swarmq up`: URLs of broker, management UI, proxies and engines."""
        return self.path / "endpoints.json"

    @property
    def roster(self) -> Path:
        """JSON of each policy's engines, if they have changed since the start (registries/engines.py)."""
        return self.path / "engines.json"

    @property
    def proxies(self) -> Path:
        """JSON list of the proxies that serve at present (registries/proxies.py)."""
        return self.path / "proxies.json"

    @property
    def registries(self) -> tuple[Path, ...]:
        """The lists of clients, hosts, proxies and engines."""
        return (self.clients, self.hosts, self.proxies, self.roster)

    @property
    def lock(self) -> Path:
        """Lock file held by the process that keeps the run up."""
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
        """JSON lines of the run's events."""
        return self.path / "events.jsonl"

    @property
    def transcripts(self) -> Path:
        """Segments with every closed episode (transcripts/format.py)."""
        return self.path / "transcripts"

    @property
    def board(self) -> Path:
        """JSON of the run's present state, replaced every 2 s while the run is recorded (observe/recorder.py)."""
        return self.path / "board.json"

    @property
    def samples(self) -> Path:
        """JSON lines of queue depths, counts and loads, one every 10 s while the run is recorded."""
        return self.path / "samples.jsonl"

    @property
    def training(self) -> Path:
        """JSON of what `swarmq train` measured and how long it took (whole_run/report.py)."""
        return self.path / "train.json"

    @property
    def report(self) -> Path:
        """Markdown page with which `swarmq train` ends."""
        return self.path / "report.md"

    @property
    def prometheus_targets(self) -> Path:
        """JSON file that lists the addresses of the run's `/metrics` pages for Prometheus (`file_sd_configs`)."""
        return self.path / "prometheus.json"

    @property
    def recorder_lock(self) -> Path:
        """Lock file held by the process that records the run."""
        return self.path / "recorder.lock"

    def batch_log(self, policy: str) -> Path:
        return self.path / policy / "batches"

    def token_log(self, policy: str) -> Path:
        return self.path / policy / "tokens"

    def trackers(self, policy: str) -> Path:
        return self.path / policy / "trackers"

    @property
    def replays(self) -> Path:
        """Folders of replays that a host's clients have asked for."""
        return self.path / "replays"

    def checkpoints(self, policy: str) -> Path:
        return self.path / policy / "checkpoints"

    def newest_checkpoint(self, policy: str) -> int:
        """Return the weight version of the newest checkpoint, or 0 if there is none."""
        versions = (path.name.removeprefix("step-") for path in self.checkpoints(policy).glob("step-*"))
        return max((int(version) for version in versions if version.isdecimal()), default=0)


def make_folder(path: Path) -> None:
    """Create the folder and its parents. Raises ConfigError if that fails or the folder is not writable."""
    reason = os.strerror(errno.EACCES)
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        writable, reason = False, error.strerror or str(error)
    if not writable:
        raise ConfigError(f"{path}: cannot be written to ({reason}): choose another `folder`")


def _check_shares(where: str, mix: dict[str, float]) -> None:
    if abs(sum(mix.values()) - 1) > MIX_TOLERANCE:
        raise ValueError(f"{where}: the shares sum to {sum(mix.values()):g}, not 1")


def _check_points(points: Sequence[MixPoint]) -> None:
    if not points:
        raise ValueError("mix_schedule.points: at least one point is needed")
    steps = [point.step for point in points]
    if steps != sorted(set(steps)):
        raise ValueError(f"mix_schedule.points: steps must rise, but are {', '.join(map(str, steps))}")
    for number, point in enumerate(points):
        _check_shares(f"mix_schedule.points[{number}].mix", point.mix)


def resolve_amqp_url(broker: BrokerSettings) -> str | None:
    """Return the URL of the user's RabbitMQ: the setting, else `$SWARMQ_AMQP_URL`, else None."""
    return broker.url or os.environ.get("SWARMQ_AMQP_URL")


def parse_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Parse `section.key=value` texts into path -> value. Raises ConfigError for a malformed text."""
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
        msgspec.msgpack.encode(value)  # commands carry the value as msgpack
    except OverflowError as error:
        raise ConfigError(f"{where}: the whole number has more than 64 bits") from error
    return path.strip(), value


def _assign(tree: dict[str, Any], assignment: str) -> None:
    path, value = _assignment(assignment, f"--set {assignment!r}")
    if (present := present_path(path)) != path:
        _warn_of_former(path, present)
    *sections, key = present.split(".")
    node = tree
    for depth, section in enumerate(sections):
        if node.get(section) is None:  # also creates a section that is None by default
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise ConfigError(f"--set {assignment!r}: {'.'.join(sections[: depth + 1])} is a value, not a section")
    node[key] = value


def present_path(path: str) -> str:
    """Return the present path of the setting at `path`, which may be a former path."""
    steps = path.split(".")
    for former, present in RENAMED.items():
        if len(steps) == former.count(".") + 1 and fnmatch.fnmatchcase(path, former):
            return ".".join([*steps[:-1], present.rpartition(".")[2]])
    return path


def rename_former(tree: dict[str, Any], section: str = "") -> None:
    """Rename settings in `tree` that have a former name. Raises ConfigError if a setting is given under both names.

    `section`: path of `tree` in a job, e.g. `policies.*.train`; empty: the whole job.
    """
    prefix = f"{section}." if section else ""
    for former, present in RENAMED.items():
        if not former.startswith(prefix):
            continue
        *sections, old = former.removeprefix(prefix).split(".")
        new = present.rpartition(".")[2]
        for where, node in _sections(tree, sections):
            if old not in node:
                continue
            if new in node:
                raise ConfigError(f"{where}: {old} is the former name of {new}, but both are set; remove {old}")
            node[new] = node.pop(old)
            _warn_of_former(f"{where}.{old}", f"{where}.{new}")


def _sections(tree: Any, pattern: Sequence[str], where: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return path and content of every section of `tree` with a path that matches `pattern`, in which `*` stands for any name."""
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
    """Raise ConfigError if `sets` change a policy that the file lacks, unless they also set the policy's model."""
    known = tree.get("policies")
    for text in sets:
        sections = _path(text)
        name = sections[1] if sections[0] == "policies" and len(sections) > 2 else None
        if name and isinstance(known, dict) and name not in known and "model" not in whole["policies"][name]:
            raise ConfigError(f"--set {text!r}: there is no policy {name!r}; the job has {', '.join(known)}")


def _find_blamed(complaint: str, tree: dict[str, Any], sets: Sequence[str]) -> list[str]:
    """Return the `sets` that caused msgspec's complaint, or [] if the file alone causes it."""
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
