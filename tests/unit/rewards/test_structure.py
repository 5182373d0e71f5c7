"""Form is checked whole: what stands twice, outside or in another place is wrong, and no answer stalls the check."""

import pytest

from swarmq.errors import RewardError
from swarmq.rewards import extract_json, extract_tag, regex_match, schema_match, tags_match
from swarmq.rewards.helper import close_helpers

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True, scope="module")
def helpers():
    yield
    close_helpers()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("<think>a</think>\n<answer>b</answer>", ""),
        ("<answer>b</answer><think>a</think>", "not in its place"),
        ("<think>a<answer>b</think></answer>", "not in its place"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "<answer> occurs 2 times"),
        ("<think>a</think><answer>b", "</answer> 0 times"),
        ("<think> </think><answer>b</answer>", "<think> is empty"),
        ("Sure! <think>a</think><answer>b</answer>", "outside of the tags: 'Sure!'"),
        ("", "<think> occurs 0 times"),
    ],
)
def test_an_answer_needs_every_tag_in_order(answer, reason):
    score = tags_match(answer, ["think", "answer"])
    assert reason in score.reason
    assert score.value == (not reason)


def test_text_outside_of_tags_can_be_allowed_and_a_tag_can_be_read():
    answer = "Sure! <think>a</think> so <answer> b </answer>"
    assert tags_match(answer, ["think", "answer"], only=False).value == 1.0
    assert extract_tag(answer, "answer") == "b"
    assert extract_tag(answer + "<answer>c</answer>", "answer") == extract_tag("<answer>b", "answer") == ""
    with pytest.raises(RewardError, match="tags is"):
        tags_match("", ["a b"])


def test_a_pattern_must_match_the_whole_answer_and_cannot_be_stalled():
    assert regex_match("A: 42", r"A: \d+").value == 1.0
    assert regex_match("A: 42 or 43", r"A: \d+").value == 0.0
    assert regex_match("a" * 60 + "!", r"(a+)+", timeout_s=0.1).reason == "the check took more than 0.1 s of CPU time"
    with pytest.raises(RewardError, match="pattern"):
        regex_match("a", "(")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"city": "Paris"}', ""),
        ('Here:\n```json\n{"city": "Paris", "age": 3}\n```\nBye', ""),
        ('```\n{"city": 1}\n```\n```json\n{"city": "Paris"}\n```', ""),
        ('```python\n{"city": "Paris"}\n```', "no JSON"),
        ('{"city": "Paris"} and more', "no JSON"),
        ('{"city": 5}', "at $.city: 5 is not of type 'string'"),
        ('{"city": "Paris", "age": -1}', "at $.age"),
        ('{"city": "Paris", "other": 1}', "at $"),
        ('{"city": 1, "city": "Paris"}', "a key twice"),
        ('{"city": "Paris", "age": NaN}', "NaN is not JSON"),
        ('{"city": "Paris", "age": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 100_000, "recursion"),
        ("", "no JSON"),
        (" " * 2_000_000, "2000000 characters"),
    ],
)
def test_json_must_match_the_schema(answer, reason):
    score = schema_match(answer, SCHEMA)
    assert reason in score.reason
    assert score.value == (not reason)


def test_a_wrong_schema_fails_the_episode():
    with pytest.raises(RewardError, match=r"schema: at \$.type"):
        schema_match("{}", {"type": "objekt"})
    with pytest.raises(RewardError, match="other documents are not fetched"):
        schema_match("{}", {"$ref": "http://127.0.0.1:1/schema.json"})


def test_a_slow_pattern_in_a_schema_cannot_be_stalled():
    assert schema_match('"' + "a" * 60 + '!"', {"type": "string", "pattern": "^(a+)+$"}, timeout_s=0.1).value == 0.0


def test_json_is_returned_to_who_asks():
    assert extract_json('```json\n{"a": [1, null]}\n```') == {"a": [1, None]}
    with pytest.raises(ValueError, match="no JSON"):
        extract_json("none")
