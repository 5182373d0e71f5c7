"""Every episode can be read, whatever became of it, with the cause for each of its tokens."""

import msgspec
import pytest

from support.episodes import make_group
from support.run_folder import make_whole_run
from swarmq.config import Train
from swarmq.errors import EpisodeError
from swarmq.learner.methods.credit import compute_advantages
from swarmq.learner.store.records import BatchIndex, BatchRecord
from swarmq.messages import encode, unpack_ids
from swarmq.observe.episodes import _advantages, read_detail, read_group, read_tokens
from swarmq.observe.index import RunIndex
from swarmq.observe.inspect.read import Decoders


@pytest.fixture
def whole(tmp_path):
    run, ids = make_whole_run(tmp_path / "runs")
    run.write_transcripts()
    index = RunIndex(run.folder, cache=tmp_path / "cache")
    index.update()
    yield run, ids, index
    run.close()


def all_tokens(index, episode, **fields):
    pages = [read_tokens(index, episode, **fields)]
    while len(pages) < pages[0].timelines:
        pages.append(read_tokens(index, episode, timeline=len(pages), **fields))
    return pages


@pytest.mark.parametrize(
    "state",
    ["trained", "equal_rewards", "failed", "aborted", "silent", "silent eval", "eval", "waiting", "published", "open"],
)
def test_an_episode_in_any_state_is_shown_with_its_conversation_and_all_of_its_tokens(whole, state):
    run, ids, index = whole
    _, end, turns = run.parts[ids[state]]
    detail = read_detail(index, ids[state])
    assert [turn.call_id for turn in detail.turns] == [turn.call_id for turn in turns]
    assert detail.turns[0].messages[0] == {"role": "user", "content": "<b>hi</b>"}
    assert detail.notes == []
    assert detail.rewards == (end.rewards if end else {})
    assert detail.why.endswith(".")
    sampled = sorted(token for turn in turns for token in unpack_ids(turn.sampled_ids))
    pages = all_tokens(index, ids[state])
    assert detail.timelines == len(pages)
    shown = [
        (token, cause) for page in pages for token, cause in zip(page.id, page.cause, strict=True) if cause != "given"
    ]
    assert sorted(token for token, _ in shown) == sampled
    if state != "trained":
        assert {cause for _, cause in shown} == {"not_trained"}
        logprobs = [
            value for page in pages for value, cause in zip(page.logprob, page.cause, strict=True) if cause != "given"
        ]
        assert None not in logprobs


def test_why_says_what_happened(whole):
    _, ids, index = whole
    whys = {state: read_detail(index, episode).why for state, episode in ids.items()}
    assert whys["trained"] == "Trained in step 1 of main, with staleness 0."
    assert "same reward" in whys["equal_rewards"]
    assert "waits for its group, of which 1 of 2 have finished" in whys["waiting"]
    assert "has not reported" in whys["published"]
    assert "is running" in whys["open"]
    assert "never trained" in whys["eval"]
    assert "idle timeout" in whys["silent eval"]
    assert read_detail(index, ids["failed"]).detail == "ZeroDivisionError: division by zero"
    assert "begin" in read_detail(index, "stray-1").why


def test_an_episode_without_a_conversation_is_shown_with_a_note(tmp_path):
    run, ids = make_whole_run(tmp_path / "runs")
    index = RunIndex(run.folder, cache=tmp_path / "cache")
    index.update()
    detail = read_detail(index, ids["failed"])
    assert (detail.turns, detail.timelines) == ([], 0)
    assert any("not stored" in note for note in detail.notes)
    with pytest.raises(EpisodeError, match="no tokens of it are stored"):
        read_tokens(index, ids["failed"])
    trained = read_detail(index, ids["trained"])
    assert len(trained.turns) == 2, "the batch log has it"
    run.close()


def test_each_trained_token_has_its_cause(whole):
    """The traces say: the second token of each turn was filtered, the first was clipped."""
    run, ids, index = whole
    _, _, turns = run.parts[ids["trained"]]
    causes = {
        (n, offset): "clipped" if offset == 0 else "filtered" if offset == 1 else "trained"
        for n, turn in enumerate(turns)
        for offset in range(turn.num_sampled)
    }
    seen = dict[int, int]()
    for page in all_tokens(index, ids["trained"]):
        assert page.notes == ["the tokens are not decoded; only ids are shown"]
        for at, turn in enumerate(page.turn):
            if turn is None:
                assert (page.cause[at], page.logprob[at], page.entropy[at]) == ("given", None, None)
                continue
            offset = seen.get(turn, 0)
            seen[turn] = offset + 1
            assert page.cause[at] == causes[turn, offset]
            assert page.logprob_trained[at] == pytest.approx(page.logprob[at] + 0.25, abs=1e-5)
            assert page.ratio[at] == pytest.approx(1.2840, abs=1e-3)
            assert page.entropy[at] == pytest.approx(2 * offset / max(turns[turn].num_sampled - 1, 1), abs=1e-3)
            assert (page.advantage[at], page.version[at]) == (-0.5, 0)
            if page.cause[at] != "trained":
                assert page.cause_detail[at]
    assert seen == {n: turn.num_sampled for n, turn in enumerate(turns)}


def test_without_traces_the_advantages_are_computed_as_the_learner_did(tmp_path):
    run, ids = make_whole_run(tmp_path / "runs")
    for path in run.folder.token_log("main").iterdir():
        path.unlink()
    index = RunIndex(run.folder, cache=tmp_path / "cache")
    index.update()
    (page, *_) = all_tokens(index, ids["trained"])
    assert any("not recorded" in note for note in page.notes)
    assert {*page.cause} == {"given", "trained"}
    assert {*page.advantage} == {None, -1.0}, "leave one out of the rewards 0 and 1"
    assert compute_advantages([], run.job.policies["main"].train) == {}
    run.close()


def test_the_advantage_of_a_turn_that_a_critic_judged_token_by_token_is_not_made_up():
    group = make_group("a", (0.0, 1.0), turns=1)
    record = BatchRecord(index=BatchIndex(record=1, version=1), episodes=tuple(group), settings=Train(advantage="gae"))
    assert _advantages(record) == {"a-0": [None], "a-1": [None]}
    plain = msgspec.structs.replace(record, settings=Train(advantage="centered"))
    assert _advantages(plain) == {"a-0": [-0.5], "a-1": [0.5]}


def test_damaged_traces_and_removed_batches_leave_the_transcript(whole):
    run, ids, index = whole
    for path in run.folder.token_log("main").iterdir():
        path.write_bytes(b"torn")
    assert read_tokens(index, ids["trained"]).total
    for path in run.folder.batch_log("main").glob("*.log"):
        path.unlink()
    detail = read_detail(index, ids["trained"])
    assert len(detail.turns) == 2
    assert any("was removed" in note for note in detail.notes)
    assert {*read_tokens(index, ids["trained"]).cause} == {"given", "not_trained"}


def test_pages_of_tokens_are_the_whole_in_pieces(whole):
    run, ids, index = whole
    decoders = Decoders(run.job, run.folder)
    whole_page = read_tokens(index, ids["open"], decoders=decoders)
    assert "".join(whole_page.text)
    assert whole_page.notes == []
    pieces = [
        read_tokens(index, ids["open"], start=start, limit=3, decoders=decoders)
        for start in range(0, whole_page.total, 3)
    ]
    for name in ("id", "cause", "logprob", "version", "turn", "text"):
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(whole_page, name), name
    assert read_tokens(index, ids["open"], start=10_000).id == []
    with pytest.raises(EpisodeError, match="no timeline 9"):
        read_tokens(index, ids["open"], timeline=9)


def test_a_policy_s_tokens_are_those_of_its_turns(tmp_path):
    run, ids = make_whole_run(tmp_path / "runs", policies=("main", "judge"))
    run.write_transcripts()
    index = RunIndex(run.folder, cache=tmp_path / "cache")
    index.update()
    pages = all_tokens(index, ids["failed"])
    assert {page.policy for page in pages} == {"main", "judge"}
    detail = read_detail(index, ids["failed"])
    for page in pages:
        assert {detail.turns[n].policy for n in page.turn if n is not None} == {page.policy}
    assert read_detail(index, ids["trained"]).row.state == "published", "the judge has not reported"
    run.step(policy="judge", dropped=dict.fromkeys(run.closed, "stale"))
    index.update()
    why = read_detail(index, ids["trained"]).why
    assert "step 1 of judge" in why
    assert "step 1 of main" in why
    run.close()


def test_turns_that_cannot_be_resolved_are_shown_as_far_as_they_go(whole, tmp_path):
    run, ids, index = whole
    _, _, turns = run.parts[ids["failed"]]
    lost = msgspec.structs.replace(turns[1], parent="never-recorded", shared=4, logprobs=b"")
    run.closed[ids["failed"]] = msgspec.structs.replace(
        run.closed[ids["failed"]], turns=[encode(turns[0]), encode(lost)]
    )
    run.folder.transcripts.joinpath("000000000001.seg").unlink()
    run.write_transcripts(number=2)
    index.update()
    page = all_tokens(index, ids["failed"])[-1]
    assert unpack_ids(lost.sampled_ids).tolist() == page.id[-lost.num_sampled :]
    assert page.logprob[-1] is None
    assert any("as far as it was recorded" in note for note in page.notes)


def test_a_group_shows_its_attempts_side_by_side(whole):
    _, _ids, index = whole
    group = read_group(index, "taught/0")
    assert (group.state, group.size, group.mean_reward, group.kind, group.task) == ("trained", 2, 0.5, "math", "taught")
    assert [(one.row.reward, one.advantage) for one in group.members] == [(0.0, -1.0), (1.0, 1.0)]
    equal = read_group(index, "equal/0")
    assert [one.advantage for one in equal.members] == [None, None]
    assert "same reward" in equal.members[0].why
    waiting = read_group(index, "half/0")
    assert (waiting.size, len(waiting.members)) == (2, 1)
    with pytest.raises(EpisodeError, match="group '../x'"):
        read_group(index, "../x")
