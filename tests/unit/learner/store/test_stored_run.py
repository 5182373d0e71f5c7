"""A run folder that swarmq 0.1.0 left behind is read, replayed and gone on with."""

import shutil
from collections import Counter

import pytest
from safetensors.torch import load_file

from support.stored import unpack_run
from swarmq.collector.ledger import read_fates
from swarmq.collector.store import Store
from swarmq.learner.checkpoint import discovery
from swarmq.learner.replay import replay
from swarmq.learner.store import batch_log
from swarmq.learner.store.records import RunIdentity

ROUNDING = 1e-5
"""Share of their way by which the weights may differ: processors, also of one family, add products in different orders."""


@pytest.fixture
def stored(tmp_path):
    return unpack_run(tmp_path)


def test_every_batch_is_read(stored):
    job, folder = stored
    places = batch_log.scan_log(folder.batch_log("main"), RunIdentity.of(job, "main"))
    trained = [place for place in places if place.index.trained]
    assert [place.index.version for place in trained] == list(range(1, 18))
    ids = [episode.episode_id for place in trained for episode in batch_log.read_record(place).episodes]
    assert len(ids) == len(set(ids)) == 135
    assert all(
        turn.num_sampled for place in trained for one in batch_log.read_record(place).episodes for turn in one.turns
    )


def test_checkpoints_are_sound(stored):
    _, folder = stored
    found = sorted(folder.checkpoints("main").glob("step-*"))
    assert [discovery.verify(path).version for path in found] == [10, 17]


def test_a_replay_from_a_stored_checkpoint_gives_the_stored_weights(stored, tmp_path):
    job, folder = stored
    start, end = (folder.checkpoints("main") / f"step-{version:08}" for version in (10, 17))
    assert replay(job, "main", folder, to_folder=tmp_path / "again", from_checkpoint=start) == 17
    [made] = (tmp_path / "again").glob("*/model.safetensors")
    first, last, now = (load_file(path) for path in (start / "model.safetensors", end / "model.safetensors", made))
    assert set(now) == set(last)
    moved, off = (
        sum(float((left[name] - right[name]).square().sum()) for name in last) ** 0.5
        for left, right in ((last, first), (now, last))
    )
    assert moved > 0
    assert off < ROUNDING * moved


def test_the_ledger_says_what_became_of_every_episode(stored):
    _, folder = stored
    ends = Counter((fate.state, fate.reason) for fate in read_fates(folder.inbox).values())
    assert ends == {("trained", ""): 135, ("dropped", "stale"): 8, ("dropped", "group_too_small"): 1}


def test_a_collector_goes_on_from_a_file_of_the_middle_of_a_run(stored, tmp_path):
    _, folder = stored
    path = tmp_path / "collector.sqlite"
    shutil.copy(folder.path / "collector-midway.sqlite", path)
    store = Store(path, run="faults")
    try:
        snapshot = store.snapshot()
        assert len(snapshot.episodes) == 5
        assert sum(map(len, snapshot.waiting.values())) == 6
        assert snapshot.tickets
        published = [name for name, fate in read_fates(path).items() if fate.state == "published"]
        assert len(published) == 40
        for episode_id in published:
            begin, end, turns = store.parts(episode_id)
            assert begin.episode_id == end.episode_id == turns[0].episode_id == episode_id
    finally:
        store.close()
