"""Which runs may start: never more than the host has room for, each GPU for one run, and in the order of the queue."""

from hypothesis import given
from hypothesis import strategies as st

from swarmq.host_daemon.ledger import RunRecord
from swarmq.host_daemon.queue import choose_startable, list_queued

STATES = ("queued", "queued", "queued", "running", "stopping", "stopped", "done", "failed")


@st.composite
def hosts(draw):
    num_gpus, records, free = draw(st.integers(0, 8)), [], set(range(8))
    for number, state in enumerate(draw(st.lists(st.sampled_from(STATES), max_size=8))):
        needs = draw(st.integers(0, num_gpus))
        held = tuple(sorted(free & set(range(num_gpus))))[:needs] if state in {"running", "stopping"} else ()
        free -= set(held)
        fields = {"run": f"r{number}", "job": {}, "request_id": "", "digest": "", "owner": "", "launched_at": 0.0}
        records.append(
            RunRecord(**fields, num_gpus=needs, state=state, gpus=held, queued_at=draw(st.floats(0, 9))),
        )
    return records, num_gpus, draw(st.integers(1, 4))


@given(hosts())
def test_what_starts_fits_and_nobody_is_overtaken(host):
    records, num_gpus, most_running = host
    chosen = list(choose_startable(records, num_gpus=num_gpus, most_running=most_running))
    running = [one for one in records if one.is_running]
    held = [gpu for one in running for gpu in one.gpus] + [gpu for _, gpus in chosen for gpu in gpus]
    assert len(held) == len(set(held)) <= num_gpus
    assert all(len(gpus) == record.num_gpus for record, gpus in chosen)
    assert not chosen or len(running) + len(chosen) <= most_running
    queued = list_queued(records)
    assert [record for record, _ in chosen] == queued[: len(chosen)]
    left = queued[len(chosen) :]
    assert not left or len(running) + len(chosen) >= most_running or left[0].num_gpus > num_gpus - len(held)
