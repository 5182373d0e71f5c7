"""Placement of learners and engines on GPUs, by the memory that both need. Pure: numbers in, a plan or an error out.

    shared   learner and engine on the same GPU: side by side if both fit, else the engine sleeps while the learner steps
    split    separate GPUs: rollouts continue at full speed during the step

On several GPUs the plan also decides whether the learner's ranks shard the model or hold a full copy each. Before that, the
context limit (tokens of the longest request) is chosen if the settings leave it open: the longest limit whose plan is the same
as for short requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from swarmq.config import Policy, Train
from swarmq.engine.server.gpus import GpuCapacity
from swarmq.engine.server.launch import DEFAULT_CONTEXT, ENGINE_ALONE_SHARE
from swarmq.engine.server.model_check import ModelFacts
from swarmq.errors import ConfigError
from swarmq.learner.memory.estimate import GIB, HEADROOM, ModelShape, learner_bytes, state_bytes, suggest_less

ENGINE_BESIDE_LEARNER_SHARE = 0.45
"""Fraction of a GPU's memory for an engine beside a learner, if that much is free."""
ENGINE_OVERHEAD_BYTES = 4 * GIB
"""Bytes that an engine needs besides weights and KV cache: CUDA context, CUDA graphs, activations."""
SLEEPING_ENGINE_BYTES = 2 * GIB
"""Bytes of GPU memory that a sleeping engine keeps."""
DRIVER_BYTES = 2 * GIB
"""Maximum bytes of a GPU's memory that its driver uses by itself; more means that other processes use the GPU."""
MIN_CACHED_REQUESTS = 8
"""Minimum number of requests of maximum length that the KV cache of an engine must hold at the same time."""
MIN_CONTEXT = 2048
"""Minimum context limit in tokens to choose if the settings name none, unless the model's own maximum is smaller."""
CONTEXT_STEP = 1024
FP8_BYTES = 1
HALF_BYTES = 2
FULL_BYTES = 4
SHARE_DIGITS = 3
"""Number of decimals to which memory fractions are rounded."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and memory fractions of one policy; GPUs are numbered among the visible ones."""

    kind: str
    """`shared`, `split`, or `engines` for a policy that is not trained here."""
    learner: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    """GPUs of each engine; several GPUs use tensor parallelism."""
    gpu_memory_utilization: float
    """Fraction of each engine GPU's memory for all engines on it together."""
    learner_share: float
    """Fraction of each learner GPU's memory that the learner may fill, so that a restarted engine finds its memory free."""
    sleep: bool
    sharding: Literal["none", "full"] = "none"
    """Value that `train.sharding = "auto"` resolves to."""
    reason: str

    def apply_to_policy(self, policy: Policy) -> Policy:
        """Return the policy with the sleep and sharding settings of the plan."""
        auto = policy.train.sharding == "auto"
        return msgspec.structs.replace(
            policy,
            engine=msgspec.structs.replace(policy.engine, sleep=self.sleep),
            train=msgspec.structs.replace(policy.train, sharding=self.sharding) if auto else policy.train,
        )

    def apply_to_engines(self, policy: Policy) -> tuple[Policy, tuple[tuple[int, ...], ...]]:
        """Return the policy as its engines are started, and each engine's GPUs. If `engine.count` exceeds the GPU groups,
        several engines share a group."""
        count = max(policy.engine.count, len(self.engines))
        width = len(self.engines[0])
        arguments = ("--tensor-parallel-size", str(width)) if width > 1 else ()
        share = self.gpu_memory_utilization / _engines_per_gpu(policy, len(self.engines))
        own_policy = self.apply_to_policy(policy)
        engine = msgspec.structs.replace(
            own_policy.engine,
            gpu_memory_utilization=policy.engine.gpu_memory_utilization or share,
            arguments=(*arguments, *policy.engine.arguments),
        )
        gpus = tuple(self.engines[number % len(self.engines)] for number in range(count))
        return msgspec.structs.replace(own_policy, engine=engine), gpus

    def __str__(self) -> str:
        engines = "engines on GPU " + " ".join("+".join(map(str, gpus)) for gpus in self.engines)
        layout = ", sharding the model" if self.sharding == "full" else ", a full copy of the model on each"
        learner = f"learner on GPU {' '.join(map(str, self.learner))}{layout if len(self.learner) > 1 else ''}, "
        return f"{self.kind}: {learner if self.learner else ''}{engines}; {self.reason}"


class PlacementMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one GPU in bytes, as far as the policy may use it."""

    total: int
    held: int
    """Bytes of `total` that other processes hold."""
    share: float
    """Ratio of `total` to all memory of the GPU."""

    @classmethod
    def of(cls, gpus: Sequence[GpuCapacity], share: float) -> PlacementMemory:
        """Combine several GPUs: the memory of the smallest, and the use of the fullest."""
        held = max(gpu.total - gpu.free for gpu in gpus)
        return cls(total=int(share * min(gpu.total for gpu in gpus)), held=int(share * held), share=share)

    @property
    def usable(self) -> int:
        return int(HEADROOM * self.total) - self.held

    @property
    def is_used(self) -> bool:
        """Whether other processes hold more memory than the driver's overhead."""
        return self.held > DRIVER_BYTES

    def share_of_gpu(self, size: float) -> float:
        """Return `size` bytes as a fraction of a whole GPU."""
        return self.share * size / self.total

    def __str__(self) -> str:
        return _format_gib(self.total) + (
            f", {_format_gib(self.held)} of them held by other processes" if self.is_used else ""
        )


class LearnerNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a learner on a number of ranks, in bytes per GPU."""

    ranks: int
    full: bool
    """Whether the ranks shard the model."""
    step: int
    state: int
    """Bytes that the learner holds between steps."""


class PolicyNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one policy needs, in bytes per GPU."""

    learners: tuple[LearnerNeeds, ...]
    """Every layout of the learner that `train` allows: few ranks first, and an unsharded model before a sharded one."""
    engine: int
    weights: int
    """Bytes of the engine's weights, on all its GPUs together."""

    @classmethod
    def of(
        cls, policy: Policy, model: ModelFacts, *, num_gpus: int, judge_sizes: Sequence[int] | None = None
    ) -> PolicyNeeds:
        """Compute the needs. `judge_sizes` are the parameter counts of the frozen models that the learner holds besides its own."""
        train, shape = policy.train, to_learner_shape(model)
        weights = HALF_BYTES * model.parameters
        requested = policy.engine.max_model_len or MIN_CONTEXT
        length = min(requested, model.max_length or requested)
        entry = HALF_BYTES if policy.engine.kv_cache_dtype == "auto" else FP8_BYTES
        cache = MIN_CACHED_REQUESTS * length * entry * model.kv_values_per_token
        ways = (
            [(n, full) for n in range(1, num_gpus + 1) for full in _sharding_options(train, n)]
            if policy.trained
            else []
        )
        return cls(
            learners=tuple(
                LearnerNeeds(
                    ranks=ranks,
                    full=full,
                    step=learner_bytes(shape, train, ranks=ranks, full=full, judge_sizes=judge_sizes),
                    state=state_bytes(shape, train, ranks=ranks, full=full, judge_sizes=judge_sizes),
                )
                for ranks, full in ways
            ),
            engine=weights + cache + ENGINE_OVERHEAD_BYTES,
            weights=weights,
        )


def to_learner_shape(model: ModelFacts) -> ModelShape:
    return ModelShape(parameters=model.parameters, hidden=model.hidden_size, layers=model.layers, fans=model.fans)


def _sharding_options(train: Train, ranks: int) -> tuple[bool, ...]:
    """Return the allowed values of `full` (whether the ranks shard the model), the better one first; empty if this number of
    ranks is not possible."""
    if ranks % train.context_parallel:
        return ()
    if ranks == 1:
        return () if train.cpu_offload else (False,)
    if train.sharding == "none":
        return (False,)
    return (False, True) if train.sharding == "auto" else (True,)


class ContextLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Context limit chosen for a policy whose `engine.max_model_len` is open."""

    tokens: int
    """Maximum number of tokens of prompt and answer together."""
    reason: str

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens for prompt and answer, {self.reason}"

    def apply_to(self, policy: Policy) -> Policy:
        return msgspec.structs.replace(policy, engine=msgspec.structs.replace(policy.engine, max_model_len=self.tokens))


def choose_context_limits(
    policies: Mapping[str, Policy],
    models: Mapping[str, ModelFacts],
    gpus: Sequence[GpuCapacity],
    *,
    judges: Mapping[str, Sequence[int]] | None = None,
    host_cache: int,
) -> dict[str, ContextLimit]:
    """Choose the context limit of every policy in `models` whose settings name none.

    `host_cache` is the size in bytes of an engine's cache without a GPU; `judges` is as in `place_all`. Raises ConfigError if
    not even a short request fits.
    """
    open_ = {name: model for name, model in models.items() if policies[name].engine.max_model_len is None}
    if not gpus:
        return {name: _limit_on_cpu(policies[name], model, host_cache) for name, model in open_.items()}
    places = _assign_gpus(models, gpus)
    return {
        name: _limit_on_gpus(policies[name], model, *places[name], judge_sizes=(judges or {}).get(name))
        for name, model in open_.items()
    }


def _upper_bound(policy: Policy, model: ModelFacts) -> ContextLimit:
    """Return the context limit that model and learner allow on any hardware."""
    made_for = model.max_length or MIN_CONTEXT
    budget = policy.train.micro_batch_tokens
    if policy.trained and budget < made_for:
        why = f"as many as the learner computes in one pass (train.micro_batch_tokens); the model's maximum is {made_for:,}"
        return ContextLimit(tokens=budget, reason=why)
    whole = "equal to the model's maximum" if model.max_length else "because the model's config states no maximum"
    return ContextLimit(tokens=made_for, reason=whole)


def _limit_on_cpu(policy: Policy, model: ModelFacts, host_cache: int) -> ContextLimit:
    bound = _upper_bound(policy, model)
    entry = (HALF_BYTES if policy.engine.dtype in {"bfloat16", "float16"} else FULL_BYTES) * model.kv_values_per_token
    room = host_cache // entry if entry else bound.tokens
    if min(room, DEFAULT_CONTEXT) >= bound.tokens:
        return bound
    made_for = f"the model's maximum is {model.max_length:,}" if model.max_length else bound.reason
    if room < DEFAULT_CONTEXT:
        tokens = max(room // CONTEXT_STEP * CONTEXT_STEP, min(room, CONTEXT_STEP), 1)
        return ContextLimit(tokens=tokens, reason=f"as many as the engine's cache in host memory holds; {made_for}")
    return ContextLimit(tokens=DEFAULT_CONTEXT, reason=f"the default without a GPU; {made_for}")


def _limit_on_gpus(
    policy: Policy,
    model: ModelFacts,
    gpus: Sequence[GpuCapacity],
    first: int,
    share: float,
    *,
    judge_sizes: Sequence[int] | None,
) -> ContextLimit:
    bound = _upper_bound(policy, model)

    def plan(tokens: int) -> tuple[object, ...] | None:
        """Return the properties of a placement that must stay the same when requests get longer; None if requests of `tokens` do not fit."""
        own_policy = ContextLimit(tokens=tokens, reason="").apply_to(policy)
        try:
            placement = place(own_policy, model, gpus, first=first, share=share, judge_sizes=judge_sizes)
        except ConfigError:
            return None
        requested = policy.engine.gpu_memory_utilization
        needs = PolicyNeeds.of(own_policy, model, num_gpus=len(gpus), judge_sizes=judge_sizes)
        fixed = needs.engine - needs.weights
        if requested and needs.weights / len(placement.engines[0]) + fixed > requested * min(gpu.total for gpu in gpus):
            return None
        return placement.kind, placement.learner, placement.engines, placement.sleep, placement.sharding

    least = min(MIN_CONTEXT, bound.tokens)
    wanted = plan(least)
    if wanted and plan(bound.tokens) == wanted:
        return bound
    shorter = range(bound.tokens // CONTEXT_STEP * CONTEXT_STEP, least, -CONTEXT_STEP) if wanted else ()
    tokens = next((tokens for tokens in shorter if plan(tokens) == wanted), least)
    made_for = f"the model's maximum is {model.max_length:,}" if model.max_length else bound.reason
    why = f"because GPU memory holds the KV cache of {MIN_CACHED_REQUESTS} such calls" + (
        " beside the learner" if policy.trained else ""
    )
    return ContextLimit(tokens=tokens, reason=f"{why}; {made_for}")


def _assign_gpus(
    models: Mapping[str, ModelFacts], gpus: Sequence[GpuCapacity]
) -> dict[str, tuple[Sequence[GpuCapacity], int, float]]:
    """Divide the GPUs evenly among the policies, which share GPUs if there are too few. Returns for each policy its GPUs, the
    number of the first GPU, and its fraction of each."""
    share = 1 / -(-len(models) // len(gpus))
    assigned = {}
    for number, name in enumerate(models):
        first = number * len(gpus) // len(models)
        after = max((number + 1) * len(gpus) // len(models), first + 1)
        assigned[name] = (gpus[first:after], first, share)
    return assigned


def place_all(
    policies: Mapping[str, Policy],
    models: Mapping[str, ModelFacts],
    gpus: Sequence[GpuCapacity],
    *,
    judges: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Placement]:
    """Place every policy in `models`; GPUs are divided evenly, and shared if there are too few. Returns {} without a GPU.

    `judges` maps policies to the parameter counts of their learners' frozen models, where known.
    """
    if not gpus or not models:
        return {}
    assigned = _assign_gpus(models, gpus)
    return {
        name: place(policies[name], model, own_gpus, first=first, share=share, judge_sizes=(judges or {}).get(name))
        for name, (own_gpus, first, share), model in ((name, assigned[name], model) for name, model in models.items())
    }


def place(
    policy: Policy,
    model: ModelFacts,
    gpus: Sequence[GpuCapacity],
    *,
    first: int = 0,
    share: float = 1.0,
    judge_sizes: Sequence[int] | None = None,
) -> Placement:
    """Place a policy on `gpus`, of which the first has the number `first`, using the fraction `share` of each.

    For policies whose engines swarmq starts. Raises ConfigError with the missing memory and what to change if the policy does
    not fit into the free memory.
    """
    memory = PlacementMemory.of(gpus, share)
    needs = PolicyNeeds.of(policy, model, num_gpus=len(gpus), judge_sizes=judge_sizes)
    numbers = tuple(range(first, first + len(gpus)))
    if not policy.trained:
        return _place_untrained(policy, model, needs, numbers, memory)
    if len(gpus) < policy.train.context_parallel:
        raise _context_parallel_error(policy, model, len(gpus))
    if not needs.learners:
        raise ConfigError(
            f"train.cpu_offload: {model.name} gets one GPU, and a single rank cannot offload: use two GPUs or "
            "more, or remove train.cpu_offload"
        )
    may_split = policy.placement != "shared" and share == 1.0
    split = _place_split(policy, needs, numbers, memory) if may_split else None
    if split is not None:
        return split
    whole_groups = len(gpus) % policy.train.context_parallel == 0
    if policy.placement == "split" or (may_split and not whole_groups):
        smallest = min(needs.learners, key=lambda way: way.step)
        raise _does_not_fit_error(
            policy, model, needs, memory, len(gpus), "split", smallest, smallest.step - memory.usable
        )
    if not whole_groups:
        raise _context_parallel_error(policy, model, len(gpus))
    return _place_shared(policy, model, needs, numbers, memory)


def _context_parallel_error(policy: Policy, model: ModelFacts, num_gpus: int) -> ConfigError:
    ranks = policy.train.context_parallel
    return ConfigError(
        f"train.context_parallel: {ranks} ranks compute each pass of {model.name} together, but its learner gets {num_gpus} GPU(s): give it a "
        f"multiple of {ranks} GPUs, or set train.context_parallel to a divisor of {num_gpus}"
    )


def _place_split(
    policy: Policy, needs: PolicyNeeds, numbers: tuple[int, ...], memory: PlacementMemory
) -> Placement | None:
    """Give the learner half of the GPUs, or as many as it needs; return None if the GPUs do not suffice."""
    width = _tensor_parallel_size(needs, memory)
    fitting = [way for way in needs.learners if way.step <= memory.usable]
    if width is None or not fitting:
        return None
    learner = next((way for way in fitting if way.ranks >= len(numbers) // 2), fitting[-1])
    served = (len(numbers) - learner.ranks) // width
    if not served:
        return None
    rest = numbers[learner.ranks :]
    return Placement(
        kind="split",
        learner=numbers[: learner.ranks],
        engines=tuple(rest[n * width : (n + 1) * width] for n in range(served)),
        gpu_memory_utilization=_engine_share(policy, served, memory),
        learner_share=round(memory.share_of_gpu(memory.usable), SHARE_DIGITS),
        sleep=False,
        sharding="full" if learner.full else "none",
        reason=f"the learner takes {_format_gib(learner.step)} of each of its GPUs' {memory}, so that rollouts "
        "go on while it steps",
    )


def _place_shared(
    policy: Policy, model: ModelFacts, needs: PolicyNeeds, numbers: tuple[int, ...], memory: PlacementMemory
) -> Placement:
    """Place the learner and an engine on every GPU. Prefers running both at the same time to
    taking turns, and a full copy of the model per GPU to sharding."""
    engines_per_gpu, requested = _engines_per_gpu(policy, len(numbers)), policy.engine.gpu_memory_utilization
    least = (
        int(requested * engines_per_gpu * memory.total / memory.share) if requested else engines_per_gpu * needs.engine
    )
    learners = [way for way in needs.learners if way.ranks == len(numbers)]
    turns = (False, True) if policy.engine.sleep is None else (policy.engine.sleep,)
    plans = [(way, sleep) for sleep in turns for way in learners]
    taken = [
        max(way.step + engines_per_gpu * SLEEPING_ENGINE_BYTES, way.state + least) if sleep else way.step + least
        for way, sleep in plans
    ]
    (learner, sleep), most = next(
        ((plan, size) for plan, size in zip(plans, taken, strict=True) if size <= memory.usable),
        min(zip(plans, taken, strict=True), key=lambda both: both[1]),
    )
    if most > memory.usable:
        raise _does_not_fit_error(policy, model, needs, memory, len(numbers), "shared", learner, most - memory.usable)
    room = memory.usable - (learner.state if sleep else learner.step)
    wanted = max(
        memory.share_of_gpu(least), (ENGINE_ALONE_SHARE if sleep else ENGINE_BESIDE_LEARNER_SHARE) * memory.share
    )
    utilization = (
        engines_per_gpu * requested
        if requested
        else round(min(wanted, _round_down(memory.share_of_gpu(room))), SHARE_DIGITS)
    )
    both = f"learner {_format_gib(learner.step)} and engine {_format_gib(int(utilization / memory.share * memory.total))} of a GPU's {memory}"
    why = "take turns (engine.sleep): the engine" if policy.engine.sleep else "do not fit together, so the engine"
    return Placement(
        kind="shared",
        learner=numbers,
        engines=tuple((number,) for number in numbers),
        gpu_memory_utilization=utilization,
        learner_share=round(memory.share_of_gpu(memory.usable) - (0 if sleep else utilization), SHARE_DIGITS),
        sleep=sleep,
        sharding="full" if learner.full else "none",
        reason=f"{both} {why} sleeps during steps" if sleep else f"{both} fit together",
    )


def _place_untrained(
    policy: Policy, model: ModelFacts, needs: PolicyNeeds, numbers: tuple[int, ...], memory: PlacementMemory
) -> Placement:
    """Place the engines of a policy that is not trained."""
    width = _tensor_parallel_size(needs, memory)
    if width is None or width > len(numbers):
        missing = needs.engine - _max_engine_bytes(memory)
        raise _does_not_fit_error(policy, model, needs, memory, len(numbers), "an engine alone", None, missing)
    engines = tuple(numbers[at : at + width] for at in range(0, len(numbers) - width + 1, width))
    return Placement(
        kind="engines",
        learner=(),
        engines=engines,
        gpu_memory_utilization=_engine_share(policy, len(engines), memory),
        learner_share=0.0,
        sleep=False,
        reason="it is served and not trained",
    )


def _tensor_parallel_size(needs: PolicyNeeds, memory: PlacementMemory) -> int | None:
    """Return the smallest sufficient number of GPUs per engine, or None if eight are too few."""
    fixed = needs.engine - needs.weights
    return next((n for n in (1, 2, 4, 8) if needs.weights / n + fixed <= _max_engine_bytes(memory)), None)


def _max_engine_bytes(memory: PlacementMemory) -> int:
    """Return the maximum number of bytes of a GPU that an engine without a learner may use."""
    return min(int(ENGINE_ALONE_SHARE * memory.total), memory.usable)


def _engine_share(policy: Policy, groups: int, memory: PlacementMemory) -> float:
    """Return the memory fraction of a GPU for its engines if no learner is on it. Raises ConfigError if the setting exceeds
    the free memory, because vLLM would not start."""
    requested = policy.engine.gpu_memory_utilization
    if not requested:
        return round(
            min(ENGINE_ALONE_SHARE * memory.share, _round_down(memory.share_of_gpu(memory.usable))), SHARE_DIGITS
        )
    share, free = _engines_per_gpu(policy, groups) * requested, memory.share_of_gpu(memory.total - memory.held)
    if share > free:
        raise ConfigError(
            f"engine.gpu_memory_utilization: {requested:g} of a GPU with {_engines_per_gpu(policy, groups)} engine(s) on it is more than the "
            f"{free:.2f} that other processes leave free; lower it, or free the GPU"
        )
    return share


def _engines_per_gpu(policy: Policy, groups: int) -> int:
    """Return the number of engines per GPU, or per tensor-parallel group of GPUs."""
    return max(1, -(-policy.engine.count // groups))


def _round_down(share: float) -> float:
    return math.floor(share * 10.0**SHARE_DIGITS) / 10.0**SHARE_DIGITS


def _does_not_fit_error(
    policy: Policy,
    model: ModelFacts,
    needs: PolicyNeeds,
    memory: PlacementMemory,
    num_gpus: int,
    how: str,
    learner: LearnerNeeds | None,
    missing: int,
) -> ConfigError:
    requested, engine = policy.engine.gpu_memory_utilization, _format_gib(needs.engine)
    if requested:
        engine = f"{_format_gib(int(requested * memory.total / memory.share))} (engine.gpu_memory_utilization = {requested:g})"
    takes = (
        f"the learner takes {_format_gib(learner.step)} ({_format_gib(learner.state)} between steps)" if learner else ""
    )
    both = f"{takes} and the engine {engine}" if learner else f"the engine takes {engine}"
    lacking = f"{_format_gib(missing)} are missing on each GPU" if missing > 0 else "there are too few GPUs for both"
    advice = ["take more GPUs", *(["free memory held by other processes"] if memory.is_used else [])]
    advice += ["lower or remove engine.gpu_memory_utilization"] if requested else []
    advice += ["leave engine.sleep out"] if learner and policy.engine.sleep is False else []
    advice += ["lower engine.max_model_len" + (" or train.micro_batch_tokens" if learner else "")]
    advice += [suggest_less(policy.train)] if learner else []
    return ConfigError(
        f"{model.name} ({model.parameters / 1e9:.1f} B parameters) does not fit as {how} on {num_gpus} GPU(s) of {memory}: "
        f"{both}, {lacking}; {', '.join(advice)}"
    )


def _format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
