"""The clients of a run: what each has done, with which code, and its own words on what failed last."""

import pytest

from support.run_folder import make_whole_run
from swarmq.observe.clients import read_clients
from swarmq.observe.index import RunIndex
from swarmq.registries.clients import ClientRegistry


def test_a_client_is_shown_with_its_code_versions_its_rate_and_its_last_error(tmp_path):
    run, _ = make_whole_run(tmp_path / "runs")
    run.end(run.begin("later", code_version="v2"), status="failed", reason="KeyError: 'answer'")
    newest = run.end(run.begin("last", code_version="v2"), status="failed", reason="ValueError: no")
    run.begin("other", client_id="bob@host", turns=0)
    index = RunIndex(run.folder, cache=tmp_path / "cache")
    index.update()
    first, second = read_clients(index)
    assert (first.client, first.trained, first.dropped, first.failed, first.evaluated) == ("client-a", 2, 3, 5, 2)
    assert [(one.version, one.episodes) for one in first.code_versions] == [("v1", 14), ("v2", 2)]
    assert first.code_versions[0].last_at <= first.code_versions[1].first_at
    assert (first.last_error.text, first.last_error.episode) == ("ValueError: no", newest)
    assert first.last_error.at == pytest.approx(run.now, abs=1.0)
    assert (second.client, second.episodes, second.last_error, second.is_revoked) == ("bob@host", 1, None, False)
    assert second.per_min == 1.0
    with ClientRegistry.open(run.folder.clients) as registry:
        registry.remove("bob", now=1.0)
    assert [one.is_revoked for one in read_clients(index)] == [False, True]
    run.folder.clients.write_text("damaged")
    assert [one.is_revoked for one in read_clients(index)] == [False, False]
    run.close()
