"""Real coding agents, as npm has them, on a scripted model: they mend a bug and summarise on the way, and follow swarmq's skill.

Here are the two that start within seconds; `python -m benchmarks.coding_agents` runs opencode and aider, too.
"""

import pytest
from benchmarks.coding_agents import AGENTS, mend_bug, set_up_training

AGENT = {agent.name: agent for agent in AGENTS}
QUICK = pytest.mark.parametrize("name", ["Claude Code", "Codex CLI"])


@QUICK
async def test_a_coding_agent_edits_compacts_and_is_scored(tmp_path, name):
    row = await mend_bug(AGENT[name], tmp_path)
    assert row["result"] == "ok", row
    assert row["received"] == row["turns"] >= 4
    assert row["counted"].keys() <= {"history_edited", "tools_changed"}


@QUICK
async def test_a_coding_agent_finds_the_skill_and_its_commands_set_up_a_job(tmp_path, name):
    row = await set_up_training(AGENT[name], tmp_path)
    assert row["result"] == "ok", row
    assert row["commands"].splitlines()[0].startswith("swarmq init math")
