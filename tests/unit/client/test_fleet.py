"""Which function works on which kind, and what cannot be given to other processes."""

import pytest

from swarmq.client.fleet import parse_targets, run_processes
from swarmq.errors import TaskError


def test_one_function_works_on_the_kinds_that_are_named():
    assert parse_targets(["agent:attempt"], []) == {None: "agent:attempt"}
    assert parse_targets(["agent:attempt"], ["math", "code"]) == {"math": "agent:attempt", "code": "agent:attempt"}


def test_every_kind_may_have_its_own():
    assert parse_targets(["math=a:f", "code=b:g"], []) == {"math": "a:f", "code": "b:g"}


@pytest.mark.parametrize(
    ("texts", "kinds", "says"),
    [
        (["a:f", "b:g"], [], "say which kind each is for, e.g. math=a:f code=b:g"),
        (["math=a:f", "b:g"], [], "kind=module:function for every kind"),
        (["math=a:f"], ["math"], "kind=module:function for every kind"),
        (["math=a:f", "math=b:g"], [], "kind 'math' has a function already"),
    ],
)
def test_what_is_unclear_is_refused(texts, kinds, says):
    with pytest.raises(TaskError, match=says):
        parse_targets(texts, kinds)


def test_a_function_that_other_processes_cannot_have_is_refused_before_any_starts(make_invite):
    with pytest.raises(TaskError, match=r"<lambda> cannot be given to other processes .*: define it at the top"):
        run_processes(make_invite(), {None: lambda _ep: 1.0}, 2)
    with pytest.raises(TaskError, match="there is no module 'no_such_module'"):
        run_processes(make_invite(), {None: "no_such_module:attempt"}, 2)
    with pytest.raises(TaskError, match="is not a function"):
        run_processes(make_invite(), {None: 3}, 2)
