"""Made-up closed episodes, and segments written by hand."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import zstandard

from support.episodes import make_turns
from swarmq.messages import DeliveryReport, EpisodeBegin, EpisodeEnd, Slot, Turn, encode
from swarmq.transcripts.format import (
    Transcript,
    TranscriptMeta,
    pack_body,
    pack_frame,
    pack_segment_header,
    segment_path,
)
from swarmq.transcripts.writer import ClosedEpisode


def make_transcript(name: str = "e0", *, state: str = "trained", reason: str = "", kind: str = "default") -> Transcript:
    """A transcript of three turns; what only the writer derives is left at its default."""
    slot = Slot(task_id=f"task-{name}")
    begin = EpisodeBegin(
        run="r", episode_id=name, slot=slot, kind=kind, group_size=1, policies=("main",), client_id="c"
    )
    turns = make_turns(random.Random(name), episode_id=name, turns=3, vocab=128, length=8, version=2)
    end = EpisodeEnd(
        run="r",
        episode_id=name,
        status="finished",
        rewards={"main": 0.5},
        calls=tuple(turn.call_id for turn in turns[:2]),
    )
    meta = TranscriptMeta(
        episode_id=name,
        state=state,
        reason=reason,
        kind=kind,
        slot=slot.id,
        task_id=slot.task_id,
        group_id=slot.group_id,
        group_size=1,
        client_id="c",
        policies=("main",),
        began_at=1.0,
        ended_at=2.0,
        closed_at=3.0,
        turns=3,
        body_bytes=7,
    )
    return Transcript(meta=meta, begin=begin, end=end, turns=tuple(turns))


def frame_of(transcript: Transcript, *, with_body: bool = True) -> bytes:
    end = encode(transcript.end) if transcript.end else None
    turns: list[Turn] = list(transcript.turns)
    body = pack_body(encode(transcript.begin), end, [encode(turn) for turn in turns])
    return pack_frame(msgspec.msgpack.encode(transcript.meta), zstandard.compress(body) if with_body else b"")


def write_segment(folder: Path, number: int, frames: list[bytes], *, generation: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = segment_path(folder, number)
    path.write_bytes(b"".join([pack_segment_header(generation), *frames]))
    return path


def make_closed(
    name: str = "e0",
    *,
    state: str = "trained",
    reason: str = "",
    kind: str = "default",
    at: float = 3.0,
    padding: int = 0,
    with_end: bool = True,
) -> ClosedEpisode:
    """What the collector hands to the writer; `padding`: incompressible bytes of its messages."""
    made = make_transcript(name, kind=kind)
    report = DeliveryReport(run="r", served_id="s", sent={name: ("c0",)})
    begin = encode(made.begin)
    turns = [encode(turn) for turn in made.turns]
    if padding:
        noise = random.Random(name).randbytes(padding)
        turns[0] = encode(msgspec.structs.replace(made.turns[0], messages=noise))
    return ClosedEpisode(
        episode_id=name,
        state=state,
        reason=reason,
        began_at=at - 2,
        ended_at=at - 1,
        closed_at=at,
        begin=begin,
        end=encode(made.end) if with_end else None,
        turns=[turns[0], encode(report), *turns[1:]],
        outcomes=[("main", "trained", 7, "")] if state == "trained" else [],
        size=1000 + padding,
    )
