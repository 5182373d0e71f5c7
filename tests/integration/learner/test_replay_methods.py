"""The episodes of a run that swarmq 0.1.0 left are trained again under other methods, beside the original."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from support.stored import unpack_run
from swarmq.cli import main
from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import ConfigError, SetUpError
from swarmq.learner.replay import Comparison, compare, find_start, replay

METHODS = """
from swarmq.learner.methods.losses import TokenLoss

def plain(tokens, loss):
    return TokenLoss.whole(-tokens.advantages * tokens.logprobs, tokens.advantages)

def broken(tokens, loss):
    return tokens.nothing
"""
FIRST, LAST = 12, 13


@pytest.fixture
def stored(tmp_path, monkeypatch) -> tuple[SwarmJob, RunFolder]:
    monkeypatch.chdir(tmp_path)
    Path("replayed_methods.py").write_text(METHODS)
    return unpack_run(tmp_path)


def train_again(stored: tuple[SwarmJob, RunFolder], out: str, *sets: str) -> Comparison:
    job, folder = stored
    start = find_start(job, "main", folder, FIRST, LAST)
    return compare(job, "main", folder, sets=sets, to_folder=Path(out), from_checkpoint=start, first=FIRST, last=LAST)


def weights(folder: str):
    [file] = Path(folder).glob("*/model.safetensors")
    return load_file(file)


def test_the_method_that_trained_gives_the_replay_itself_and_another_one_departs_from_it(stored):
    job, folder = stored
    start = find_start(job, "main", folder, FIRST, LAST)
    assert start
    assert start.name == "step-00000010"
    replay(job, "main", folder, to_folder=Path("plain"), from_checkpoint=start, until=LAST)
    same = train_again(stored, "same", "train.loss.name=tis_mask")
    assert same.changes == ()
    assert [(step.version, step.distance) for step in same.steps] == [(FIRST, 0.0), (LAST, 0.0)]
    assert all(step.original == step.replayed and step.original_moved > 0 for step in same.steps)
    expected = weights("plain")
    assert all(tensor.numpy().tobytes() == expected[name].numpy().tobytes() for name, tensor in weights("same").items())

    other = train_again(stored, "other", "train.loss.name=replayed_methods:plain", "train.learning_rate=1e-2")
    assert other.changes == (
        "train.loss.name: tis_mask -> replayed_methods:plain",
        "train.learning_rate: 0.0001 -> 0.01",
    )
    assert [step.original for step in other.steps] == [step.original for step in same.steps]
    assert 0 < other.steps[0].distance < other.steps[1].distance
    assert other.steps[0].replayed.kl_k3 == other.steps[0].original.kl_k3, "the weights before the first step are equal"
    assert other.steps[1].replayed.kl_k3 > other.steps[1].original.kl_k3, "large steps depart from the sampler"
    assert other.steps[1].replayed_moved > 10 * other.steps[1].original_moved


def test_a_run_without_critic_is_trained_again_with_one(stored):
    job, folder = stored
    start = find_start(job, "main", folder, FIRST, LAST)  # the run's initial model is gone
    made = train_again(stored, "critic", "train.advantage=gae", f"train.critic.model={start}")
    assert made.changes == ("train.advantage: rloo -> gae", f"train.critic.model: None -> {start}")
    assert all(
        step.replayed.tokens_trained >= step.original.tokens_trained and step.distance > 0 for step in made.steps
    )
    [file] = Path("critic").glob("*/state/critic.bin")
    assert torch.load(file)["batches"] == len(made.steps)


def test_the_command_writes_page_lines_and_checkpoint(stored):
    line = [
        "replay",
        "faults",
        "--out",
        "out",
        "--advantage",
        "ema",
        "--set",
        "train.loss.name=reinforce",
        "--steps",
        "11",
    ]
    told = CliRunner().invoke(main, line)
    assert told.exit_code == 0, told.output
    assert (
        "Changed: train.advantage: rloo -> ema; train.loss.name: tis_mask -> reinforce. Steps 11 to 11." in told.output
    )
    assert {path.name for path in Path("out").iterdir()} >= {"comparison.md", "comparison.jsonl", "step-00000011"}
    [step] = map(json.loads, Path("out/comparison.jsonl").read_text().splitlines())
    assert (step["version"], step["distance"] > 0) == (11, True)


def test_what_cannot_be_replayed_is_one_line_and_leaves_nothing(stored):
    job, folder = stored
    for sets, error, flaw in (
        (["train.loss.name=replayed_methods:broken"], SetUpError, "step 12 with .*AttributeError: .* 'nothing'.*:8"),
        (["train.loss.name=replayed_methods:gone"], SetUpError, "has no function 'gone'"),
        (["train.loss.name=nope"], ConfigError, "loss.name"),
        (["groups.group_size=2"], ConfigError, "settings of train alone"),
        (["train.lora={}"], SetUpError, "lora"),
        (["train.sft.share=0.5"], ConfigError, "only train.sft.weight can be changed"),
    ):
        with pytest.raises(error, match=flaw):
            train_again(stored, "out", *sets)
        assert not Path("out").exists()
    with pytest.raises(ConfigError, match="step 18 cannot be replayed: the batch log has steps 1 to 17"):
        find_start(job, "main", folder, 12, 18)
    start = folder.checkpoints("main") / "step-00000010"
    with pytest.raises(ConfigError, match="step 5 lies before the checkpoint, which is of version 10"):
        compare(
            job, "main", folder, sets=["train.loss.name=gspo"], to_folder=Path("out"), from_checkpoint=start, first=5
        )
    shutil.rmtree(folder.batch_log("main"))
    told = CliRunner().invoke(main, ["replay", "faults", "out", "--loss", "gspo", "--from", str(start)])
    assert (told.exit_code, "no batch was trained yet" in told.output) == (1, True), told.output


def test_steps_and_folder_are_checked_before_the_run_is_read(stored):
    for line, flaw in (
        (["out", "--steps", "3:1"], "the last one does not come before the first"),
        (["out", "--steps", "a"], "write A:B"),
        ([], "name the new folder"),
        (["out", "--out", "other"], "name the new folder"),
    ):
        told = CliRunner().invoke(main, ["replay", "faults", *line, "--loss", "gspo"])
        assert (told.exit_code, flaw in told.output) == (2, True), told.output
