"""Every field of an event is described, and every described field is one that the code sends."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import swarmq
from swarmq.event_fields import EVENTS, FIELDS, undescribed
from swarmq.messages import Event, EventName
from swarmq.proxy.counters import Counters
from swarmq.proxy.episodes.cache import EpisodeCache

NOT_SENT = {"weights", "stage"}
"""Names that readers accept and nothing sends."""


def test_every_event_has_a_meaning_and_fields():
    assert EVENTS.keys() == FIELDS.keys()
    assert {name for name, _ in EVENTS} == set(get_args(EventName)) - NOT_SENT


def test_the_state_of_a_proxy_is_described():
    fields = Counters().fields() | EpisodeCache(idle_s=1.0).fields()
    event = Event(run="r", source="proxy.0", name="state", at=0.0, fields=fields)
    assert undescribed(event) == set()
    assert fields.keys() == FIELDS["state", "proxy"].keys()


def test_a_field_without_a_description_is_found():
    event = Event(run="r", source="learner.main", name="step", at=0.0, fields={"loss": 1.0, "luck": 1.0})
    assert undescribed(event) == {"luck"}
    assert undescribed(Event(run="r", source="up", name="warning", at=0.0, fields={"text": ""})) == set()


@pytest.mark.parametrize("key", FIELDS, ids=" of ".join)
def test_described_fields_are_those_that_the_code_sends(key):
    source = Path(swarmq.__file__).parent
    texts = [path.read_text() for path in source.rglob("*.py") if path.name != "event_fields.py"]
    code = "\n".join(texts)
    assert [field for field in FIELDS[key] if f'"{field}"' not in code and f"{field}=" not in code] == []
