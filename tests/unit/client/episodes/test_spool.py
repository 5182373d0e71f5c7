"""Ends outlive their process on disk, and only one other process picks them up."""

import pytest

from swarmq.client.episodes.spool import Orphan, Spool, spool_root
from swarmq.errors import ClientError
from swarmq.keys import Invite
from swarmq.messages import EpisodeBegin, EpisodeEnd, Slot


def end(name="e1"):
    return EpisodeEnd(run="r", episode_id=name, status="finished", rewards={"main": 1.0})


def test_what_was_put_is_found_by_the_next_owner_and_only_once(tmp_path):
    dead = Spool(tmp_path, "dead")
    dead.put(end("e1"))
    dead.put(end("e2"))
    dead.remove("e2")
    assert dead.close() == 1
    heir, rival = Spool(tmp_path, "heir"), Spool(tmp_path, "rival")
    assert dead.folder in heir.others()
    with Orphan.claim(dead.folder) as mine, Orphan.claim(dead.folder) as theirs:
        assert theirs is None
        [found] = mine.ends()
        assert found == end("e1")
        mine.remove(found)
    assert not dead.folder.exists()
    heir.close()
    rival.close()


def test_a_living_owner_is_never_robbed(tmp_path):
    living, other = Spool(tmp_path, "living"), Spool(tmp_path, "other")
    living.put(end())
    with Orphan.claim(living.folder) as claimed:
        assert claimed is None
    assert living.close() == 1
    assert other.close() == 0


def test_an_empty_spool_leaves_nothing_behind(tmp_path):
    spool = Spool(tmp_path / "deep" / "er", "me")
    spool.put(end())
    spool.remove("e1")
    spool.remove("e1")
    assert spool.close() == 0
    assert list((tmp_path / "deep" / "er").iterdir()) == []


def begin(name="e1"):
    slot = Slot(task_id="t")
    return EpisodeBegin(
        run="r",
        episode_id=name,
        slot=slot,
        kind="k",
        group_size=1,
        policies=("main",),
        client_id="alice@dead",
        attempt=0,
    )


def test_what_a_dead_process_left_open_is_aborted_in_its_name(tmp_path):
    spool = Spool(tmp_path, "dead")
    for name in ("ended", "open", "done"):
        spool.begin(begin(name))
    spool.put(end("ended"))
    spool.remove("done")
    (spool.folder / "torn.begin").write_bytes(b"half")
    assert spool.close() == 1
    with Orphan.claim(spool.folder) as orphan:
        left = {}
        for one in orphan.ends():
            left[one.episode_id] = (one.status, one.client_id)
            orphan.remove(one)
    assert left == {"ended": ("finished", ""), "open": ("aborted", "alice@dead")}
    assert not spool.folder.exists()


def test_a_damaged_file_is_set_aside_and_the_others_are_delivered(tmp_path):
    spool = Spool(tmp_path, "dead")
    spool.put(end("e1"))
    (spool.folder / "e0.end").write_bytes(b"torn")
    (spool.folder / "e9.part").write_bytes(b"half")
    spool.close()
    with Orphan.claim(spool.folder) as orphan:
        assert [found.episode_id for found in orphan.ends()] == ["e1"]
    assert (spool.folder / "e0.bad").exists()


def test_a_folder_that_cannot_be_used_says_how_to_choose_another(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ClientError, match=r"set \$SWARMQ_SPOOL"):
        Spool(tmp_path / "file", "me")


def test_runs_of_one_name_and_clients_of_one_run_do_not_share_a_spool(monkeypatch, tmp_path):
    monkeypatch.setenv("SWARMQ_SPOOL", str(tmp_path))

    def root(secret):
        return spool_root(
            Invite(run="r", client="a", secret=secret, amqp_url="", base_url="", policies=(), kinds=(), group_size=1)
        )

    assert root(b"1").parent == tmp_path
    assert root(b"1") != root(b"2")
    monkeypatch.delenv("SWARMQ_SPOOL")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert root(b"1").parent == tmp_path / "state" / "swarmq" / "spool"
