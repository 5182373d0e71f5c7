"""Demonstrations are learned as what they are: the assistant's words, in the prompts that the template makes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from support.families import tokenizer_of
from support.tiny_model import tiny_model
from swarmq.cli import main
from swarmq.config import Loss, Policy, SwarmJob, Train
from swarmq.errors import LearnerError, TaskError
from swarmq.learner.demonstrations import longest_call, parse_demonstration, read_demonstrations
from swarmq.learner.train.trainer import Trainer
from swarmq.learner.warm_start import WarmStart, WarmStartProgress, warm

TRAIN = Train(learning_rate=3e-3, warmup_steps=0, micro_batch_tokens=256, gradient_checkpointing=False, trackers=())
CHAT = [
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "The answer is 42."},
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_model())


def text(tokenizer: Any, packed: bytes) -> str:
    return str(tokenizer.decode(np.frombuffer(packed, "<i4").tolist()))


def test_everything_the_assistant_says_is_a_turn_up_to_its_end_of_turn(tokenizer: Any) -> None:
    episode = parse_demonstration(json.dumps({"messages": CHAT}), tokenizer, where="here")
    assert [text(tokenizer, turn.sampled_ids) for turn in episode.turns] == [
        "The answer is 42.<|im_end|>",
        "Yes.<|im_end|>",
    ]
    asked = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, tokenize=False)
    assert text(tokenizer, episode.turns[1].prompt_ids) == asked
    assert (
        longest_call(episode)
        == sum(len(part) for part in (episode.turns[1].prompt_ids, episode.turns[1].sampled_ids)) // 4
    )


def test_words_are_spelled_as_they_are_in_their_place(tokenizer: Any) -> None:
    """A tokenizer that puts a space before the first word of whatever it encodes: no model would sample that one there."""
    spaced = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("sentencepiece"), eos_token="<end_of_turn>")
    spaced.chat_template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
    )
    turn = parse_demonstration(json.dumps({"messages": CHAT}), spaced, where="here").turns[1]
    ids = np.frombuffer(turn.prompt_ids + turn.sampled_ids, "<i4").tolist()
    in_place = spaced(spaced.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False).input_ids
    assert ids == in_place[: len(ids)]
    assert text(spaced, turn.sampled_ids) == "Yes.<end_of_turn>"


@pytest.mark.parametrize(
    ("template", "ends", "said"),
    [
        ("{{ m.content }}<|im_end|>\n", ["<|im_end|>"], "Yes.<|im_end|>"),
        ("{{ m.content }}<|im_end|>\n<|endoftext|>", ["<|im_end|>"], "Yes.<|im_end|>"),
        ("{{ m.content }}<|im_end|>\n<|endoftext|>", [], "Yes.<|im_end|>\n<|endoftext|>"),
        ("{{ m.content }}<|im_end|>\n", [], "Yes.<|im_end|>"),
        ("<|im_start|>{{ m.content }}\n", [], "<|im_start|>Yes.\n"),
    ],
    ids=["named", "the first that is named", "the tokenizer's", "a base model's", "none"],
)
def test_a_turn_ends_where_an_engine_would_end_it(template: str, ends: list[str], said: str) -> None:
    base = AutoTokenizer.from_pretrained(tiny_model())
    base.eos_token = "<|endoftext|>"
    base.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n{% else %}"
        + template
        + "{% endif %}{% endfor %}"
    )
    chat = json.dumps({"messages": [CHAT[0], CHAT[3]]})
    [turn] = parse_demonstration(chat, base, where="here", ends=base.convert_tokens_to_ids(ends)).turns
    assert text(base, turn.sampled_ids) == said


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_models_folder_names_ends_of_turns(file: str, tmp_path: Path) -> None:
    """Of a template that writes more after them than fits a pass."""
    plan = started(tmp_path)
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
        "{% if not add_generation_prompt %}{{ 'more ' * 300 }}{% endif %}"
    )
    tokenizer.save_pretrained(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"eos_token_id": None}))
    (model / "generation_config.json").unlink()
    known = json.loads((model / file).read_text()) if (model / file).exists() else {}
    (model / file).write_text(json.dumps(known | {"eos_token_id": [tokenizer.eos_token_id, end]}))
    seen = []
    warm(msgspec.structs.replace(plan, model=str(model)), seen.append)
    assert [one.left_out for one in seen] == [0]


@pytest.mark.parametrize("normalisation", ["token", "episode", "constant"])
def test_the_loss_that_is_reported_is_in_nats_a_token(normalisation: str, tmp_path: Path) -> None:
    plan = started(tmp_path)
    plan.demonstrations.write_text("\n".join(json.dumps({"messages": chat}) for chat in (CHAT, CHAT[:2])))
    seen = []
    warm(msgspec.structs.replace(plan, train=msgspec.structs.replace(TRAIN, normalisation=normalisation)), seen.append)
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(plan.model), AutoTokenizer.from_pretrained(plan.model)
    nats = []
    for turn in (turn for episode in read_demonstrations(plan.demonstrations, tokenizer) for turn in episode.turns):
        ids = torch.tensor(np.frombuffer(turn.prompt_ids + turn.sampled_ids, "<i4")[None]).long()
        likely = lm(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        nats += (-likely[len(turn.prompt_ids) // 4 - 1 :, 0]).tolist()
    assert seen[0].loss == pytest.approx(statistics.fmean(nats), rel=1e-4)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("nonsense", 'line 2: not a JSON object with "messages"'),
        ('{"messages": [{"role": "user", "content": "?"}]}', "line 2: it has no message of the assistant"),
        ('{"chat": []}', 'line 2: it needs "messages"'),
        (
            '{"messages": [{"role": "User", "content": "?"}, {"role": "assistant", "content": "!"}]}',
            "ignores message 0, .*'User'",
        ),
        (
            '{"messages": [{"content": "?"}, {"role": "assistant", "content": "!"}]}',
            "line 2: .* ignores message 0, .*None",
        ),
        ('{"messages": [7, {"role": "assistant", "content": "!"}]}', 'line 2: not a JSON object with "messages"'),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: str, match: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(TaskError, match=match):
        list(read_demonstrations(path, tokenizer))


def test_a_line_ends_where_json_lines_end_and_a_file_may_begin_with_a_mark(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    chat = [CHAT[0], {"role": "assistant", "content": "one\u2028paragraph"}]
    path.write_text(json.dumps({"messages": chat}, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    [episode] = read_demonstrations(path, tokenizer)
    assert "one\u2028paragraph" in text(tokenizer, episode.turns[0].sampled_ids)


@pytest.mark.parametrize(
    ("model", "written", "out", "says"),
    [
        (None, b"\n", "warm", "demonstrations.jsonl: the file has no demonstrations"),
        (None, b"\xff", "warm", "demonstrations.jsonl: not UTF-8 text"),
        (
            None,
            json.dumps({"messages": CHAT}).encode(),
            "demonstrations.jsonl/warm",
            "Not a directory: check the folder",
        ),
        ("/nowhere", json.dumps({"messages": CHAT}).encode(), "warm", "model /nowhere: there is no such folder"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(
    model: str | None, written: bytes, out: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("swarmq.learner.warm_start.Trainer")
    path = tmp_path / "demonstrations.jsonl"
    path.write_bytes(written)
    plan = WarmStart(model=model or str(tiny_model()), demonstrations=path, out=tmp_path / out, train=TRAIN)
    with pytest.raises((TaskError, LearnerError), match=says):
        warm(plan, lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


def test_a_warm_start_makes_the_demonstrations_likely_and_leaves_a_model_folder(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("\n".join([json.dumps({"messages": CHAT})] * 4 + [json.dumps({"messages": LONG})]))
    of_the_run = {
        "row_k3_max": 0.1,
        "ratio_band": (0.5, 2.0),
        "steps_per_batch": 2,
        "loss": Loss(name="distill"),
        "teacher": "http://teacher:8000/v1",
        "teacher_tokenizer": "theirs",
        "grouping": "mine:group",
        "reward_transform": "mine:reward",
        "token_filter": "mine:keep",
    }
    plan = WarmStart(
        model=str(tiny_model()),
        demonstrations=path,
        out=tmp_path / "warm",
        train=msgspec.structs.replace(TRAIN, **of_the_run),
        epochs=4,
        batch=2,
    )
    seen = []
    warm(plan, seen.append)
    assert [(one.step, one.steps, one.left_out) for one in seen] == [(n, 8, 1) for n in range(1, 9)]
    assert {one.max_length for one in seen} == {256}
    assert sorted(tmp_path.iterdir()) == [path, plan.out]
    assert seen[-1].loss < 0.5 * seen[0].loss
    AutoModelForCausalLM.from_pretrained(plan.out)
    assert AutoTokenizer.from_pretrained(plan.out).chat_template
    with pytest.raises(TaskError, match="exists already"):
        warm(plan, seen.append)


def test_a_step_that_changed_nothing_ends_it_without_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("\n".join([json.dumps({"messages": CHAT})] * 2))
    train = msgspec.structs.replace(TRAIN, learning_rate=1e30)
    plan = WarmStart(model=str(tiny_model()), demonstrations=path, out=tmp_path / "warm", train=train, batch=1)
    with pytest.raises(LearnerError, match=r"step 2 of 2 changed nothing \(gradient_not_finite\).* is not written"):
        warm(plan, lambda _: None)
    assert list(tmp_path.iterdir()) == [path]


def started(folder: Path) -> WarmStart:
    path = folder / "demonstrations.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    return WarmStart(model=str(tiny_model()), demonstrations=path, out=folder / "warm", train=TRAIN)


def test_a_model_for_which_there_is_no_room_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: mock.Mock(free=10_000_000))
    plan, seen = started(tmp_path), []
    with pytest.raises(LearnerError, match=r"0\.01 GB are free, but the model takes 0\.01\d"):
        warm(plan, seen.append)
    assert (seen, list(tmp_path.iterdir())) == ([], [plan.demonstrations])


def test_a_model_that_cannot_be_written_ends_it_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(Trainer, "save_weights", full)
    plan = started(tmp_path)
    with pytest.raises(LearnerError, match=r"warm cannot be written \(No space left"):
        warm(plan, lambda _: None)
    assert list(tmp_path.iterdir()) == [plan.demonstrations]


def test_a_second_one_for_the_same_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    plan = started(tmp_path)

    def again(_: WarmStartProgress) -> None:
        with pytest.raises(LearnerError, match=rf"is in use by process {os.getpid()}"):
            warm(plan, lambda _: None)

    warm(plan, again)
    AutoModelForCausalLM.from_pretrained(plan.out)


def test_what_a_killed_one_left_is_in_nobodys_way(tmp_path: Path) -> None:
    left = tmp_path / ".warm.partial" / "model"
    left.mkdir(parents=True)
    (left / "junk").write_text("")
    plan = started(tmp_path)
    warm(plan, lambda _: None)
    assert not (plan.out / "junk").exists()
    assert sorted(tmp_path.iterdir()) == [plan.demonstrations, plan.out]


def test_a_folder_that_appears_meanwhile_is_left_alone_and_the_model_is_kept(tmp_path: Path) -> None:
    plan = started(tmp_path)

    def appear(_: WarmStartProgress) -> None:
        plan.out.mkdir()
        (plan.out / "notes").write_text("mine")

    with pytest.raises(
        TaskError, match=r"warm cannot be created \(Directory not empty\): .* is .*/\.warm\.partial/model"
    ):
        warm(plan, appear)
    assert [path.name for path in plan.out.iterdir()] == ["notes"]
    AutoModelForCausalLM.from_pretrained(tmp_path / ".warm.partial" / "model")


LONG = [{"role": "user", "content": "one " * 400}, {"role": "assistant", "content": "Too long."}]


@pytest.mark.parametrize(("rate", "fall"), [((), 3.0), (("--learning-rate", "1e-3"), 4.0)])
def test_the_command_as_its_help_shows_it_teaches_the_demonstrations(
    tmp_path: Path, rate: tuple[str, ...], fall: float
) -> None:
    """With a job's own settings, whose learning rate is for rewards: at 1e-6 the loss of these 16 steps ends at 5.7, here at 0.9."""
    chats, job = tmp_path / "chats.jsonl", tmp_path / "job.toml"
    chats.write_text("\n".join([json.dumps({"messages": CHAT})] * 4))
    job.write_text(SwarmJob(run="r", policies={"main": Policy(model=str(tiny_model()))}).to_toml())
    told = ["warm", str(job), str(chats), str(tmp_path / "out"), "--epochs", "4", "--batch", "1", *rate]
    ran = CliRunner().invoke(main, told)
    assert ran.exit_code == 0, ran.output
    assert (
        f"learning rate {rate[1] if rate else '2e-05 (change it with --learning-rate)'}".replace("1e-3", "0.001")
        in ran.output
    )
    losses = [float(line.rpartition(" ")[2]) for line in ran.output.splitlines() if line.startswith("step ")]
    assert losses[0] - losses[-1] > fall
