"""The packages of the trackers, checked before anything starts. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from swarmq.errors import SetUpError

PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow", "mlflow-skinny")}
"""Tracker -> packages that provide it, where the names differ."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise LearnerError for trackers whose package is not installed. A folder with the package's name does not count as the
    package."""
    if missing := [name for name in names if not any(map(_is_installed, PACKAGES.get(name, (name,))))]:
        raise SetUpError(
            f"train.trackers: not installed: {', '.join(missing)}; pip install {' '.join(missing)}, or leave them out"
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
