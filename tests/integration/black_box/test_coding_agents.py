"""Real coding agents, as npm and PyPI have them, on a scripted model: they mend a bug and summarise on the way, and follow swarmq's
skill."""

import pytest
from benchmarks.coding_agents import AGENTS, mend_bug, set_up_training


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
async def test_a_coding_agent_edits_compacts_and_is_scored(tmp_path, agent):
    row = await mend_bug(agent, tmp_path)
    assert row["result"] == "ok", row
    assert row["received"] == row["turns"] >= 4
    assert row["counted"], "its summary is a branch"
    assert row["counted"].keys() <= {"history_edited", "tools_changed"}


@pytest.mark.parametrize("agent", [agent for agent in AGENTS if agent.skills], ids=lambda agent: agent.name)
async def test_a_coding_agent_finds_the_skill_and_its_commands_set_up_a_job(tmp_path, agent):
    row = await set_up_training(agent, tmp_path)
    assert row["result"] == "ok", row
    assert row["commands"].splitlines()[0].startswith("swarmq init math")
