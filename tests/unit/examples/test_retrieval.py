"""Corpus, search, reward and agent of examples/retrieval."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
from examples.retrieval import agent, demonstrations, environment

TASK = {"size": "toy", "question": "Where does Ada Holt live?", "answer": "Oslo"}


@pytest.fixture(scope="module")
def toy():
    return environment.corpus("toy")


def test_no_training_question_is_about_a_held_out_person():
    train, held_out = list(environment.train()), list(environment.held_out())
    assert len(held_out) == 128
    assert len(train) == 1024
    name = re.compile(r"([A-Z]\w+ [A-Z]\w+)[ ?]")
    train_names, held_out_names = (
        {name.findall(task["question"])[-1] for task in tasks} for tasks in (train, held_out)
    )
    assert (len(train_names), len(held_out_names)) == (512, 64)
    assert not train_names & held_out_names
    assert len({task["id"] for task in train + held_out}) == 1152


def test_full_questions_take_several_searches():
    full = environment.corpus("full")
    task = next(task for task in environment.held_out_full() if task["question"].startswith("In which city"))
    person = full.people[re.search("manager of (.*) live", task["question"])[1]]
    assert task["answer"] == full.people[person.manager].city
    assert person.manager in full.search(f"{person.name} manager") + full.search(
        f"{person.name} reports"
    ) + full.search(f"{person.name} leads")


def test_one_precise_search_answers_every_toy_question(toy):
    for task in environment.held_out():
        name = re.search(r"([A-Z]\w+ [A-Z]\w+)[ ?]", task["question"].removeprefix("Where ").removeprefix("What "))[1]
        found = toy.search(f"{name} {'lives' if 'live' in task['question'] else 'is a'}")
        assert found.strip(".").split()[-1] == task["answer"]


@pytest.mark.parametrize(
    "query",
    ['" OR body:Ada', "NEAR(Ada Holt)", "*", "Ada*", "-Ada", "", "a" * 100_000, "Ada AND NOT Holt", "(", "😀", "\0"],
)
def test_no_query_is_syntax_or_an_error(toy, query):
    found = toy.search(query)
    assert found in {"nothing found", "give words to search for"} or found.count("\n") == 0


def test_threads_share_a_corpus(toy):
    name = next(iter(toy.people))
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(toy.search, [f"{name} lives"] * 200))) == 1


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<answer>Oslo</answer>", 1.0),
        ("<answer> oslo. </answer>", 1.0),
        ("Oslo", 0.0),
        ("<answer>Oslo Kiel</answer>", 0.0),
        ("<answer>Oslo</answer><answer>Kiel</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_word_in_tags_is_rewarded(reply, reward):
    assert environment.score(TASK, reply) == reward


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_broken_calls_come_back_as_text_and_endless_ones_get_nothing():
    says = [("search", "not JSON"), ("find", {"query": "Ada"}), ("search", {"query": 3})]
    with scripted_chat(says) as chat:
        outcome = agent.attempt(chat.episode(TASK))
    assert (outcome.reward, outcome.success, outcome.metrics) == (0.0, False, {"searches": 3})
    assert [text for role, text, *_ in chat.conversation() if role == "tool"] == [
        'error: give {"query": "..."}',
        "error: no tool find",
    ]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("way", demonstrations.WAYS)
def test_demonstrations_show_what_the_agent_sends(toy, way):
    shown = demonstrations.chat(toy, toy.people["Ada Holt"], way, random.Random(2))
    task = {"size": "toy", "question": shown[1]["content"], "answer": toy.people["Ada Holt"].city}
    if "job" in task["question"]:
        task["answer"] = toy.people["Ada Holt"].job
    with scripted_chat(answers_of(shown)) as chat:
        outcome = agent.attempt(chat.episode(task))
    assert chat.conversation() == spoken(shown[:-1])
    assert chat.requests[0]["tools"] == demonstrations.TOOLS
    assert outcome.metrics == {"searches": way != "guess"}
    if way == "precise":
        assert outcome.reward == 1.0
