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

if TYPE_CHECKING:
    from swarmq.client.ask import ask as ask
    from swarmq.client.ask import ask_async as ask_async
    from swarmq.client.episode import AsyncEpisode as AsyncEpisode
    from swarmq.client.episode import Episode as Episode
    from swarmq.client.report import EvalReport as EvalReport
    from swarmq.client.report import RunSummary as RunSummary
    from swarmq.client.session import AsyncSwarmClient as AsyncSwarmClient
    from swarmq.client.sync_client import SwarmClient as SwarmClient
    from swarmq.client.tasks import SwarmTask as SwarmTask
    from swarmq.config import SwarmJob as SwarmJob
    from swarmq.errors import SwarmqError as SwarmqError
    from swarmq.keys import Invite as Invite
    from swarmq.outcome import Outcome as Outcome

__version__ = "0.1.0"

_HOMES = {
    "AsyncEpisode": "swarmq.client.episode",
    "AsyncSwarmClient": "swarmq.client.session",
    "Episode": "swarmq.client.episode",
    "EvalReport": "swarmq.client.report",
    "Invite": "swarmq.keys",
    "Outcome": "swarmq.outcome",
    "RunSummary": "swarmq.client.report",
    "SwarmClient": "swarmq.client.sync_client",
    "SwarmJob": "swarmq.config",
    "SwarmTask": "swarmq.client.tasks",
    "SwarmqError": "swarmq.errors",
    "ask": "swarmq.client.ask",
    "ask_async": "swarmq.client.ask",
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
