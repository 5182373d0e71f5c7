"""`swarmq proxy --join INVITE`: a proxy that has nothing but an invite, as on a host that shares no disk with the run."""

from __future__ import annotations

import asyncio
import signal

import msgspec
import pytest

from support.other_host import logged
from swarmq import keys
from swarmq.registries.hosts import read_hosts

pytestmark = [pytest.mark.vllm, pytest.mark.broker]
HELLO = {"role": "user", "content": "hello"}


async def test_it_serves_with_the_invite_alone_and_leaves_nothing_behind(world):
    async with world.command("proxy") as process:
        url = (await logged(process, "joined"))["url"]
        assert world.proxies.urls() == (url,)
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].proxies == (url,)
        async with world.agent(url) as agent:
            answer = await agent.ask(HELLO, key=world.key(agent, "alice"))
            assert answer["usage"]["completion_tokens"] >= 1
            world.revoke("alice")
            async with asyncio.timeout(600):
                while (await agent.post({"model": "main", "messages": [HELLO]}, key=world.key(agent, "alice")))[
                    0
                ] != 401:
                    pass
            await agent.ask(HELLO, key=world.key(agent, "bob"))
        process.send_signal(signal.SIGTERM)
        await logged(process, "leaving")
        assert world.proxies.urls() == ()
        assert read_hosts(world.job.run_folder.hosts)["gpu2"].proxies == ()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(600):
            assert await process.wait() == 0
    assert list(world.folder.iterdir()) == []


async def test_after_an_outage_it_refuses_clients_that_were_removed_meanwhile_from_the_first_call_on(world):
    async with world.command("proxy") as process, world.agent((await logged(process, "joined"))["url"]) as agent:
        await agent.ask(HELLO, key=world.key(agent, "alice"))
        world.relay.cut(refuse=True)
        await logged(process, "broker_session_lost")
        world.revoke("alice")
        body = {"model": "main", "messages": [HELLO]}
        calls = [asyncio.create_task(agent.post(body, key=world.key(agent, client))) for client in ("alice", "bob")]
        await asyncio.wait(calls, timeout=1.0)
        world.relay.release()
        (refused, _, why), (answered, _, _) = await asyncio.gather(*calls)
        assert (refused, answered) == (401, 200)
        assert b"'alice' was removed" in why


async def test_an_address_that_others_cannot_reach_and_an_expired_invite_are_one_clear_line(world, tmp_path):
    invite = keys.HostInvite.decode(world.invite_file.read_text())
    for arguments, text, why in [
        (["--host", "0.0.0.0"], invite.encode(), "http://0.0.0.0:"),
        (["--url", "http://nowhere.invalid:1/v1"], invite.encode(), "the name 'nowhere.invalid' resolves to nothing"),
        (["--url", "http://127.0.0.1:9/v1"], invite.encode(), "the run's host cannot connect to 127.0.0.1:9"),
        ([], msgspec.structs.replace(invite, expires_at=1.0).encode(), "expired at 1970-01-01"),
    ]:
        world.invite_file.write_text(text)
        async with world.command("proxy", *arguments) as process:
            line = (await process.stderr.read()).decode().strip().splitlines()[-1]
            assert await process.wait() == 1
        assert why in line
        assert "Traceback" not in line
    assert world.proxies.urls() == ()
