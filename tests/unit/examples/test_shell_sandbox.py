"""Folders, shell, reward and agent of examples/shell_sandbox."""

import itertools
import random

import pytest

from support.scripted_chat import answers_of, scripted_chat, spoken

pytest.importorskip("openai")
from examples.shell_sandbox import agent, demonstrations, environment, shell

GOALS = [(size, goal) for size, goals in environment.GOALS.items() for goal in goals]


def task(goal, size="toy", seed=5):
    return {"size": size, "goal": goal, "seed": seed}


@pytest.fixture
def files():
    return {"a.txt": "apple\nbeech\n", "b.txt": "cedar\n"}


def test_the_splits_have_different_seeds():
    train, held_out = list(environment.train()), list(environment.held_out())
    assert (len(train), len(held_out)) == (1500, 96)
    seeds = {one["seed"] for one in train + held_out}
    assert len(seeds) == 1596
    assert max(seeds) < environment.WARMUP_SEED
    assert len({one["id"] for one in train + held_out}) == 1596


@pytest.mark.parametrize(("size", "goal"), GOALS)
def test_a_task_always_gives_the_same_problem_and_nothing_done_is_wrong(size, goal):
    one = task(goal, size)
    problem = environment.build(one)
    assert problem == environment.build(one) != environment.build({**one, "seed": 6})
    assert environment.score(problem, problem.files, "<answer>nothing</answer>") == 0.0
    assert environment.score(problem, problem.after, f"<answer>{problem.answer}</answer>") == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_the_words_of_a_toy_question_name_one_file(seed):
    problem = environment.build(task("find", seed=seed))
    assert [name for name, text in problem.files.items() if problem.subject in text.split()] == [problem.answer]
    gone = environment.build(task("delete", seed=seed))
    assert [name for name, text in gone.files.items() if gone.subject in text.split()] == list(
        gone.files.keys() - gone.after
    )


@pytest.mark.parametrize("seed", range(5))
def test_full_problems_have_the_answers_that_their_logs_give(seed):
    errors = environment.build(task("errors", "full", seed))
    lines = [text for path, text in errors.files.items() if f"/{errors.subject}/" in path]
    assert int(errors.answer) == sum(" ERROR " in line for text in lines for line in text.splitlines())
    longest = environment.build(task("noisiest", "full", seed))
    assert longest.files[longest.answer].count("\n") == max(text.count("\n") for text in longest.files.values())
    purge = environment.build(task("purge", "full", seed))
    assert purge.after.keys() <= purge.files.keys()
    report = environment.build(task("report", "full", seed))
    assert report.after.keys() - report.files.keys() == {"report.txt"}


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("ls", "a.txt\nb.txt"),
        ("cat a.txt", "apple\nbeech"),
        ("cat *", "apple\nbeech\ncedar"),
        ("grep beech a.txt", "beech"),
        ("grep e *", "a.txt:apple\na.txt:beech\nb.txt:cedar"),
        ("grep -l cedar *", "b.txt"),
        ("grep -l kiwi *", "(no output)"),
        ("wc -l *", "2 a.txt\n1 b.txt"),
        ("wc -w a.txt", "2 a.txt"),
        ("cat c.txt", "c.txt: No such file"),
        ("grep x c.txt", "c.txt: No such file"),
        ("grep x", "usage: grep [-l] WORD FILE..."),
        ("", "sh: no command"),
        ("cat 'a", "sh: No closing quotation"),
        ("python", "sh: python: not found; there are ls, cat, grep, wc, rm"),
        ("ls | cat", "sh: one command at a time, without | & ; < > ` $"),
        ("cat $HOME", "sh: one command at a time, without | & ; < > ` $"),
        ("cat " + "a" * 1000, "sh: the command has more than 200 characters"),
    ],
)
def test_the_tiny_shell_answers_as_a_terminal_does(files, command, output):
    before = dict(files)
    assert shell.run("toy", files, command) == output
    assert files == before


@pytest.mark.parametrize("target", ["../secret.txt", "/etc/passwd", "../*", "./a.txt", "..", "."])
def test_the_tiny_shell_knows_no_paths(files, target):
    for command in ("cat", "grep -l secret", "rm", "wc"):
        assert shell.run("toy", files, f"{command} {target}") == f"{target}: No such file"


def test_files_are_removed_and_output_is_limited(files):
    assert shell.run("toy", files, "rm a.txt a.txt") == "(no output)"
    assert list(files) == ["b.txt"]
    files["c.txt"] = "x" * 10_000
    assert len(shell.run("toy", files, "cat c.txt")) < 320


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_agent_looks_and_deletes():
    one = task("delete")
    word = environment.build(one).subject
    says = [
        ("run", {"command": f"grep -l {word} *"}),
        lambda messages: ("run", {"command": f"rm {messages[-1]['content']}"}),
        "done",
    ]
    with scripted_chat(says) as chat:
        outcome = agent.attempt(chat.episode(one))
    assert (outcome.reward, outcome.success, outcome.metrics) == (1.0, True, {"commands": 2})


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_deleting_everything_and_knowing_the_answer_is_not_rewarded():
    one = task("find")
    says = [("run", {"command": "rm *"}), f"<answer>{environment.build(one).answer}</answer>"]
    with scripted_chat(says) as chat:
        assert agent.attempt(chat.episode(one)).reward == 0.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("arguments", ["not JSON", "[]", '{"run": "ls"}', "[" * 5000])
def test_broken_calls_come_back_as_text(arguments):
    assert agent.run_tool("toy", {}, "run", arguments).startswith("error: ")
    assert agent.run_tool("toy", {}, "sh", "{}") == "error: no tool sh"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("goal", environment.GOALS["toy"])
@pytest.mark.parametrize("way", ["look", "list", "guess"])
def test_demonstrations_show_what_the_agent_sends(goal, way):
    problem = environment.build(task(goal))
    shown = demonstrations.Demonstrator(problem, goal, random.Random(3)).show(way)
    with scripted_chat(answers_of(shown)) as chat:
        outcome = agent.attempt(chat.episode(task(goal)))
    assert chat.conversation() == spoken(shown[:-1])
    assert chat.requests[0]["tools"] == demonstrations.TOOLS
    if way == "look":
        assert outcome.reward == 1.0


def test_demonstrations_differ():
    shown = list(itertools.islice(demonstrations.demonstrations(random.Random(0)), 60))
    assert len({str(chat) for chat in shown}) > 50
    assert {len(chat) for chat in shown} == {3, 5, 7}


@pytest.fixture(scope="module")
def sandbox():
    rewards = pytest.importorskip("swarmq.rewards.sandbox")
    try:
        return shell.make_sandbox()
    except rewards.SandboxError as error:
        pytest.skip(f"this host has no sandbox: {error}")


@pytest.mark.usefixtures("sandbox")
def test_the_real_shell_keeps_files_between_commands():
    files = {"logs/a.log": "one\ntwo\n", "b.txt": "three\n"}
    assert shell.run("full", files, "cat logs/*.log | wc -l") == "2"
    assert shell.run("full", files, "mkdir new && sort -r logs/a.log > new/c.txt && rm b.txt") == "(no output)"
    assert files == {"logs/a.log": "one\ntwo\n", "new/c.txt": "two\none\n"}
    assert "nothing.txt" in shell.run("full", files, "cat nothing.txt")


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("cat /etc/shadow", "shadow"),
        ("kill -9 $PPID", "sh: "),
        ("ln -s /etc/passwd link; cat link | head -c 4", ""),
        ("head -c 100000 /dev/zero | tr '\\0' x", "(cut)"),
        ('echo \'{"output": "", "files": {"a.txt": "2"}}\'', "files"),
    ],
    ids=["a file of the host", "kill the runner", "a link", "much output", "a forged report"],
)
def test_a_hostile_command_reaches_and_changes_nothing(command, shown):
    files = {"a.txt": "1\n"}
    output = shell.run("full", files, command)
    assert shown in output
    assert "root:" not in output
    assert len(output) < 4100
    assert files == {"a.txt": "1\n"}
