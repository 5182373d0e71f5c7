"""Addresses of the management API, one or those of a cluster's nodes, and its requests when some cannot be reached."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from swarmq.broker import topology
from swarmq.broker.admin.users import ManagementApi
from swarmq.errors import BrokerError
from swarmq.runtime.processes import reserve_port

CLUSTER = "amqp://u:p%40@a:1111/team,amqp://u:p%40@[::1]:2222/team"


class OneUser(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'[{"name": "u"}]')

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def live_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneUser) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_node_of_the_broker_has_one_at_the_usual_port() -> None:
    api = ManagementApi.of(CLUSTER)
    assert api.urls == ("http://a:15672", "http://[::1]:15672")
    assert (api.user, api.password, api.vhost) == ("u", "p@", "team")


def test_its_own_urls_and_login_may_be_listed() -> None:
    api = ManagementApi.of(CLUSTER, "https://m:q@a/,https://m:q@b:99/rabbit/")
    assert api.urls == ("https://a:15671", "https://b:99/rabbit")
    assert (api.user, api.password) == ("m", "q")


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ("http://m:secret@a/,http://m:other-secret@b/", "different users or passwords"),
        ("http://m:secret@a/,amqp://m:secret@b/", "needs http:// or https:// and a host"),
    ],
)
def test_a_list_that_is_no_cluster_is_refused(urls: str, words: str) -> None:
    with pytest.raises(BrokerError, match=words):
        ManagementApi.of(CLUSTER, urls)


def test_another_node_answers_for_one_that_cannot_be_reached(live_url: str) -> None:
    api = ManagementApi.of(CLUSTER, f"http://127.0.0.1:{reserve_port()},{live_url}")
    assert all(api.users() == {"u"} for _ in range(6))


def test_an_error_names_every_node_that_was_tried() -> None:
    ports = reserve_port(), reserve_port()
    api = ManagementApi.of(CLUSTER, ",".join(f"http://127.0.0.1:{port}" for port in ports))
    with pytest.raises(BrokerError) as failed:
        api.users()
    assert all(f"127.0.0.1:{port} (<urlopen error [Errno 111]" in str(failed.value) for port in ports)


def test_a_host_of_a_study_publishes_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(ManagementApi, "_put", lambda _self, _path, body: given.append(body))
    api = ManagementApi.of(CLUSTER)
    for emits, writes in ((True, r"^study\-toy\."), (False, "^$")):
        given.clear()
        api.add_host("study-toy", "gpu2", "password", emits=emits)
        (topic,) = [one for one in given if one.get("exchange") == topology.EVENTS]
        assert (topic["write"], topic["read"]) == (writes, r"^study\-toy\.")
