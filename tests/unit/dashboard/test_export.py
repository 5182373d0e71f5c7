"""Exports: safe embedding of hostile text, the policy of the page, its first view, and its size."""

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.run_folder import make_whole_run
from swarmq.dashboard.export import collect_group, collect_samples, embed_json, export_html, find_start
from swarmq.errors import EpisodeError
from swarmq.observe.run import Run

HOSTILE = "</script><script>alert(1)</script><!--<script>-->]]>\u2028\u2029&lt;\x00\ud83d\ude00\u202e"


class Scripts(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.seen, self.attributes, self.open = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.attributes += [value for name, value in attributes if name in {"src", "href", "action"}]
        self.open = tag
        if tag in {"script", "style"}:
            self.seen.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open in {"script", "style"}:
            self.seen[-1][2] += data


def page_of(payloads, kind="episode"):
    return export_html(kind, payloads).decode()


def test_hostile_text_stays_data():
    answer = {"why": HOSTILE.encode("utf-8", "surrogatepass").decode("utf-8", "replace")}
    scripts = Scripts(page_of({"runs/math/episodes/e1": answer})).seen
    assert [(tag, attributes.get("type")) for tag, attributes, _ in scripts] == [
        ("style", None), ("script", "application/json"), ("script", "module"),
    ]  # fmt: skip
    assert json.loads(scripts[1][2])["answers"]["runs/math/episodes/e1"] == answer


@given(st.text())
def test_embedded_json_says_the_same_and_ends_no_element(text):
    embedded = embed_json({text: [text]})
    assert not re.search("[<>&\u2028\u2029]", embedded.decode())
    assert json.loads(embedded) == {text: [text]}


def test_the_policy_allows_the_inlined_files_and_no_network():
    page = page_of({"runs/math/episodes/e1": {}})
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1])
    for tag, attributes, text in Scripts(page).seen:
        if attributes.get("type") != "application/json":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert Scripts(page).attributes == ["data:,"]


@pytest.mark.parametrize(
    ("kind", "path", "start"),
    [
        ("episode", "runs/math/episodes/e 1", "#/run/math/episode/e%201"),
        ("group", "runs/a%2Fb/groups/gsm8k/7@0", "#/run/a%252Fb/group/gsm8k%2F7%400"),
        ("report", "runs/math/overview", "#/run/math/overview"),
    ],
)
def test_the_page_opens_with_its_first_answer(kind, path, start):
    assert find_start(kind, path) == start


def test_an_export_of_something_else_is_refused():
    with pytest.raises(ValueError, match="expected runs/RUN/groups/"):
        export_html("group", {"runs/math/episodes/e1": {}})


def test_a_page_that_is_too_large_is_refused_with_its_size():
    with pytest.raises(EpisodeError, match=r"group has \d.\d MB, over the limit of 0.2 MB: export single episodes"):
        export_html("group", {"runs/math/groups/g": {"text": "x" * 200_000}}, max_bytes=200_000)


def test_a_group_brings_its_episodes_with_every_token(tmp_path):
    made, ids = make_whole_run(tmp_path / "runs")
    run = Run(made.folder.path, cache=tmp_path / "cache")
    run.refresh()
    payloads = collect_group(run, "r", "taught/0", page_tokens=5)
    assert next(iter(payloads)) == "runs/r/groups/taught/0"
    for member in payloads["runs/r/groups/taught/0"].members:
        path = f"runs/r/episodes/{member.row.id}"
        for timeline in range(payloads[path].timelines):
            pages = [page for key, page in payloads.items() if key.startswith(f"{path}/tokens?timeline={timeline}&")]
            assert sum(len(page.id) for page in pages) == pages[0].total > 5
            assert {f"{path}/tokens?timeline={timeline}&from={page.positions[0]}" for page in pages} <= {*payloads}
    assert payloads[f"runs/r/episodes/{ids['trained']}"].row.id == ids["trained"]
    made.close()


def test_samples_show_every_state_and_reason_and_keep_to_their_size(tmp_path):
    made, _ = make_whole_run(tmp_path / "runs")
    made.write_transcripts()
    run = Run(made.folder.path, cache=tmp_path / "cache")
    run.refresh()
    payloads = collect_samples(run, "r", each=1)
    sampled = payloads["runs/r/episodes"].rows
    every = {(row.state, row.reason) for row in run.index.page(limit=100).rows}
    assert {(row.state, row.reason) for row in sampled} == every
    assert len(sampled) == len(every) > 7
    assert {f"runs/r/episodes/{row.id}" for row in sampled} < {*payloads}
    few = collect_samples(run, "r", max_bytes=4000)
    assert 0 < few["runs/r/episodes"].total < len(sampled)
    assert len(msgspec.json.encode({key: one for key, one in few.items() if key != "runs/r/episodes"})) < 4500
    made.close()
