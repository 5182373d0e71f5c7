"""The store: one transaction or nothing, one run, one collector."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sqlite3
from pathlib import Path

import msgspec
import pytest

from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.ledger import read_fates
from swarmq.collector.store import PLACEHOLDER, SQL, STATEMENTS, Bodies, RecentBodies, Store, decode_rows
from swarmq.errors import CollectorError
from swarmq.messages import Slot, encode
from unit.collector.memory_store import WRITERS

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "collector.sqlite"


def test_a_transaction_that_fails_leaves_nothing(path):
    store = Store(path, run="r")
    with contextlib.suppress(KeyError), store.transaction():
        store.write(do.Open("e", 1.0))
        raise KeyError
    assert store.snapshot().episodes == []
    store.close()


def test_turns_are_read_forgotten_and_rolled_back_with_their_transaction(path, say):
    store, turn = Store(path, run="r"), encode(say.turn())
    with store.transaction():
        store.write(do.Begin(encode(say.begin()), "e", 1.0))
        store.write(do.SaveTurn("e", turn))
        assert store.closed(do.Close("dropped", "silent", "e"), 2.0).turns == [turn]
        store.write(do.SaveTurn("e", turn))
        store.write(do.ForgetTurns("e"))
        store.write(do.SaveTurn("kept", turn))
    with contextlib.suppress(KeyError), store.transaction():
        store.write(do.SaveTurn("lost", turn))
        raise KeyError
    with store.transaction():
        store.write(do.SaveTurn("next", turn))
    assert store._all("SELECT episode FROM turns ORDER BY seq") == [("kept",), ("next",)]
    store.close()


def test_a_transaction_that_an_earlier_collector_left_in_the_log_means_what_it_meant(path, say):
    begin, turn, end = (encode(say.begin()), encode(say.turn()), encode(say.end(calls=("a",))))
    transaction = [
        ["Open", "e", 1.0],
        ["SaveBegin", begin, "e"],
        ["SaveTurn", "e", turn],
        ["Seal", "t/0/0", "math", "c", b"digest", "a", 2.0, "e"],
        ["SaveEnd", end, "e"],
        ["Accept", "main", "e"],
    ]
    store = Store(path, run="r")
    with store.transaction():
        for effect in decode_rows(msgspec.msgpack.encode(transaction)):
            store.write(effect)
    columns = "state, began_at, begin, slot, kind, client, digest, calls, ended_at, end, policies"
    assert store._one(f"SELECT {columns} FROM episodes") == (
        *("waiting", 1.0, begin),
        *("t/0/0", "math", "c", b"digest", "a", 2.0),
        *(end, "main"),
    )
    assert store._all("SELECT episode, body FROM turns") == [("e", turn)]
    store.close()


def test_no_row_that_collectors_send_each_other_has_other_fields_than_before():
    """An array in a log is read by its name and its order: a row with other fields takes another name."""
    assert {row.__name__: list(row.__struct_fields__) for row in SQL} == json.loads((DATA / "effects.json").read_text())


def test_what_is_committed_is_there_for_the_next_process(path):
    store = Store(path, run="r")
    with store.transaction():
        store.write(do.Open("e", 1.0))
    store.close()
    store = Store(path, run="r")
    assert [episode.episode_id for episode in store.snapshot().episodes] == ["e"]
    store.close()


def test_commits_reach_the_disk_before_they_return(path):
    store = Store(path, run="r")
    assert store._one("PRAGMA journal_mode") == ("wal",)
    assert store._one("PRAGMA synchronous") == (2,)
    store.close()


def test_what_an_older_swarmq_wrote_of_an_episode_of_two_clients_is_understood(path):
    store = Store(path, run="r")
    with store.transaction():
        store.write(do.Open("e", 1.0))
    store._db.execute("UPDATE episodes SET tainted = 1")
    store.close()
    store = Store(path, run="r")
    assert [episode.taint for episode in store.snapshot().episodes] == ["two_clients"]
    store.close()


def test_a_store_of_an_older_swarmq_learns_which_slots_are_given_up(path):
    store = Store(path, run="r")
    store._db.execute("DROP TABLE given_up")
    store.close()
    store = Store(path, run="r")
    with store.transaction():
        store.write(do.GiveUpSlot("t/0", "t/1/0", "math", 2, 5.0))
    assert store.snapshot().given_up == [("t/0", "t/1/0", "math", 2, 5.0)]
    store.close()


def test_a_store_of_an_older_swarmq_learns_which_attempts_of_a_round_are_given_up(path):
    store = Store(path, run="r")
    store._db.execute("ALTER TABLE eval_slots DROP COLUMN given_up")
    store._db.execute(
        "INSERT INTO eval_slots (id, slot, kind, version, began_at) VALUES ('a/0/0', ?, 'math', 0, 1.0)",
        [msgspec.msgpack.encode(Slot(task_id="a"))],
    )
    store.close()
    store = Store(path, run="r")
    assert [one.given_up for one in store.snapshot().evals.slots.values()] == [False]
    with store.transaction():
        store.write(do.GiveUpEval("a/0/0"))
    store.close()
    store = Store(path, run="r")
    assert [one.given_up for one in store.snapshot().evals.slots.values()] == [True]
    store.close()


def test_a_store_of_an_older_swarmq_learns_the_metrics_of_attempts_and_keeps_evaluations(path):
    store = Store(path, run="r")
    store._db.executescript("DROP TABLE evaluations; ALTER TABLE eval_slots DROP COLUMN metrics")
    store._db.execute(
        "INSERT INTO eval_slots (id, slot, kind, version, began_at) VALUES ('a/0/0', ?, 'math', 0, 1.0)",
        [msgspec.msgpack.encode(Slot(task_id="a"))],
    )
    store.close()
    store = Store(path, run="r")
    assert [one.metrics for one in store.snapshot().evals.slots.values()] == [{}]
    evaluation = do.SendEvaluation("main", 1.0, b"body")
    with store.transaction():
        store.write(do.EvalDone(1.0, True, msgspec.msgpack.encode({"calls": 2.0}), "a/0/0"))
        store.write(evaluation)
    store.close()
    store = Store(path, run="r")
    assert [one.metrics for one in store.snapshot().evals.slots.values()] == [{"calls": 2.0}]
    assert evaluation in store.outbox()
    with store.transaction():
        store.write(do.EvaluationSent("main", 1.0))
    assert evaluation not in store.outbox()
    store.close()


def test_a_store_of_another_run_is_refused(path):
    Store(path, run="r").close()
    with pytest.raises(CollectorError, match=r"collector.sqlite: belongs to run 'r', not 'other'"):
        Store(path, run="other")
    Store(path, run="r").close()


def test_a_store_of_a_newer_swarmq_is_refused(path):
    Store(path, run="r").close()
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    database.close()
    with pytest.raises(CollectorError, match="store schema 99, this swarmq reads 2"):
        Store(path, run="r")


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be looked at" * 50, None])
def test_a_file_that_is_no_store_is_refused(path, content):
    path.parent.mkdir()
    if content:
        path.write_bytes(content)
    else:
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE other (x)")
        database.close()
    with pytest.raises(CollectorError, match=r"collector\.sqlite: (not a collector's store|file is not a database)"):
        Store(path, run="r")


def test_a_second_collector_is_refused_and_told_who_holds_the_store(path):
    context = multiprocessing.get_context("spawn")
    ready, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(path, ready, leave))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(CollectorError, match=rf"in use by the collector with pid {holder.pid}"):
        Store(path, run="r")
    leave.set()
    holder.join()
    Store(path, run="r").close()


def _hold(path, ready, leave):
    store = Store(path, run="r")
    ready.set()
    leave.wait(60)
    store.close()


def test_the_ledger_can_be_read_beside_a_running_collector(path, say):
    store = Store(path, run="r")
    rules = Rules(run="r", trained=("main",), known=("main",), mix={"math": 1.0})
    core = Core(rules, store, store.snapshot(), now=1.0)
    pieces = [say.begin("a"), say.turn(episode="a"), say.end("a"), say.consumed("a", version=4)]
    pieces += [say.begin("b", "u"), say.end("b", status="failed"), say.begin("c", "v")]
    with store.transaction():
        for number, piece in enumerate(pieces):
            for effect in core.take(piece, encode(piece), float(number)):
                store.write(effect)
    told = {episode: (fate.slot, fate.state, fate.reason) for episode, fate in read_fates(path).items()}
    assert told == {
        "a": ("t/0/0", "trained", ""),
        "b": ("u/0/0", "dropped", "failed"),
        "c": ("", "open", ""),
    }
    store.close()


@pytest.mark.parametrize("effect", SQL, ids=lambda effect: effect.__name__)
def test_every_field_of_an_effect_has_a_placeholder_of_its_name(effect):
    for_the_transcript = {"end", "outcomes"} if effect is do.Close else set()
    assert sorted({*PLACEHOLDER.findall(SQL[effect]), *for_the_transcript}) == sorted(effect.__struct_fields__)


def test_every_row_of_the_twin_has_a_statement_and_the_reverse():
    assert SQL.keys() == WRITERS.keys()


def test_a_store_of_an_older_swarmq_learns_when_episodes_ended(path):
    store = Store(path, run="r")
    store._db.execute("ALTER TABLE episodes DROP COLUMN ended_at")
    store.close()
    store = Store(path, run="r")
    with store.transaction():
        store.write(do.Open("e", 1.0))
        store.write(do.Seal("t/0/0", "math", "c", b"", "", 5.0, "e"))
    assert store._one("SELECT ended_at FROM episodes") == (5.0,)
    store.close()


def test_no_row_of_a_transaction_costs_a_temporary_table(path):
    Store(path, run="r").close()
    with contextlib.closing(sqlite3.connect(path)) as file:  # as earlier versions made it
        file.execute("CREATE INDEX live ON episodes (state) WHERE state IN ('open', 'waiting', 'published')")
    store = Store(path, run="r")
    for statement, _ in STATEMENTS.values():
        program = store._all(f"EXPLAIN {statement}", *[None] * statement.count("?"))
        assert "OpenEphemeral" not in {step[1] for step in program}, statement
    store.close()


def test_bodies_of_published_episodes_are_remembered_up_to_a_number_of_bytes():
    recent = RecentBodies(250)
    for name in ("a", "b", "c"):
        recent.add(name, Bodies((b"x" * 40, b"y" * 30, 0.0, 0.0), [b"z" * 30]))
    assert recent.pop("a") is None
    assert [recent.pop(name).size for name in ("b", "c")] == [100, 100]
    recent.add("large", Bodies((b"x" * 300, None, 0.0, 0.0), []))
    assert recent.pop("large") is None
