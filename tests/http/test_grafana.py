"""The Grafana board in the repository asks for metrics that collector, learner and proxy really have."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
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
