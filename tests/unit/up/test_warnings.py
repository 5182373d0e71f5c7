"""What a job allows and nobody can mean is said when it comes up."""

import pytest

from swarmq.config import Engine, Policy, SwarmJob, Train
from swarmq.engine.model import Model
from swarmq.up.deployment import untrainable_calls


@pytest.mark.parametrize(
    ("served", "made_for", "computed", "trained", "warned"),
    [
        (32768, None, 16384, True, True),
        (32768, 131072, 16384, True, True),
        (32768, 8192, 16384, True, False),
        (16384, None, 16384, True, False),
        (32768, None, 16384, False, False),
    ],
)
def test_calls_too_long_to_be_trained_are_warned_of_by_both_settings(
    served: int, made_for: int | None, computed: int, trained: bool, warned: bool
) -> None:
    model = Model(name="m", architecture="Q", hidden_size=1, is_folder=True, tool_call_parser=None, max_length=made_for)
    train = Train(micro_batch_tokens=computed)
    solver = Policy(model="m", engine=Engine(max_model_len=served), train=train, trained=trained)
    job = SwarmJob(run="r", policies={"solver": solver, "main": Policy(model="m")})
    told = list(untrainable_calls(job, {"solver": model}))
    assert len(told) == warned
    for setting in ("policies.solver.engine.max_model_len", "policies.solver.train.micro_batch_tokens"):
        assert all(setting in line for line in told)
