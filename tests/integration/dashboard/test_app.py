"""The dashboard over real HTTP, on a stored run: who may read and act, what answers look like, what is told as it changes."""

import asyncio
import contextlib
import shutil
from urllib.parse import quote

import msgspec
import pytest
from aiohttp import ClientSession, ClientTimeout

from support.proxy import served
from support.stored import unpack_run
from swarmq.dashboard.access import LinkAccess, Reader
from swarmq.dashboard.app import HEADERS, create_app
from swarmq.dashboard.shelf import Shelf

TOKEN = "sesame"
BEARER = {"authorization": f"Bearer {TOKEN}"}
CONFIRM = {"x-swarmq-confirm": "yes"}
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


class Visitor(LinkAccess):
    """Somebody who may look and not touch."""

    def identify(self, token):
        super().identify(token)
        return Reader(name="visitor", roles=("read",), can_operate=False)


class Browser:
    def __init__(self, url, http, folder):
        self.url, self.http, self.folder = url, http, folder

    async def get(self, path, **how):
        how.setdefault("headers", BEARER)
        async with self.http.get(self.url + path, **how) as answer:
            return answer.status, answer.headers, await answer.read()

    async def json(self, path):
        status, headers, body = await self.get(path)
        assert (status, headers["content-type"]) == (200, "application/json"), body
        return msgspec.json.decode(body)

    async def post(self, path, body, **headers):
        async with self.http.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, answer.headers, msgspec.json.decode(await answer.read())

    async def indexed(self):
        async with asyncio.timeout(30):
            while not (await self.json("/api/runs/faults/overview"))["index"]["is_done"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def opened(folders, cache, *, access=LinkAccess):
    app = create_app(Shelf(folders, cache=cache), access(TOKEN, name="ann", cookie="c"))
    async with served(app) as url, ClientSession(timeout=ClientTimeout(total=60)) as http:
        yield Browser(url, http, folders[0])


@pytest.fixture
async def browser(tmp_path):
    unpack_run(tmp_path / "runs")
    async with opened([tmp_path / "runs"], tmp_path / "cache") as one:
        yield one


VIEWS = (
    *(
        "overview",
        "steps",
        "time",
        "ledger",
        "episodes",
        "episodes/histogram?of=reward",
        "clients",
        "mix",
        "evaluations",
    ),
    *("engines", "settings", "logs", "dead-letters"),
)


async def test_every_view_of_a_run_of_an_older_version_opens(browser):
    await browser.indexed()
    runs = (await browser.json("/api/runs"))["runs"]
    assert [(one["id"], one["error"]) for one in runs] == [("faults", "")]
    for view in VIEWS:
        await browser.json(f"/api/runs/faults/{view}")
    overview = await browser.json("/api/runs/faults/overview")
    assert not overview["is_live"]
    assert overview["bottleneck"] is None
    assert {node["state"] for node in overview["nodes"]} <= {"down", "unknown"}


async def test_a_number_of_the_ledger_leads_to_the_tokens_and_to_files_to_send(browser):
    await browser.indexed()
    ledger = await browser.json("/api/runs/faults/ledger")
    page = await browser.json("/api/runs/faults/episodes?state=trained&limit=1")
    assert page["total"] == ledger["trained"] > 0
    [row] = page["rows"]
    detail = await browser.json(f"/api/runs/faults/episodes/{row['id']}")
    assert detail["row"] == row
    tokens = await browser.json(f"/api/runs/faults/episodes/{row['id']}/tokens?from=1&limit=3")
    assert tokens["positions"] == [1, 4]
    group = await browser.json(f"/api/runs/faults/groups/{quote(row['group'])}")
    assert row["id"] in {member["row"]["id"] for member in group["members"]}
    for what in (f"episode/{row['id']}", f"group/{quote(row['group'])}", "report"):
        status, headers, body = await browser.get(f"/api/runs/faults/export/{what}")
        assert (status, headers["content-disposition"][:10]) == (200, "attachment"), body
        assert b"Content-Security-Policy" in body


@pytest.mark.parametrize(
    "path", ["/api/me", "/api/runs", "/api/runs/faults/overview", "/api/runs/faults/logs/proxy.log"]
)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"cookie": "c=wrong"}])
async def test_nothing_is_read_without_the_token(browser, path, headers):
    status, _, body = await browser.get(path, headers=headers)
    assert status == 401
    assert "error" in msgspec.json.decode(body)


async def test_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(browser):
    status, headers, _ = await browser.post("/api/login", {"token": TOKEN})
    assert status == 200
    cookie = headers["set-cookie"].lower()
    assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/"))
    status, _, body = await browser.get("/api/me", headers={"cookie": f"c={TOKEN}"})
    assert msgspec.json.decode(body) == {"name": "ann", "roles": ["read", "operate"], "base": "", "can_operate": True}
    assert (await browser.post("/api/login", {"token": "wrong"}))[0] == 401
    assert (await browser.post("/api/login", {"token": TOKEN}, origin="https://evil.example"))[0] == 403


@pytest.mark.parametrize(
    "path", ["/", "/app.js", "/app.css", "/api/runs", "/api/runs/none/ledger", "/nothing", "/api/x/y/z"]
)
async def test_every_answer_has_the_security_headers(browser, path):
    _, headers, _ = await browser.get(path)
    assert {name: headers.get(name) for name in HEADERS} == HEADERS
    assert "unsafe" not in headers["content-security-policy"]
    _, headers, _ = await browser.get(path, headers={})
    assert {name: headers.get(name) for name in HEADERS} == HEADERS


@pytest.mark.parametrize(
    "path",
    [
        *("logs/..%2Fsecret", "logs/%2e%2e%2fsecret", "logs/..", "logs/secret", "logs/%2Fetc%2Fpasswd", "logs/no.log"),
        *(
            "episodes/..%2Fx",
            "episodes/nobody",
            "groups/../../secret",
            "groups/no/group",
            "export/episode/nobody",
            "nothing",
        ),
    ],
)
async def test_what_is_not_there_is_not_found_and_no_path_leads_out_of_the_folder(browser, path):
    await browser.indexed()
    (browser.folder / "faults" / "secret").write_bytes(b"top-secret" * 8)
    status, _, body = await browser.get(f"/api/runs/faults/{path}")
    assert (status, b"top-secret" in body) == (404, False)


@pytest.mark.parametrize("run", ["..", "..%2Ffaults", "no", "faults%00", "%2Fetc"])
async def test_an_unknown_run_is_not_found(browser, run):
    assert (await browser.get(f"/api/runs/{run}/overview"))[0] == 404


@pytest.mark.parametrize("query", ["foo=1", "step=x", "limit=x", "sort=nobody", "cursor=x", "reward_min=low"])
async def test_a_wrong_filter_is_named(browser, query):
    status, _, body = await browser.get(f"/api/runs/faults/episodes?{query}")
    assert status == 400
    assert query.partition("=")[0].split("_")[0] in msgspec.json.decode(body)["error"]


INTERNAL = ("Expected", "`", "$", "http", "Struct", "Validation", "msgspec")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("episodes?reward_min=low", "reward_min: 'low' is not a number"),
        ("episodes?reward_below=nan", "reward_below: 'nan' is not a number"),
        ("episodes?step=-1", "step: '-1' is not a step number"),
        ("episodes?foo=1", "foo: not a filter of episodes; the filters are state, reason"),
        ("episodes?state=gone", "state: 'gone' is not one of open"),
        ("episodes?kind=maths", "kind: 'maths' is unknown in this run; it has"),
        ("episodes?reason=stal", "reason: 'stal' is unknown in this run; it has stale"),
        ("episodes?client=nobody", "client: 'nobody' is unknown in this run; it has"),
        ("episodes?policy=critic", "policy: 'critic' is unknown in this run; it has main"),
        ("episodes/histogram?kind=maths", "kind: 'maths' is unknown"),
        ("episodes/histogram?of=age", "of is 'age': give reward or staleness"),
        ("episodes?limit=x", "limit: 'x' is not a whole number"),
        ("episodes/x/tokens?from=-3", "from: '-3' is not a whole number"),
        ("logs/proxy.log?lines=many", "lines: 'many' is not a whole number"),
        ("steps?policy=critic", "policy 'critic': not a trained policy of the run; it has main"),
    ],
)
async def test_a_wrong_parameter_is_answered_in_plain_words(browser, path, text):
    await browser.indexed()
    status, _, body = await browser.get(f"/api/runs/faults/{path}")
    assert status == 400
    error = msgspec.json.decode(body)["error"]
    assert error.startswith(text)
    assert not [word for word in INTERNAL if word in error]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"action": "format"}, "action: 'format' is not one of pause, resume, drain, checkpoint, set, stop, revoke"),
        ({}, "action: missing"),
        ({"action": "pause", "force": True}, "force: unknown; a request has action, settings, policy, client"),
        ({"action": "set", "settings": 3}, "settings: '3' is not an object"),
        ([], "the request's body is not a JSON object"),
    ],
)
async def test_a_wrong_body_is_answered_in_plain_words(browser, body, text):
    status, _, found = await browser.post("/api/runs/faults/actions", body, **BEARER, **CONFIRM)
    assert status == 400
    assert found["error"].startswith(text)
    assert not [word for word in INTERNAL if word in found["error"]]


async def test_a_login_without_a_token_says_what_is_missing(browser):
    for body in ({}, {"token": 3}, {"token": "x", "more": 1}, "x"):
        status, _, found = await browser.post("/api/login", body)
        assert status in {400, 401}
        assert not [word for word in INTERNAL[1:] if word in found["error"].replace("`swarmq dashboard`", "")]


async def test_actions_need_a_role_a_confirmation_and_the_dashboard_s_own_pages(browser, tmp_path):
    path, pause = "/api/runs/faults/actions", {"action": "pause"}
    assert (await browser.post(path, pause, **CONFIRM))[0] == 401
    assert (await browser.post(path, pause, **BEARER))[0] == 403
    assert (await browser.post(path, pause, **BEARER, **CONFIRM, origin="https://evil.example"))[0] == 403
    assert (await browser.post(path, {"action": "format"}, **BEARER, **CONFIRM))[0] == 400
    async with opened([tmp_path / "runs"], tmp_path / "cache", access=Visitor) as visitor:
        status, _, body = await visitor.post(path, pause, **BEARER, **CONFIRM)
    assert status == 403
    assert "needs operate" in body["error"]


async def test_an_action_on_a_run_that_is_not_up_says_so(browser):
    (browser.folder / "faults" / "secret").unlink(missing_ok=True)
    status, _, body = await browser.post("/api/runs/faults/actions", {"action": "pause"}, **BEARER, **CONFIRM)
    assert status == 403
    assert "secret" in body["error"]


async def test_text_from_strangers_stays_data(browser):
    logs = browser.folder / "faults" / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "agent.log").write_text(HOSTILE)
    found = await browser.json("/api/runs/faults/logs/agent.log")
    assert found["text"] == HOSTILE


async def test_a_change_is_told_and_a_reader_that_leaves_ends_its_stream(browser):
    await browser.indexed()
    async with browser.http.get(f"{browser.url}/api/runs/faults/stream", headers=BEARER) as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readline() == b": connected\n"
        with (browser.folder / "faults" / "events.jsonl").open("ab") as events:
            events.write(b'{"type":"event"')  # torn
        async with asyncio.timeout(20):
            while (line := await answer.content.readline()) != b"event: changed\n":
                assert not line.startswith(b"event")
            told = msgspec.json.decode((await answer.content.readline()).removeprefix(b"data: "))
    assert "steps" in told["what"]
    await browser.json("/api/runs/faults/steps")


async def test_readers_are_told_when_the_index_is_done(browser):
    async with browser.http.get(f"{browser.url}/api/runs/faults/stream", headers=BEARER) as answer:
        async with asyncio.timeout(30):
            while await answer.content.readline() != b"event: changed\n":  # no file of the run changes
                pass
            told = msgspec.json.decode((await answer.content.readline()).removeprefix(b"data: "))
    assert {"episodes", "state"} <= set(told["what"])
    assert (await browser.json("/api/runs/faults/ledger"))["index"]["is_done"]


async def test_many_folders_are_listed_whatever_is_in_them(tmp_path):
    _, folder = unpack_run(tmp_path / "runs")
    for number in range(100):
        shutil.copytree(
            folder.path, tmp_path / "runs" / f"copy-{number}", ignore=shutil.ignore_patterns("main", "*.sqlite*")
        )
    (tmp_path / "runs" / "copy-7" / "resolved.toml").write_text("run = [")
    (tmp_path / "runs" / "copy-8" / "events.jsonl").write_bytes(b"\xff\x00{")
    (tmp_path / "runs" / "no-run").mkdir()
    async with opened([tmp_path / "runs", tmp_path / "nowhere"], tmp_path / "cache") as one:
        runs = {row["id"]: row for row in (await one.json("/api/runs"))["runs"]}
        assert len(runs) == 101
        assert [name for name, row in runs.items() if row["error"]] == ["copy-7"]
        for number in range(20):  # more than are held open
            await one.json(f"/api/runs/copy-{number + 20}/overview")
        assert (await one.get("/api/runs/copy-7/overview"))[0] == 400
        diff = await one.json("/api/diff?runs=faults,copy-1")
        assert diff["runs"] == ["faults", "copy-1"]
