"""The page at the end of `swarmq train` says what became of the rewards and the episodes."""

import pytest

from support.run_folder import MadeRun, make_whole_run
from swarmq.client.runners.attempts import AttemptResult
from swarmq.client.runners.report import make_eval_report
from swarmq.errors import ConfigError
from swarmq.whole_run.report import TrainingRecord, write_report


def measured(reward):
    done = [AttemptResult(episode_id="e", task_id=t, kind="math", attempt=0, reward=reward, seconds=1.0) for t in "ab"]
    return {"math": make_eval_report(done, failed=0, failures={}, seconds=1.0)}


@pytest.fixture
def run(tmp_path):
    made, ids = make_whole_run(tmp_path / "runs")
    for step in range(2, 6):
        made.emit("learner.main", "step", version=step, reward=step / 10, wait_s=30.0, train_s=60.0)
    yield made, ids, tmp_path / "cache"
    made.close()


def test_rewards_time_drops_and_checkpoint_are_on_the_page(run):
    made, ids, cache = run
    (made.folder.checkpoints("main") / "step-00000004").mkdir(parents=True)
    record = TrainingRecord(seconds=3725.0, held_out={0: measured(0.25), 5: measured(0.75)})
    page = write_report(made.folder, record, cache=cache)
    assert made.folder.report.read_text() == page
    rows = dict(line.strip("| ").split(" | ", 1) for line in page.splitlines() if line.startswith("| "))
    assert rows["steps"] == "5"
    assert rows["training reward, first and last 2 steps"] == "0.350 → 0.450"
    assert rows["held-out reward, version 0"].startswith("reward 0.250")
    assert rows["held-out reward, version 5"].startswith("reward 0.750")
    assert rows["time"].startswith("1 h 2 min, waiting for episodes 2 min 0 s, training 4 min 0 s")
    assert rows["checkpoint"] == f"`{made.folder.checkpoints('main') / 'step-00000004'}`"
    assert rows["failed"].split(" | ")[:2] == ["math", "1"]
    assert ids["failed"] in rows["failed"]
    trained, lost, left = (int(part.split()[0]) for part in rows["episodes"].split(", ")[1:])
    assert int(rows["episodes"].split()[0]) == trained + lost + left


def test_without_held_out_tasks_the_page_says_how_to_get_them(run):
    made, _, cache = run
    assert "`--held-out DATA`" in write_report(made.folder, TrainingRecord(), cache=cache)


def test_a_run_with_finished_episodes_that_wait_does_not_claim_that_all_were_trained(tmp_path):
    made = MadeRun(tmp_path / "runs")
    made.finish("sent")
    page = write_report(made.folder, TrainingRecord(), cache=tmp_path / "cache")
    made.close()
    assert "2 begun, 0 trained, 0 dropped or failed, 2 left over" in page
    assert "No episode was dropped or failed." in page


def test_a_record_is_kept_and_a_damaged_one_is_said(tmp_path):
    path = tmp_path / "train.json"
    assert TrainingRecord.load(path).held_out == {}
    TrainingRecord(seconds=2.0, held_out={3: measured(0.5)}).save(path)
    assert TrainingRecord.load(path).held_out[3]["math"].mean_reward == 0.5
    path.write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"train.json: cannot be read .*remove it to measure again"):
        TrainingRecord.load(path)
