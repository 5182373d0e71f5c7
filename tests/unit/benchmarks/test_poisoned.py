"""The benchmark of an environment that fails, without its training runs."""

import json
import sys

import msgspec
import pytest
from benchmarks import poisoned

ONES = [(rate, way, seed) for rate in (0.0, 0.9) for way in ("ours", "zero") for seed in (0, 1)]


def result(rate, way, seed):
    after = {"ours": 0.8, "zero": 0.8 - rate / 2}[way] + seed / 10
    counts = {"begun": 96, "killed": 0, "trained": 96, "killed_trained": 0 if way == "ours" else 7}
    rewards = [0.2, 0.4, 0.6]
    return poisoned.Trained(
        rate=rate, way=way, seed=seed, before=0.2, after=after, steps=3, seconds=9.0, rewards=rewards, **counts
    )


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """Run the benchmark of three steps, of which the folder has some rows."""
    folder = tmp_path / "rows"
    folder.mkdir()

    def run(rows):
        for one in rows:
            (folder / "{:g}-{}-{}-3.json".format(*one)).write_bytes(msgspec.json.encode(result(*one)))
        words = f"--rates 0 0.9 --seeds 0 1 --steps 3 --folder {folder} --out {tmp_path} --picture {tmp_path}/one.png"
        monkeypatch.setattr(sys, "argv", ["poisoned", *words.split()])
        poisoned.main()
        return json.loads((tmp_path / "poisoned.json").read_text())

    return run


def test_finished_rows_are_not_repeated_and_become_one_figure_and_means_by_rate(benchmark, tmp_path):
    figures = benchmark(ONES)["figures"]
    assert figures == pytest.approx(
        {
            "reward_after_0_ours": 0.85,
            "reward_after_0_scored_zero": 0.85,
            "reward_after_90_ours": 0.85,
            "reward_after_90_scored_zero": 0.4,
            "killed_episodes_trained_ours": 0,
        }
    )
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_the_server_is_down_for_as_many_attempts_as_it_should_whatever_the_task():
    agent = poisoned.Poisoned(0.9, "ours")
    assert sum(agent.is_down(f"episode-{number}") for number in range(2000)) == pytest.approx(1800, abs=60)
    assert agent.is_down("episode-1") == poisoned.Poisoned(0.9, "zero").is_down("episode-1")
