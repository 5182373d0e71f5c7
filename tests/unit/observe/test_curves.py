"""The curve is drawn from the event file, also from one whose writer was killed."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.image import imread

from swarmq.messages import Event
from swarmq.observe.curves import HELD_OUT, KINDS, Mark, draw_reward, find_changes, read_events


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


def test_a_reward_that_was_not_finite_is_left_out_of_the_curve(tmp_path):
    events = [
        Event(
            run="r",
            source="learner.main",
            name="step",
            at=float(version),
            fields={"version": version, "reward": reward, "reward_by_kind": {"math": reward, "code": 0.5}},
        )
        for version, reward in enumerate((0.1, math.inf, math.nan, 0.4), 1)
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    draw_reward(read_events(path), {}, tmp_path / "curve.png", title="t")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_an_edited_client_and_a_changed_setting_are_marked_where_they_took_effect():
    def step(version: int, **code_versions: int) -> Event:
        fields = {"version": version, "reward": 0.5, "code_versions": code_versions}
        return Event(run="r", source="learner.main", name="step", at=float(version), fields=fields)

    changes = [{"path": "groups.group_size", "before": 8, "value": 4}]
    control = {"state": "accepted", "changes": changes, "command_id": "c"}
    events = [
        step(1, old=4),
        step(2, old=4),
        Event(run="r", source="collector", name="control", at=2.5, fields=control),
        Event(run="r", source="collector", name="control", at=2.75, fields=control),  # asked again
        step(3, old=2, new=2),
        step(4, new=4),
    ]
    assert [(mark.at, mark.text) for mark in find_changes(events)] == [
        (2.5, "groups.group_size = 4"),
        (3.0, "client code new"),
    ]


def steps(*rewards: float, **kinds: tuple[float, ...]) -> list[Event]:
    fields = [
        {"version": v, "reward": reward, "reward_by_kind": {kind: values[v - 1] for kind, values in kinds.items()}}
        for v, reward in enumerate(rewards, 1)
    ]
    return [Event(run="r", source="learner.main", name="step", at=0.0, fields=one) for one in fields]


def columns(picture: Path, colour: str) -> tuple[int, int]:
    """The first and the last column of pixels, left of the legend, that have it."""
    pixels = imread(picture)[:, :, :3]
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    (found,) = (np.abs(pixels[:, : int(0.8 * pixels.shape[1])] - wanted) < 0.02).all(axis=2).any(axis=0).nonzero()
    return found[0], found[-1]


@pytest.mark.parametrize("far", [-3.0, 1.9])
def test_nothing_of_a_curve_is_cut_off_wherever_rewards_lie(far: float, tmp_path: Path) -> None:
    """Each curve begins far out, comes back, and ends far out; the picture has it from its first to its last step."""

    def drawn(ends: float) -> list[tuple[int, int]]:
        path = tmp_path / "curve.png"
        kinds = {"code": (0.5, 0.5, 0.5), "math": (ends, 0.25, ends)}
        draw_reward(steps(0.5, 0.5, 0.5, **kinds), {1: ends, 2: 0.75, 3: ends}, path, title="t")
        return [columns(path, colour) for colour in (HELD_OUT, KINDS[1])]

    for (left, right), (first, last) in zip(drawn(0.1), drawn(far), strict=True):
        assert abs(left - first) < 60
        assert abs(right - last) < 60
