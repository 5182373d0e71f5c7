"""Every episode ever begun is in the index, in its state, and the account is exact, whatever of the folder is there."""

import os
import shutil
import sqlite3
import threading

import pytest

from support.run_folder import MadeRun, make_whole_run
from swarmq.config import RunFolder
from swarmq.errors import ConfigError, EpisodeError
from swarmq.observe.index import SORTS, EpisodeFilter, RunIndex, open_ledger


@pytest.fixture
def whole(tmp_path):
    run, ids = make_whole_run(tmp_path / "runs")
    yield run, ids
    run.close()


def index_of(folder, tmp_path, **fields):
    index = RunIndex(folder, cache=tmp_path / "cache", **fields)
    index.update()
    return index


def snapshot_of(folder):
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_the_account_of_a_run_is_exact_and_explained(whole, tmp_path):
    run, _ = whole
    ledger = index_of(run.folder, tmp_path).ledger()
    assert ledger.is_balanced
    assert ledger.begun == run.core.counts["begun"] == 12
    parts = ledger.trained + ledger.open + ledger.waiting + ledger.published
    assert parts + sum(ledger.dropped.values()) + sum(ledger.failed.values()) == ledger.begun
    assert (ledger.trained, ledger.open, ledger.waiting, ledger.published) == (2, 1, 1, 2)
    assert ledger.dropped == {"equal_rewards": 2, "no_turns": 1}
    assert ledger.failed == {"failed": 1, "aborted": 1, "silent": 1}
    assert ledger.evaluated == {"finished": 1, "silent": 1}
    assert ledger.stray == {"no_begin": 1}
    assert {*ledger.dropped, *ledger.failed, *ledger.evaluated, *ledger.stray} <= ledger.explanations.keys()


@pytest.mark.parametrize("lost", ["events.jsonl", "main", "transcripts", ""])
def test_every_number_of_the_account_opens_its_episodes_whatever_file_is_missing(whole, tmp_path, lost):
    run, _ = whole
    run.write_transcripts()
    run.close()
    if lost:
        path = run.folder.path / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    index = index_of(run.folder, tmp_path)
    ledger = index.ledger()
    assert ledger.is_balanced
    for state in ("trained", "open", "waiting", "published"):
        assert index.count(EpisodeFilter(state=state)) == getattr(ledger, state)
    for state, numbers in (
        ("dropped", ledger.dropped),
        ("failed", ledger.failed),
        ("eval", ledger.evaluated),
        ("stray", ledger.stray),
    ):
        for reason, number in numbers.items():
            assert index.count(EpisodeFilter(state=state, reason=reason)) == number, (state, reason)


def test_with_the_ledger_alone_the_counters_tell_evaluation_from_training(whole, tmp_path):
    run, _ = whole
    run.folder.events.unlink()
    ledger = index_of(run.folder, tmp_path).ledger()
    assert (ledger.is_balanced, ledger.failed["silent"], ledger.evaluated) == (True, 1, {"finished": 1, "silent": 1})


@pytest.mark.parametrize("with_transcripts", [False, True])
def test_a_row_says_what_became_of_an_episode(whole, tmp_path, with_transcripts):
    run, ids = whole
    if with_transcripts:
        run.write_transcripts()
    index = index_of(run.folder, tmp_path)
    row = index.find(ids["trained"]).row
    assert (row.state, row.reward, row.step, row.staleness, row.kind, row.task) == (
        "trained",
        0.0,
        1,
        0,
        "math",
        "taught",
    )
    assert (row.group, row.client, row.code_version, row.turns) == ("taught/0", "client-a", "v1", 2)
    assert row.sampled_tokens > 0
    assert row.has_transcript == with_transcripts
    assert index.find(ids["equal_rewards"]).row.reward == 1.0
    failed = index.find(ids["failed"])
    assert (failed.row.state, failed.row.reason, failed.detail) == (
        "failed",
        "failed",
        "ZeroDivisionError: division by zero",
    )
    evaluated = index.find(ids["eval"]).row
    assert (evaluated.state, evaluated.reason, evaluated.mode, evaluated.reward) == ("eval", "finished", "eval", 0.25)
    assert index.find(ids["silent eval"]).row.state == "eval"
    running = index.find(ids["open"]).row
    assert (running.state, running.kind, running.turns, running.client) == ("open", "code", 2, "client-a")


def test_an_index_follows_a_run_that_goes_on(whole, tmp_path):
    run, ids = whole
    index = index_of(run.folder, tmp_path)
    assert index.progress.is_done
    assert not index.update(), "nothing is new"
    run.step()
    run.end(ids["open"], status="failed")
    late = run.begin("later")
    assert index.update()
    assert index.find(ids["published"]).row.state == "trained"
    assert index.find(ids["published"]).row.step == 2
    assert index.find(ids["open"]).row.state == "failed"
    assert index.find(late).row.state == "open"
    assert index.ledger().is_balanced


def test_an_episode_whose_client_has_a_slow_clock_is_found_later(whole, tmp_path):
    run, _ = whole
    index = index_of(run.folder, tmp_path)
    run.serial = -1
    early = run.end(run.begin("early"), status="failed")
    assert early < min(row.id for row in index.iterate())
    index._count_cost = 0.0
    index.update()
    assert index.find(early).row.state == "failed"


def test_an_update_that_was_cancelled_goes_on_where_it_stopped(whole, tmp_path):
    run, _ = whole
    index = RunIndex(run.folder, cache=tmp_path / "cache")
    index.update(is_cancelled=lambda: True)
    assert not index.progress.is_done
    assert RunIndex(run.folder, cache=tmp_path / "cache").update()
    assert index.ledger().is_balanced


def test_several_threads_may_update_and_read_one_index(whole, tmp_path):
    run, _ = whole
    indices = [RunIndex(run.folder, cache=tmp_path / "cache") for _ in range(3)]
    threads = [threading.Thread(target=index.update) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(index.ledger().is_balanced for index in indices)


def test_a_folder_that_became_another_run_is_read_anew(whole, tmp_path):
    run, ids = whole
    index = index_of(run.folder, tmp_path)
    run.close()
    shutil.rmtree(run.folder.path)
    other = MadeRun(tmp_path / "runs")
    other.serial = 1000
    there = other.finish("else")
    index.update()
    assert index.find(there[0]).row.state == "published"
    with pytest.raises(EpisodeError, match="no episode"):
        index.find(ids["trained"])
    other.close()


def test_reading_changes_nothing_in_the_folder_and_blocks_no_collector(whole, tmp_path):
    run, _ = whole
    run.close()
    before = snapshot_of(run.folder.path)
    index_of(run.folder, tmp_path)
    assert snapshot_of(run.folder.path) == before
    reader = sqlite3.connect(run.folder.inbox)
    reader.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open_ledger(run.folder) as ledger:
        ledger.execute("BEGIN")
        ledger.execute("SELECT count(*) FROM episodes").fetchone()
        writer = sqlite3.connect(run.folder.inbox, timeout=0)
        writer.execute("UPDATE counts SET value = value")
        writer.commit()
        writer.close()
    reader.close()


def test_pages_follow_each_other_in_every_order(whole, tmp_path):
    run, _ = whole
    index = index_of(run.folder, tmp_path)
    everything = index.page(limit=1000)
    assert everything.total == len(everything.rows) == 15
    assert everything.next is None
    for sort in (*SORTS, *(f"-{name}" for name in SORTS)):
        seen, cursor = [], None
        while True:
            page = index.page(sort=sort, cursor=cursor, limit=3)
            seen += [row.id for row in page.rows]
            if (cursor := page.next) is None:
                break
        assert sorted(seen) == sorted(row.id for row in everything.rows), sort
        values = [
            value for row in index.iterate(sort=sort) if (value := getattr(row, sort.removeprefix("-"))) is not None
        ]
        assert values == sorted(values, reverse=sort.startswith("-")), sort


def test_filters_choose_what_they_say(whole, tmp_path):
    run, ids = whole
    index = index_of(run.folder, tmp_path)

    def chosen(**fields):
        return {row.id for row in index.iterate(EpisodeFilter(**fields))}

    assert ids["failed"] in chosen(state="failed,dropped")
    assert chosen(kind="code", state="open") == {ids["open"]}
    assert chosen(task="broken", client="client-a") == {ids["failed"]}
    assert ids["trained"] in chosen(step=1, policy="main")
    assert not chosen(policy="mai")
    assert chosen(group="taught/0") == chosen(state="trained")
    assert chosen(reward_min=0.25, reward_max=0.25, mode="eval") == {ids["eval"]}
    assert ids["eval"] not in chosen(reward_below=0.25)
    assert chosen(text=ids["open"][:8]) == {ids["open"]}
    assert not chosen(client="'; DROP TABLE episodes; --")
    with pytest.raises(ConfigError, match="'lost' is not one of"):
        chosen(state="lost")
    with pytest.raises(ConfigError, match="sort"):
        index.page(sort="id; DROP TABLE episodes")
    with pytest.raises(ConfigError, match="cursor"):
        index.page(cursor="nonsense")


def test_histograms_count_every_value_once(whole, tmp_path):
    run, _ = whole
    index = index_of(run.folder, tmp_path)
    rewards = index.histogram(bins=4)
    assert len(rewards.edges) == len(rewards.counts) + 1
    with_reward = [row for row in index.iterate() if row.reward is not None]
    assert sum(rewards.counts) == len(with_reward)
    assert index.histogram(EpisodeFilter(state="trained"), of="staleness").counts == [2]
    assert index.histogram(EpisodeFilter(task="nobody")).counts == []


@pytest.mark.parametrize("part", ["", "..", "../secret", "a/b", "a\\b", "\0"])
def test_an_id_with_parts_of_a_path_is_refused(whole, tmp_path, part):
    run, _ = whole
    with pytest.raises(EpisodeError, match="is not an episode id"):
        index_of(run.folder, tmp_path).find(part)


def test_an_ambiguous_or_unknown_id_says_so(whole, tmp_path):
    run, _ = whole
    index = index_of(run.folder, tmp_path)
    with pytest.raises(EpisodeError, match="several episodes"):
        index.find("0000")
    with pytest.raises(EpisodeError, match="no episode"):
        index.find("zzz")


def test_a_folder_that_is_none_is_refused_and_an_empty_one_has_no_episodes(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        RunIndex(RunFolder(tmp_path / "nowhere"), cache=tmp_path / "cache")
    index = index_of(RunFolder(tmp_path), tmp_path)
    assert index.page().total == 0
    assert not index.ledger().is_balanced
    assert any("ledger" in note for note in index.progress.notes)
    assert not (tmp_path / "collector.sqlite").exists(), "a reader makes no files"


def test_a_half_copied_run_is_shown_as_far_as_it_goes(whole, tmp_path):
    run, ids = whole
    run.step()
    run.write_transcripts()
    run.close()
    (segment,) = run.folder.batch_log("main").glob("*.log")
    segment.write_bytes(segment.read_bytes()[:-40])
    run.folder.events.write_bytes(run.folder.events.read_bytes()[:-10])
    run.folder.inbox.write_bytes(run.folder.inbox.read_bytes()[:20_000])
    run.folder.inbox.with_name("collector.sqlite-wal").unlink(missing_ok=True)
    index = index_of(run.folder, tmp_path)
    assert index.find(ids["trained"]).row.state == "trained"
    assert index.find(ids["failed"]).row.state == "failed"
    assert any("collector.sqlite" in note for note in index.progress.notes)
    assert not index.ledger().is_balanced


def test_a_ledger_copied_without_the_rights_to_write_beside_it_is_read(whole, tmp_path):
    run, ids = whole
    copy = tmp_path / "copy" / "r"
    shutil.copytree(run.folder.path, copy, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    assert (copy / "collector.sqlite-wal").stat().st_size, "the copy was made while the run is up"
    index = index_of(RunFolder(copy), tmp_path)
    assert index.find(ids["open"]).row.state == "open"
    assert index.ledger().is_balanced


def test_a_damaged_or_older_index_is_built_anew_and_one_that_nobody_opens_is_removed(whole, tmp_path):
    run, ids = whole
    path = index_of(run.folder, tmp_path).path
    forgotten = path.with_name("forgotten.sqlite")
    forgotten.write_bytes(b"")
    os.utime(forgotten, (0, 0))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '0' WHERE key = 'schema'")
    db.close()
    assert index_of(run.folder, tmp_path).find(ids["open"]).row.state == "open"
    assert not forgotten.exists()
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    path.write_bytes(b"no database" * 1000)
    assert index_of(run.folder, tmp_path).ledger().is_balanced


def test_a_cache_that_cannot_be_written_is_named(whole, tmp_path):
    run, _ = whole
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        RunIndex(run.folder, cache=tmp_path / "file")
    index = index_of(run.folder, tmp_path)
    run.begin("more")
    with sqlite3.connect(index.path) as db:
        db.execute("CREATE TRIGGER full BEFORE INSERT ON episodes BEGIN SELECT raise(ABORT, 'disk is full'); END")
    db.close()
    with pytest.raises(ConfigError, match="cannot be written .disk is full.: free space"):
        index.update()


def test_transcripts_whose_segment_was_rewritten_are_read_anew(whole, tmp_path):
    run, ids = whole
    run.write_transcripts()
    index = index_of(run.folder, tmp_path)
    assert index.find(ids["failed"]).row.has_transcript
    run.write_transcripts(with_body=False, generation=1)
    index.update()
    assert not index.find(ids["failed"]).row.has_transcript
    assert not index.find(ids["trained"]).row.has_transcript
