"""The demo's warm-up, on a recipe of seconds."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmq.demo.job import DemoSize, demo_job
from swarmq.demo.model_recipe import DemoRecipe, model_folder, recipe_digest
from swarmq.demo.problems import KINDS, problems
from swarmq.demo.run import DemoOptions
from swarmq.demo.warmup import demonstrations, load_or_warm_up, reductions, warm_up
from swarmq.toy_model.recipe import Architecture, WarmupProgress

pytestmark = pytest.mark.slow

MICRO = DemoRecipe(
    architecture=Architecture(hidden=32, layers=1, heads=1, feed_forward=32), steps=6, settling_steps=2, batch=8, rise=2
)


def ignore(_progress: WarmupProgress) -> None:
    pass


def test_the_same_recipe_gives_the_same_model():
    models = [warm_up(MICRO, report=ignore)[1].state_dict() for _ in range(2)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_size_of_the_parts_of_a_batch_does_not_change_what_is_learned():
    whole, parts = (warm_up(msgspec.structs.replace(MICRO, similar=n, steps=2), report=ignore)[1] for n in (8, 3))
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)


def test_another_seed_gives_another_model():
    other = msgspec.structs.replace(MICRO, seed=1)
    assert not torch.equal(*(warm_up(recipe, report=ignore)[1].lm_head.weight for recipe in (MICRO, other)))


def test_progress_is_reported_and_the_loss_falls():
    seen: list[WarmupProgress] = []
    warm_up(MICRO, report=seen.append)
    assert [progress.step for progress in seen] == list(range(1, 9))
    assert {progress.steps for progress in seen} == {8}
    assert seen[-1].loss < seen[0].loss


def test_a_warmed_model_is_made_once_and_loads_with_the_auto_classes(tmp_path: Path):
    seen: list[WarmupProgress] = []
    folder = load_or_warm_up(tmp_path, MICRO, report=seen.append)
    assert load_or_warm_up(tmp_path, MICRO, report=seen.append) == folder
    assert len(seen) == 8
    words, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert words.chat_template
    assert model.config.eos_token_id == words.eos_token_id
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()


def test_what_a_broken_making_left_behind_is_not_taken_for_a_model(tmp_path: Path):
    def fail(_progress: WarmupProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_warm_up(tmp_path, MICRO, report=fail)
    assert (load_or_warm_up(tmp_path, MICRO, report=ignore) / "config.json").exists()


def test_another_recipe_has_another_folder():
    assert recipe_digest(MICRO) != recipe_digest(msgspec.structs.replace(MICRO, tool_share=0.5))


def test_demonstrations_end_in_the_true_answer_and_use_warm_up_problems_alone():
    shown = list(itertools.islice(demonstrations(MICRO), 300))
    assert all(chat[-1]["role"] == "assistant" and chat[-1]["content"].startswith("<answer>") for chat in shown)
    held_out = {p.question for kind in KINDS for p in problems(kind, "held-out", 1000)}
    assert not any(question in chat[1]["content"] for chat in shown for question in held_out)


def test_the_final_mix_calls_the_tool_less_often_than_the_first():
    shown = list(itertools.islice(demonstrations(msgspec.structs.replace(MICRO, steps=0)), 4000))
    calling = [len(chat) > 3 for chat in shown]
    assert sum(calling[:2000]) > 1.8 * sum(calling[2000:])


def test_an_expression_is_reduced_from_left_to_right():
    assert reductions("10 - 30 + 5") == [("10 - 30 + 5", "-20 + 5"), ("-20 + 5", "-15")]


def test_the_demo_job_is_a_valid_job_of_all_kinds():
    job = demo_job("folder", run="demo", seed=3, size=DemoSize(steps=7))
    assert (set(job.mix), job.policies["main"].train.max_steps, job.policies["main"].train.seed) == (set(KINDS), 7, 3)
    assert type(job).build(msgspec.to_builtins(job)) == job


def test_a_model_that_was_made_is_found_without_torch(tmp_path: Path):
    model_folder(tmp_path, DemoRecipe()).mkdir()
    (model_folder(tmp_path, DemoRecipe()) / "config.json").touch()
    look = (
        "import asyncio, sys; from pathlib import Path; from swarmq.demo.make_model import ensure_model; "
        "print(asyncio.run(ensure_model(Path(sys.argv[1]), print)), 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", look, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [f"model: found in {tmp_path}", f"{model_folder(tmp_path, DemoRecipe())} False"]


def test_models_are_kept_in_the_users_cache_whatever_folder_a_demo_is_started_in(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert DemoOptions().cache == tmp_path / "cache" / "swarmq" / "demo-models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert DemoOptions().cache == tmp_path / ".cache" / "swarmq" / "demo-models"


def test_of_two_demos_that_make_a_model_at_once_both_have_it(tmp_path: Path):
    def another_is_faster(progress: WarmupProgress) -> None:
        if progress.step == progress.steps:
            load_or_warm_up(tmp_path, MICRO, report=ignore)

    folder = load_or_warm_up(tmp_path, MICRO, report=another_is_faster)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "config.json").exists()
