"""The engines of each policy, if they have changed since the run was started: a JSON file in the run folder.

Commands that add or remove an engine write the file; the run's proxies and learners poll it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from swarmq import keys
from swarmq.config import RunFolder, SwarmJob
from swarmq.engine.auth import SECRET_ENV
from swarmq.errors import EngineError
from swarmq.runtime.files import locked_for_change, read_or_reset, write_atomically

Urls = dict[str, tuple[str, ...]]
DECODER = msgspec.json.Decoder(Urls)


class EngineRegistry:
    """The engines of a run as listed in its run folder."""

    def __init__(self, job: SwarmJob, folder: RunFolder | None = None) -> None:
        """`folder`: the run folder, if it differs from the job's."""
        self.folder = folder or job.run_folder
        self._path = self.folder.roster
        self._at_start: Urls = {name: policy.engine.urls for name, policy in job.policies.items()}

    def urls(self) -> Urls:
        """Return policy -> URLs of its engines at present. Raises EngineError if the file cannot be read."""
        try:
            written = read_or_reset(self._path, DECODER.decode, Urls(), action="the engines of the job file are used")
        except OSError as error:
            raise EngineError(f"{self._path} cannot be read ({error}): check the folder and its rights") from error
        return {name: written.get(name, urls) for name, urls in self._at_start.items()}

    def secret(self) -> str:
        """Return the secret that the engines require: $SWARMQ_ENGINE_SECRET if set (for engines shared by runs), else the run's own."""
        return os.environ.get(SECRET_ENV) or keys.derive_engine_secret(keys.load_root(self.folder.root_secret))

    def add(self, policy: str, url: str) -> Urls:
        return self._change(policy, lambda urls: urls if url in urls else (*urls, url))

    def remove(self, policy: str, url: str) -> Urls:
        return self._change(policy, lambda urls: tuple(one for one in urls if one != url))

    def forget(self) -> None:
        """Delete the registry file, so that the engines of the job file are in effect again."""
        self._path.unlink(missing_ok=True)

    def _change(self, policy: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Urls:
        with locked_for_change(self._path):
            urls = self.urls()
            urls[policy] = change(urls[policy])
            write_atomically(self._path, msgspec.json.encode(urls))
        return urls
