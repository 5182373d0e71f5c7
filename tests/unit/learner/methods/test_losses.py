"""Every loss and its gradient against a plain float64 implementation written from the formula, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.own_methods import FILTER, write_own_methods
from swarmq.config import LOSSES, Loss, Train
from swarmq.learner.methods import registry
from swarmq.learner.methods.filters import apply_filters
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.methods.losses import LossInputs
from swarmq.learner.methods.losses.tis_mask import PENALTY_SQUARE_REACH
from swarmq.learner.methods.policy_loss import policy_loss
from swarmq.learner.methods.registry import find_method

EVERY = torch.ones(1, dtype=torch.bool)
CALLS = [0, 0, 0, 1, 1, 2]
Reference = Callable[[float, float, float, float], tuple[float, float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def tis_mask(logprobs: float, behavior_logprobs: float, a: float, _: float) -> tuple[float, float]:
    moved = math.exp(logprobs) - math.exp(behavior_logprobs)
    masked = (a > 0 and moved > 0.2) or (a < 0 and moved < -0.2)
    weight = 0.0 if masked else min(math.exp(logprobs - behavior_logprobs), 20.0)
    d, reach = logprobs - behavior_logprobs, 3.0
    pull, slope = (d**2, 2 * d) if abs(d) <= reach else (2 * reach * abs(d) - reach**2, math.copysign(2 * reach, d))
    return -weight * a * logprobs + 1e-3 * pull, -weight * a + 1e-3 * slope


def ppo_clip(logprobs: float, behavior_logprobs: float, a: float, _: float) -> tuple[float, float]:
    rho = math.exp(logprobs - behavior_logprobs)
    inner, bound = min(rho * a, clip(rho, 0.8, 1.28) * a), 3.0 * a
    value = max(inner, bound) if a < 0 else inner
    return -value, -rho * a if value == rho * a else 0.0


def cispo(logprobs: float, behavior_logprobs: float, a: float, _: float) -> tuple[float, float]:
    weight = clip(math.exp(logprobs - behavior_logprobs), 0.0, 5.0)
    return -weight * a * logprobs, -weight * a


def gspo(logprobs: float, behavior_logprobs: float, a: float, sequence: float) -> tuple[float, float]:
    limited = clip(sequence, 1 - 3e-4, 1 + 4e-4)
    value = min(sequence * a, limited * a)
    return -value, -sequence * a if value == sequence * a else 0.0


def reinforce(logprobs: float, behavior_logprobs: float, a: float, _: float) -> tuple[float, float]:
    weight = min(math.exp(logprobs - behavior_logprobs), 20.0)
    return -weight * a * logprobs, -weight * a


def sft(logprobs: float, behavior_logprobs: float, a: float, _: float) -> tuple[float, float]:
    return -logprobs, -1.0


def distill(logprobs: float, behavior_logprobs: float, a: float, _: float) -> tuple[float, float]:
    """The teacher of these tests finds every token twice as likely as the engine did."""
    return reinforce(logprobs, behavior_logprobs, behavior_logprobs + math.log(2) - logprobs, _)


REFERENCES: dict[str, Reference] = {
    "tis_mask": tis_mask, "ppo_clip": ppo_clip, "cispo": cispo, "gspo": gspo, "reinforce": reinforce, "sft": sft,
    "distill": distill,
}  # fmt: skip


def test_every_loss_has_a_reference() -> None:
    assert REFERENCES.keys() == set(LOSSES)


def sampled(spread: float, seed: int) -> tuple[torch.Tensor, ...]:
    """logprobs, behavior_logprobs, A, and log-probabilities under two other models; float64."""
    generator = torch.Generator().manual_seed(seed)
    behavior_logprobs = -3 * torch.rand(6, generator=generator, dtype=torch.float64)
    logprobs, *others = (
        (behavior_logprobs + spread * torch.randn(6, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)
        for _ in range(3)
    )
    return logprobs, behavior_logprobs, torch.randn(6, generator=generator, dtype=torch.float64), *others


def slowly(
    name: str, logprobs: torch.Tensor, behavior_logprobs: torch.Tensor, a: torch.Tensor
) -> list[tuple[float, float]]:
    """Value and slope of every token."""
    made = []
    for i, row in enumerate(CALLS):
        members = [j for j, other in enumerate(CALLS) if other == row]
        sequence = math.exp(sum(float(logprobs[j] - behavior_logprobs[j]) for j in members) / len(members))
        made.append(REFERENCES[name](float(logprobs[i]), float(behavior_logprobs[i]), float(a[i]), sequence))
    return made


def assert_follows(tokens: LossInputs, loss: Loss, wanted: list[tuple[float, float]]) -> None:
    """`tokens` are float64; they are computed in float32, as always."""
    learned = tokens.logprobs.float().requires_grad_()
    single = {k: v.float() for k, v in tokens._asdict().items() if isinstance(v, torch.Tensor) and k != "calls"}
    got = policy_loss(tokens._replace(**single | {"logprobs": learned}), loss).per_token
    got.sum().backward()
    assert learned.grad is not None
    values, slopes = (torch.tensor(each, dtype=torch.float64) for each in zip(*wanted, strict=True))
    torch.testing.assert_close(got.double(), values, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(learned.grad.double(), slopes, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("spread", [1e-4, 0.3, 4.0])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_follow_the_formula(name: str, spread: float, seed: int) -> None:
    logprobs, behavior_logprobs, a, *_ = sampled(spread, seed)
    tokens = LossInputs(logprobs, behavior_logprobs, a, torch.tensor(CALLS), 3, teacher=behavior_logprobs + math.log(2))
    assert_follows(tokens, Loss(name=name), slowly(name, logprobs, behavior_logprobs, a))


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(5))
def test_later_steps_of_a_batch_compare_with_its_first_weights_and_weigh_what_the_engine_did(
    name: str, seed: int
) -> None:
    """Decoupled PPO: min(pi_prox / behavior_logprobs, C) times the loss of logprobs against pi_prox."""
    logprobs, behavior_logprobs, a, prox, _ = sampled(0.5, seed)
    cap = 1.5 if name in {"ppo_clip", "cispo", "gspo"} else 20.0  # those have no use for it themselves
    inner = slowly(name, logprobs, prox, a)
    weights = [
        1.0 if name == "sft" else min(math.exp(p - m), cap) for p, m in zip(prox, behavior_logprobs, strict=True)
    ]
    wanted = [(w * v, w * s) for w, (v, s) in zip(weights, inner, strict=True)]
    tokens = LossInputs(
        logprobs, behavior_logprobs, a, torch.tensor(CALLS), 3, proximal=prox, teacher=prox + math.log(2)
    )
    assert_follows(tokens, Loss(name=name, ratio_cap=cap), wanted)


@pytest.mark.parametrize("seed", range(5))
def test_the_divergence_from_a_reference_is_k3_weighted_for_having_been_sampled_elsewhere(seed: int) -> None:
    logprobs, behavior_logprobs, a, reference, _ = sampled(0.5, seed)
    wanted = []
    for (value, slope), t, m, r in zip(
        slowly("reinforce", logprobs, behavior_logprobs, a), logprobs, behavior_logprobs, reference, strict=True
    ):
        weight, d = min(math.exp(t - m), 20.0), float(r - t)
        wanted.append((value + 0.1 * weight * (math.exp(d) - d - 1), slope + 0.1 * weight * (1 - math.exp(d))))
    tokens = LossInputs(logprobs, behavior_logprobs, a, torch.tensor(CALLS), 3, reference=reference)
    assert_follows(tokens, Loss(name="reinforce", kl=0.1), wanted)


@pytest.mark.parametrize("seed", range(5))
def test_a_divergence_in_the_reward_lowers_an_advantage_by_that_of_the_rest_of_the_call(seed: int) -> None:
    logprobs, behavior_logprobs, a, reference, _ = sampled(0.5, seed)
    gaps = [float(m - r) for m, r in zip(behavior_logprobs, reference, strict=True)]
    lowered = [
        float(a[i]) - 0.1 * sum(gaps[j] for j in range(i, len(CALLS)) if CALLS[j] == CALLS[i])
        for i in range(len(CALLS))
    ]
    wanted = slowly("reinforce", logprobs, behavior_logprobs, torch.tensor(lowered))
    shuffled = torch.tensor([3, 0, 5, 1, 4, 2])  # the tokens of a call stay in their order
    tokens = LossInputs(logprobs, behavior_logprobs, a, torch.tensor(CALLS), 3, reference=reference)
    for order in (torch.arange(6), shuffled):
        moved = {name: value[order] for name, value in tokens._asdict().items() if isinstance(value, torch.Tensor)}
        assert_follows(
            tokens._replace(**moved), Loss(name="reinforce", reward_kl=0.1), [wanted[i] for i in order.tolist()]
        )
    used = policy_loss(tokens, Loss(name="reinforce", reward_kl=0.1)).advantages
    assert used is not None
    assert used.tolist() == pytest.approx(lowered), "metrics and token trace show what the loss used"


def test_the_entropy_bonus_has_the_entropys_gradient_in_expectation_over_the_sampled_token() -> None:
    """Of a distribution over five tokens, by its logits; each token counts as often as it would be sampled."""
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    every = logits.log_softmax(0)
    entropy = -(every.exp() * every).sum()
    (wanted,) = torch.autograd.grad(-0.3 * entropy, logits, retain_graph=True)
    tokens = LossInputs(
        logprobs=every,
        behavior_logprobs=every.detach(),
        advantages=torch.zeros(5, dtype=torch.float64),
        calls=torch.zeros(5, dtype=torch.int64),
        num_calls=1,
        entropies=entropy.detach().expand(5),
    )
    values = policy_loss(tokens, Loss(name="reinforce", entropy_bonus=0.3)).per_token
    (got,) = torch.autograd.grad((values * every.detach().exp()).sum(), logits)
    torch.testing.assert_close(got, wanted)
    assert values.tolist() == pytest.approx([-0.3 * float(entropy.detach())] * 5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_over_candidates_is_the_divergence_of_both_distributions_with_the_rest_as_one(beta: float) -> None:
    """By logits of a vocabulary of seven, in float64: of the teacher's three likeliest tokens, and of the four others together."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(6, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    top = teacher.topk(3)
    candidates = logits.log_softmax(-1).gather(1, top.indices)
    tokens = LossInputs(
        *(torch.zeros(6, dtype=torch.float64) for _ in range(3)),
        torch.tensor(CALLS),
        3,
        teacher=torch.zeros(6),
        candidates=candidates,
        teacher_candidates=teacher.log_softmax(-1).gather(1, top.indices),
    )
    values = policy_loss(tokens, Loss(name="distill", top_k=3, distill_beta=beta)).per_token
    gradient = torch.autograd.grad(values.sum(), logits, retain_graph=True)[0]

    buckets = torch.stack([torch.bincount(row, minlength=7) for row in top.indices]).bool()
    p, q = (
        torch.cat([x.softmax(-1).gather(1, top.indices), (x.softmax(-1) * ~buckets).sum(-1, keepdim=True)], -1)
        for x in (logits, teacher)
    )
    m = (1 - beta) * p + beta * q
    kl = {
        0.0: (q * (q / p).log()).sum(-1),
        1.0: (p * (p / q).log()).sum(-1),
        0.3: beta * (q * (q / m).log()).sum(-1) + (1 - beta) * (p * (p / m).log()).sum(-1),
    }[beta]
    torch.testing.assert_close(values, kl)
    torch.testing.assert_close(gradient, torch.autograd.grad(kl.sum(), logits)[0])


def test_distillation_by_spans_credits_each_token_with_the_gap_of_its_span() -> None:
    logprobs, behavior_logprobs, _, teacher, _ = sampled(0.5, 0)
    spans = torch.tensor([0, 0, 1, 2, 2, 2])
    wanted = []
    for i, (t, m) in enumerate(zip(logprobs.tolist(), behavior_logprobs.tolist(), strict=True)):
        gap = sum(float(teacher[j] - logprobs[j]) for j in range(6) if spans[j] == spans[i])
        wanted.append(reinforce(t, m, gap, 0.0))
    tokens = LossInputs(
        logprobs, behavior_logprobs, torch.zeros(6), torch.tensor(CALLS), 3, teacher=teacher, spans=spans
    )
    learned = logprobs.clone().requires_grad_()
    values = policy_loss(tokens._replace(logprobs=learned), Loss(name="distill")).per_token
    (gradient,) = torch.autograd.grad(values.sum(), learned)
    assert values.tolist() == pytest.approx([value for value, _ in wanted])
    assert gradient.tolist() == pytest.approx([slope for _, slope in wanted])


def test_candidates_that_the_teacher_does_not_name_add_nothing() -> None:
    def loss(names: int) -> tuple[float, list[float]]:
        candidates = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
        of_teacher = torch.tensor([[-0.5, -1.5, -math.inf]])
        tokens = LossInputs(
            *(torch.zeros(1) for _ in range(3)),
            torch.zeros(1, dtype=torch.int64),
            1,
            candidates=candidates[:, :names],
            teacher_candidates=of_teacher[:, :names],
        )
        value = policy_loss(tokens, Loss(name="distill", top_k=3, distill_beta=0.5)).per_token.sum()
        value.backward()
        assert candidates.grad is not None
        return float(value.detach()), candidates.grad[0].tolist()

    assert loss(3) == loss(2)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_tokens_reported_as_cut_are_those_without_a_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([-0.1, -2.0, -0.1, -2.0], requires_grad=True)
    behavior_logprobs = torch.tensor([-2.0, -0.1, -2.0, -0.1])
    a, calls = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.arange(4)
    result = find_method("loss", name)(
        LossInputs(logprobs, behavior_logprobs, a, calls, 4, teacher=behavior_logprobs),
        Loss(name=name, logratio_penalty=0.0),
    )
    (grad,) = torch.autograd.grad(result.per_token.sum(), logprobs)
    assert (grad == 0).tolist() == [LossEffect(each).cuts for each in result.effects.tolist()]
    assert bool((grad == 0).any()) == (name in {"tis_mask", "ppo_clip", "gspo"})


@pytest.mark.parametrize("name", ["tis_mask", "reinforce", "cispo", "distill"])
def test_a_ratio_beyond_its_bound_is_truncated_and_reported(name: str) -> None:
    """Ratios 1, 2, 8 under a bound of 4; the last token has also moved further than `tis_mask` lets it."""
    behavior_logprobs = torch.full((4,), -9.0)
    behavior_logprobs[3] = -0.9
    logprobs = behavior_logprobs + torch.tensor([1.0, 2.0, 8.0, 2.0]).log()
    tokens = LossInputs(
        logprobs, behavior_logprobs, torch.ones(4), torch.zeros(4, dtype=torch.int64), 1, teacher=logprobs + 1
    )
    effects = find_method("loss", name)(tokens, Loss(name=name, ratio_cap=4.0, clip_high=3.0)).effects.tolist()
    assert effects == [0, 0, LossEffect.TRUNCATED, LossEffect.MASKED if name == "tis_mask" else 0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_that_a_grammar_forced_is_moved_by_its_reward_alone(advantage: float) -> None:
    """Among what the grammar allowed its probability was 1, among all tokens it is 1.7e-5: that is no move of the policy."""
    logprobs = torch.tensor([-11.0, -11.0], requires_grad=True)
    held = torch.tensor([True, False])
    tokens = LossInputs(
        logprobs,
        torch.zeros(2),
        torch.full((2,), advantage),
        torch.zeros(2, dtype=torch.int64),
        1,
        held=held,
    )
    policy_loss(tokens, Loss(mask_delta=0.99999)).per_token.sum().backward()
    assert logprobs.grad is not None
    forced, free = logprobs.grad.tolist()
    assert forced == pytest.approx(-advantage * math.exp(-11))
    assert free == pytest.approx(-advantage * math.exp(-11) - 2e-3 * PENALTY_SQUARE_REACH)


@pytest.mark.parametrize("behavior_logprobs", [-9999.0, -1e30])
def test_a_log_probability_out_of_all_bounds_pulls_no_harder_than_a_large_one(behavior_logprobs: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    nothing = torch.zeros(1)
    tokens = LossInputs(logprobs, torch.tensor([behavior_logprobs]), nothing, torch.zeros(1, dtype=torch.int64), 1)
    policy_loss(tokens, Loss()).per_token.sum().backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(2e-3 * PENALTY_SQUARE_REACH)


def test_the_advantages_are_those_that_the_loss_used() -> None:
    logprobs, behavior_logprobs, a, teacher, _ = sampled(0.5, 0)
    tokens = LossInputs(logprobs, behavior_logprobs, a, torch.tensor(CALLS), 3, teacher=teacher)
    used = {
        name: find_method("loss", name)(tokens, Loss(name=name)).advantages for name in ("tis_mask", "sft", "distill")
    }
    assert used["tis_mask"] is a
    assert used["sft"] is None
    assert used["distill"] is not None
    torch.testing.assert_close(used["distill"], teacher - logprobs)


def test_calls_are_left_out_by_their_mean_mismatch_and_not_for_being_long() -> None:
    gap = torch.tensor([0.1] * 500 + [3.0, 3.0])
    calls = torch.tensor([0] * 500 + [1, 1])
    kept = apply_filters(
        LossInputs(gap - 3, torch.full((502,), -3.0), gap, calls, 2), Train(row_k3_max=1.0), EVERY.expand(502)
    )
    assert kept is not None
    assert kept.tokens.tolist() == [True] * 500 + [False] * 2
    assert (int(kept.calls_out), int(kept.tokens_out)) == (1, 0)


def test_tokens_outside_the_band_are_left_out_and_counted() -> None:
    ratios = torch.tensor([0.49, 0.51, 1.0, 1.99, 2.01])
    kept = apply_filters(
        LossInputs(ratios.log() - 3, torch.full((5,), -3.0), ratios, torch.zeros(5, dtype=torch.int64), 1),
        Train(ratio_band=(0.5, 2.0)),
        EVERY.expand(5),
    )
    assert kept is not None
    assert kept.tokens.tolist() == [False, True, True, True, False]
    assert (int(kept.calls_out), int(kept.tokens_out)) == (0, 2)


def test_tokens_that_are_not_trained_are_not_counted_as_filtered() -> None:
    """As those of an idle rank, and of turns with nothing to learn from."""
    tokens = LossInputs(torch.full((4,), -9.0), *(torch.zeros(4),) * 2, torch.tensor([0, 0, 1, 1]), 2)
    for train in (Train(row_k3_max=0.1), Train(ratio_band=(0.5, 2.0))):
        kept = apply_filters(tokens, train, torch.tensor([True, True, False, False]))
        assert kept is not None
        assert not kept.tokens.any()
        assert (int(kept.calls_out), int(kept.tokens_out)) in {(1, 0), (0, 2)}


def test_an_own_filter_chooses_among_what_the_others_leave_and_is_counted_by_token(tmp_path: Path) -> None:
    write_own_methods(tmp_path)
    registry.adopt([registry.read_code("filter", FILTER, str(tmp_path))])
    logprobs = torch.tensor([-0.001, -0.5, -3.0, -3.0])
    tokens = LossInputs(logprobs, torch.full((4,), -1.0), logprobs, torch.tensor([0, 0, 0, 1]), 2)
    kept = apply_filters(tokens, Train(ratio_band=(0.5, 3.0), token_filter=FILTER), EVERY.expand(4))
    assert kept is not None
    assert kept.tokens.tolist() == [False, True, False, False]
    assert (int(kept.calls_out), int(kept.tokens_out)) == (0, 3)


def test_without_filters_nothing_is_computed() -> None:
    assert (
        apply_filters(LossInputs(*(torch.zeros(1),) * 3, torch.zeros(1, dtype=torch.int64), 1), Train(), EVERY) is None
    )


def test_a_loss_without_ratios_is_not_filtered_by_them() -> None:
    tokens = LossInputs(torch.full((2,), -9.0), *(torch.zeros(2),) * 2, torch.zeros(2, dtype=torch.int64), 1)
    assert apply_filters(tokens, Train(loss=Loss(name="sft"), row_k3_max=0.1, ratio_band=(0.5, 2.0)), EVERY) is None


OTHER = {"mask_delta": 0.99, "logratio_penalty": 0.5, "clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.01}


@pytest.mark.parametrize("constant", OTHER)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_depends_on_the_constants_that_are_listed_for_it_and_on_no_other(name: str, constant: str) -> None:
    def of(loss: Loss) -> list[float]:
        logprobs = torch.tensor([-3.0, -0.1, -3.0, -0.1])
        tokens = LossInputs(
            logprobs=logprobs,
            behavior_logprobs=torch.tensor([-0.1, -3.0, -0.1, -3.0]),
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
            calls=torch.arange(4),
            num_calls=4,
            teacher=logprobs + 1,
        )
        return policy_loss(tokens, loss).per_token.tolist()

    loss = Loss(name=name, **{constant: OTHER[constant]})
    assert (of(loss) == of(Loss(name=name))) == (constant in loss.find_unused_constants())
