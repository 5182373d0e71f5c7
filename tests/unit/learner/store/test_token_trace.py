"""Beside the batch log lies what training saw of every token; the training itself does not need it."""

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.episodes import make_group
from swarmq.config import Loss, Train
from swarmq.learner.batching.micro_batches import build_rank_batch
from swarmq.learner.methods.loss_effects import LossEffect
from swarmq.learner.store import token_trace
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.learner.store.token_trace import EpisodeTrace, TurnTrace
from swarmq.learner.train.trainer import Trainer
from swarmq.messages import unpack_floats
from swarmq.timeline import resolve

TRAIN = Train(gradient_checkpointing=False, learning_rate=1e-3, warmup_steps=0, micro_batch_tokens=40)


def record(train):
    episodes = tuple(make_group("g0", (0.0, 1.0, 0.5), turns=5) + make_group("g1", (1.0, 0.0), turns=3))
    return BatchRecord(index=BatchIndex(record=1, version=1), episodes=episodes, settings=train)


@pytest.fixture(scope="module")
def stepped(tiny_qwen):
    trainer = Trainer(str(tiny_qwen), TRAIN)
    trainer.step(record(TRAIN))
    return trainer


def test_every_sampled_token_is_recorded_with_the_log_probability_that_the_model_gave_it(tiny_qwen, stepped):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    recorded = {(e.episode_id, t.call_id): t for e in stepped.token_traces for t in e.turns}
    episodes = record(TRAIN).episodes
    assert len(recorded) == sum(len(episode.turns) for episode in episodes)
    for episode in episodes:
        for turn, whole in zip(episode.turns, resolve(episode.turns), strict=True):
            with torch.no_grad():
                logits = model(torch.from_numpy(whole.token_ids.astype(np.int64))[None]).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(
                -1, torch.from_numpy(whole.token_ids[1:].astype(np.int64))[:, None]
            )
            seen = recorded[episode.episode_id, turn.call_id]
            np.testing.assert_allclose(
                unpack_floats(seen.logprobs), expected[whole.prompt_length - 1 :, 0].numpy(), atol=2e-5
            )
            assert seen.left_out == b""


def test_every_sampled_token_has_the_entropy_of_the_distribution_of_which_it_was_drawn(tiny_qwen, stepped):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    recorded = {(e.episode_id, t.call_id): t for e in stepped.token_traces for t in e.turns}
    for episode in record(TRAIN).episodes:
        for turn, whole in zip(episode.turns, resolve(episode.turns), strict=True):
            with torch.no_grad():
                logprobs = model(torch.from_numpy(whole.token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
            expected = -(logprobs.exp() * logprobs).sum(-1)[whole.prompt_length - 1 : -1]
            given = np.frombuffer(recorded[episode.episode_id, turn.call_id].entropies, "<f2")
            np.testing.assert_allclose(given, expected.numpy(), rtol=2e-3)


def test_the_advantage_is_the_one_that_was_trained_with(stepped):
    """Leave-one-out over rewards 0, 1 and 0.5."""
    by_id = {e.episode_id: {t.advantage for t in e.turns} for e in stepped.token_traces}
    assert by_id["g0-0"] == {-0.75}
    assert by_id["g0-1"] == {0.75}
    assert by_id["g0-2"] == {0.0}


def test_tokens_that_a_filter_left_out_are_marked(tiny_qwen):
    train = msgspec.structs.replace(TRAIN, ratio_band=(0.9, 1.1))
    trainer = Trainer(str(tiny_qwen), train)
    trainer.step(record(train))
    for episode in trainer.token_traces:
        sampled = {
            turn.call_id: turn for e in record(train).episodes for turn in e.turns if e.episode_id == episode.episode_id
        }
        for turn in episode.turns:
            logprobs = np.array(unpack_floats(turn.logprobs))
            ratio = np.exp(logprobs - np.array(unpack_floats(sampled[turn.call_id].logprobs)))
            out = np.frombuffer(turn.left_out, np.uint8) if turn.left_out else np.zeros(len(logprobs))
            np.testing.assert_array_equal(out == 1, (ratio < 0.9) | (ratio > 1.1))


def recorded(model, **changed):
    """What one step records of every turn."""
    train = msgspec.structs.replace(TRAIN, **changed)
    trainer = Trainer(str(model), train)
    trainer.step(record(train))
    return [(e.episode_id, turn) for e in trainer.token_traces for turn in e.turns]


def test_what_the_loss_did_to_the_gradient_of_a_token_is_marked(tiny_qwen):
    """Masked where the probability moved with the advantage at all, else truncated at a ratio of 0.7."""
    sampled = {
        (e.episode_id, turn.call_id): unpack_floats(turn.logprobs) for e in record(TRAIN).episodes for turn in e.turns
    }
    seen = set()
    for episode_id, turn in recorded(tiny_qwen, loss=Loss(mask_delta=1e-9, ratio_cap=0.7)):
        gap = np.array(unpack_floats(turn.logprobs)) - np.array(sampled[episode_id, turn.call_id])
        rest = np.where(np.exp(gap) > 0.7, LossEffect.TRUNCATED, LossEffect.WHOLE)
        expected = np.where(gap * turn.advantage > 0, LossEffect.MASKED, rest)
        np.testing.assert_array_equal(np.frombuffer(turn.effects, np.uint8) if turn.effects else 0 * expected, expected)
        seen |= set(expected)
    assert seen == {LossEffect.MASKED, LossEffect.TRUNCATED, LossEffect.WHOLE}


def test_a_distillation_records_the_advantage_of_every_token_and_demonstrations_have_none(tiny_qwen, other_qwen):
    for _, turn in recorded(tiny_qwen, loss=Loss(name="distill"), teacher=str(other_qwen)):
        if len(turn.logprobs) > 4:
            assert (turn.advantage, len(turn.advantages)) == (None, len(turn.logprobs))
            assert len(set(unpack_floats(turn.advantages))) > 1
    for _, turn in recorded(tiny_qwen, loss=Loss(name="sft")):
        assert (turn.advantage, turn.advantages, turn.effects) == (None, b"", b"")


def test_recording_does_not_change_the_step(tiny_qwen, stepped):
    off = msgspec.structs.replace(TRAIN, token_log=False)
    trainer = Trainer(str(tiny_qwen), off)
    fields = trainer.step(record(off))
    on = Trainer(str(tiny_qwen), TRAIN).step(record(TRAIN))
    assert trainer.token_traces == []
    assert (fields["loss"], fields["grad_norm"]) == (on["loss"], on["grad_norm"])


def test_two_ranks_together_record_what_one_does(tiny_qwen, stepped, tmp_path):
    trainer = Trainer(str(tiny_qwen), TRAIN)
    episodes = record(TRAIN).episodes
    gathered = []
    for rank in range(2):
        work = build_rank_batch(episodes, TRAIN, trainer.traits, rank=rank, world=2)
        traces = trainer.accumulate(work, TRAIN).tally.traces
        gathered += traces.build(episodes)
        assert traces.build(episodes)
    token_trace.write_trace(tmp_path, 1, gathered)
    for alone in stepped.token_traces:
        together = token_trace.find_trace(tmp_path, 1, alone.episode_id)
        mine, theirs = ({t.call_id: t for t in one.turns} for one in (together, alone))
        assert len(mine) == len(together.turns)
        assert mine.keys() == theirs.keys()
        for call, turn in theirs.items():
            assert mine[call].advantage == turn.advantage
            np.testing.assert_allclose(unpack_floats(mine[call].logprobs), unpack_floats(turn.logprobs), atol=2e-5)


def tokens(name):
    return EpisodeTrace(episode_id=name, turns=(TurnTrace(call_id="c", advantage=0.5, logprobs=b"\0" * 4),))


def test_an_episode_is_found_whichever_rank_wrote_it(tmp_path):
    token_trace.write_trace(tmp_path / "t", 7, [tokens("a")])
    (of_one,) = (tmp_path / "t").iterdir()
    of_one.rename(of_one.with_name(of_one.name.replace(".0.", ".1.")))  # as earlier versions named rank 1's
    token_trace.write_trace(tmp_path / "t", 7, [tokens("b")])
    assert token_trace.find_trace(tmp_path / "t", 7, "a") == tokens("a")
    assert token_trace.find_trace(tmp_path / "t", 7, "b") == tokens("b")
    assert token_trace.find_trace(tmp_path / "t", 7, "c") is None
    assert token_trace.find_trace(tmp_path / "t", 8, "a") is None
    assert token_trace.find_trace(tmp_path / "never", 7, "a") is None


def test_old_records_go_with_the_batches_of_their_steps(tmp_path):
    for version in (1, 2, 3):
        token_trace.write_trace(tmp_path, version, [tokens("a")])
    token_trace.prune_traces(tmp_path, 2)
    assert [token_trace.find_trace(tmp_path, version, "a") is None for version in (1, 2, 3)] == [True, True, False]


def test_what_cannot_be_written_or_read_costs_only_the_record(tmp_path):
    (tmp_path / "file").touch()
    token_trace.write_trace(tmp_path / "file", 1, [tokens("a")])
    token_trace.write_trace(tmp_path, 1, [tokens("a")])
    (path,) = tmp_path.glob("*.zst")
    path.write_bytes(path.read_bytes()[:-3])
    assert token_trace.find_trace(tmp_path, 1, "a") is None
