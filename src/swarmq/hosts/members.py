"""The members of a run (engines, proxies, removed clients) and its settings, for proxies and engines on every host. The run's
own host reads them in the run folder; other hosts follow them over the broker (follow.py)."""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from swarmq.config import SwarmJob
from swarmq.errors import ConfigError
from swarmq.hosts.model_files import ModelFingerprint, describe_model
from swarmq.registries.clients import RevokedNames, read_revoked
from swarmq.registries.engines import EngineRegistry, Urls
from swarmq.registries.proxies import ProxyRegistry
from swarmq.version import __version__

OF_ITS_HOST = ("host", "port", "certificate", "key")
"""Settings of [proxy] that differ from host to host, so they are not sent."""


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The present members of a run: the fields of the collector's `members` event."""

    engines: Urls
    proxies: tuple[str, ...]
    revoked: tuple[str, ...]
    """Names of clients and operators whose keys and tokens are refused."""
    resumed_at: dict[str, int]
    """Trained policy -> step of its newest checkpoint."""
    settings: dict[str, Any]
    """Settings of the run, without [broker], `folder` and OF_ITS_HOST."""
    models: dict[str, ModelFingerprint]
    """Policy -> fingerprint of its model, if that is a folder on the collector's host."""
    swarmq: str
    """Version of swarmq that the collector runs."""


def number_proxy(url: str) -> int:
    """Return the number of a proxy on another host, which depends on its URL alone."""
    return zlib.crc32(url.encode())


class Roster(Protocol):
    """The engines of all policies, and changes of them."""

    def urls(self) -> Urls: ...

    def add(self, policy: str, url: str) -> Urls:
        """Add an engine, and return policy -> URLs. Raises ConfigError if this host cannot change the list."""

    def remove(self, policy: str, url: str) -> Urls:
        """Remove an engine, and return policy -> URLs. Raises ConfigError if this host cannot change the list."""


class RunMembership(Protocol):
    """The members of a run as a proxy knows them."""

    @property
    def roster(self) -> Roster: ...

    @property
    def revoked(self) -> Container[str]:
        """Names of clients and operators whose keys and tokens are refused."""

    @property
    def resumed_at(self) -> Mapping[str, int]:
        """Trained policy -> step of its newest checkpoint when the proxy started."""

    def proxies(self) -> tuple[str, ...]:
        """Return the base URLs of the run's proxies."""

    async def wait_current(self, patience_s: float) -> bool:
        """Wait until the membership is current, and return whether it was within `patience_s` seconds."""


class StoredMembership:
    """The membership in the files of the run folder."""

    def __init__(self, job: SwarmJob) -> None:
        self._job = job
        self._proxies = ProxyRegistry(job.run_folder.proxies)
        self.roster = EngineRegistry(job)
        self.revoked = RevokedNames(job.run_folder.clients)

    @cached_property
    def _models(self) -> dict[str, ModelFingerprint]:
        models = {name: describe_model(Path(policy.model)) for name, policy in self._job.policies.items()}
        return {name: model for name, model in models.items() if model}

    @cached_property
    def _settings(self) -> dict[str, Any]:
        tree: dict[str, Any] = msgspec.to_builtins(self._job)
        for key in ("broker", "folder"):
            tree.pop(key)
        for key in OF_ITS_HOST:
            tree["proxy"].pop(key)
        return tree

    @property
    def resumed_at(self) -> dict[str, int]:
        return {name: self._job.run_folder.newest_checkpoint(name) for name in self._job.trained}

    def proxies(self) -> tuple[str, ...]:
        return self._proxies.urls()

    async def wait_current(self, patience_s: float) -> bool:  # noqa: ARG002 - files are read at each call
        return True

    def read(self) -> Members:
        """Return the present members. Raises ConfigError or EngineError if a registry cannot be read."""
        return Members(
            engines=self.roster.urls(),
            proxies=self.proxies(),
            revoked=tuple(sorted(read_revoked(self._job.run_folder.clients))),
            resumed_at=self.resumed_at,
            settings=self._settings,
            models=self._models,
            swarmq=__version__,
        )


def build_job(members: Members, *, engines: Urls, proxy: Mapping[str, Any]) -> SwarmJob:
    """Return the run's job for an engine or proxy on another host, which has no run folder. `engines`: policy -> URLs of its
    engines. `proxy`: this host's own settings of [proxy]. Raises ConfigError if the settings are not valid here."""
    tree = members.settings | {"proxy": members.settings["proxy"] | proxy}
    job = SwarmJob.build(tree, origin="the settings that the collector sent")
    policies = {
        name: msgspec.structs.replace(policy, engine=msgspec.structs.replace(policy.engine, urls=engines[name]))
        for name, policy in job.policies.items()
    }
    return msgspec.structs.replace(job, policies=policies)


def check_model_files(members: Members, policy: str) -> None:
    """Raise ConfigError if this host has no copy of a policy's model folder, or if its shape or tokenizer differs from the run's."""
    path = Path(members.settings["policies"][policy]["model"])
    expected = members.models.get(policy)
    if expected is None:
        return
    own = describe_model(path)
    if own is None:
        raise ConfigError(
            f"the model of policy {policy} is the folder {path} on the run's host, and this host has no such folder with a config.json "
            "and a tokenizer: copy it to the same path"
        )
    if differing := expected.find_difference(own):
        raise ConfigError(
            f"{path} is another model here than on the run's host: {differing}. Copy the folder from there"
        )
