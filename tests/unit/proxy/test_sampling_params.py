"""What a turn says that it was sampled with."""

import pytest

from swarmq.proxy.http_errors import RefusedError
from swarmq.proxy.sampling_params import to_sampling_record


def test_what_was_asked_in_several_forms_is_recorded_in_one():
    made = to_sampling_record({"stop": "end", "top_k": -1, "logit_bias": {7: 2}, "temperature": 1})
    assert (made.stop, made.top_k, made.logit_bias, made.temperature) == (("end",), 0, {"7": 2.0}, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {"7": {"a": 1}}},
        {"logit_bias": [7]},
        {"top_k": "few"},
        {"stop": 3},
        {"min_p": []},
        {"seed": -(2**70)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_no_engine_samples_by_is_refused(wrong):
    with pytest.raises(RefusedError, match="sampling parameters"):
        to_sampling_record(wrong)
