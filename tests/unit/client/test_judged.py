"""An episode whose judge is down has failed; nobody scored it."""

import pytest

import swarmq
from swarmq.errors import EpisodeError
from swarmq.rewards import Judge, TextChecks


async def test_an_episode_whose_judge_is_down_fails_and_is_attempted_again(swarm, client):
    judge = Judge("m", base_url="http://127.0.0.1:9/v1", attempts=1)
    summary = await client.run_episodes_until_all_complete(
        [{"id": "a"}], lambda _ep: judge.score("t", "a"), repeats=1, max_attempts=2, retry_pause_s=0.0, progress=False
    )
    assert (summary.finished, summary.failed, summary.given_up) == (0, 2, 1)
    assert [(end.status, end.rewards) for end in swarm.ends] == [("failed", {})] * 2
    assert TextChecks().problem("anything") == ""


async def test_asking_a_model_that_is_not_there_fails_the_episode(client):
    async with client.episode({"id": "a"}, mode="eval") as ep:
        with pytest.raises(EpisodeError, match="cannot be reached"):
            await swarmq.ask_async(ep, "6 * 7?", attempts=1)
        await ep.abort()
