"""swarmq: train LLM agents with reinforcement learning over a durable message pipeline.

    from swarmq import SwarmClient

    with SwarmClient() as client:                       # joins the run that $SWARMQ_INVITE names
        with client.episode({"id": "t1", "question": "6 * 7"}) as ep:
            ...                                         # any OpenAI client with ep.base_url, ep.api_key, ep.model
            ep.end(reward=1.0)

Names are loaded when they are first used: `import swarmq` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmq.version import __version__

if TYPE_CHECKING:
    from swarmq.client.ask import ask as ask
    from swarmq.client.ask import ask_async as ask_async
    from swarmq.client.async_client import AsyncSwarmClient as AsyncSwarmClient
    from swarmq.client.data.tasks import SwarmTask as SwarmTask
    from swarmq.client.episodes.episode import AsyncEpisode as AsyncEpisode
    from swarmq.client.episodes.episode import Episode as Episode
    from swarmq.client.runners.report import EvalReport as EvalReport
    from swarmq.client.runners.report import RunSummary as RunSummary
    from swarmq.client.sync_client import SwarmClient as SwarmClient
    from swarmq.config import SwarmJob as SwarmJob
    from swarmq.errors import SwarmqError as SwarmqError
    from swarmq.keys import Invite as Invite
    from swarmq.observe.open_run import open_run as open_run
    from swarmq.outcome import Outcome as Outcome
    from swarmq.remote.client import HostClient as HostClient
    from swarmq.remote.run import RemoteRun as RemoteRun
    from swarmq.remote.run import launch as launch

_HOMES = {
    "AsyncEpisode": "swarmq.client.episodes.episode",
    "AsyncSwarmClient": "swarmq.client.async_client",
    "Episode": "swarmq.client.episodes.episode",
    "EvalReport": "swarmq.client.runners.report",
    "HostClient": "swarmq.remote.client",
    "Invite": "swarmq.keys",
    "Outcome": "swarmq.outcome",
    "RemoteRun": "swarmq.remote.run",
    "RunSummary": "swarmq.client.runners.report",
    "SwarmClient": "swarmq.client.sync_client",
    "SwarmJob": "swarmq.config",
    "SwarmTask": "swarmq.client.data.tasks",
    "SwarmqError": "swarmq.errors",
    "ask": "swarmq.client.ask",
    "ask_async": "swarmq.client.ask",
    "launch": "swarmq.remote.run",
    "open_run": "swarmq.observe.open_run",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are names


def __getattr__(name: str) -> Any:
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except KeyError:
        raise AttributeError(f"module 'swarmq' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
