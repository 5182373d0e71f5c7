"""Checks of a method on random episodes: what it returns, that it keeps no state, that layouts and ranks cannot change its result,
and its gradient. Used by `swarmq check-method`, and before a run with methods of the user's own starts."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from swarmq.config import Train
from swarmq.errors import SetUpError
from swarmq.learner.methods.advantages import AdvantageFunction, EpisodeValues, RewardSet, list_values
from swarmq.learner.methods.filters import FilterFunction
from swarmq.learner.methods.groupings import GroupingFunction, find_grouping_flaw
from swarmq.learner.methods.losses import LossFunction, LossInputs, TokenLoss
from swarmq.learner.methods.optimizers import OptimizerFunction
from swarmq.learner.methods.rewards import RewardFunction
from swarmq.learner.methods.schedules import ScheduleFunction
from swarmq.messages import Rollout, Slot, Turn, VersionSpan, pack_floats, pack_ids

CALLS = 12
"""Model calls in a random micro-batch."""
SAME = 1e-9
"""Largest relative difference between float64 results that rounding explains when a sum is taken in another order."""
TWIN = 1e-4
"""Largest relative difference between gradients in float32 and float64 that rounding explains."""
STEP = 1e-6
"""Step of finite differences, in nats."""
SLOPE = 1e-5
"""Largest relative difference between a gradient and finite differences that rounding explains."""
KINDS_BY_PARAMETER = {
    "tokens": "loss",
    "sets": "advantage",
    "step": "schedule",
    "parameters": "optimizer",
    "episode": "reward",
    "episodes": "grouping",
}
"""Name of a method's first parameter -> kind of the method."""


class Check(NamedTuple):
    name: str
    flaw: str
    """What is wrong; "" if nothing is."""
    figure: float | None = None


class MethodError(Exception):
    """A check failed; the message says how."""


def find_kind(name: str, function: Callable[..., Any]) -> str:
    """Return the kind of a method by the name of its first parameter. Raises SetUpError if the name tells none."""
    parameters = list(inspect.signature(function).parameters)
    if parameters[:2] == ["tokens", "among"]:
        return "filter"
    if not parameters or parameters[0] not in KINDS_BY_PARAMETER:
        known = ", ".join(f"{first} ({kind})" for first, kind in KINDS_BY_PARAMETER.items())
        raise SetUpError(f"{name}: the first parameter tells the kind of a method: {known}; or give --kind")
    return KINDS_BY_PARAMETER[parameters[0]]


def check_method(kind: str, function: Callable[..., Any], train: Train) -> Iterator[Check]:
    """Yield the result of each check of the method under the settings `train`. If the first one (shape) fails, the
    others make no sense and are left out."""
    checks = CHECKS[kind](function, train)
    for number, (name, run) in enumerate(checks.items()):
        try:
            yield Check(name, "", run())
        except MethodError as error:
            yield Check(name, str(error))
        except Exception as error:
            yield Check(name, f"raised {type(error).__name__}: {error}")
        else:
            continue
        if number == 0:
            return


def _loss_checks(loss: LossFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    def compute(tokens: LossInputs) -> TokenLoss:
        return loss(_add_candidates(tokens, train.loss.top_k), train.loss)

    return {
        "shape": lambda: _check_loss_shape(compute),
        "finite": lambda: _check_loss_finite(compute),
        **_token_checks(lambda tokens: compute(tokens).per_token.detach()),
        "gradient in float32 and float64": lambda: _check_twin(compute),
        "gradient and finite differences": lambda: _check_slopes(compute),
    }


def _token_checks(compute: Callable[[LossInputs], Tensor]) -> dict[str, Callable[[], float | None]]:
    """`compute`: returns a value for each token."""
    return {
        "inputs unchanged": lambda: _check_inputs_unchanged(compute),
        "no state": lambda: _check_no_state(lambda seed: compute(draw_tokens(seed)).tolist()),
        "packing and ranks": lambda: _check_packing(compute),
        "order of model calls": lambda: _check_order_of_calls(compute),
    }


def draw_tokens(seed: int, *, dtype: torch.dtype = torch.float64, spread: float = 0.3) -> LossInputs:
    """Return random tokens of `CALLS` model calls, as a micro-batch has them.

    `spread`: standard deviation of all differences between log-probabilities, in nats.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (CALLS,), generator=generator)
    calls = torch.repeat_interleave(torch.arange(CALLS), lengths)

    def near(values: Tensor) -> Tensor:
        noise = torch.randn(len(calls), generator=generator, dtype=torch.float64)
        return (values + spread * noise).clamp(max=-1e-3)

    behavior_logprobs = near(-3 * torch.rand(len(calls), generator=generator, dtype=torch.float64))
    advantages = torch.randn(CALLS, generator=generator, dtype=torch.float64)[calls]
    others = {name: near(behavior_logprobs).to(dtype) for name in ("reference", "teacher")}
    others["entropies"] = 3 * torch.rand(len(calls), generator=generator, dtype=torch.float64).to(dtype)
    return LossInputs(
        logprobs=near(behavior_logprobs).to(dtype).requires_grad_(),
        behavior_logprobs=behavior_logprobs.to(dtype),
        advantages=advantages.to(dtype),
        calls=calls,
        num_calls=CALLS,
        held=torch.zeros(len(calls), dtype=torch.bool),
        **others,
    )


def _add_candidates(tokens: LossInputs, k: int) -> LossInputs:
    """Return `tokens` with `k` candidates for each, which share the token's probability: 1/2, 1/4, ... of it."""
    if not k or tokens.teacher is None:
        return tokens
    shares = -math.log(2) * torch.arange(1, k + 1, dtype=tokens.logprobs.dtype)
    candidates, of_teacher = (values[:, None] + shares for values in (tokens.logprobs, tokens.teacher))
    return tokens._replace(candidates=candidates, teacher_candidates=of_teacher)


def _check_loss_shape(compute: Callable[[LossInputs], TokenLoss]) -> None:
    tokens = draw_tokens(0)
    result: Any = compute(tokens)
    if not isinstance(result, TokenLoss):
        raise MethodError(f"returned a {type(result).__name__}, not a TokenLoss")
    number = len(tokens.calls)
    found: dict[str, Any] = result._asdict()
    for name, value in found.items():
        if name == "advantages" and value is None:
            continue
        if not isinstance(value, Tensor) or value.shape != (number,):
            raise MethodError(f"{name} is {_describe(value)}, not one value for each of {number} tokens")
    if found["effects"].is_floating_point():
        raise MethodError(f"effects is {_describe(found['effects'])}, not one LossEffect for each of {number} tokens")
    if result.advantages is not None and result.advantages.requires_grad:
        raise MethodError("advantages carries a gradient: detach it")
    if not result.per_token.requires_grad or not _gradient(compute, tokens).any():
        raise MethodError("no gradient reaches tokens.logprobs: is it detached, or multiplied by 0?")


def _check_loss_finite(compute: Callable[[LossInputs], TokenLoss]) -> None:
    for spread in (0.0, 5.0, 300.0):
        tokens = draw_tokens(1, dtype=torch.float32, spread=spread)
        values, gradient = compute(tokens).per_token.detach(), _gradient(compute, tokens)
        for what, found in (("loss", values), ("gradient", gradient)):
            if not found.isfinite().all():
                at = int((~found.isfinite()).nonzero()[0])
                raise MethodError(
                    f"the {what} is {float(found[at])} for a token with logprobs {float(tokens.logprobs[at].detach()):g}, behavior_logprobs "
                    f"{float(tokens.behavior_logprobs[at]):g} and advantage {float(tokens.advantages[at]):g}"
                )


def _check_inputs_unchanged(compute: Callable[[LossInputs], Tensor]) -> None:
    tokens = draw_tokens(2)
    before = {name: value.clone() for name, value in tokens._asdict().items() if isinstance(value, Tensor)}
    compute(tokens)
    for name, value in before.items():
        if not torch.equal(getattr(tokens, name), value):
            raise MethodError(f"it changes tokens.{name} in place")


def _check_no_state(compute: Callable[[int], Sequence[float]]) -> None:
    """Raise MethodError if a result depends on earlier calls or on chance. `compute` returns the numbers of the result for a seed."""

    def run(seed: int, chance: int) -> Sequence[float]:
        state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(chance)
            random.seed(chance)
            try:
                return compute(seed)
            finally:
                random.setstate(state)

    first, again = run(3, 0), run(3, 1)
    if not _are_equal(first, again):
        raise MethodError("two calls with equal inputs return different values: it uses random numbers, or keeps state")
    run(4, 2)
    if not _are_equal(first, run(3, 3)):
        raise MethodError("it keeps state: its result depends on earlier calls")


def _check_packing(compute: Callable[[LossInputs], Tensor]) -> None:
    tokens = draw_tokens(5)
    whole = compute(tokens)
    for first in (range(1), range(CALLS // 2), range(CALLS - 1)):
        kept = tokens.calls < len(first)
        for part in (kept, ~kept):
            made = compute(_take(tokens, part.nonzero().flatten()))
            _require_close(
                made,
                whole[part],
                "the result for a token depends on the other model calls in its micro-batch, so packing and ranks change it",
            )


def _check_order_of_calls(compute: Callable[[LossInputs], Tensor]) -> None:
    tokens = draw_tokens(6)
    turned_calls = CALLS - 1 - tokens.calls
    turned = turned_calls.argsort(stable=True)
    made = compute(_take(tokens._replace(calls=turned_calls), turned))
    whole = compute(tokens)
    _require_close(
        made, whole[turned], "the result for a token depends on the order of the model calls in its micro-batch"
    )


def _take(tokens: LossInputs, places: Tensor) -> LossInputs:
    """Return the tokens at `places`, with model calls numbered from 0."""
    kept = {name: value.detach()[places] for name, value in tokens._asdict().items() if isinstance(value, Tensor)}
    which, calls = torch.unique(kept["calls"], return_inverse=True)
    kept["logprobs"].requires_grad_()
    return tokens._replace(**kept | {"calls": calls}, num_calls=len(which))


def _check_twin(compute: Callable[[LossInputs], TokenLoss]) -> float:
    worst = 0.0
    for seed in range(10, 15):
        tokens = draw_tokens(seed, dtype=torch.float32)
        single = _gradient(compute, tokens).double()
        double = _gradient(compute, _as_double(tokens))
        worst = max(worst, float((single - double).norm() / double.norm().clamp(min=1e-30)))
    if not worst <= TWIN:
        raise MethodError(f"the gradients in float32 and float64 differ by {worst:.2g} relative (limit {TWIN:g})")
    return worst


def _as_double(tokens: LossInputs) -> LossInputs:
    cast: dict[str, Any] = {
        name: value.detach().double()
        for name, value in tokens._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    cast["logprobs"].requires_grad_()
    return tokens._replace(**cast)


class _HeldConstants(TorchFunctionMode):
    """Records the values that are detached in a first run, and returns them in later runs, whatever their inputs are. Finite differences
    thus hold constant what autograd holds constant.

    `no_grad`: whether values computed without gradient count as detached, too; that is wrong inside a custom autograd function.
    """

    def __init__(self, *, no_grad: bool) -> None:
        super().__init__()
        self._no_grad, self._values, self._at = no_grad, list[Any](), -1

    def replay(self) -> _HeldConstants:
        self._at = 0
        return self

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_constant = func in (Tensor.detach, Tensor.data.__get__) or (self._no_grad and not torch.is_grad_enabled())  # type: ignore[attr-defined]
        if not (is_constant and isinstance(result, Tensor)):
            return result
        if self._at < 0:
            self._values.append(result)
            return result
        self._at += 1
        return self._values[self._at - 1]


def _check_slopes(compute: Callable[[LossInputs], TokenLoss]) -> float:
    worst = min(_measure_slopes(compute, no_grad=no_grad) for no_grad in (True, False))
    if not worst <= SLOPE:
        raise MethodError(
            f"the gradient differs from finite differences by {worst:.2g} relative (limit {SLOPE:g}), with everything constant "
            "that is detached or computed without gradient"
        )
    return worst


def _measure_slopes(compute: Callable[[LossInputs], TokenLoss], *, no_grad: bool) -> float:
    """Return the largest relative difference between the gradient of a weighted sum of the loss and finite differences."""
    worst = 0.0
    for seed in range(20, 23):
        tokens = draw_tokens(seed)
        weights = torch.rand(len(tokens.calls), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        gradient = _gradient(compute, tokens, weights)
        held = _HeldConstants(no_grad=no_grad)
        with held:
            compute(tokens)

        def value(
            at: int, step: float, tokens: LossInputs = tokens, held: _HeldConstants = held, weights: Tensor = weights
        ) -> float:
            moved = tokens.logprobs.detach().clone()
            moved[at] += step
            with held.replay():
                result = compute(tokens._replace(logprobs=moved.requires_grad_())).per_token
            return float((result.detach() * weights).sum())

        for at in range(0, len(tokens.calls), 7):
            slope = (value(at, STEP) - value(at, -STEP)) / (2 * STEP)
            scale = max(float(gradient.abs().max()), 1e-12)
            worst = max(worst, abs(slope - float(gradient[at])) / scale)
    return worst


def _gradient(compute: Callable[[LossInputs], TokenLoss], tokens: LossInputs, weights: Tensor | None = None) -> Tensor:
    """Return the gradient of the sum of the loss by `logprobs`."""
    values = compute(tokens).per_token
    (found,) = torch.autograd.grad((values if weights is None else values * weights).sum(), tokens.logprobs)
    return found


def _advantage_checks(method: AdvantageFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    def compute(sets: Sequence[RewardSet]) -> Sequence[EpisodeValues]:
        return method(sets, train, {"default": 0.25, "code": -1.0})

    def flat(seed: int) -> list[float]:
        return [value for of in compute(draw_rewards(seed)) for value in list_values(of)]

    return {
        "shape": lambda: _check_advantage_shape(compute),
        "finite": lambda: _check_advantage_finite(compute),
        "inputs unchanged": lambda: _check_rewards_unchanged(compute),
        "no state": lambda: _check_no_state(flat),
        "order of groups and episodes": lambda: _check_order_of_rewards(compute),
    }


def draw_rewards(seed: int, *, size: float = 1.0) -> list[RewardSet]:
    """Return random rewards of a batch: of episodes, agents and calls; also equal ones, and those of a single episode."""
    rng = random.Random(seed)
    sets = []
    for group in range(8):
        level = ("episode", "episode", "agent", "call")[group % 4]
        episodes = [f"{group}-{member}" for member in range(1 if group == 7 else rng.randint(2, 6))]
        calls = {e: [f"c{n}" for n in range(rng.randint(1, 3))] if level == "call" else [""] for e in episodes}
        values = {
            e: {call: size * (1.0 if group == 6 else rng.choice((0.0, 1.0, rng.gauss(0, 1)))) for call in calls[e]}
            for e in episodes
        }
        kind, agent = rng.choice(("default", "code")), "solver" if level != "episode" else None
        sets.append(RewardSet(kind=kind, level=level, agent=agent, rewards=values))  # type: ignore[arg-type]
    return sets


def _check_advantage_shape(compute: Callable[[Sequence[RewardSet]], Sequence[EpisodeValues]]) -> None:
    sets = draw_rewards(0)
    results: list[Any] = list(compute(sets))
    if len(results) != len(sets):
        raise MethodError(f"returned {len(results)} results for {len(sets)} sets of rewards")
    for given, result in zip(sets, results, strict=True):
        if not isinstance(result, Mapping):
            raise MethodError(f"a result is {_describe(result)}, not episode id -> call id -> advantage")
        shapes = [{e: set(own) for e, own in of.items()} for of in (given.rewards, result)]
        if result and shapes[0] != shapes[1]:
            raise MethodError(
                f"a result has values for {shapes[1]}, the rewards are of {shapes[0]}: give each reward a value, or return {{}}"
            )
        values: list[Any] = list_values(result)
        if wrong := [value for value in values if not isinstance(value, float)]:
            raise MethodError(f"an advantage is {_describe(wrong[0])}, not a float")
    if not any(results):
        raise MethodError("it returns no advantage at all")


def _check_advantage_finite(compute: Callable[[Sequence[RewardSet]], Sequence[EpisodeValues]]) -> None:
    for size in (0.0, 1e-12, 1.0, 1e6):
        sets = draw_rewards(1, size=size)
        for given, result in zip(sets, compute(sets), strict=True):
            for value in list_values(result):
                if not math.isfinite(value):
                    raise MethodError(f"an advantage is {value} for the rewards {list_values(given.rewards)}")


def _check_rewards_unchanged(compute: Callable[[Sequence[RewardSet]], Sequence[EpisodeValues]]) -> None:
    sets = draw_rewards(2)
    before = copy.deepcopy(sets)
    compute(sets)
    if sets != before:
        raise MethodError("it changes the rewards in place")


def _check_order_of_rewards(compute: Callable[[Sequence[RewardSet]], Sequence[EpisodeValues]]) -> None:
    sets = draw_rewards(5)
    turned = [
        msgspec.structs.replace(each, rewards=dict(reversed(list(each.rewards.items())))) for each in reversed(sets)
    ]
    for one, other in zip(compute(sets), reversed(list(compute(turned))), strict=True):
        for episode, own in one.items():
            for call, value in own.items():
                if not math.isclose(value, other[episode][call], rel_tol=SAME, abs_tol=SAME):
                    raise MethodError(
                        f"an advantage is {value:g}, and {other[episode][call]:g} with groups and episodes in another order"
                    )


def _schedule_checks(schedule: ScheduleFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    steps = [*range(1, 201), 1000, 10**6, 1]

    def compute(_seed: int = 0) -> list[float]:
        return [schedule(step, train) for step in steps]

    return {"shape": lambda: _check_factors(compute(), steps), "no state": lambda: _check_no_state(compute)}


def _check_factors(factors: Sequence[Any], steps: Sequence[int]) -> None:
    for step, factor in zip(steps, factors, strict=True):
        if not isinstance(factor, float) or not 0 <= factor < math.inf:
            raise MethodError(
                f"the factor of the learning rate at step {step} is {_describe(factor)}, not a float of at least 0"
            )
    if factors[0] != factors[-1]:
        raise MethodError("it keeps state: its factor at step 1 depends on earlier calls")
    if not any(factors):
        raise MethodError("the factor is 0 at every step, so nothing would be learned")


def _optimizer_checks(make: OptimizerFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    return {
        "shape": lambda: _check_optimizer_covers(make, train),
        "learning rate": lambda: _check_learning_rate(make, train),
        "finite": lambda: _check_steps_finite(make, train),
        "no randomness": lambda: _check_no_state(lambda _: _flatten_weights(_steps(make, train, 3))),
        "continues from its state": lambda: _check_continues(make, train),
    }


def _draw_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(16, 8),
                "layer": nn.Linear(8, 8),
                "norm": nn.LayerNorm(8),
                "lm_head": nn.Linear(8, 16),
            }
        )


def _build_optimizer(
    make: OptimizerFunction, train: Train, model: nn.Module, rate: float = 1e-2
) -> torch.optim.Optimizer:
    optimizer = make(list(model.named_parameters()), train)
    for group in optimizer.param_groups:
        group.update(lr=rate, betas=train.betas, weight_decay=train.weight_decay)
    return optimizer


def _take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Sequence[int], size: float = 1.0) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = size * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def _steps(make: OptimizerFunction, train: Train, count: int) -> nn.Module:
    model = _draw_model()
    _take_steps(model, _build_optimizer(make, train, model), range(count))
    return model


def _flatten_weights(model: nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def _check_optimizer_covers(make: OptimizerFunction, train: Train) -> None:
    model = _draw_model()
    optimizer: Any = make(list(model.named_parameters()), train)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MethodError(f"returned {_describe(optimizer)}, not a torch.optim.Optimizer")
    taken = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    left = [name for name, parameter in model.named_parameters() if taken.count(id(parameter)) != 1]
    if left:
        raise MethodError(
            f"{left[0]} is in {taken.count(id(model.get_parameter(left[0])))} parameter groups, not in one"
        )
    moved = _steps(make, train, 1)
    for (name, before), after in zip(model.named_parameters(), moved.parameters(), strict=True):
        if torch.equal(before, after):
            raise MethodError(f"a step leaves {name} as it is")


def _check_learning_rate(make: OptimizerFunction, train: Train) -> None:
    model, plain = _draw_model(), msgspec.structs.replace(train, weight_decay=0.0)
    _take_steps(model, _build_optimizer(make, plain, model, rate=0.0), range(2))
    if _flatten_weights(model) != _flatten_weights(_draw_model()):
        raise MethodError(
            'it moves parameters at a learning rate of 0: take the rate from group["lr"], which the trainer sets'
        )


def _check_steps_finite(make: OptimizerFunction, train: Train) -> None:
    for size in (0.0, 1e-12, 1e4):
        model = _draw_model()
        _take_steps(model, _build_optimizer(make, train, model), range(2), size)
        if not all(map(math.isfinite, _flatten_weights(model))):
            raise MethodError(f"weights are not finite after gradients of size {size:g}")


def _check_continues(make: OptimizerFunction, train: Train) -> None:
    whole = _steps(make, train, 4)
    first = _draw_model()
    optimizer = _build_optimizer(make, train, first)
    _take_steps(first, optimizer, range(2))
    second = _draw_model()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    again = _build_optimizer(make, train, second)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _take_steps(second, again, range(2, 4))
    if _flatten_weights(second) != _flatten_weights(whole):
        raise MethodError("it continues otherwise from its state_dict: something that it remembers is not in it")


def _are_equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Compare bit for bit; a NaN equals itself."""
    return list(map(repr, one)) == list(map(repr, other))


def _require_close(made: Tensor, wanted: Tensor, flaw: str) -> None:
    apart = (made - wanted).abs()
    if not bool((apart <= SAME * wanted.abs().clamp(min=1)).all()):
        raise MethodError(f"{flaw} (by {float(apart.max()):.2g})")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return " ".join(repr(value).split())[:60]


def _filter_checks(keep: FilterFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    def compute(tokens: LossInputs) -> Tensor:
        return keep(
            tokens._replace(logprobs=tokens.logprobs.detach()), torch.ones_like(tokens.calls, dtype=torch.bool), train
        )

    return {
        "shape": lambda: _check_mask(compute(draw_tokens(0)), len(draw_tokens(0).calls)),
        **_token_checks(lambda tokens: compute(tokens).double()),
    }


def _check_mask(kept: Any, number: int) -> None:
    if not isinstance(kept, Tensor) or kept.shape != (number,) or kept.dtype != torch.bool:
        raise MethodError(f"returned {_describe(kept)}, not whether to keep each of {number} tokens")
    if not kept.any():
        raise MethodError("it keeps no token at all")


def _reward_checks(transform: RewardFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    def compute(seed: int) -> list[float]:
        return [transform(episode, episode.reward, train) for episode in draw_episodes(seed)]

    return {"shape": lambda: _check_rewards(compute(0)), "no state": lambda: _check_no_state(compute)}


def draw_episodes(seed: int, count: int = 8) -> list[Rollout]:
    """Return random episodes with a chat of a few turns and a few metrics."""
    rng = random.Random(seed)
    episodes = []
    for number in range(count):
        turns = []
        for turn in range(rng.randint(1, 4)):
            sampled = [rng.randrange(100) for _ in range(rng.randint(1, 20))]
            turns.append(
                Turn(
                    run="check",
                    episode_id=str(number),
                    policy="main",
                    call_id=f"{number}-{turn}",
                    request_id=f"{number}-{turn}",
                    prompt_ids=pack_ids([rng.randrange(100) for _ in range(5)]),
                    sampled_ids=pack_ids(sampled),
                    logprobs=pack_floats([-rng.random() for _ in sampled]),
                    versions=(VersionSpan(version=0, start=0, end=len(sampled)),),
                )
            )
        episodes.append(
            Rollout(
                run="check",
                policy="main",
                episode_id=str(number),
                slot=Slot(task_id="task", repeat=number),
                kind="default",
                group_id="task/0",
                group_members=count,
                group_size=count,
                reward=rng.choice((0.0, 1.0, rng.gauss(0, 1))),
                metrics={"steps": float(len(turns))},
                turns=tuple(turns),
            )
        )
    return episodes


def _grouping_checks(grouping: GroupingFunction, train: Train) -> dict[str, Callable[[], float | None]]:
    def compute(seed: int) -> list[float]:
        groups = grouping(draw_batch(seed), train)
        return [float(episode.episode_id) for group in groups for episode in (*group, *group[:1])]

    return {
        "shape": lambda: _check_partition(grouping, train),
        "no state": lambda: _check_no_state(compute),
        "order of slots": lambda: _check_order_of_slots(grouping, train),
    }


def draw_batch(seed: int) -> list[Rollout]:
    """Return the episodes of a random batch: slots of several sizes, tasks and kinds, one after another."""
    rng = random.Random(seed)
    episodes: list[Rollout] = []
    for number in range(8):
        members = draw_episodes(rng.randrange(2**32), rng.randint(2, 5))
        kind, task = rng.choice(("default", "code")), f"task-{rng.randrange(4)}"
        episodes += [
            msgspec.structs.replace(
                each,
                episode_id=str(len(episodes) + place),
                kind=kind,
                slot=Slot(task_id=f"{kind}-{task}", repeat=number),
                group_id=f"{kind}-{task}/{number}",
            )
            for place, each in enumerate(members)
        ]
    return episodes


def _check_partition(grouping: GroupingFunction, train: Train) -> None:
    episodes = draw_batch(0)
    groups: Any = grouping(episodes, train)
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Sequence) and all(isinstance(each, Rollout) for each in group) for group in groups
    ):
        raise MethodError(f"returned {_describe(groups)}, not groups of episodes")
    if flaw := find_grouping_flaw(episodes, groups):
        raise MethodError(flaw)


def _check_order_of_slots(grouping: GroupingFunction, train: Train) -> None:
    slots = [list(group) for _, group in groupby(draw_batch(5), key=lambda episode: episode.group_id)]

    def compute(slots: Sequence[Sequence[Rollout]]) -> set[frozenset[str]]:
        groups = grouping([episode for each in slots for episode in each], train)
        return {frozenset(each.episode_id for each in group) for group in groups}

    if compute(slots) != compute(slots[::-1]):
        raise MethodError("episodes are grouped otherwise if the slots come in another order")


def _check_rewards(rewards: Sequence[Any]) -> None:
    for reward in rewards:
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise MethodError(f"a reward is {_describe(reward)}, not a finite float")


CHECKS: dict[str, Callable[[Any, Train], dict[str, Callable[[], float | None]]]] = {
    "loss": _loss_checks,
    "advantage": _advantage_checks,
    "schedule": _schedule_checks,
    "optimizer": _optimizer_checks,
    "filter": _filter_checks,
    "reward": _reward_checks,
    "grouping": _grouping_checks,
}


def check_named(kind: str, name: str, function: Callable[..., Any], train: Train) -> None:
    """Raise SetUpError that says what is wrong with a method."""
    for check in check_method(kind, function, train):
        if check.flaw:
            raise SetUpError(f"{name} fails the check {check.name!r}: {check.flaw}; try `swarmq check-method {name}`")
