import msgspec
import pytest

from support.scripted_model import scripted_model
from swarmq.environments import load_environment
from swarmq.errors import EpisodeError, TaskError

reasoning_gym = pytest.importorskip("reasoning_gym")


async def attempt(environment, task, *script):
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(task))  # what a queue makes of it
    with scripted_model(*script) as model:
        return await environment.attempt(model.episode(sent)), model.asked


async def test_a_problem_is_asked_with_the_instructions_and_scored_by_the_library():
    environment = load_environment("reasoning-gym:chain_sum?size=3&seed=1")
    task = next(environment.tasks("train"))
    right, asked = await attempt(environment, task, f"so <answer>{task['answer']}</answer>")
    assert (right.reward, right.success, right.metrics) == (1.0, True, {"score": 1.0, "answered": 1.0})
    system, question = asked[0]["messages"]
    assert "<answer>answer here</answer>" in system["content"]
    assert question["content"] == task["question"]
    wrong, _ = await attempt(environment, task, "no idea")
    assert (wrong.reward, wrong.metrics["answered"]) == (0.0, 0.0)


async def test_scores_of_structured_answers_survive_the_queue():
    """Scores of some data sets compare tuples in the metadata, which a queue makes lists."""
    for name in ("countdown", "sokoban", "rush_hour", "zebra_puzzles", "game_of_life", "tower_of_hanoi"):
        environment = load_environment(f"reasoning-gym:{name}?size=1")
        task = next(environment.tasks("train"))
        entry = reasoning_gym.create_dataset(name, size=1, seed=0)[0]
        truth = entry["answer"] or "1"
        expected = reasoning_gym.create_dataset(name, size=1, seed=0).score_answer(truth, entry)
        outcome, _ = await attempt(environment, task, f"<answer>{truth}</answer>")
        assert outcome.reward == pytest.approx(expected), name


def test_evaluation_has_other_problems_than_training():
    environment = load_environment("reasoning-gym:chain_sum?size=50&min_terms=2&max_terms=2&max_digits=1&eval_size=40")
    train, held_out = (list(environment.tasks(split)) for split in ("train", "eval"))
    assert len(train) == 50
    assert 0 < len(held_out) < 40, "drawn problems that training has are left out"
    for field in ("id", "question"):
        assert not {task[field] for task in train} & {task[field] for task in held_out}
    assert held_out == list(environment.tasks("eval"))


async def test_a_worker_needs_no_settings_and_refuses_other_problems():
    fed = next(load_environment("reasoning-gym:chain_sum?size=3&seed=5&min_terms=4").tasks("eval"))
    plain = load_environment("reasoning-gym:chain_sum")
    outcome, _ = await attempt(plain, fed, f"<answer>{fed['answer']}</answer>")
    assert outcome.reward == 1.0
    with pytest.raises(TaskError, match="problem 0 differs from the one that was fed"):
        await attempt(plain, {**fed, "question": "1 + 1"})
    with pytest.raises(EpisodeError, match="scripted 400"):
        await attempt(plain, fed, 400)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("chainsum", "there is no data set 'chainsum'; did you mean chain_sum"),
        ("chain_sum?sise=3", "chain_sum has no parameter 'sise'"),
        ("chain_sum?system=rude", "system is 'rude': choose one of DeepSeekZero, default"),
    ],
)
def test_a_wrong_name_or_setting_is_refused(target, says):
    with pytest.raises(TaskError, match=says):
        load_environment(f"reasoning-gym:{target}")
