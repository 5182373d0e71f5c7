"""The critic: advantages, value loss and gradients against a slow float64 computation, in whatever way they are computed, and what is
kept of it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from support.episodes import make_episode, make_group
from support.same_gradient import assert_same_gradient
from swarmq.config import Critic, Kind, Lora, Loss, Policy, SwarmJob, Train
from swarmq.errors import ConfigError, SetUpError
from swarmq.learner.batching.micro_batches import build_rank_batch, set_estimates
from swarmq.learner.checkpoint import discovery, save_load
from swarmq.learner.feed.ipc import StopSignal
from swarmq.learner.model.loading import load_lm
from swarmq.learner.store.records import BatchIndex, BatchRecord, RunIdentity
from swarmq.learner.train.loop import Learner
from swarmq.learner.train.trainer import GradientTally, Trainer
from swarmq.messages import Rollout
from swarmq.timeline import resolve

pytestmark = pytest.mark.slow

TRAIN = Train(
    advantage="gae",
    critic=Critic(discount=0.9, gae_lambda=0.8, learning_rate=3e-2, value_clip=0.05, lora=Lora(rank=4, alpha=8.0)),
    loss=Loss(name="reinforce"),
    gradient_checkpointing=False,
    learning_rate=1e-2,
    warmup_steps=0,
    token_log=False,
    trackers=(),
)
IDENTITY = RunIdentity(run="r", policy="main", model="m")
LONGEST = 88


def batch() -> tuple[Rollout, ...]:
    """Chats with forks, agents, and rewards by episode, agent and call; one group has a single member."""
    one, two, three = make_group("a", (0.0, 1.0, 0.5), turns=3)
    two = msgspec.structs.replace(two, call_rewards={"c0": 0.3, "c2": -1.0})
    three = msgspec.structs.replace(three, agent_rewards={"a": 2.0})
    return (one, two, three, make_episode("b", reward=-0.5, turns=5, length=12, members=1))


def record(version: int, train: Train = TRAIN, episodes: Sequence[Rollout] | None = None) -> BatchRecord:
    index = BatchIndex(record=version, version=version)
    return BatchRecord(index=index, episodes=tuple(batch() if episodes is None else episodes), settings=train)


def make_trainer(model: Path, train: Train = TRAIN, *, steps: int = 2) -> Trainer:
    """A trainer whose critic has learned a little, so that its values differ."""
    trainer = Trainer(str(model), train)
    for version in range(1, steps + 1):
        trainer.step(record(version, train))
    return trainer


def gradients(trainer: Trainer, train: Train, worlds: int = 1, episodes: Sequence[Rollout] | None = None) -> Any:
    """The gradients of policy and critic, the advantages of the tokens and the value loss, of this many ranks one after another."""
    part = tuple(batch() if episodes is None else episodes)
    trainer._zero_grad()
    works = [build_rank_batch(part, train, trainer.traits, rank=rank, world=worlds) for rank in range(worlds)]
    whole = build_rank_batch(part, train, trainer.traits)
    found = trainer.estimate([part], [whole], train, among={episode.episode_id for episode in part})
    tally = GradientTally.start(len(part), torch.device("cpu"))
    for work in works:
        for one in set_estimates(work, found).passes:
            assert trainer.critic
            assert one.value_targets
            trainer._backward(one, train, work.totals.of(train.normalisation), tally)
            trainer._backward_critic(trainer.critic, one, one.value_targets, train, tally.sums)
    policy = {name: p.grad.clone() for name, p in trainer.lm.named_parameters() if p.grad is not None}
    critic = {name: p.grad.clone() for name, p in trainer.critic.model.named_parameters() if p.grad is not None}
    return policy, critic, found.advantages, float(tally.sums.values["value_loss"])


class Twin:
    """Policy and critic in float64, one turn at a time, straight from the formulas; adapters are multiplied out."""

    def __init__(self, trainer: Trainer, model: Path) -> None:
        assert trainer.critic
        critic = trainer.critic.model
        trained = {n: p.detach().double().requires_grad_() for n, p in critic.named_parameters() if p.requires_grad}
        self.adapters = trained
        self.base = load_lm(str(model), gradient_checkpointing=False).double().requires_grad_(requires_grad=False)
        self.policy = load_lm(str(model), gradient_checkpointing=False).double()
        self.policy.load_state_dict({name: weight.double() for name, weight in trainer.lm.state_dict().items()})

    def values(self, tokens: Tensor) -> Tensor:
        merged = dict(self.base.model.named_parameters())
        for name, down in self.adapters.items():
            if ".lora_A." in name:
                up, plain = self.adapters[name.replace("lora_A", "lora_B")], name.partition(".lora_A.")[0]
                key = plain.removeprefix("decoder.model.model.") + ".weight"
                merged[key] = merged[key] + TRAIN.critic.lora.alpha / TRAIN.critic.lora.rank * up @ down
        hidden = torch.func.functional_call(self.base.model, merged, kwargs={"input_ids": tokens}).last_hidden_state[0]
        x = hidden / (hidden.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
        return x @ self.adapters["weight"] + self.adapters["bias"]

    def compute(self) -> tuple[dict[str, Tensor], dict[str, Tensor], np.ndarray, float]:
        values, logprobs, ratios, rewards, sequences, begin = [], [], [], [], [], 0
        for episode in batch():
            of_agent: dict[str | None, list[int]] = {}
            for resolved, turn in zip(resolve(episode.turns), episode.turns, strict=True):
                tokens = torch.tensor(resolved.token_ids.tolist())[None]
                at = range(resolved.prompt_length - 1, resolved.prompt_length - 1 + turn.num_sampled)
                values.append(self.values(tokens)[list(at)])
                scores = self.policy(input_ids=tokens).logits[0].log_softmax(-1)
                logprobs.append(scores[list(at), resolved.sampled_ids.tolist()])
                ratios.append((logprobs[-1].detach() - torch.tensor(resolved.logprobs.tolist())).exp().clamp(max=20.0))
                rewards += [0.0] * (turn.num_sampled - 1) + [episode.call_rewards.get(turn.call_id, 0.0)]
                of_agent.setdefault(turn.agent, []).extend(range(begin, begin := begin + turn.num_sampled))
                last = {agent: [t for t in episode.turns if t.agent == agent][-1] for agent in of_agent}
            for agent, places in of_agent.items():
                if last[agent].call_id not in episode.call_rewards:
                    rewards[places[-1]] = episode.agent_rewards.get(agent or "", episode.reward)
            sequences += of_agent.values()
        value, logprob, ratio = map(torch.cat, (values, logprobs, ratios))
        v, advantages = value.detach().tolist(), np.zeros(begin)
        for places in sequences:
            after = [*(v[place] for place in places[1:]), 0.0]
            deltas = [rewards[p] + 0.9 * after[i] - v[p] for i, p in enumerate(places)]
            for i, place in enumerate(places):
                advantages[place] = math.fsum((0.9 * 0.8) ** k * delta for k, delta in enumerate(deltas[i:]))
        returns = torch.tensor(advantages) + value.detach()
        white = (advantages - advantages.mean()) / math.sqrt(advantages.var(ddof=1) + 1e-8)
        value_loss = 0.5 * (value - returns).square().mean()
        (value_loss - (ratio * torch.tensor(white) * logprob).mean()).backward()
        policy = {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}
        return policy, {n: p.grad for n, p in self.adapters.items() if p.grad is not None}, white, value_loss.item()


def test_advantages_value_loss_and_gradients_are_the_formulas(tiny_qwen: Path) -> None:
    trainer = make_trainer(tiny_qwen)
    policy, critic, advantages, loss = gradients(trainer, TRAIN)
    wanted = Twin(trainer, tiny_qwen).compute()
    assert advantages == pytest.approx(wanted[2], rel=1e-4, abs=1e-5)
    assert loss == pytest.approx(wanted[3], rel=1e-5)
    assert_same_gradient(policy, wanted[0])
    assert critic.keys() == wanted[1].keys()
    assert_same_gradient(critic, wanted[1])


def test_packing_ranks_order_and_layout_change_nothing(tiny_qwen: Path) -> None:
    trainer = make_trainer(tiny_qwen)
    policy, critic, advantages, loss = gradients(trainer, TRAIN)
    by_token = dict(zip(_name_tokens(batch()), advantages, strict=True))
    turned = tuple(reversed(batch()))
    for changed, worlds, episodes in (
        ({"layout": "rows"}, 1, batch()),
        ({"layout": "tree"}, 1, batch()),
        ({"layout": "rows", "micro_batch_tokens": LONGEST}, 3, batch()),
        ({}, 1, turned),
    ):
        again = gradients(trainer, msgspec.structs.replace(TRAIN, **changed), worlds, episodes)
        assert_same_gradient(again[0], policy)
        assert_same_gradient(again[1], critic)
        assert dict(zip(_name_tokens(episodes), again[2], strict=True)) == pytest.approx(by_token, rel=1e-4, abs=1e-5)
        assert again[3] == pytest.approx(loss, rel=1e-5)


def _name_tokens(episodes: Sequence[Rollout]) -> list[tuple[str, str, int]]:
    return [(e.episode_id, t.call_id, n) for e in episodes for t in e.turns for n in range(t.num_sampled)]


def test_a_value_that_moved_far_within_a_batch_is_clipped(tiny_qwen: Path) -> None:
    """The values of the second step's tokens have moved in the first one."""
    train = msgspec.structs.replace(TRAIN, steps_per_batch=2)
    free = msgspec.structs.replace(train, critic=msgspec.structs.replace(train.critic, value_clip=math.inf))
    losses = [make_trainer(tiny_qwen, each, steps=0).step(record(1, each))["value_loss"] for each in (train, free)]
    assert losses[0] > losses[1] > 0


def test_the_critic_learns_which_tasks_are_rewarded(tiny_qwen: Path) -> None:
    """Groups have equal rewards, and some a single member; the policy waits while the critic is trained alone."""
    train = msgspec.structs.replace(
        TRAIN, critic=Critic(learning_rate=1e-2, warmup_steps=30, lora=Lora(rank=8)), learning_rate=1e-3
    )
    trainer, rng, fields = Trainer(str(tiny_qwen), train), random.Random(0), {}
    before = {name: weight.clone() for name, weight in trainer.lm.state_dict().items()}
    for version in range(1, 31):
        episodes = [_answer(f"{version}-{number}", rng.randrange(2)) for number in range(12)]
        fields = trainer.step(record(version, train, episodes))
        assert fields["learning_rate"] == 0
        assert "skipped" not in fields
    assert fields["explained_variance"] > 0.5
    assert fields["value_loss"] < 0.1
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.lm.state_dict().items())
    moved = trainer.step(record(31, train, [_answer("last", 0), _answer("least", 1)]))
    assert moved["learning_rate"] > 0
    assert not all(torch.equal(weight, before[name]) for name, weight in trainer.lm.state_dict().items())


def _answer(name: str, task: int) -> Rollout:
    """An attempt at one of two tasks, of which one is always rewarded."""
    episode = make_episode(name, reward=float(task), turns=1, members=1)
    (turn,) = episode.turns
    return msgspec.structs.replace(episode, turns=(msgspec.structs.replace(turn, prompt_ids=bytes([task, 0, 0, 0])),))


@pytest.mark.parametrize("saved_after", [1, 2])
def test_going_on_from_a_checkpoint_is_the_same_to_the_bit(tiny_qwen: Path, tmp_path: Path, saved_after: int) -> None:
    train = msgspec.structs.replace(TRAIN, critic=msgspec.structs.replace(TRAIN.critic, warmup_steps=2))
    whole = make_trainer(tiny_qwen, train, steps=4)
    first = make_trainer(tiny_qwen, train, steps=saved_after)
    save_load.save_checkpoint(tmp_path, first, IDENTITY, model=str(tiny_qwen), keep=1)
    found = discovery.find_newest(tmp_path, IDENTITY)
    assert found
    again = Trainer(str(found.path), train, initial=str(tiny_qwen))
    save_load.restore(again, found)
    for version in range(saved_after + 1, 5):
        again.step(record(version, train))
    assert _bits(again) == _bits(whole)


def _bits(trainer: Trainer) -> dict[str, bytes]:
    assert trainer.critic
    kept = {**trainer.lm.state_dict(), **{f"critic.{n}": w for n, w in trainer.critic.state()["weights"].items()}}
    return {name: weight.contiguous().numpy().tobytes() for name, weight in kept.items()}


def test_a_checkpoint_of_another_critic_is_refused_and_one_that_only_the_log_needs_is_loaded(
    tiny_qwen: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(tiny_qwen, steps=1)
    save_load.save_checkpoint(tmp_path, trainer, IDENTITY, model=str(tiny_qwen), keep=1)
    found = discovery.find_newest(tmp_path, IDENTITY)
    assert found
    other = msgspec.structs.replace(TRAIN, critic=Critic(lora=Lora(rank=2)))
    with pytest.raises(SetUpError, match=r"train\.critic\.lora is .*'rank': 2.*continues a critic with .*'rank': 4"):
        save_load.restore(Trainer(str(found.path), other, initial=str(tiny_qwen)), found)
    left = Trainer(
        str(found.path), msgspec.structs.replace(TRAIN, advantage="rloo", critic=Critic()), initial=str(tiny_qwen)
    )
    save_load.restore(left, found)
    left.step(record(2))
    trainer.step(record(2))
    assert _bits(left) == _bits(trainer)
    left.step(record(3, msgspec.structs.replace(TRAIN, advantage="rloo")))
    assert left.critic is None, "no step needs it any more"


def test_values_that_are_not_finite_stop_the_step(tiny_qwen: Path) -> None:
    trainer = make_trainer(tiny_qwen, steps=1)
    assert trainer.critic
    with torch.no_grad():
        trainer.critic.model.bias.fill_(math.inf)
    before = {name: weight.clone() for name, weight in trainer.lm.state_dict().items()}
    fields = trainer.step(record(2))
    assert fields["skipped"] == "value_gradient_not_finite"
    assert "explained_variance" not in fields
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.lm.state_dict().items())


def test_kinds_with_other_advantages_are_not_the_critics(tiny_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, advantage="rloo", advantages={"code": "gae"})
    trainer = Trainer(str(tiny_qwen), train)
    part = (*make_group("a", (0.0, 1.0)), make_episode("b", kind="code", reward=1.0, members=1))
    work = build_rank_batch(part, train, trainer.traits)
    found = trainer.estimate([part], [work], train, among={episode.episode_id for episode in part})
    assert found.known.sum() == sum(turn.num_sampled for turn in part[2].turns)
    for before, one in zip(work.passes, set_estimates(work, found).passes, strict=True):
        others = before.layout.episodes < 2
        assert (one.advantages == before.advantages)[others].all()
        assert (one.advantages != before.advantages)[~others].any()


def test_the_critic_of_a_kind_is_there_from_the_start(tiny_qwen: Path, tmp_path: Path) -> None:
    train = msgspec.structs.replace(TRAIN, advantage="rloo")
    job = SwarmJob(
        run="r",
        folder=str(tmp_path),
        kinds={"code": Kind(advantage="gae")},
        policies={"main": Policy(model=str(tiny_qwen), train=train)},
    )
    assert Learner(job, "main", pusher=None, stop=StopSignal()).trainer.critic


def test_a_larger_vocabulary_of_the_policy_is_refused(tiny_qwen: Path, tmp_path: Path) -> None:
    small = load_lm(str(tiny_qwen), gradient_checkpointing=False)
    small.resize_token_embeddings(100)
    small.save_pretrained(tmp_path)
    train = msgspec.structs.replace(TRAIN, critic=Critic(model=str(tmp_path)))
    with pytest.raises(SetUpError, match=r"train\.critic\.model: .* has 100 tokens, the policy 128"):
        Trainer(str(tiny_qwen), train)


@pytest.mark.parametrize("changed", [{"policies.main.train.advantage": "gae"}, {"kinds.code.advantage": "gae"}])
def test_a_second_discount_is_refused(changed: dict[str, str]) -> None:
    tree = {"run": "r", "policies": {"main": {"model": "m", "train": {"call_discount": 0.9}}}}
    with pytest.raises(
        ConfigError, match=r"main\.train(\.|: )call_discount: the advantage 'gae' discounts by critic\.discount"
    ):
        SwarmJob.build(tree, sets=[f"{path}={value}" for path, value in changed.items()])
