"""Comparison of a policy's engines by version and model. Engines with other versions may render prompts or parse answers otherwise,
and an engine with another model samples what the learner does not train."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial

from swarmq.engine.client.protocol import Engine, EngineIdentity
from swarmq.engine.client.tokenizer_compat import REQUEST_TIMEOUT_S
from swarmq.engine.client.vllm import VllmEngine
from swarmq.errors import EngineError
from swarmq.hosts.model_files import find_other_field


async def identify_all(
    urls: Sequence[str], *, secret: str = "", timeout_s: float = REQUEST_TIMEOUT_S
) -> dict[str, EngineIdentity]:
    """Return the identities by engine url. Engines that do not answer are left out. `secret`: secret that the engines require.
    `timeout_s`: maximum seconds to wait for an engine's answer."""

    async with AsyncExitStack() as opened:
        opener = partial(VllmEngine.open, deadline_s=timeout_s, secret=secret)
        engines = [await opened.enter_async_context(opener(url)) for url in urls]
        answers = zip(urls, await asyncio.gather(*map(try_identify, engines)), strict=True)
    return {url: identity for url, identity in answers if identity is not None}


async def try_identify(engine: Engine) -> EngineIdentity | None:
    """Return the engine's identity, or None if it does not answer."""
    with suppress(EngineError):
        return await engine.identity()
    return None


def check_like_others(url: str, present: Mapping[str, EngineIdentity]) -> None:
    """Raise EngineError if the engine at `url` has another version or model than another one in `present`."""
    if (own := present.get(url)) is None:
        return
    for other, theirs in present.items():
        if field := find_other_field(theirs.shape, own.shape) if own.shape else "":
            raise EngineError(
                f"the engine at {url} serves another model than the one at {other}: {field} in its config.json is "
                f"{own.shape.get(field)}, not {theirs.shape[field]}; start it with the same model"
            )
        if difference := describe_version_difference(url, own, other, theirs):
            raise EngineError(difference)


def check_routing_replay(url: str, identity: EngineIdentity) -> None:
    """Raise EngineError if the engine does not return routed experts, which `train.routing_replay` needs."""
    if not identity.returns_routed_experts:
        raise EngineError(
            f"train.routing_replay: the engine at {url} (vLLM {identity.vllm or 'of an unknown version'}) returns no routed experts: start "
            "it with --enable-return-routed-experts and swarmq's plug-in, or set train.routing_replay to false"
        )


def describe_version_difference(url: str, own: EngineIdentity, other: str, theirs: EngineIdentity) -> str:
    """Return a text on the first package whose versions differ, or ""."""
    for package in ("vllm", "swarmq"):
        ours, expected = getattr(own, package), getattr(theirs, package)
        if ours and expected and ours != expected:
            return (
                f"the engine at {url} has {package} {ours}, the one at {other} {package} {expected}: install the same version on all "
                "hosts, and start the engine again"
            )
    return ""
