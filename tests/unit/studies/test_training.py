"""The result of a trial that is a training is that of its last step, or none."""

from support.run_folder import MadeRun
from swarmq.client.runners.report import EvalReport
from swarmq.studies.training import read_training
from swarmq.whole_run.report import TrainingRecord


def measured(reward):
    fields = dict.fromkeys(EvalReport.__struct_fields__) | {"tasks": 2, "n": 2, "failed": 0, "seconds": 1.0}
    return {
        "default": EvalReport(
            **fields | {"mean_reward": reward, "success_rate": reward, "reward_by_kind": {}, "failures": {}}
        )
    }


def test_a_training_that_was_killed_before_it_was_measured_has_no_result(tmp_path):
    made = MadeRun(tmp_path)
    made.finish("taught")
    made.step()
    made.close()
    record = TrainingRecord(held_out={0: measured(0.25)})
    record.save(made.folder.training)
    assert "held_out" not in read_training(made.folder, 1).metrics, "what was measured before is no result"
    record.held_out[1] = measured(0.75)
    record.save(made.folder.training)
    metrics = read_training(made.folder, 1).metrics
    assert (metrics["held_out_before"], metrics["held_out"], metrics["held_out_success"]) == (0.25, 0.75, 0.75)
