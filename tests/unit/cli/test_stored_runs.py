"""`swarmq inspect` lists episodes of any fate and shows each, with the reason for which it was not trained."""

import msgspec
import pytest
from click.testing import CliRunner

from support.run_folder import make_whole_run
from swarmq.cli import main
from swarmq.observe.index import EpisodeRow
from swarmq.observe.open_run import open_run


@pytest.fixture
def whole(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run, ids = make_whole_run(tmp_path / "runs")
    run.write_transcripts()
    yield run, ids
    run.close()


def inspect(run, *arguments, status=0):
    result = CliRunner().invoke(main, ["inspect", str(run.folder.path), *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def rows(run, *arguments):
    return [msgspec.json.decode(line, type=EpisodeRow) for line in inspect(run, *arguments, "--json").splitlines()]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--dropped"], ["equal_rewards", "equal_rewards", "no_turns"]),
        (["--dropped", "equal_rewards"], ["equal_rewards", "equal_rewards"]),
        (["--dropped", "silent"], ["silent"]),
        (["--failed"], ["aborted", "failed", "silent"]),
        (["--dropped", "no_begin"], ["no_begin"]),
        (["--dropped", "--failed"], ["aborted", "equal_rewards", "equal_rewards", "failed", "no_turns", "silent"]),
        (["--client", "cli", "--failed"], ["aborted", "failed", "silent"]),
        (["--eval"], ["finished", "silent"]),
        (["--eval", "--reward", ">0"], ["finished"]),
        (["--open"], ["", "", "", ""]),
        (["--open", "--kind", "code"], [""]),
        (["--task", "broken", "--client", "client-a"], ["failed"]),
        (["--reward", "<0.2"], [""]),
        (["--reward", "0.2..0.5", "--open"], [""]),
        (["--reward", "1", "--dropped"], ["equal_rewards", "equal_rewards", "no_turns"]),
        (["--dropped", "--failed", "--limit", "1"], ["no_turns"]),
        (["--step", "1", "--limit", "9"], ["", ""]),
    ],
)
def test_the_options_choose_episodes(whole, options, wanted):
    run, _ = whole
    found = rows(run, *options)
    if "--limit" in options:
        assert len(found) == len(wanted)
    else:
        assert sorted(row.reason for row in found) == wanted


def test_the_list_says_what_the_reasons_mean(whole):
    run, ids = whole
    listing = inspect(run, "--dropped")
    assert listing.splitlines()[0].split() == [
        "began",
        "reward",
        "turns",
        "tokens",
        "step",
        "episode",
        "kind",
        "state",
        "reason",
    ]
    assert ids["equal_rewards"][-8:] in listing
    assert "equal_rewards 2: All attempts of its group had the same reward" in listing
    assert "3 episodes\n" in listing
    assert "3 episodes, the newest 1 of them shown (--limit)" in inspect(run, "--dropped", "--limit", 1)


@pytest.mark.parametrize("state", ["failed", "equal_rewards", "eval", "open", "waiting", "published"])
def test_an_episode_that_was_not_trained_is_shown_with_conversation_tokens_and_reason(whole, state):
    run, ids = whole
    _, _, turns = run.parts[ids[state]]
    shown = inspect(run, ids[state])
    detail = msgspec.json.decode(inspect(run, ids[state], "--json"))
    assert detail["why"] in shown
    assert shown.count("user: <b>hi</b>\n") == len(turns)
    assert "not_trained" in shown
    assert f"; {turns[0].num_prompt} prompt tokens, {turns[0].num_sampled} sampled, stop" in shown
    sampled = sum(cause == "not_trained" for page in detail["tokens"] for cause in page["cause"])
    assert sampled == sum(turn.num_sampled for turn in turns)


def test_the_list_shows_the_last_line_of_what_the_client_said_of_a_failure(whole):
    run, _ = whole
    raised = "Traceback (most recent call last):\n  File ...\nKeyError: 'price'\n"
    failed = [
        run.end(run.begin(task), status="failed", reason=words) for task, words in (("a", raised), ("b", "x" * 500))
    ]
    run.write_transcripts(number=2)
    listing = inspect(run, "--failed").splitlines()
    found = {failed_id: line for failed_id in failed for line in listing if failed_id[-8:] in line.split()}
    assert listing[0].split()[-2:] == ["reason", "detail"]
    assert found[failed[0]].endswith(" KeyError: 'price'")
    assert found[failed[1]].endswith("x" * 100 + "...")
    assert "Traceback" not in "".join(listing)


def test_an_episode_that_a_learner_has_is_told_in_the_dashboard_s_words(whole):
    run, ids = whole
    [line] = [line for line in inspect(run, "--open").splitlines() if ids["published"][-8:] in line.split()]
    assert "in learners" in line
    assert inspect(run, ids["published"]).startswith(f"{ids['published']}  in learners\n")
    assert {row.state for row in rows(run, "--open")} >= {"published"}, "programs go on with the name"


def test_the_client_s_own_words_are_shown_and_nothing_in_them_reaches_the_terminal(whole):
    run, _ = whole
    hostile = run.end(run.begin("hostile"), status="failed", reason="boom \x1b[31m\u202e")
    run.write_transcripts(number=2)
    shown = inspect(run, hostile)
    assert "detail: boom" in shown
    assert "\x1b[31m" not in shown
    assert "\u202e" not in shown


def test_a_trained_episode_is_shown_as_it_was_trained(whole, tmp_path):
    run, ids = whole
    assert "masked or clipped by the loss" in inspect(run, ids["trained"])
    assert msgspec.json.decode(inspect(run, ids["trained"], "--json"))["step"] == 1
    page = tmp_path / "page.html"
    for state in ("trained", "failed"):
        assert inspect(run, ids[state], "--html", page) == ""
        assert ids[state] in page.read_text()
        assert page.stat().st_mode & 0o77 == 0


def test_wrong_options_are_refused_with_what_to_do(whole):
    run, ids = whole
    assert "give a range such as" in inspect(run, "--reward", "cheap", status=1)
    assert "cannot be combined with options that list" in inspect(run, ids["open"], "--failed", status=1)
    assert "no episode of the run begins or ends with" in inspect(run, "zzz", status=1)
    assert "is not an episode id" in inspect(run, "../secret", status=1)
    assert "a REASON finds failed episodes" in inspect(run, "--dropped", "stale", "--failed", status=1)
    assert "kind: 'maths' is unknown in this run; it has math" in inspect(run, "--kind", "maths", status=1)
    assert "reason: 'stal' is unknown in this run; it has stale" in inspect(run, "--dropped", "stal", status=1)
    assert "client: 'bob' is unknown in this run; it has client-a" in inspect(run, "--client", "bob", status=1)
    assert "policy: 'critic' is unknown in this run; it has main" in inspect(
        run, "--policy", "critic", "--limit", 3, status=1
    )


def test_the_number_of_failed_episodes_is_that_of_the_ledger(whole):
    run, _ = whole
    failed = open_run(run.folder.path).ledger().failed
    assert len(rows(run, "--failed")) == sum(failed.values())


def test_a_folder_that_lacks_files_is_shown_with_a_note(whole):
    run, ids = whole
    run.close()
    run.folder.inbox.unlink()
    result = CliRunner().invoke(main, ["inspect", str(run.folder.path), "--failed"])
    assert result.exit_code == 0
    assert "note: " in result.stderr
    assert "no ledger" in result.stderr
    assert ids["failed"][-8:] in result.stdout
