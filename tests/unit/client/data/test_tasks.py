import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmq.client.data.tasks import SlotNumbering, SwarmTask, as_task
from swarmq.errors import TaskError


class Puzzle:
    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.kind = "math"


def test_a_dict_an_object_and_a_task_all_become_tasks():
    assert as_task({"id": 7, "question": "6*7"}) == SwarmTask("7", None, {"id": 7, "question": "6*7"})
    puzzle = Puzzle("p1")
    assert as_task(puzzle) == SwarmTask("p1", "math", puzzle)
    assert as_task(SwarmTask("t")) == SwarmTask("t")


def test_a_task_without_id_is_named_by_its_content_whatever_the_order_of_its_keys():
    assert as_task({"a": 1, "b": 2}).id == as_task({"b": 2, "a": 1}).id
    assert as_task("question one").id != as_task("question two").id


def test_what_cannot_be_named_says_how_to_name_it():
    with pytest.raises(TaskError, match=r"wrap it as SwarmTask\(id="):
        as_task(object())
    assert as_task(object(), default_id="task-3").id == "task-3"


@pytest.mark.parametrize("name", ["", "x" * 201, 5])
def test_an_id_that_cannot_name_a_slot_is_refused(name):
    with pytest.raises(TaskError, match="1 to 200 characters"):
        as_task(SwarmTask(name))


@given(st.lists(st.sampled_from("abc"), max_size=60), st.integers(1, 5))
def test_no_two_attempts_of_one_client_fill_the_same_slot_and_groups_fill_up_in_order(names, group_size):
    numbering = SlotNumbering()
    slots = [numbering.next_slot(name, group_size) for name in names]
    assert len({slot.id for slot in slots}) == len(slots)
    for name in set(names):
        repeats = [slot.repeat for slot in slots if slot.task_id == name]
        assert repeats == [number % group_size for number in range(len(repeats))]
        groups = [slot.group_id for slot in slots if slot.task_id == name]
        assert len(set(groups)) == -(-len(groups) // group_size)


def test_another_start_of_the_same_script_names_other_slots():
    first, second = SlotNumbering(), SlotNumbering()
    assert first.next_slot("t", 8) != second.next_slot("t", 8)


def test_a_slot_number_survives_json_in_a_browser():
    assert SlotNumbering().fresh_epoch() < 2**53
