"""The runner of the comparison with peers: what it counts, what it compares, and that nothing of a peer survives it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.peers.processes import PeerError, started, wait_for_lines
from benchmarks.peers.run import blocks, fastest, figures, rate
from benchmarks.peers.verl_run import settings
from benchmarks.peers.work import EPISODES, GROUP_SIZE, PROMPTS, SAMPLED, TURNS

WRITES_TWO = "import sys\nwith open(sys.argv[1], 'w') as file: file.write('a\\nb\\n')\nprint('why it stopped')"
LEAVES_ONE = (
    "import subprocess, sys, time\n"
    "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    "open(sys.argv[1], 'w').write('\\n')\n"
    "time.sleep(60)"
)


def test_a_rate_is_of_the_steps_after_the_warm_up() -> None:
    found = rate([100.0, 110.0, 130.0], warm_up=1)
    assert found["samples_per_s"] == pytest.approx(2 * EPISODES / 30)
    assert found["steps_s"] == [10.0, 20.0]


def test_the_spread_is_that_of_whole_blocks_of_two_steps() -> None:
    seconds, episodes = [1.0, 1.0, 2.0, 3.0, 3.0, 2.0, 9.0], [64, 56, 64, 64, 64, 64, 64]
    assert blocks(seconds, episodes) == [120 / 2, 128 / 5, 128 / 5]


def test_each_way_of_swarmq_is_compared_with_the_best_of_a_peer() -> None:
    parts = {"swarmq": 30.0, "swarmq_mps": 45.0, "verl_sync": 10.0, "verl_sync_bypass": 15.0, "trl_bf16": 20.0}
    detail: dict[str, Any] = {part: {"samples_per_s": value} for part, value in parts.items()}
    detail["verl_async"] = {"failed": "why"}
    detail["swarmq"]["figures"] = {"sampled_tokens_per_s": 24.0 * TURNS * SAMPLED}
    detail["swarmq_mps"]["figures"] = {"sampled_tokens_per_s": 36.0 * TURNS * SAMPLED}
    found = figures(detail)
    assert found["verl_sync_ratio"] == 2.0
    assert found["verl_sync_ratio_sampled"] == pytest.approx(1.6)
    assert found["verl_sync_ratio_mps"] == 3.0
    assert found["trl_tuned_ratio"] == 1.5
    assert found["trl_tuned_ratio_mps_sampled"] == pytest.approx(1.8)
    assert not [name for name in found if name.startswith("verl_async_ratio")]


def test_the_fastest_is_chosen_of_what_ran() -> None:
    probed = {"probe": {"attention": {"flash_attention_4": "Traceback", "sdpa": 2.0, "flex_attention": 1.0}}}
    assert fastest(probed, "attention", "eager") == "flex_attention"
    assert fastest({}, "attention", "eager") == "eager"


def test_verl_trains_one_batch_of_whole_groups_a_step(tmp_path: Path) -> None:
    asked = settings(tmp_path, tmp_path, "sync", bypass=True, attention="sdpa", logits="flash", steps=1)
    assert asked["data.train_batch_size"] == asked["actor_rollout_ref.actor.ppo_mini_batch_size"] == PROMPTS
    assert asked["actor_rollout_ref.rollout.n"] == GROUP_SIZE


def test_a_process_that_stops_early_is_told_with_its_log(tmp_path: Path) -> None:
    steps, log = tmp_path / "steps", tmp_path / "log"
    command = [sys.executable, "-c", WRITES_TWO, str(steps)]
    with started(command, {}, log) as process, pytest.raises(PeerError, match=r"2 of 3 steps(.|\n)*why it stopped"):
        wait_for_lines(process, steps, 3, deadline=time.monotonic() + 60, log=log)


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    steps, log = tmp_path / "steps", tmp_path / "log"
    with started([sys.executable, "-c", LEAVES_ONE, str(steps)], {}, log) as process:
        assert len(wait_for_lines(process, steps, 1, deadline=time.monotonic() + 60, log=log)) == 1
        left = psutil.Process(process.pid).children(recursive=True)
    assert left
    assert not any(child.is_running() for child in left)


def test_a_run_that_is_late_is_measured_by_the_steps_it_came_to(tmp_path: Path) -> None:
    steps, log = tmp_path / "steps", tmp_path / "log"
    with started([sys.executable, "-c", LEAVES_ONE, str(steps)], {}, log) as process:
        wait_for_lines(process, steps, 1, deadline=time.monotonic() + 60, log=log)
        assert len(wait_for_lines(process, steps, 3, deadline=time.monotonic(), log=log, least=1)) == 1
        with pytest.raises(PeerError, match="1 of 3 steps at the deadline"):
            wait_for_lines(process, steps, 3, deadline=time.monotonic(), log=log)
