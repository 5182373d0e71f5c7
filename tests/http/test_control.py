"""Episodes over HTTP: begun and ended with the guarantees of the AMQP client, by those who may."""

import asyncio

import msgspec
import pytest

from support.proxy import token
from swarmq.broker import topology
from swarmq.messages import EpisodeBegin, EpisodeEnd, Ticket, Turn, decode

BEGIN = {"task_id": "t1", "mode": "eval", "episode_id": "e-1"}


async def call(stage, method, path, body=None, *, as_=None, roles=("rollout",)):
    """Status and parsed body."""
    headers = {"authorization": f"Bearer {as_ or token(*roles)}"}
    async with stage.http.request(method, f"{stage.url}/v1/control{path}", json=body, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read() or b"null")


def pieces(stage, kind):
    return [m for s in stage.broker.stored(topology.inbox("r")) if isinstance(m := decode(s.body), kind)]


async def issue(stage, ticket_id, **fields):
    ticket = Ticket(run="r", ticket_id=ticket_id, kind="default", **fields)
    await stage.broker.publish(topology.tickets("r", "default"), ticket)


async def test_an_episode_begins_with_a_ticket_and_its_key_works(stage):
    await issue(stage, "ticket-1")
    status, begun = await call(stage, "POST", "/episodes", {"task_id": "t1", "repeat": 2, "max_calls": 1})
    assert status == 201, begun
    [begin] = pieces(stage, EpisodeBegin)
    assert (begin.episode_id, begin.slot.id, begin.ticket_id) == (begun["episode_id"], "t1/2/0", "ticket-1")
    assert (begin.client_id, begin.group_size, begin.policies) == ("ops", 8, ("main", "other"))
    assert begun["base_url"] == f"{stage.url}/v1"
    stage.engine.say("x")
    await stage.ask({"role": "user", "content": "hi"}, key=begun["api_key"])
    [turn] = pieces(stage, Turn)
    assert turn.episode_id == begin.episode_id


async def test_a_begin_that_is_repeated_takes_no_second_ticket(stage):
    for number in range(2):
        await issue(stage, f"ticket-{number}")
    body = {"task_id": "t1", "episode_id": "e-1"}
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(call(stage, "POST", "/episodes", body)) for _ in range(3)]
    answers = [call.result() for call in calls]
    assert [status for status, _ in answers] == [201] * 3
    assert sorted(begun["repeated"] for _, begun in answers) == [False, True, True]
    assert len(pieces(stage, EpisodeBegin)) == 1
    status, fault = await call(stage, "POST", "/episodes", {**body, "task_id": "t2"})
    assert (status, fault["error"]["code"]) == (409, "episode_conflict")


async def test_without_a_ticket_the_begin_is_429_and_can_be_repeated(stage):
    body = {"task_id": "t1", "episode_id": "e-1", "wait_s": 0.02}
    status, fault = await call(stage, "POST", "/episodes", body)
    assert (status, fault["error"]["code"]) == (429, "no_ticket")
    assert pieces(stage, EpisodeBegin) == []
    await issue(stage, "late")
    status, _ = await call(stage, "POST", "/episodes", {**body, "wait_s": 60})
    assert status == 201


async def test_a_begin_is_answered_after_the_confirm_only(stages):
    async with stages(confirm_timeout_s=0.05) as stage:
        stage.broker.away(gone=True)
        status, fault = await call(stage, "POST", "/episodes", BEGIN)
        assert (status, fault["error"]["code"]) == (503, "broker_unavailable")
        stage.broker.away(gone=False)
        status, begun = await call(stage, "POST", "/episodes", BEGIN)
        assert (status, begun["repeated"]) == (201, False)


async def test_an_end_is_sent_once_however_often_it_is_said(stage):
    await call(stage, "POST", "/episodes", BEGIN)
    for repeated in (False, True):
        status, ended = await call(stage, "POST", "/episodes/e-1/end", {"reward": 0.5, "calls": ["a"]})
        assert (status, ended["status"], ended["repeated"]) == (200, "finished", repeated)
    [end] = pieces(stage, EpisodeEnd)
    assert end.rewards == {"main": 0.5, "other": 0.5}
    assert end.calls == ("a",)
    status, fault = await call(stage, "POST", "/episodes/e-1/end", {"reward": 0.7})
    assert (status, fault["error"]["code"]) == (409, "episode_conflict")
    status, _ = await call(stage, "POST", "/episodes/e-1/abort", {"reason": "changed my mind"})
    assert status == 409


async def test_an_outcome_id_says_what_is_the_same_end(stage):
    for body, repeated in (
        ({"rewards": {"main": 1.0}}, False),
        ({"rewards": {"main": 1.0}, "metrics": {"s": 2.5}}, True),
    ):
        _, ended = await call(stage, "POST", "/episodes/e-9/end", {**body, "outcome_id": "o1"})
        assert (ended["outcome_id"], ended["repeated"]) == ("o1", repeated)
    assert len(pieces(stage, EpisodeEnd)) == 1


@pytest.mark.parametrize("status", ["aborted", "failed"])
async def test_an_episode_that_is_given_up_has_no_reward(stage, status):
    got, ended = await call(stage, "POST", "/episodes/e-1/abort", {"status": status, "reason": "api balance"})
    assert (got, ended["status"]) == (200, status)
    [end] = pieces(stage, EpisodeEnd)
    assert (end.status, end.reason, end.rewards, end.final) == (status, "api balance", {}, False)


async def test_an_abort_can_say_that_no_further_attempt_will_come(stage):
    for repeated in (False, True):
        _, ended = await call(stage, "POST", "/episodes/e-1/abort", {"final": True})
        assert (ended["status"], ended["repeated"]) == ("aborted", repeated)
    [end] = pieces(stage, EpisodeEnd)
    assert end.final


async def test_a_client_ends_only_what_it_began(stage):
    eve, alice = (token("rollout", name=name, by_client=True) for name in ("eve", "alice"))
    await call(stage, "POST", "/episodes", {**BEGIN, "client_id": "alice@host-1"}, as_=alice)
    for path, body in (("end", {"reward": 1.0, "policies": ["main"]}), ("abort", {})):
        status, fault = await call(stage, "POST", f"/episodes/e-1/{path}", body, as_=eve)
        assert (status, fault["error"]["code"]) == (403, "episode_foreign")
    assert pieces(stage, EpisodeEnd) == []
    status, _ = await call(stage, "POST", "/episodes/e-1/end", {"reward": 1.0}, as_=alice)
    assert (status, pieces(stage, EpisodeEnd)[0].client_id) == (200, "alice")


async def test_a_foreign_end_does_not_stand_in_the_way_of_the_owners(stage):
    """At a proxy that knows of no begin, both pass; the collector, which does, drops the foreign one."""
    eve, alice = (token("rollout", name=name, by_client=True) for name in ("eve", "alice"))
    body = {"policies": ["main"], "outcome_id": "o"}
    for who, reward in ((eve, 0.0), (alice, 1.0)):
        for repeated in (False, True):
            status, ended = await call(stage, "POST", "/episodes/e-1/end", {**body, "reward": reward}, as_=who)
            assert (status, ended["repeated"]) == (200, repeated)
    assert [(end.client_id, end.rewards["main"]) for end in pieces(stage, EpisodeEnd)] == [("eve", 0.0), ("alice", 1.0)]
    status, _ = await call(stage, "POST", "/episodes/e-1/abort", {}, as_=alice)
    assert status == 409
    status, _ = await call(stage, "POST", "/episodes/e-1/abort", {})
    assert status == 409, "an operator's end is one of the owner's"


async def test_an_operator_ends_what_anybody_began(stage):
    alice = token("rollout", name="alice", by_client=True)
    await call(stage, "POST", "/episodes", BEGIN, as_=alice)
    status, _ = await call(stage, "POST", "/episodes/e-1/abort", {})
    assert (status, pieces(stage, EpisodeEnd)[0].client_id) == (200, "@ops")


async def test_the_keys_of_a_client_that_begins_over_http_are_in_its_name(stage):
    _, begun = await call(stage, "POST", "/episodes", BEGIN, as_=token("rollout", name="alice", by_client=True))
    stage.engine.say("x")
    await stage.ask({"role": "user", "content": "hi"}, key=begun["api_key"])
    assert pieces(stage, Turn)[0].client_id == "alice"
    status, error = await stage.refused({"model": "main", "messages": []}, key=stage.key("e-1", client="eve"))
    assert (status, error["code"]) == (403, "episode_foreign")


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/episodes", {"task_id": ""}, None),
        ("/episodes", {}, None),
        ("/episodes", {"task_id": "t", "kind": "nope"}, None),
        ("/episodes", {"task_id": "t", "policies": ["nope"]}, None),
        ("/episodes", {"task_id": "t", "policies": []}, None),
        ("/episodes", {"task_id": "t", "episode_id": "a\nb"}, None),
        ("/episodes", {"task_id": "t", "colour": 1}, None),
        ("/episodes", {"task_id": "t", "wait_s": 1e9}, None),
        ("/episodes/e/end", {"reward": "much"}, None),
        ("/episodes/e/end", {}, None),
        ("/episodes/e/end", {"reward": 1.0}, None),
        ("/episodes/e/end", {"rewards": {"main": 1.0}, "reward": 1.0}, "invalid_outcome"),
        ("/episodes/e/abort", {"status": "finished"}, None),
    ],
)
async def test_a_request_that_cannot_be_meant_is_400_and_sends_nothing(stage, path, body, code):
    status, answer = await call(stage, "POST", path, body)
    assert status == 400, answer
    assert code is None or answer["error"]["code"] == code
    assert pieces(stage, EpisodeBegin | EpisodeEnd) == []


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/episodes", None, "task_id", "task_id: needed"),
        ("/episodes", {}, "task_id", "task_id: needed"),
        ("/engines/add", None, "policy", "policy: needed"),
        ("/engines/add", {"policy": "main"}, "url", "url: needed"),
        ("/episodes", {"task_id": "t", "colour": 1}, "colour", "colour: unknown; there are task_id, repeat, epoch, "),
        ("/episodes", {"task_id": "t", "wait_s": 1e9}, "wait_s", "wait_s: Expected `float` <= 120.0"),
        ("/episodes/e/end", None, "policies", "another proxy began this episode"),
        ("/episodes/e/abort", [], "body", "body: Expected `object`, got `array`"),
    ],
)
async def test_a_refusal_names_the_field(stage, path, body, param, says):
    status, answer = await call(stage, "POST", path, body, roles=("admin",))
    assert (status, answer["error"]["param"], answer["error"]["message"][: len(says)]) == (400, param, says)


async def test_an_empty_body_says_nothing_where_all_is_optional(stage):
    await call(stage, "POST", "/episodes", BEGIN)
    status, ended = await call(stage, "POST", "/episodes/e-1/abort")
    assert (status, ended["status"]) == (200, "aborted")
    assert await call(stage, "POST", "/episodes/e-1/abort", {}) == (200, {**ended, "repeated": True})


@pytest.mark.parametrize(
    ("made", "status"),
    [
        (token("read"), 403),
        (token("rollout"), 201),
        (token("admin"), 201),
        (token("rollout", by_client=True), 201),
        (token("admin", by_client=True), 401),
        (token("rollout", expires_in=-100), 401),
        (token("rollout", run="other"), 401),
        (token("rollout")[:-4] + "AAAA", 401),
        ("nonsense", 401),
        ("ä", 401),
    ],
    ids=[
        "read",
        "rollout",
        "admin",
        "client",
        "client as admin",
        "expired",
        "other run",
        "forged",
        "nonsense",
        "strange",
    ],
)
async def test_only_tokens_with_the_role_begin_episodes(stage, made, status):
    got, answer = await call(stage, "POST", "/episodes", BEGIN, as_=made)
    assert got == status
    assert made not in str(answer)


async def test_an_episode_s_own_key_opens_no_control_route(stage):
    for method, path in (("GET", "/status"), ("POST", "/episodes/e1/end")):
        status, _ = await call(stage, method, path, {"reward": 1.0}, as_=stage.key())
        assert status == 401


async def test_an_operator_token_calls_no_model(stage):
    status, _ = await stage.refused({"model": "main", "messages": []}, key=token("admin"))
    assert status == 401


async def test_readers_see_episodes_and_status(stage):
    stage.engine.say("x")
    await stage.ask({"role": "user", "content": "hi"}, key=stage.key("e-7"))
    _, seen = await call(stage, "GET", "/episodes", roles=["read"])
    assert [(view["episode_id"], view["calls"], view["sampled_tokens"]) for view in seen] == [("e-7", 1, 2)]
    assert (await call(stage, "GET", "/episodes/e-7", roles=["read"]))[1]["policies"] == ["main"]
    assert (await call(stage, "GET", "/episodes/e-8", roles=["read"]))[0] == 404
    _, status = await call(stage, "GET", "/status", roles=["read"])
    assert (status["run"], status["episodes"]) == ("r", 1)
    assert (await call(stage, "GET", "/status", roles=["rollout"]))[0] == 403


async def test_the_routes_are_described(stage):
    async with stage.http.get(f"{stage.url}/schema/openapi.json") as response:
        paths = (await response.json(content_type=None))["paths"]
    assert set(paths["/v1/control/episodes"]["post"]["responses"]) >= {"201", "400", "401", "403", "409", "429", "503"}
    assert paths["/v1/control/episodes/{episode_id}/end"]["post"]["security"] == [{"operatorToken": ["rollout"]}]
    async with stage.http.get(f"{stage.url}/schema") as response:
        assert response.content_type == "text/html", "and there is a page to read them on"


async def test_a_training_episode_of_frozen_policies_alone_is_refused(stages):
    async with stages(frozen=True) as stage:
        body = {"task_id": "t1", "policies": ["other"]}
        status, fault = await call(stage, "POST", "/episodes", body)
        assert (status, fault["error"]["param"]) == (400, "policies")
        assert "other given, which no learner trains" in fault["error"]["message"]
        assert "name one of main too" in fault["error"]["message"]
        status, _ = await call(stage, "POST", "/episodes", {**body, "mode": "eval"})
        assert status == 201


@pytest.mark.parametrize("path", ["/episodes", "/episodes/e-1/end", "/episodes/e-1/abort"])
@pytest.mark.parametrize("raw", [b"{", b'{"reward": }', b"\xff"])
async def test_a_body_that_is_no_json_is_refused_as_by_the_other_routes(stage, path, raw):
    headers = {"authorization": f"Bearer {token('rollout')}", "content-type": "application/json"}
    async with stage.http.post(f"{stage.url}/v1/control{path}", data=raw, headers=headers) as response:
        fault = msgspec.json.decode(await response.read())["error"]
    assert (response.status, fault["code"]) == (400, "invalid_json")
    assert fault["message"].startswith("the body is not JSON: ")
    assert pieces(stage, EpisodeBegin | EpisodeEnd) == []


async def test_attempts_of_a_group_are_numbered_within_its_size(stage):
    await issue(stage, "ticket-1")
    status, fault = await call(stage, "POST", "/episodes", {"task_id": "t1", "repeat": 8})
    assert (status, fault["error"]["param"]) == (400, "repeat")
    assert "a group of 8 are numbered 0 to 7" in fault["error"]["message"]
    status, _ = await call(stage, "POST", "/episodes", {"task_id": "t1", "repeat": 8, "group_size": 9})
    assert status == 201
    status, _ = await call(stage, "POST", "/episodes", {**BEGIN, "repeat": 8})
    assert status == 201, "attempts to evaluate are in no group"


async def test_who_names_no_size_gets_groups_of_the_size_they_have_now(stage):
    for number, size in enumerate((4, 2, 2)):
        await issue(stage, f"ticket-{number}", group_size=size)
    first, second = ({"task_id": "t1", "repeat": number, "episode_id": f"e-{number}"} for number in range(2))
    _, begun = await call(stage, "POST", "/episodes", first)
    assert begun["group_size"] == 4
    _, begun = await call(stage, "POST", "/episodes", second)
    assert begun["group_size"] == 2
    assert [begin.group_size for begin in pieces(stage, EpisodeBegin)] == [8, 4], (
        "a change is known from the next ticket on"
    )
    status, begun = await call(stage, "POST", "/episodes", first)
    assert (status, begun["repeated"]) == (201, True), "of another size than it would have now"
    status, fault = await call(stage, "POST", "/episodes", {**first, "group_size": 4})
    assert (status, fault["error"]["code"]) == (409, "episode_conflict")
