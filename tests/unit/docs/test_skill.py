"""The skill for coding agents: CLIs can find it, its links lead somewhere, and swarmq says what its page on failures quotes."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SKILL = ROOT / "skills/swarmq"
VLLM_SAYS = "No available memory for the cache blocks"
SYMPTOM = re.compile(r"^\| ([^|]*`[^|]*) \|", re.MULTILINE)
BREAK_IN_STRING = re.compile(r'"\s*\n\s*f?"')


def test_its_head_is_what_every_cli_reads():
    _, head, _ = (SKILL / "SKILL.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields.keys() == {"name", "description"}
    assert fields["name"] == SKILL.name
    assert len(fields["description"]) <= 1024


@pytest.mark.parametrize("folder", [".claude", ".agents"])
def test_a_cli_started_in_the_repository_finds_it(folder):
    assert (ROOT / folder / "skills" / SKILL.name).resolve() == SKILL


@pytest.mark.parametrize("page", sorted(SKILL.rglob("*.md")), ids=lambda page: page.name)
def test_its_links_stay_within_the_skill_which_is_copied_as_it_is(page):
    linked = [(page.parent / name).resolve() for name in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    assert [path for path in linked if not (path.is_file() and path.is_relative_to(SKILL))] == []


def test_swarmq_says_what_the_page_on_failures_quotes():
    source = "\n".join(path.read_text() for path in (ROOT / "src/swarmq").rglob("*.py"))
    source = BREAK_IN_STRING.sub("", source)
    page = (SKILL / "references/debug.md").read_text()
    quoted = [code for cell in SYMPTOM.findall(page) for code in re.findall(r"`((?!swarmq )[^`]+)`", cell)]
    pieces = {piece for code in quoted for piece in re.split(r"\s*\.\.\.\s*|^policies\.main\.", code) if piece}
    assert len(pieces) > 20
    assert {piece for piece in pieces if piece not in source} == {VLLM_SAYS}
