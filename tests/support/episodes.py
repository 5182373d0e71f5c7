"""Made-up episodes and a random Qwen3 of two layers, for tests of the learner."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmq.messages import Rollout, Slot, Turn, VersionSpan, pack_floats, pack_ids


def make_turns(rng: random.Random, *, episode_id: str, turns: int, vocab: int, length: int, version: int) -> list[Turn]:
    """A chat that grows; one in four turns forks off an earlier prefix."""
    made: list[Turn] = []
    lengths: dict[str, int] = {}
    for number in range(turns):
        parent = made[-1] if made else None
        shared = lengths[parent.call_id] if parent else 0
        if parent and rng.random() < 0.25:
            shared = rng.randint(1, shared)
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(2, length))]
        sampled = [rng.randrange(vocab) for _ in range(rng.randint(1, length))]
        call = f"c{number}"
        lengths[call] = shared + len(prompt) + len(sampled)
        made.append(
            Turn(
                run="r",
                episode_id=episode_id,
                policy="main",
                call_id=call,
                request_id=call,
                parent=parent.call_id if parent else None,
                shared=shared,
                prompt_ids=pack_ids(prompt),
                sampled_ids=pack_ids(sampled),
                logprobs=pack_floats([-5.0 + rng.random() for _ in sampled]),
                versions=(VersionSpan(version=version, start=0, end=len(sampled)),),
                agent=rng.choice([None, "a", "b"]),
            )
        )
    return made


def make_episode(
    group: str = "g0",
    member: int = 0,
    *,
    reward: float = 0.0,
    members: int = 2,
    kind: str = "default",
    turns: int = 2,
    vocab: int = 128,
    length: int = 8,
    version: int = 0,
    seed: int | None = None,
    **fields: Any,
) -> Rollout:
    episode_id = f"{group}-{member}"
    rng = random.Random(episode_id if seed is None else seed)
    return Rollout(
        run="r",
        policy="main",
        episode_id=episode_id,
        slot=Slot(task_id=group, repeat=member),
        kind=kind,
        group_id=f"{group}/0",
        group_members=members,
        group_size=members,
        reward=reward,
        turns=tuple(make_turns(rng, episode_id=episode_id, turns=turns, vocab=vocab, length=length, version=version)),
        **fields,
    )


def make_group(name: str = "g0", rewards: tuple[float, ...] = (0.0, 1.0), **fields: Any) -> list[Rollout]:
    """A whole group, one episode per reward."""
    return [make_episode(name, i, reward=reward, members=len(rewards), **fields) for i, reward in enumerate(rewards)]


def make_routed_turn(
    number: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    routed: Iterable[int],
    *,
    parent: str | None = None,
    shared: int = 0,
) -> Turn:
    return Turn(
        run="r",
        episode_id="e",
        policy="main",
        call_id=f"c{number}",
        request_id=f"c{number}",
        parent=parent,
        shared=shared,
        prompt_ids=pack_ids(prompt),
        sampled_ids=pack_ids(sampled),
        logprobs=pack_floats([-1.0] * len(sampled)),
        routed_experts=bytes(routed),
    )


def route(episodes: Iterable[Rollout], *, layers: int = 2, chosen: int = 2, experts: int = 4) -> list[Rollout]:
    """The episodes with experts drawn at random, by default for `tiny_experts`."""

    def routed(turn: Turn, rng: random.Random) -> Turn:
        ids = (id_ for _ in range(turn.num_routed * layers) for id_ in rng.sample(range(experts), chosen))
        return msgspec.structs.replace(turn, routed_experts=bytes(ids))

    made = []
    for episode in episodes:
        rng = random.Random(episode.episode_id)
        made.append(msgspec.structs.replace(episode, turns=tuple(routed(turn, rng) for turn in episode.turns)))
    return made


def make_qwen(folder: Path, *, seed: int = 0) -> Path:
    """A random Qwen3 with two layers and 128 tokens, without tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
