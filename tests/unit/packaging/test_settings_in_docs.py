"""Settings that a page names exist, and those that it sets in a live run may be set there."""

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from swarmq.config import Policy, Settings, SwarmJob
from swarmq.live_settings import is_live

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
SECTIONS = (
    "policies",
    "groups",
    "kinds",
    "eval",
    "proxy",
    "broker",
    "metrics",
    "alerts",
    "transcripts",
    "collector",
    "mix_schedule",
)
OF_A_POLICY = ("train", "engine", "sampling", "loss")
SETTING = re.compile(rf"({'|'.join(SECTIONS + OF_A_POLICY)})((?:\.\w+)+)(?: = .*|=.*)?")
FILE = re.compile(r".*\.(?:py|md|toml|json|jsonl|parquet|sqlite|yaml)")


def paths(kind):
    """Every path below a section; the names of policies, kinds and the like are `*`."""
    for one in msgspec.structs.fields(kind):
        yield one.encode_name
        for below in sections(one.type):
            middle = f"{one.encode_name}.*" if "dict" in str(one.type) else one.encode_name
            yield from (f"{middle}.{path}" for path in paths(below))


def sections(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in sections(part)]


KNOWN = {
    *paths(SwarmJob),
    *paths(Policy),
    *(f"loss.{path.rpartition('.')[2]}" for path in paths(Policy) if ".loss." in path),
}


def is_module(path):
    module = ROOT / "src/swarmq" / "/".join(path.split(".")[:2])
    return module.is_dir() or module.with_suffix(".py").exists()


def is_setting(path):
    first, *rest = path.split(".")
    named = ".".join([first, "*", *rest[1:]]) if first in ("policies", "kinds") else path
    return named in KNOWN or path in KNOWN or any(known.startswith(f"{named}.") for known in KNOWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_setting_that_a_page_names_exists(page):
    prose = BLOCK.sub("", page.read_text())
    spans = [found for span in SPAN.findall(prose) if (found := SETTING.fullmatch(span)) and not FILE.fullmatch(span)]
    named = [found[1] + found[2] for found in spans]
    assert [path for path in named if not is_setting(path) and not is_module(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_sets_in_a_live_run_can_be_set(page):
    scripts = [text for language, text in BLOCK.findall(page.read_text()) if language == "sh"]
    commands = [
        shlex.split(line, comments=True) for text in scripts for line in text.splitlines() if "swarmq set" in line
    ]
    paths = [word.partition("=")[0] for words in commands for word in words[3:] if "=" in word]
    assert [path for path in paths if not is_live(path)] == []


def test_a_setting_that_does_not_exist_is_found():
    assert is_setting("train.loss.kl")
    assert is_setting("policies.main.train.lora")
    assert is_setting("kinds.code.episode_tokens")
    assert not is_setting("train.loss.beta")
    assert not is_setting("policies.main.train.rank")
