"""Which engines serve a policy, where that has changed since the run was started: a JSON file in the run folder.

Whoever adds or removes an engine writes it; proxies and learners of the run look at it now and then.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from swarmq.config import RunFolder, SwarmJob
from swarmq.errors import EngineError
from swarmq.sheets import changing, write_whole

Urls = dict[str, tuple[str, ...]]


class Roster:
    def __init__(self, job: SwarmJob, folder: RunFolder | None = None) -> None:
        """`folder`: the run folder, where it is not known by the job's name for it."""
        self._path = (folder or job.run_folder).roster
        self._at_start: Urls = {name: policy.engine.urls for name, policy in job.policies.items()}

    def urls(self) -> Urls:
        """Policy -> engines, as of now. Raises EngineError for a file that is not ours."""
        try:
            written = msgspec.json.decode(self._path.read_bytes(), type=Urls)
        except FileNotFoundError:
            written = {}
        except (OSError, msgspec.MsgspecError) as error:
            raise EngineError(
                f"{self._path} cannot be read ({error}): delete it to go back to the job's engines"
            ) from error
        return {name: written.get(name, urls) for name, urls in self._at_start.items()}

    def add(self, policy: str, url: str) -> Urls:
        return self._change(policy, lambda urls: urls if url in urls else (*urls, url))

    def remove(self, policy: str, url: str) -> Urls:
        return self._change(policy, lambda urls: tuple(one for one in urls if one != url))

    def forget(self) -> None:
        """Back to the job's engines."""
        self._path.unlink(missing_ok=True)

    def _change(self, policy: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Urls:
        with changing(self._path):
            urls = self.urls()
            urls[policy] = change(urls[policy])
            write_whole(self._path, msgspec.json.encode(urls))
        return urls
