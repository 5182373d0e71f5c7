"""Finished episodes that one core's collector takes from bytes on `in` to bytes for `ready`, commits to disk included.

The broker is left out: messages are decoded and checked, decided, committed in batches as the service does it, and every
episode is put together, encoded, marked, reported on and forgotten. Counted per CPU second of the process, which a
busy machine changes little; wall-clock stands beside it. Example:

    python -m benchmarks.collector --turns 10
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from swarmq.collector.decide import effects as do
from swarmq.collector.decide.core import Core
from swarmq.collector.decide.state import Rules
from swarmq.collector.service import BATCH, build_rollout
from swarmq.collector.store import Store
from swarmq.messages import (
    DeliveryReport,
    EpisodeBegin,
    EpisodeEnd,
    Message,
    Slot,
    StepReport,
    Turn,
    VersionSpan,
    decode,
    encode,
    new_id,
    pack_floats,
    pack_ids,
)
from swarmq.transcripts.read import scan
from swarmq.transcripts.writer import ClosedEpisode, TranscriptWriter

RUN, GROUP_SIZE = "benchmark", 8
RULES = Rules(run=RUN, trained=("main",), known=("main",), mix={"math": 1.0}, groups_per_batch=8)
REPEATS = 5


class Pass(NamedTuple):
    cpu_s: float
    wall_s: float
    forwarded: int


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=1600)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a turn, half of them sampled")
    parser.add_argument(
        "--transcripts", action="store_true", help="compare with and without transcripts; saves nothing"
    )
    arguments = parser.parse_args()
    if arguments.transcripts:
        ratios = compare_transcripts(arguments.episodes, arguments.turns, arguments.tokens // 2)
        print(
            report.table(["", "median", "low", "high"], [["with / without transcripts", *report.Spread.of(ratios)[:3]]])
        )
        return
    bodies = [encode(message) for message in traffic(arguments.episodes, arguments.turns, arguments.tokens // 2)]
    passes = [collect(bodies) for _ in range(REPEATS)]
    assert all(one.forwarded == arguments.episodes for one in passes)
    cpu, wall = (
        report.Spread.of(arguments.episodes / seconds for seconds in column)
        for column in ([one.cpu_s for one in passes], [one.wall_s for one in passes])
    )
    num_messages = len(bodies) / arguments.episodes
    figures = {
        "episodes_per_cpu_s": cpu.median,
        "pieces_per_cpu_s": cpu.median * num_messages,
        "episodes_per_wall_s": wall.median,
    }
    print(report.table(["", "median", "low", "high"], [["episodes per CPU s", *cpu[:3]], ["per wall s", *wall[:3]]]))
    detail = {**vars(arguments), "out": None, "cpu": cpu.samples, "wall": wall.samples}
    report.save("collector", figures, detail=detail, out=arguments.out)


def traffic(episodes: int, turns: int, tokens: int) -> list[Message]:
    """Return groups of episodes. The messages of a group are interleaved, as concurrent agents send them; each row of turns is
    followed by the delivery report of the row before."""
    messages: list[Message] = []
    for number in range(episodes // GROUP_SIZE):
        members = [list(episode(f"t{number}", repeat, turns, tokens)) for repeat in range(GROUP_SIZE)]
        reports: list[Message] = []
        for row in zip(*members, strict=True):
            messages += [*row, *reports]
            sent = {message.episode_id: (message.call_id,) for message in row if isinstance(message, Turn)}
            reports = [DeliveryReport(run=RUN, served_id=new_id(), sent=sent)] if sent else []
    return messages


def episode(task: str, repeat: int, turns: int, tokens: int) -> list[Message]:
    name, parent, shared = new_id(), None, 0
    slot = Slot(task_id=task, repeat=repeat)
    begin = EpisodeBegin(
        run=RUN, episode_id=name, slot=slot, kind="math", group_size=GROUP_SIZE, policies=("main",), client_id="c"
    )
    messages: list[Message] = [begin]
    for _ in range(turns):
        turn = Turn(
            run=RUN,
            episode_id=name,
            policy="main",
            call_id=new_id(),
            request_id=new_id(),
            request_digest=new_id(),
            parent=parent,
            shared=shared,
            prompt_ids=pack_ids(range(tokens)),
            sampled_ids=pack_ids(range(tokens)),
            logprobs=pack_floats([-1.0] * tokens),
            versions=(VersionSpan(version=3, start=0, end=tokens),),
            messages=b"x" * 4 * tokens,
            receipt=True,
        )
        messages.append(turn)
        parent, shared = turn.call_id, shared + 2 * tokens
    return [*messages, EpisodeEnd(run=RUN, episode_id=name, status="finished", rewards={"main": 1.0})]


def compare_transcripts(episodes: int = 1600, turns: int = 10, tokens: int = 128, pairs: int = 15) -> list[float]:
    """Return, for each pair of passes, episodes per second with transcripts over episodes per second without.

    By the wall clock, because the writer is a thread beside the collector's. The order within a pair alternates.
    """
    bodies = [encode(message) for message in traffic(episodes, turns, tokens)]
    ratios = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        wall_s = {recorded: collect(bodies, transcripts=recorded).wall_s for recorded in order}
        ratios.append(wall_s[False] / wall_s[True])
    return ratios


def collect(bodies: list[bytes], *, transcripts: bool = False) -> Pass:
    """Send all messages once through a core with a fresh store, and record transcripts as the service does, if asked to."""
    with tempfile.TemporaryDirectory() as folder:
        writer = (
            TranscriptWriter(Path(folder) / "transcripts", size_bytes=2 * 10**9, age_s=1e9) if transcripts else None
        )
        closed: list[ClosedEpisode] = []
        store = Store(Path(folder) / "collector.sqlite", run=RUN)
        store.keeps_bodies = transcripts
        core = Core(RULES, store, store.snapshot(), now=0.0)
        inbox, confirmed, num_forwarded, version = deque(bodies), list[do.Forward](), 0, 0
        cpu, wall = time.process_time(), time.perf_counter()
        while inbox or confirmed:
            effects: list[do.Effect] = []
            closing: list[ClosedEpisode] = []
            with store.transaction():
                steps = [core.confirm_forward(item.episode_id, item.policy) for item in confirmed]
                for effect in (effect for step in steps for effect in step):
                    store.write(effect)
                for body in [inbox.popleft() for _ in range(min(BATCH, len(inbox)))]:
                    for effect in core.take(decode(body), body, 1.0):
                        if writer and type(effect) is do.Close and (episode := store.closed(effect, time.time())):
                            closing.append(episode)
                        store.write(effect)
                        effects.append(effect)
                for effect in core.settle():
                    store.write(effect)
                if writer and closed:
                    writer.offer(closed)
            closed = closing
            confirmed = [effect for effect in effects if isinstance(effect, do.Forward)]
            for item in confirmed:
                message = build_rollout(store, item)
                assert message is not None
                encode(message)
            num_forwarded += len(confirmed)
            if confirmed:
                version += 1
                trained = tuple(item.episode_id for item in confirmed)
                inbox.append(
                    encode(StepReport(run=RUN, policy="main", record=version, version=version, trained=trained))
                )
        done = Pass(time.process_time() - cpu, time.perf_counter() - wall, num_forwarded)
        store.close()
        if writer:
            writer.offer(closed)
            writer.close()
            assert not writer.lost
            found = sum(1 for _ in scan(Path(folder) / "transcripts"))
            assert found == num_forwarded, f"{found} of {num_forwarded} transcripts were recorded"
    return done


if __name__ == "__main__":
    main()
