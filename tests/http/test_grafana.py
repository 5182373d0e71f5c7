"""The Grafana board in the repository asks for metrics that collector, learner and proxy really have, and is written in Grafana's schema.

No Grafana runs here. The board is read into the classes that Grafana generates from its own sources (grafana-foundation-sdk) and written
again: a field that this schema does not have would be lost on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery
from prometheus_client.parser import text_string_to_metric_families

from support.proxy import token
from swarmq.collector.main import serve_collector_metrics
from swarmq.collector.service import Collector
from swarmq.collector.store import Store
from swarmq.config import SwarmJob
from swarmq.learner.feed.metrics import LearnerMetrics
from swarmq.runtime.metrics_page import serve_metrics
from swarmq.runtime.processes import reserve_port
from swarmq.testing import MemoryBroker

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"\bswarmq_\w+")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana/swarmq.json").read_text())


def queries(board: dict[str, Any]) -> list[str]:
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return panels + [one["definition"] for one in board["templating"]["list"] if one["type"] == "query"]


def names(page: str) -> set[str]:
    """Return the names that a page's samples have, also of families that have no sample yet."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {f"{one.name}{suffix}" for one in text_string_to_metric_families(page) for suffix in suffixes[one.type]}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


@contextlib.asynccontextmanager
async def collector_page(folder: Path) -> AsyncIterator[str]:
    port = reserve_port()
    tree = {
        "run": "r",
        "folder": str(folder),
        "policies": {"main": {"model": "m"}},
        "metrics": {"collector_port": port},
    }
    job, broker, stop = SwarmJob.build(tree), MemoryBroker(), asyncio.Event()
    job.run_folder.path.mkdir()
    await broker.declare("r", policies=["main"], kinds=job.task_kinds)
    with contextlib.closing(Store(job.run_folder.inbox, run="r")) as store:
        collector = Collector(job, broker, store)
        async with serve_collector_metrics(job, collector), asyncio.TaskGroup() as tasks:
            tasks.create_task(collector.run(stop))
            yield f"http://127.0.0.1:{port}/metrics"
            stop.set()


async def test_every_metric_of_the_board_is_served(board: dict[str, Any], stage: Any, tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {token('read')}"}
    async with stage.http.get(f"{stage.url}/metrics", headers=headers) as response:
        of_proxy = names(await response.text())
    async with collector_page(tmp_path) as url:
        of_collector = names(await asyncio.to_thread(fetch, url))
    port = reserve_port()
    async with serve_metrics("127.0.0.1", port, LearnerMetrics("main").page):
        of_learner = names(await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/metrics"))
    for one, other in itertools.combinations((of_proxy, of_collector, of_learner), 2):
        assert not one & other, "a name means one thing"
    asked = {name for query in queries(board) for name in METRIC.findall(query)}
    assert len(asked) > 25
    assert asked <= of_proxy | of_collector | of_learner
    for there in (of_proxy, of_collector, of_learner):
        assert asked & there


def test_the_board_is_one_that_grafana_loads(board: dict[str, Any]) -> None:
    assert board["uid"] == "swarmq"
    assert isinstance(board["schemaVersion"], int)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {one["name"] for one in board["templating"]["list"]}
    assert variables == {"datasource", "run", "policy"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, f"{panel['title']} overlaps another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))


def test_every_field_of_the_board_is_one_of_grafanas_schema(board: dict[str, Any]) -> None:
    register_default_plugins()
    read = Dashboard.from_json(board)
    assert {type(target) for panel in read.panels for target in getattr(panel, "targets", None) or ()} == {Dataquery}
    assert lost_fields(board, json.loads(JSONEncoder().encode(read))) <= {"templating.list.definition"}, (
        "`definition` is what Grafana's editor shows of a query"
    )


@pytest.mark.parametrize("place", ["", "panels", "panels.gridPos", "panels.targets", "templating.list"])
def test_a_field_that_grafana_does_not_have_is_found(board: dict[str, Any], place: str) -> None:
    register_default_plugins()
    broken = copy.deepcopy(board)
    at: Any = broken
    for name in filter(None, place.split(".")):
        at = at[name]
        at = at[1] if isinstance(at, list) and len(at) > 1 else at[0] if isinstance(at, list) else at
    at["heigth"] = 3
    lost = lost_fields(broken, json.loads(JSONEncoder().encode(Dashboard.from_json(broken))))
    assert ".".join(filter(None, (place, "heigth"))) in lost


def lost_fields(before: Any, after: Any, path: str = "") -> set[str]:
    """Return the paths of all that is in `before` and not, or otherwise, in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {
            one
            for name, value in before.items()
            for one in lost_fields(value, after.get(name, ...), f"{path}.{name}" if path else name)
        }
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return {one for old, new in zip(before, after, strict=True) for one in lost_fields(old, new, path)}
    return set() if before == after else {path}


def test_queries_use_the_variables_and_are_balanced(board: dict[str, Any]) -> None:
    for query in queries(board):
        used = set(re.findall(r"\$(\w+)", query))
        assert used <= {"run", "policy", "__rate_interval"}
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


def test_the_sample_of_prometheus_reads_the_files_that_runs_write() -> None:
    settings = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    [scrape] = settings["scrape_configs"]
    [files] = scrape["file_sd_configs"]
    run_folder = SwarmJob.build(
        {"run": "math", "folder": "/data/runs", "policies": {"main": {"model": "m"}}}
    ).run_folder
    assert files["files"] == [str(run_folder.prometheus_targets)]
