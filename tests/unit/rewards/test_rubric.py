"""A rubric is kept if a judge that follows it agrees with examples that its author did not see."""

import http.server
import json
import re
import threading

import pytest

from swarmq.errors import EndpointError, OutcomeError, RewardError
from swarmq.rewards import ChatEndpoint, Example, Rubric, derive_rubric

GOOD, BAD = "Score by the number of reasons.", "Score by mood."


class Models(http.server.BaseHTTPRequestHandler):
    """A teacher that writes the server's rubrics in turn, and a judge that counts reasons under the good one alone."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        if body["model"] == "teacher":
            self.server.prompts.append(prompt)
            text = self.server.rubrics.pop(0) if len(self.server.rubrics) > 1 else self.server.rubrics[0]
        else:
            text = f"Score: {min(prompt.count('because'), 10) if GOOD in prompt else 5}"
        answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def models():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        server.prompts, server.rubrics = [], [f"Thoughts.\n<rubric>\n{GOOD}\n</rubric>"]
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


EXAMPLES = [
    Example(task=f"task {number}.", answer="yes" + " because" * reasons, score=reasons / 10)
    for number in range(10)
    for reasons in (number % 3, 8)
]


def derive(models, examples=EXAMPLES, **options):
    teacher = ChatEndpoint("teacher", base_url=models.url, api_key="k", attempts=2, pause=lambda _s: None)
    return derive_rubric(examples, teacher=teacher, judge_model="judge", base_url=models.url, api_key="k", **options)


def test_a_rubric_is_derived_checked_saved_and_used(models, tmp_path):
    rubric = derive(models)
    assert rubric.text == GOOD
    assert rubric.agreement.examples == 6
    assert rubric.agreement.correlation == pytest.approx(1.0)
    assert rubric.agreement.mean_error == pytest.approx(0.0)
    rubric.save(tmp_path / "rubric.json")
    loaded = Rubric.load(tmp_path / "rubric.json")
    assert loaded == rubric
    assert loaded.judge(base_url=models.url, api_key="k").score("t", "because because") == 0.2


def test_the_teacher_does_not_see_what_is_held_back(models):
    derive(models)
    shown = set(re.findall(r"task \d+\.", models.prompts[0]))
    assert len(shown) == 7
    assert models.prompts[0].count("<example>") == 14


def test_the_best_of_several_rubrics_is_kept(models):
    models.rubrics = [f"<rubric>{BAD}</rubric>", f"<rubric>{GOOD}</rubric>", f"<rubric>{BAD}</rubric>"]
    assert derive(models).text == GOOD
    assert len(models.prompts) == 2


def test_a_rubric_that_does_not_agree_is_refused(models):
    models.rubrics = [f"<rubric>{BAD}</rubric>"]
    with pytest.raises(RewardError, match=r"no rubric of 3 agrees with the 6 examples held back: .* is 0.00"):
        derive(models)


def test_a_teacher_that_writes_none_is_an_error(models):
    models.rubrics = ["<rubric></rubric>"]
    with pytest.raises(EndpointError, match="no <rubric>"):
        derive(models)


def test_unusable_examples_are_refused_before_anything_is_asked(models):
    with pytest.raises(RewardError, match=r"examples\[0\].score is 7"):
        derive(models, [Example(task="t", answer="a", score=7)])
    with pytest.raises(OutcomeError, match=r"examples\[0\].score is nan"):
        derive(models, [Example(task="t", answer="a", score=float("nan"))])
    with pytest.raises(RewardError, match="needs at least 4 with two different scores"):
        derive(models, EXAMPLES[:4])
    assert models.prompts == []


@pytest.mark.parametrize(
    "content", ["{", '{"text": "t"}', '{"text": " ", "judge_model": "m", "teacher": "t", "agreement": AGREEMENT}',
                '{"text": 5, "judge_model": "m", "teacher": "t", "agreement": AGREEMENT}'],
)  # fmt: skip
def test_a_file_that_is_no_rubric_is_named(tmp_path, content):
    path = tmp_path / "rubric.json"
    path.write_text(content.replace("AGREEMENT", '{"examples": 1, "correlation": 1, "mean_error": 0}'))
    with pytest.raises(RewardError, match="rubric.json: "):
        Rubric.load(path)
