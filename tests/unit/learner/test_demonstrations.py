"""Demonstrations beside the batches of a run: their formats, and the step that trains them. test_warm_start.py has chats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.episodes import make_episode, make_group
from support.same_gradient import assert_same_gradient
from support.tiny_model import tiny_model
from swarmq.config import Sft, Train
from swarmq.errors import SetUpError
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.demonstrations import draw_demonstrations, load_demonstrations, parse_demonstration
from swarmq.learner.store.records import BatchIndex, BatchRecord, decode_record, encode_record
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import Rollout
from swarmq.timeline import resolve, unfold

ASKED = [
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "No."},
]
ANSWER = [{"role": "assistant", "content": "42"}]
SFT = Sft(demonstrations="chats.jsonl", share=0.5, weight=0.3)
TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-3, warmup_steps=0, sft=SFT, deterministic=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model())


def decode(tokenizer: Any, packed: bytes) -> str:
    return str(tokenizer.decode(np.frombuffer(packed, "<i4").tolist()))


def shown() -> tuple[Rollout, ...]:
    return tuple(make_episode(f"line {number}", turns=2, length=4 + 3 * number) for number in range(4))


def test_of_a_prompt_of_messages_only_the_completion_is_trained(tokenizer: Any) -> None:
    line = json.dumps({"prompt": ASKED, "completion": ANSWER})
    (turn,) = parse_demonstration(line, tokenizer, where="here").turns
    whole = parse_demonstration(json.dumps({"messages": [*ASKED, *ANSWER]}), tokenizer, where="here")
    assert turn.sampled_ids == whole.turns[-1].sampled_ids
    assert turn.prompt_ids == whole.turns[-1].prompt_ids


def test_a_text_is_trained_up_to_the_end_token_and_passes_no_template(tokenizer: Any) -> None:
    (turn,) = parse_demonstration(json.dumps({"prompt": "6 * 7 =", "completion": " 42"}), tokenizer, where="here").turns
    assert decode(tokenizer, turn.prompt_ids) == "6 * 7 ="
    assert decode(tokenizer, turn.sampled_ids) == " 42" + tokenizer.eos_token


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["[]"], "line 1: not a JSON object"),
        (['{"messages": []}'], "line 1: it has no message of the assistant"),
        (["", '{"prompt": "a"}'], 'line 2: it needs "messages", or "prompt" and "completion"'),
        (['{"prompt": "a", "completion": ""}'], "line 1: it needs"),
        (['{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}'], "line 1: it needs"),
        (['{"prompt": "a", "completion": "' + "word " * 60 + '"}'], "line 1: it has .* more than 32, the limit"),
        ([], "the file has no demonstrations"),
    ],
)
def test_a_demonstration_that_cannot_be_trained_is_refused_with_setting_file_and_line(
    lines: list[str], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines))
    train = Train(sft=Sft(demonstrations=str(path)), micro_batch_tokens=32)
    with pytest.raises(SetUpError, match=rf"train\.sft\.demonstrations: {path}.*{says}"):
        load_demonstrations(str(tiny_model()), train)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"config.json": '{"model_type": "qwen3", "vocab_size": 9}'}, r"line 1: token id \d+ is not in \[0, 8\]"),
        ({"chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "line 1: no sampled tokens"),
    ],
)
def test_a_demonstration_that_would_fail_in_a_step_is_refused_before(
    changed: dict[str, str], says: str, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model(), model := tmp_path / "model")
    for name, content in changed.items():
        (model / name).write_text(content)
    (path := tmp_path / "chats.jsonl").write_text(
        json.dumps({"prompt": ASKED, "completion": [{"role": "assistant", "content": ""}]})
    )
    with pytest.raises(SetUpError, match=rf"train\.sft\.demonstrations: .*{says}"):
        load_demonstrations(str(model), Train(sft=Sft(demonstrations=str(path))))


def test_a_step_has_as_many_as_the_share_asks_for_and_repeats_only_when_all_have_come() -> None:
    def count(share: float, episodes: int, **train: Any) -> int:
        settings = msgspec.structs.replace(TRAIN, sft=msgspec.structs.replace(SFT, share=share), **train)
        drawn = draw_demonstrations(shown(), settings, step=1, num_episodes=episodes)
        assert len({each.episode_id for each in drawn}) == min(len(drawn), len(shown()))
        return len(drawn)

    assert [count(0.5, 8), count(0.1, 8), count(2.0, 8), count(0.1, 8, steps_per_batch=3)] == [4, 1, 16, 3]
    assert draw_demonstrations(shown(), msgspec.structs.replace(TRAIN, sft=None), step=1, num_episodes=8) == ()


def test_the_gradient_is_that_of_the_batch_and_the_weighted_mean_cross_entropy_in_float64(tiny_qwen: Path) -> None:
    trainer = Trainer(str(tiny_qwen), TRAIN)
    batch = make_group("a", (0.0, 1.0), turns=3)

    def gradient(demonstrations: tuple[Rollout, ...]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        trainer.optimizer.zero_grad()
        work = build_rank_batch(batch, TRAIN, trainer.traits)
        fields = trainer.accumulate(work, TRAIN, supervised=trainer.build_supervised(demonstrations, TRAIN)).fields
        return {name: p.grad.double() for name, p in trainer.lm.named_parameters() if p.grad is not None}, fields

    alone, plain = gradient(())
    both, fields = gradient(shown())
    assert "sft_loss" not in plain

    twin = AutoModelForCausalLM.from_pretrained(tiny_qwen, dtype=torch.float64)
    losses, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in (row for each in shown() for row in unfold(resolve(each.turns))):
        ids, trained = torch.tensor(row.token_ids).long(), torch.tensor(row.trained)
        logprobs = twin(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        losses, tokens = losses - logprobs[trained[1:]].sum(), tokens + int(trained.sum())
    mean = losses / tokens
    mean.backward()
    assert fields["sft_loss"] == pytest.approx(float(mean.detach()), rel=1e-5)
    wanted = {name: alone[name] + SFT.weight * p.grad for name, p in twin.named_parameters() if name in alone}
    assert_same_gradient(both, wanted)
    assert fields["loss"] == plain["loss"], "the loss of the episodes stays apart"


def test_a_step_is_repeated_bit_for_bit_from_its_record_without_the_file(tiny_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, steps_per_batch=2)
    episodes = (*make_group("a", turns=2), *make_group("b", turns=2))
    drawn = draw_demonstrations(shown(), train, step=1, num_episodes=4)
    index = BatchIndex(record=1, version=1)
    record = BatchRecord(index=index, episodes=episodes, settings=train, demonstrations=drawn)

    def weights(record: BatchRecord) -> list[torch.Tensor]:
        trainer = Trainer(str(tiny_qwen), train)
        fields = trainer.step(decode_record(encode_record(record)))
        assert fields["sft_loss"] > 0
        return [p.detach().clone() for p in trainer.lm.parameters()]

    once, again = weights(record), weights(record)
    assert all(map(torch.equal, once, again))
    other = msgspec.structs.replace(record, demonstrations=(shown()[0], shown()[0]))
    assert not all(map(torch.equal, once, weights(other)))


def test_demonstrations_are_trained_although_filters_leave_no_token_of_the_episodes(tiny_qwen: Path) -> None:
    train = msgspec.structs.replace(TRAIN, row_k3_max=1e-9)
    record = BatchRecord(
        index=BatchIndex(record=1, version=1), episodes=tuple(make_group("a")), settings=train, demonstrations=shown()
    )
    fields = Trainer(str(tiny_qwen), train).step(record)
    assert fields["tokens_trained"] == 0
    assert "skipped" not in fields
    assert fields["grad_norm"] > 0
