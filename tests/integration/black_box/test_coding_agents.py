"""Real coding agents, as npm has them, mend a bug on a scripted model and summarise on the way.

Here are the two that start within seconds; `python -m benchmarks.coding_agents` runs opencode and aider, too.
"""

import pytest
from benchmarks.coding_agents import AGENTS, run_row


@pytest.mark.parametrize("name", ["Claude Code", "Codex CLI"])
async def test_a_coding_agent_edits_compacts_and_is_scored(tmp_path, name):
    (agent,) = [one for one in AGENTS if one.name == name]
    row = await run_row(agent, tmp_path)
    assert row["result"] == "ok", row
    assert row["received"] == row["turns"] >= 4
    assert row["counted"].keys() <= {"history_edited", "tools_changed"}
