"""The curve is drawn from the event file, also from one whose writer was killed."""

import msgspec

from swarmq.messages import Event
from swarmq.observe.curves import Mark, draw_reward, read_events


def test_a_torn_last_line_is_left_out_and_the_rest_is_drawn(tmp_path):
    events = [
        Event(run="r", source="learner.main", name="step", at=float(v), fields={"version": v, "reward": v / 10})
        for v in range(1, 6)
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(e) + b"\n" for e in events) + b'{"type":"ev')
    assert list(read_events(path)) == events
    picture = tmp_path / "curve.png"
    draw_reward(read_events(path), {0: 0.2, 5: 0.6}, picture, title="t", marks=[Mark(at=3.0, text="client killed")])
    assert picture.read_bytes().startswith(b"\x89PNG")
