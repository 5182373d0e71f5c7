"""What each piece does to an episode, in a world where everything comes twice, late, or never."""

from __future__ import annotations

import msgspec
import pytest

from swarmq.collector.decide.effects import SendDeadLetter
from swarmq.messages import Ticket, encode


def test_begin_turns_and_end_make_one_episode(bench, say):
    bench.take(say.begin(), say.turn("a"), say.turn("b", parent="a", shared=3, prompt=(9,)), say.end(reward=0.5))
    (episode,) = bench.episodes
    assert (episode.policy, episode.reward, episode.group_members) == ("main", 0.5, 1)
    assert [turn.call_id for turn in episode.turns] == ["a", "b"]
    assert bench.events("episode")[0] == {
        "episode_id": "e",
        "kind": "math",
        "status": "finished",
        "reward": 0.5,
        "rewards": {"main": 0.5},
        "client_id": "c",
        "code_version": "",
        "seconds": 0.0,
        "reason": "",
        "detail": "",
    }


def test_messages_that_come_twice_count_once(bench, say):
    pieces = [say.begin(), say.turn(), say.end()]
    bench.take(*[piece for piece in pieces for _ in range(2)], *pieces)
    assert len(bench.sent) == 1
    assert bench.core.counts["duplicates"] == 6
    assert bench.core.counts["late_turn"] == 0


def test_duplicates_are_known_after_a_restart(bench, say):
    pieces = [say.begin(), say.turn(), say.end()]
    for piece in pieces:
        bench.take(piece)
        bench.restart()
        bench.take(piece)
    assert len(bench.sent) == 1
    assert bench.core.counts["duplicates"] == 3


def test_a_different_second_end_is_ignored(bench, say):
    bench.take(say.begin(), say.turn(), say.end(reward=1.0), say.end(reward=0.0))
    assert bench.core.counts["conflicting_end"] == 1
    assert bench.episodes[0].reward == 1.0


def test_a_client_has_no_part_in_what_another_one_began(bench, say):
    mine = {"client_id": "alice@one"}
    theirs = (
        say.turn("b", client_id="eve"),
        say.end(reward=0.0, client_id="eve@two"),
        say.begin("e", client_id="eve@two"),
    )
    bench.take(say.begin(**mine), say.turn("a", client_id="alice"), *theirs, say.end(client_id="alice@three"))
    assert bench.core.counts["foreign"] == 3
    [episode] = bench.episodes
    assert (episode.reward, [turn.call_id for turn in episode.turns]) == (1.0, ["a"])


def test_an_operator_ends_what_anybody_began(bench, say):
    bench.take(say.begin(client_id="alice@one"), say.turn("a", client_id="alice"), say.end(client_id="@ops"))
    assert len(bench.sent) == 1


def test_a_turn_after_the_end_is_not_trained(bench, say):
    bench.take(say.begin(), say.turn("a"), say.end(), say.turn("b"))
    assert bench.core.counts["late_turn"] == 1
    assert [turn.call_id for turn in bench.episodes[0].turns] == ["a"]


def test_another_turn_under_a_known_call_id_is_ignored(bench, say):
    bench.take(say.begin(), say.turn("a"), say.turn("a", sampled=(7, 8)), say.end())
    assert bench.core.counts["conflicting_turn"] == 1
    assert bench.episodes[0].turns[0].sampled_ids == say.ids(3)


def test_an_end_waits_for_the_turns_it_names(bench, say):
    bench.take(say.begin(), say.turn("a"), say.end(calls=("a", "b")))
    assert not bench.sent
    bench.restart()
    bench.take(say.turn("x"), say.turn("b"))
    assert [turn.call_id for turn in bench.episodes[0].turns] == ["a", "b"]
    assert bench.core.counts["late_turn"] == 1


def test_a_hole_is_never_trained(bench, say):
    bench.take(say.begin(), say.turn("a"), say.end(calls=("a", "b")))
    bench.wait(29)
    assert bench.state() == ("open", "")
    bench.wait(1)
    assert bench.state() == ("dropped", "incomplete")
    assert bench.dropped == {"incomplete": 1}
    assert bench.num_turns() == 0


def test_an_end_waits_for_a_parent_that_its_turns_build_on(bench, say):
    bench.take(say.begin(), say.turn("b", parent="a", shared=3), say.end())
    assert not bench.sent
    bench.take(say.turn("a"))
    assert {turn.call_id for turn in bench.episodes[0].turns} == {"a", "b"}


def test_an_end_and_turns_wait_for_their_begin(bench, say):
    bench.take(say.end(), say.turn())
    bench.restart()
    bench.take(say.begin())
    assert len(bench.episodes[0].turns) == 1


def test_an_end_without_a_begin_is_given_up(bench, say):
    bench.take(say.turn(), say.end())
    bench.wait(30)
    assert bench.core.counts["stray.no_begin"] == 1
    assert bench.dropped == {}
    assert bench.state() == ("dropped", "no_begin")


def test_turns_that_contradict_each_other_are_not_sent(bench, say):
    bench.take(say.begin(), say.turn("a"), say.turn("b", parent="a", shared=4), say.end())
    assert bench.dropped == {"unresolvable": 1}


def test_turns_that_build_on_each_other_in_a_circle_are_not_sent(bench, say):
    bench.take(say.begin(), say.turn("a", parent="b", shared=1), say.turn("b", parent="a", shared=1), say.end())
    assert bench.dropped == {"unresolvable": 1}


@pytest.mark.parametrize("status", ["aborted", "failed"])
def test_an_episode_without_an_outcome_is_counted_and_its_ticket_issued_again(bench, say, status):
    issued = bench.tickets["math"]
    bench.take(say.begin(ticket_id="math.1"), say.turn(), say.end(status=status, reason="balance ran out"))
    assert bench.dropped == {status: 1}
    assert not bench.sent
    assert bench.tickets["math"] == issued + 1
    assert bench.events("episode")[0]["detail"] == "balance ran out"


def test_an_episode_without_turns_is_dropped(bench, say):
    bench.take(say.begin(), say.end())
    bench.take(say.begin("f", "u"), say.turn(episode="f", sampled=()), say.end("f"))
    assert bench.dropped == {"no_turns": 2}


def test_a_missing_or_unknown_reward_is_never_a_zero(make_bench, say):
    bench = make_bench(trained=("main", "aux"), known=("main", "aux"))
    both = ("main", "aux")
    bench.take(say.begin("e", "t", policies=both), say.turn(), say.turn("b", policy="aux"), say.end())
    bench.take(say.begin("f", "u"), say.turn(episode="f"), say.end("f", rewards={"main": 1.0, "typo": 1.0}))
    assert bench.dropped == {"reward_missing": 2}
    assert not bench.sent


def test_a_policy_that_the_job_does_not_know_drops_the_episode(bench, say):
    bench.take(say.begin(policies=("main", "other")), say.turn(), say.end(rewards={"main": 1.0, "other": 1.0}))
    assert bench.dropped == {"unknown_policy": 1}


def test_a_silent_episode_expires_by_the_collectors_clock(bench, say):
    issued = bench.tickets["math"]
    bench.take(say.begin(ticket_id="math.1", idle_timeout_s=100.0))
    bench.wait(60)
    bench.take(say.turn())
    bench.wait(60)
    assert bench.state() == ("open", "")
    bench.wait(60)
    assert bench.dropped == {"silent": 1}
    assert bench.tickets["math"] == issued + 1
    bench.take(say.end())
    assert bench.core.counts["late_end"] == 1
    assert bench.events("episode")[0]["status"] == "expired"


def test_a_begin_that_names_no_silence_gets_the_runs(bench, say):
    bench.take(say.begin())
    patience_s = bench.core.rules.idle_timeout_s
    bench.wait(patience_s - 1)
    assert bench.state() == ("open", "")
    bench.wait(1)
    assert bench.dropped == {"silent": 1}


def test_no_begin_can_ask_for_an_endless_silence(bench, say):
    bench.take(say.begin(idle_timeout_s=float("inf")))
    bench.wait(24 * 3600)
    assert bench.dropped == {"silent": 1}


def test_a_restart_gives_open_episodes_a_fresh_silence(bench, say):
    bench.take(say.begin(idle_timeout_s=100.0))
    bench.now += 99
    bench.restart()
    bench.wait(50)
    assert bench.state() == ("open", "")


def test_eval_episodes_are_told_and_never_forwarded(bench, say):
    issued = bench.tickets["math"]
    bench.take(say.begin(mode="eval"), say.turn(mode="eval"), say.end(success=True, metadata={"seed": "3"}))
    assert not bench.sent
    assert bench.num_turns() == 0
    assert bench.tickets["math"] == issued
    (event,) = bench.events("eval")
    assert (event["reward"], event["success"], event["metadata"]) == (1.0, True, {"seed": "3"})
    assert bench.core.counts["eval_finished"] == 1
    assert bench.events("episode") == []


def test_of_two_attempts_at_a_slot_the_first_that_finishes_is_trained(bench, say):
    bench.take(say.begin("e"), say.begin("f", attempt=1), say.turn(episode="f"), say.turn(episode="e"))
    bench.take(say.end("f"), say.end("e"))
    assert [item.episode_id for item in bench.sent] == ["f"]
    assert bench.dropped == {"superseded": 1}


def test_a_slot_can_be_tried_again_after_a_failure(bench, say):
    bench.take(say.begin("e"), say.turn(), say.end("e", status="failed"))
    bench.take(say.begin("f", attempt=1), say.turn(episode="f"), say.end("f"))
    assert [item.episode_id for item in bench.sent] == ["f"]


def test_a_trained_slot_is_never_trained_again(bench, say):
    bench.take(say.begin("e"), say.turn(), say.end("e"), say.consumed("e"))
    bench.restart()
    bench.take(say.begin("f"), say.turn(episode="f"), say.end("f"))
    assert [item.episode_id for item in bench.sent] == ["e"]
    assert bench.dropped == {"superseded": 1}


def test_two_processes_with_one_episode_id_are_not_mixed_up(bench, say):
    bench.take(say.begin(client_id="c@one"), say.begin(client_id="c@two"))
    bench.restart()
    bench.take(say.turn("a"), say.turn("b"), say.end())
    assert bench.core.counts["conflicting_begin"] == 1
    assert bench.dropped == {"two_clients": 1}


def test_two_processes_with_one_episode_id_are_told_apart_by_the_calls_they_name(bench, say):
    bench.take(
        say.begin(client_id="c@1"), say.begin(client_id="c@2"), say.turn("a"), say.turn("b"), say.end(calls=("b",))
    )
    assert [turn.call_id for turn in bench.episodes[0].turns] == ["b"]


def test_policies_of_one_episode_end_together(make_bench, say):
    both = ("planner", "executor")
    bench = make_bench(trained=both, known=(*both, "judge"))
    bench.take(say.begin(policies=(*both, "judge")))
    for call, policy in [("a", "planner"), ("b", "executor"), ("c", "judge"), ("d", "planner")]:
        bench.take(say.turn(call, policy=policy))
    rewards = {"planner": 1.0, "executor": 0.25, "judge": 0.0}
    bench.take(say.end(rewards=rewards, agent_rewards={"planner": {"scout": 2.0}}, call_rewards={"a": 1.0, "b": 2.0}))
    told = {e.policy: ([t.call_id for t in e.turns], e.reward, e.agent_rewards, e.call_rewards) for e in bench.episodes}
    assert told == {
        "planner": (["a", "d"], 1.0, {"scout": 2.0}, {"a": 1.0}),
        "executor": (["b"], 0.25, {}, {"b": 2.0}),
    }


def test_a_policy_that_was_not_called_needs_no_reward(make_bench, say):
    both = ("planner", "executor")
    bench = make_bench(trained=both, known=both)
    bench.take(say.begin(policies=both), say.turn(policy="planner"), say.end(rewards={"planner": 1.0}))
    assert [item.policy for item in bench.sent] == ["planner"]


def test_an_episode_too_large_for_a_message_is_dropped_not_stuck(bench, say):
    bench.take(say.begin())
    for number in range(3):
        bench.take(say.turn(f"c{number}", prompt=(1,) * 750_000))
    bench.take(say.end())
    assert bench.dropped == {"too_large": 1}


def test_pieces_of_another_run_and_other_records_are_parked(bench, say):
    bench.take(msgspec.structs.replace(say.begin(), run="x"), Ticket(run="r", ticket_id="1", kind="math"))
    parked = [effect.reason for effect in bench.effects if isinstance(effect, SendDeadLetter)]
    assert ["run 'x'" in parked[0], "Ticket" in parked[1]] == [True, True]


def test_reports_of_learners_fill_the_ledger_and_free_the_turns(bench, say):
    bench.take(say.begin("e"), say.turn(), say.end())
    bench.take(say.begin("f", "u"), say.turn(episode="f"), say.end("f"))
    assert bench.num_turns() == 2
    bench.take(say.consumed("e", version=3, dropped={"f": "zero_variance"}))
    bench.take(say.consumed("e", version=3, dropped={"f": "zero_variance"}))
    assert bench.state("e") == ("trained", "")
    assert bench.state("f") == ("dropped", "zero_variance")
    assert bench.num_turns() == 0
    assert bench.core.run.versions == {"main": 3}
    assert bench.core.counts["consumed_unknown"] == 2
    assert not set(bench.sent) & set(bench.store.outbox())


def test_an_episode_is_trained_if_any_of_its_policies_trained_it(make_bench, say):
    both = ("planner", "executor")
    bench = make_bench(trained=both, known=both)
    bench.take(say.begin(policies=both), say.turn("a", policy="planner"), say.turn("b", policy="executor"))
    bench.take(say.end(rewards={"planner": 1.0, "executor": 0.0}), say.consumed("e", policy="planner"))
    assert bench.state() == ("published", "")
    bench.restart()
    bench.take(say.consumed(policy="executor", dropped={"e": "stale"}))
    assert bench.state() == ("trained", "")


def test_a_repeated_episode_message_is_the_same_to_the_byte(bench, say):
    bench.take(say.begin(), say.turn("a"), say.turn("b", parent="a", shared=2), say.end(metadata={"z": "1", "a": "2"}))
    first = encode(bench.episodes[0])
    bench.restart()
    assert encode(bench.episodes[0]) == first


def test_every_unconfirmed_message_is_in_the_outbox_after_a_restart(bench, say):
    bench.take(say.begin(), say.turn(), say.end())
    waiting = bench.store.outbox()
    assert bench.sent[0] in waiting
    bench.run(bench.core.confirm_forward("e", "main"))
    bench.run(bench.core.confirm_ticket("math.1"))
    assert set(waiting) - set(bench.store.outbox()) == {bench.sent[0], waiting[0]}


def test_a_reward_for_a_tag_that_no_call_has_is_told_of_once_with_the_tags_there_are(bench, say):
    for name in "ab":
        rewards = {"main": {"writer": 1.0, "tster": 0.0}}
        bench.take(say.begin(name, name), say.turn("c1", name, agent="writer"), say.turn("c2", name, agent="tester"))
        bench.take(say.end(name, agent_rewards=rewards))
    [warning] = bench.events("warning")
    assert "agent_rewards of main names 'tster', but no call of episode a has this tag" in warning["text"]
    assert "its calls are tagged tester, writer" in warning["text"]
    bench.take(say.begin("c", "c"), say.turn("c1", "c"), say.end("c", agent_rewards={"main": {"writer": 1.0}}))
    assert "none of its calls has a tag" in bench.events("warning")[-1]["text"]
    assert [bench.state(name)[0] for name in "abc"] == [bench.state("a")[0]] * 3, "they are trained all the same"


def test_a_reward_for_a_call_that_is_not_trained_is_warned_of_counted_and_kept_with_the_episode(bench, say):
    bench.take(say.begin(), say.turn("c1.0"), say.turn("c2.0"))
    bench.take(say.end(calls=("c2.0",), call_rewards={"c1.0": 1.0, "c2.0": 0.5}))
    [warning] = bench.events("warning")
    assert "call_rewards of episode e names 'c1.0', a call whose answer its agent did not receive" in warning["text"]
    assert bench.core.counts["rewards_uncredited"] == 1
    [episode] = bench.episodes
    assert (episode.call_rewards, episode.uncredited) == ({"c2.0": 0.5}, {"c1.0": 1.0})


def test_a_reward_for_a_call_that_is_not_there_is_warned_of_and_says_what_an_id_looks_like(bench, say):
    for name in "ab":
        bench.take(say.begin(name, name), say.turn("c1.0", name), say.turn("c2.0", name))
        bench.take(say.end(name, call_rewards={"c1": 1.0, "c2.0": 0.5}))
    [warning] = bench.events("warning")
    assert "call_rewards of episode a names 'c1', an id that no call of it has" in warning["text"]
    assert "(header x-swarmq-call-id), e.g. 'c1.0'" in warning["text"]
    assert [bench.state(name)[0] for name in "ab"] == [bench.state("a")[0]] * 2, "they are trained all the same"
    assert bench.core.counts["rewards_uncredited"] == 2
    many = dict.fromkeys("mnop", 1.0)
    bench.take(say.begin("c", "c"), say.turn("c1.0", "c"), say.end("c", call_rewards=many))
    assert "'m', 'n', 'o' and 1 more" in bench.events("warning")[-1]["text"]
