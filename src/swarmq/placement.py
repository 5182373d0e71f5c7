"""Which GPUs learner and engines of a policy get, from what both take of memory. Pure: numbers in, a plan or an error out.

shared   learner and engine on the same GPU: side by side where both fit, else the engine sleeps while the learner steps
split    some GPUs each: rollouts go on during the step, at full speed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from swarmq.config import Policy
from swarmq.engine.gpus import Gpu
from swarmq.engine.model import Model
from swarmq.errors import ConfigError
from swarmq.learner.memory import GIB, HEADROOM, Shape, learner_bytes, state_bytes

ALONE = 0.9
"""Share of a GPU that an engine without neighbours takes."""
BESIDE = 0.45
"""Share of a GPU that an engine takes beside a learner, where there is as much."""
ENGINE_EXTRA = 4 * GIB
"""Beside weights and cache: CUDA itself, its graphs, activations."""
ASLEEP = 2 * GIB
"""What a sleeping engine keeps."""
LEAST_CACHED = 8
"""An engine is worth starting when its cache holds this many of the longest calls."""
HALF_BYTES = 2


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy. GPUs by their numbers among the visible ones."""

    kind: str
    """`shared`, `split`, or `engines` for a policy that is not trained here."""
    learner: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    """GPUs of each engine; more than one share its weights out (tensor parallel)."""
    gpu_memory_utilization: float
    learner_share: float
    """Of each GPU of the learner: what it may fill, so that an engine that is started again finds its own."""
    sleep: bool
    reason: str

    def applied(self, policy: Policy) -> tuple[Policy, tuple[tuple[int, ...], ...]]:
        """How each engine is started, and the GPUs of each: where more are asked for, several on the same ones."""
        count = max(policy.engine.count, len(self.engines))
        crowd = -(-count // len(self.engines))
        width = len(self.engines[0])
        arguments = ("--tensor-parallel-size", str(width)) if width > 1 else ()
        engine = msgspec.structs.replace(
            policy.engine,
            gpu_memory_utilization=policy.engine.gpu_memory_utilization or self.gpu_memory_utilization / crowd,
            sleep=self.sleep,
            arguments=(*arguments, *policy.engine.arguments),
        )
        gpus = tuple(self.engines[number % len(self.engines)] for number in range(count))
        return msgspec.structs.replace(policy, engine=engine), gpus

    def __str__(self) -> str:
        engines = "engines on GPU " + " ".join("+".join(map(str, gpus)) for gpus in self.engines)
        learner = f"learner on GPU {' '.join(map(str, self.learner))}, " if self.learner else ""
        return f"{self.kind}: {learner}{engines}; {self.reason}"


class Needs(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy, in bytes of one GPU."""

    learner: dict[int, int]
    """Ranks -> the learner's share on each."""
    state: dict[int, int]
    """The same between steps."""
    engine: int
    weights: int
    """Of the engine, in all."""

    @classmethod
    def of(cls, policy: Policy, model: Model, *, num_gpus: int, judged_by: Sequence[int] | None = None) -> Needs:
        """`judged_by`: parameters of the frozen models that the learner holds beside its own."""
        train, shape = policy.train, Shape(parameters=model.parameters, hidden=model.hidden_size, layers=model.layers)
        weights = HALF_BYTES * model.parameters
        length = min(policy.engine.max_model_len, model.max_length or policy.engine.max_model_len)
        cache = LEAST_CACHED * length * HALF_BYTES * model.cached_values
        most = num_gpus if not train.lora and train.sharding != "none" else 1
        ranks = range(1, (most if policy.trained else 0) + 1)
        return cls(
            learner={n: learner_bytes(shape, train, ranks=n, judged_by=judged_by) for n in ranks},
            state={n: state_bytes(shape, train, ranks=n, judged_by=judged_by) for n in ranks},
            engine=weights + cache + ENGINE_EXTRA,
            weights=weights,
        )


def place_all(
    policies: Mapping[str, Policy],
    models: Mapping[str, Model],
    gpus: Sequence[Gpu],
    *,
    judges: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Placement]:
    """Of every policy whose model is known; GPUs are dealt out evenly, and shared when there are too few. None: no GPU.

    `judges`: policy -> parameters of its learner's frozen models, where they are known."""
    if not gpus or not models:
        return {}
    placements = {}
    crowd = -(-len(models) // len(gpus))
    for number, (name, model) in enumerate(models.items()):
        first = number * len(gpus) // len(models)
        after = max((number + 1) * len(gpus) // len(models), first + 1)
        judged_by = (judges or {}).get(name)
        placements[name] = place(
            policies[name], model, gpus[first:after], first=first, share=1 / crowd, judged_by=judged_by
        )
    return placements


def place(
    policy: Policy,
    model: Model,
    gpus: Sequence[Gpu],
    *,
    first: int = 0,
    share: float = 1.0,
    judged_by: Sequence[int] | None = None,
) -> Placement:
    """On these GPUs, the first of which has the number `first`; a policy that shares them with others gets `share` of each.

    For policies whose engines we start. Raises ConfigError when it does not fit, saying how much is missing and what to change.
    """
    memory = int(share * min(gpu.total for gpu in gpus))
    needs = Needs.of(policy, model, num_gpus=len(gpus), judged_by=judged_by)
    numbers = tuple(range(first, first + len(gpus)))
    if not policy.trained:
        return _served(policy, model, needs, numbers, memory, share)
    split = _split(needs, numbers, memory) if policy.placement != "shared" and share == 1.0 else None
    if split is not None:
        return split
    if policy.placement == "split":
        raise _too_large(model, "split", needs, memory, needs.engine + min(needs.learner.values()), len(gpus))
    return _shared(policy, model, needs, numbers, memory, share)


def _split(needs: Needs, numbers: tuple[int, ...], memory: int) -> Placement | None:
    """Half of the GPUs for the learner, or as many as it needs; None where they do not suffice."""
    width = _width(needs, memory)
    fitting = [ranks for ranks, size in needs.learner.items() if size <= HEADROOM * memory]
    if width is None or not fitting:
        return None
    ranks = max(min(fitting), min(len(numbers) // 2, max(needs.learner)))
    served = (len(numbers) - ranks) // width
    if not served:
        return None
    rest = numbers[ranks:]
    return Placement(
        kind="split",
        learner=numbers[:ranks],
        engines=tuple(rest[n * width : (n + 1) * width] for n in range(served)),
        gpu_memory_utilization=ALONE,
        learner_share=HEADROOM,
        sleep=False,
        reason=f"the learner takes {_gib(needs.learner[ranks])} of each of its GPUs' {_gib(memory)}, so that rollouts "
        "go on while it steps",
    )


def _shared(
    policy: Policy, model: Model, needs: Needs, numbers: tuple[int, ...], memory: int, share: float
) -> Placement:
    """On all GPUs; an engine on each."""
    ranks = max(needs.learner)
    learner, state = needs.learner[ranks], needs.state[ranks]
    usable = HEADROOM * memory
    fits = learner + needs.engine <= usable
    if not fits and (learner + ASLEEP > usable or state + needs.engine > usable):
        raise _too_large(model, "shared", needs, memory, min(learner, state) + needs.engine, len(numbers))
    sleep = not fits if policy.engine.sleep is None else policy.engine.sleep
    room = (usable - (state if sleep else learner)) / memory
    utilization = policy.engine.gpu_memory_utilization or min(BESIDE if not sleep else ALONE, room) * share
    taken = f"learner {_gib(learner)} and engine {_gib(int(utilization / share * memory))} of a GPU's {_gib(memory)}"
    return Placement(
        kind="shared",
        learner=numbers,
        engines=tuple((number,) for number in numbers),
        gpu_memory_utilization=round(utilization, 3),
        learner_share=round(HEADROOM * share - (0 if sleep else utilization), 3),
        sleep=sleep,
        reason=f"{taken} do not fit together, so the engine sleeps during steps" if sleep else f"{taken} fit together",
    )


def _served(
    policy: Policy, model: Model, needs: Needs, numbers: tuple[int, ...], memory: int, share: float
) -> Placement:
    """A policy that is not trained."""
    width = _width(needs, memory)
    if width is None or width > len(numbers):
        raise _too_large(model, "an engine alone", needs, memory, needs.engine, len(numbers))
    return Placement(
        kind="engines",
        learner=(),
        engines=tuple(numbers[at : at + width] for at in range(0, len(numbers) - width + 1, width)),
        gpu_memory_utilization=policy.engine.gpu_memory_utilization or round(ALONE * share, 3),
        learner_share=0.0,
        sleep=False,
        reason="it is served and not trained",
    )


def _width(needs: Needs, memory: int) -> int | None:
    """GPUs that share out one engine's weights; None when eight are too few."""
    fixed = needs.engine - needs.weights
    return next((n for n in (1, 2, 4, 8) if needs.weights / n + fixed <= ALONE * memory), None)


def _too_large(model: Model, how: str, needs: Needs, memory: int, wanted: int, num_gpus: int) -> ConfigError:
    missing = wanted - int(HEADROOM * memory)
    whole = (
        f"the learner takes {_gib(needs.learner[1])} ({_gib(needs.state[1])} between steps) and "
        if needs.learner
        else ""
    )
    return ConfigError(
        f"{model.name} ({model.parameters / 1e9:.1f} B parameters) does not fit as {how} on {num_gpus} GPU(s) of "
        f"{_gib(memory)}: {whole}the engine {'' if whole else 'takes '}{_gib(needs.engine)}, {_gib(missing)} are missing of each GPU; take more GPUs, lower train.micro_batch_tokens or "
        "engine.max_model_len, or set train.lora or train.cpu_offload"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
