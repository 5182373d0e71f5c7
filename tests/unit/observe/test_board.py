"""The board says what the events said, and the screen shows it."""

import io
import math
import re

import msgspec
import pytest
from rich.console import Console

from swarmq.messages import Event
from swarmq.observe.board import BLOCKS, Board, board_to_json, condense, sparkline
from swarmq.observe.board_terminal import STALE_S, draw


def event(name, source="learner.main", at=0.0, **fields):
    return Event(run="r", source=source, name=name, at=at, fields=fields)


def text_of(board, now=0.0, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(board, now=now, width=width))
    return console.file.getvalue()


def test_steps_warnings_and_counts_reach_the_screen():
    board = Board(run="r")
    for version in range(1, 4):
        board.fold(event("step", version=version, reward=version / 4, loss=0.5, wait_s=1.0, train_s=2.0, push_s=0.25))
    board.fold(event("state", source="collector", begun=12, trained=8, dropped={"equal_rewards": 4}, orphan_turns=31))
    board.fold(event("warning", source="collector", text="group t/0 waits for 1 of 4"))
    board.depths = {"swarmq.r.main.ready": 7}
    shown = text_of(board)
    for expected in (
        "0.750",
        "1.0/2.0/0.2",
        "equal_rewards",
        "12",
        "orphan turns",
        "31",
        "group t/0 waits for 1 of 4",
        "main.ready",
        "7",
    ):
        assert expected in shown


def test_means_of_the_agents_metrics_are_shown_by_kind_for_steps_and_evaluations():
    board = Board(run="r")
    many = {f"m{number:03d}": float(number) for number in range(64)}
    board.fold(event("step", version=1, reward=0.5, metrics_by_kind={"math": {"tool calls": 2.5}, "code": many}))
    board.fold(
        event(
            "step", version=2, reward=0.5, metrics_by_kind={"math": {"tool\ncalls": 3.25, "x" * 80: None}, "code": many}
        )
    )
    kinds = {"code": {"tasks": 2, "episodes": 4, "reward": 0.5, "pass": {}, "metrics": {"tests passed": 0.75}}}
    board.fold(event("evaluated", "collector", version=2, kinds=kinds))
    shown = " ".join(text_of(board).replace("│", " ").split())
    assert "main math tool calls 3.25" in shown
    assert "m011 11 · and 52 more" in shown
    assert "m012" not in shown
    assert "code: tests passed 0.75" in shown


@pytest.mark.parametrize("broken", [math.nan, math.inf, None])
def test_a_step_whose_figures_are_not_finite_is_shown_beside_the_others(broken):
    board = Board(run="r")
    for version, figure in enumerate((0.25, broken, 0.75, broken), 1):
        kinds = {"math": figure, "code": figure, "new": broken}
        board.fold(event("step", version=version, reward=figure, loss=figure, kl_k3=figure, reward_by_kind=kinds))
    shown = text_of(board)
    assert BLOCKS[2] + BLOCKS[7] in shown
    (row,) = (line for line in shown.splitlines() if "main" in line and "0.0/0.0/0.0" in line)
    assert row.split().count("-" if broken is None else str(broken)) == 3, row


def test_each_kind_of_a_mix_is_shown_with_its_share_and_rewards():
    board = Board(run="r")
    for version, code in ((1, 0.125), (2, 0.375)):
        rewards, groups = {"math": 0.5, "code": code}, {"math": 6, "code": 2}
        board.fold(
            event(
                "step", version=version, reward_by_kind=rewards, groups_by_kind=groups, success_by_kind={"code": 0.25}
            )
        )
    shown = {line.split()[2]: line for line in text_of(board).splitlines() if "main" in line and len(line.split()) > 3}
    assert [word in shown["code"] for word in (" 2 ", "0.375", "25.0%", BLOCKS[7])] == [True] * 4
    assert [word in shown["math"] for word in (" 6 ", "0.500", " - ")] == [True] * 3


def test_an_evaluation_is_shown_with_its_interval_and_what_has_no_result():
    board = Board(run="r")
    passed = {"1": {"value": 0.5, "low": 0.25, "high": 0.75, "tasks": 8}}
    kinds = {"math": {"tasks": 8, "episodes": 8, "reward": 0.5, "pass": passed}}
    for version, missing, given_up in ((0, 2, 1), (10, 0, 0)):
        board.fold(
            event(
                "evaluated", "collector", version=version, missing=missing, given_up=given_up, kinds=kinds, seconds=9.0
            )
        )
        shown = " ".join(text_of(board).split())
        assert f"evaluation at step {version}" in shown
        assert ("3 attempts without a result" in shown) == (version == 0)
        assert "@1 50.0% [25.0%, 75.0%]" in shown


@pytest.mark.parametrize(
    ("pace", "title"),
    [("running", "r"), ("paused", "r · PAUSED"), ("draining", "r · DRAINING"), ("drained", "r · DRAINED")],
)
def test_the_title_says_that_a_run_is_paused_or_drained(pace, title):
    board = Board(run="r")
    board.fold(event("state", source="collector", pace=pace))
    assert f" swarmq · {title} ─" in text_of(board, width=80)


def test_a_single_kind_is_not_told_apart():
    board = Board(run="r")
    board.fold(event("step", version=1, reward_by_kind={"default": 0.5}))
    assert "kind" not in text_of(board)


def test_the_screen_shows_how_much_drifted_and_why_turns_branched():
    board = Board(run="r")
    first = {"continued": 4800, "drift_rate": 0.25, "repaired": 1200, "branches": {"history_edited": 7}}
    board.fold(event("state", source="proxy.0", **first))
    shown = text_of(board)
    for expected in ("25.0%", "1,200", "branch: history edited", "7"):
        assert expected in shown


def test_what_several_proxies_count_is_added_up_and_drift_is_over_all_of_their_turns():
    board = Board(run="r")
    first = {"calls": 10, "errors": 1, "continued": 9, "repaired": 0, "drift_rate": 0.0, "branches": {"drift": 1}}
    second = {"calls": 1000, "errors": 2, "continued": 1, "repaired": 1, "drift_rate": 1.0, "branches": {"drift": 2}}
    board.fold(event("state", source="proxy.0", **first))
    board.fold(event("state", source="proxy.1", **second))
    shown = text_of(board)
    figures = {"calls": "1,010", "errors": "3", "repaired": "1", "branch: drift": "3", "drift": "10.0%"}
    assert {name: re.search(rf" {name} +([\d,.%]+)", shown)[1] for name in figures} == figures


@pytest.mark.parametrize("width", [80, 120])
def test_what_proxies_count_is_said_to_be_since_their_start(width):
    board = Board(run="r")
    board.fold(event("state", source="proxy.0", calls=3))
    assert " proxies since their start " in text_of(board, width=width)


def test_a_broker_that_takes_no_messages_is_the_first_thing_shown():
    board = Board(run="r", blocked=True)
    for text in (text_of(board), text_of(board, width=80)):
        assert "RabbitMQ accepts no messages: it is low on memory or disk" in " ".join(text.split())
        assert "waiting for the first event" in text
    assert "RabbitMQ" not in text_of(Board(run="r"))


def test_a_part_that_went_silent_is_said_to_be():
    board = Board(run="r")
    board.fold(event("state", source="proxy.0", at=100.0, calls=1))
    assert "silent" not in text_of(board, now=100.0 + STALE_S - 1)
    assert "proxy.0 (silent 30 s)" in text_of(board, now=130.0)


def test_a_learner_that_has_ended_is_not_said_to_be_silent():
    board = Board(run="r")
    board.fold(event("state", at=100.0, phase="ended", version=37))
    assert "learner.main (ended)" in text_of(board, now=1000.0)
    assert "silent" not in text_of(board, now=1000.0)


def test_the_token_rate_is_measured_over_the_window_and_added_over_proxies():
    board = Board(run="r")
    for at in (0.0, 50.0, 60.0):
        board.fold(event("state", source="proxy.0", at=at, sampled_tokens=at * 100))
        board.fold(event("state", source="proxy.1", at=at, sampled_tokens=at * 10))
    assert board.tokens_per_s() == 110.0


def test_a_restarted_proxy_does_not_make_the_rate_negative():
    board = Board(run="r")
    board.fold(event("state", source="proxy.0", at=0.0, sampled_tokens=5000))
    board.fold(event("state", source="proxy.0", at=2.0, sampled_tokens=10))
    assert board.tokens_per_s() == 0.0


def test_a_sparkline_rises_where_the_values_rise():
    assert sparkline([0.0, 0.5, 1.0], low=0.0, high=1.0) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert sparkline([]) == ""
    assert set(sparkline([2.0, 2.0])) == {BLOCKS[0]}


def test_many_values_are_condensed_to_means_whose_last_is_of_the_newest():
    assert condense([float(i) for i in range(5)], 3) == [0.0, 1.5, 3.5]
    assert len(condense([1.0] * 1000, 40)) == 40
    assert condense([math.nan, 1.0, math.inf], 10) == [1.0]
    assert condense([], 10) == []


def curves_of(rewards, *, evaluated=()):
    """The curves that the screen draws, those of evaluation rounds behind those of steps."""
    board = Board(run="r")
    for version, reward in enumerate(rewards, 1):
        board.fold(event("step", version=version, reward=reward))
    for version, reward in enumerate(evaluated, 1):
        kinds = {"math": {"tasks": 8, "reward": reward, "pass": {}}}
        board.fold(event("evaluated", "collector", version=version, kinds=kinds))
    return re.findall(f"[{BLOCKS}]{{2,}}", text_of(board))


def test_rewards_below_zero_and_above_one_have_a_shape():
    falling = BLOCKS[7] + BLOCKS[4] + BLOCKS[0]
    assert curves_of([0.5, -0.0, -0.5], evaluated=[1.0, 0.0, -1.0]) == [falling, falling]
    assert curves_of([-0.25, -0.5, -1.0]) == [BLOCKS[5] + BLOCKS[4] + BLOCKS[0]], "0 is the top"
    assert curves_of([0.0, 2.0, 4.0]) == [BLOCKS[0] + BLOCKS[4] + BLOCKS[7]]
    assert curves_of([-0.5, -0.5]) == [BLOCKS[0] * 2]
    assert curves_of([0.5, 0.5]) == [BLOCKS[7] * 2]


def test_rewards_below_zero_are_red():
    board = Board(run="r")
    for version, reward in enumerate((-1.0, 1.0), 1):
        board.fold(event("step", version=version, reward=reward))
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    console.print(draw(board, now=0.0, width=120))
    assert f"\x1b[31m{BLOCKS[0]}\x1b[0m\x1b[32m{BLOCKS[7]}\x1b[0m" in console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 109, 110, 120])
def test_no_figure_or_heading_is_cut_at_any_usual_width(width):
    board = Board(run="r")
    timings = {"wait_s": 123.4, "train_s": 56.7, "push_s": 8.9, "pause_s": 0.25}
    kinds = {"product": 0.25, "sum": 0.75}
    for version in range(100, 164):
        figures = {"reward": version / 200, "loss": -0.1234, "kl_k3": 1.5e-3, "reward_by_kind": kinds}
        board.fold(event("step", version=version, **figures, **timings))
    board.fold(event("state", phase="training", version=163))
    board.fold(event("state", source="collector", dropped={"equal_rewards": 104}))
    passed = {k: {"value": 0.5, "low": 0.25, "high": 0.75} for k in ("1", "4")}
    drawn = {"sum": {"tasks": 8, "reward": 0.5, "pass": passed}}
    board.fold(event("evaluated", "collector", version=160, missing=3, kinds=drawn))
    shown = text_of(board, width=width)
    expected = ("policy", "training", "163", "0.815", "-0.1234", "1.5e-03", "123.4/56.7/8.9", "250", "reward by step")
    expected += ("wait/train/push s", "pause ms", "k3", "dropped: equal_rewards", "@4 50.0% [25.0%, 75.0%]", "by round")
    assert "…" not in shown
    assert [words for words in expected if words not in shown] == []
    assert [len(line) for line in shown.splitlines()] == [width] * len(shown.splitlines())
    assert max(len(curve) for curve in re.findall(f"[{BLOCKS}]+", shown)) >= 10


def test_a_warning_that_comes_again_with_other_figures_is_one_line():
    board = Board(run="r")
    for number in (0, 1):
        board.fold(event("warning", source="up", text=f"engine.main.{number} died with status -9"))
    for seconds in (60, 121, 181):
        board.fold(event("warning", text=f"learner main has waited {seconds} s for whole groups"))
    board.fold(event("warning", source="up", text="collector died"))
    shown = text_of(board)
    assert "has waited 181 s for whole groups (3 times)" in shown
    assert "60 s" not in shown
    assert (
        shown.index("main.0 died") < shown.index("main.1 died") < shown.index("181 s") < shown.index("collector died")
    )


def test_settings_that_differ_are_never_one_line():
    board = Board(run="r")
    for value in (8, 8, 9):
        changes = [{"path": "groups.group_size", "value": value}]
        board.fold(event("control", "collector", action="set", state="accepted", changes=changes))
    shown = text_of(board)
    assert "groups.group_size = 8 (2 times)" in shown
    assert "groups.group_size = 9" in shown


def test_a_command_that_is_answered_again_counts_once():
    board = Board(run="r")
    for command in ("a", "a", "b", "b"):
        board.fold(event("control", "collector", action="pause", state="accepted", command_id=command))
    assert [warning.times for warning in board.warnings] == [2]


def test_a_warning_of_another_day_has_its_date():
    board = Board(run="r")
    board.fold(event("warning", at=1e9, text="old"))
    assert "2001-09-" not in text_of(board, now=1e9 + 60)
    assert "2001-09-" in text_of(board, now=1e9 + 1e6)


def test_held_out_rewards_are_of_one_weight_version_and_never_of_attempts_without_a_reward():
    board = Board(run="r")
    for reward in (0.0, 0.0, 0.5, None):
        board.fold(event("eval", "collector", reward=reward))
    board.fold(event("step", version=8))
    board.fold(event("eval", "collector", reward=1.0))
    assert board.held_out() == (0, [0.0, 0.0, 0.5]), "the newer one is not complete yet"
    for reward in (1.0, 0.5):
        board.fold(event("eval", "collector", reward=reward))
    assert board.held_out() == (8, [1.0, 1.0, 0.5])
    assert re.search(r"held-out, version 8 +0\.833 \(n=3\)", text_of(board))


def test_programs_get_what_the_screen_shows():
    board = Board(run="r")
    board.fold(event("state", at=8.0, phase="training", version=2))
    board.fold(event("state", source="collector", at=9.5, pace="paused", begun=3))
    board.fold(event("state", source="proxy.0", at=9.0, calls=7))
    for version, reward in ((1, 0.5), (2, math.nan)):
        board.fold(event("step", version=version, reward=reward, loss=0.25))
    board.fold(event("evaluated", "collector", version=2, kinds={}))
    board.fold(event("warning", source="up", at=5.0, text="collector died"))
    board.depths = {"swarmq.r.in": 4}
    data = msgspec.json.decode(msgspec.json.encode(board_to_json(board, now=10.0)))
    assert data["parts"]["learner.main"] == {"silent_s": 2.0, "phase": "training", "version": 2}
    assert data["policies"]["main"] == {
        "phase": "training",
        "step": 2,
        "reward": None,
        "newest_step": {"version": 2, "reward": None, "loss": 0.25},
    }
    assert (data["run"], data["at"], data["pace"], data["queues"]) == ("r", 10.0, "paused", {"swarmq.r.in": 4})
    assert (data["proxies"]["calls"], data["evaluation"]["version"]) == (7, 2)
    assert data["warnings"] == [{"at": 5.0, "source": "up", "text": "collector died", "times": 1}]
    assert board_to_json(Board(run="r"), now=0.0)["policies"] == {}
