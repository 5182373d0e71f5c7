"""The collector's reports: fields of its `state` event, and warnings that name the cause when nothing moves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import msgspec

from swarmq.collector.decide.core import Core
from swarmq.messages import Control
from swarmq.runtime.wording import count_of

MAX_REFUSED = 4096
"""Maximum number of episodes whose refused model calls are remembered."""
PATIENCE_S = 120.0
"""Seconds of standstill before the first warning, and between repeated warnings."""

HEADLINE = (
    *("begun", "finished", "forwarded", "trained", "eval_finished", "duplicates"),
    *("orphan_turns", "unseen_turns", "rewards_uncredited"),
)


def state_fields(core: Core) -> dict[str, Any]:
    """Return the fields of the `state` event. Every training episode that began is open, waits in a group, is with a learner,
    was trained, or was dropped for a reason."""
    counts = core.counts
    dropped = {name.removeprefix("dropped."): n for name, n in counts.items() if name.startswith("dropped.")}
    return {
        **{name: counts[name] for name in HEADLINE},
        "open": sum(1 for episode in core.episodes.open.values() if episode.begin and episode.begin.mode == "train"),
        "waiting": sum(len(group.winners) for group in core.groups.open.values()),
        "in_learners": len(core.groups.place),
        "dropped": dropped,
        "groups_open": len(core.groups.open),
        "groups_ready": dict(core.groups.ready),
        "tickets_out": {kind: len(ids) for kind, ids in core.tickets.out.items()},
        "versions": dict(core.run.versions),
        **(_control(core.control.state, is_drained=core.is_drained) if core.control else {}),
        "absorbed": {name: n for name, n in counts.items() if name not in HEADLINE and not name.startswith("dropped.")},
    }


def _control(state: Control, *, is_drained: bool) -> dict[str, Any]:
    """Return the control state for the proxies, which have no control queue of their own."""
    changes = [msgspec.to_builtins(change) for change in state.changes]
    pace = "drained" if is_drained else state.pace
    return {"control": state.number, "pace": pace, "lent": list(state.lent), "changes": changes}


class StandstillWatch:
    """Warnings about what has not moved in a run for PATIENCE_S."""

    def __init__(self) -> None:
        self._since: dict[Hashable, tuple[float, float]] = {}
        """Standstill -> (time when it was first seen, time of its last warning)."""

    def find_warnings(self, core: Core, now: float) -> list[str]:
        """Return a warning for everything that has stood still for PATIENCE_S, at most one every PATIENCE_S."""
        present = {}
        lines = []
        for key, text in _standstills(core, now):
            since, warned_at = present[key] = self._since.get(key, (now, now))
            if now - warned_at >= PATIENCE_S:
                present[key] = (since, now)
                lines.append(f"{text}; nothing has moved for {now - since:.0f} s")
        self._since = present
        return lines


class NoTurnsWarnings:
    """Warnings about episodes that ended without a model call, because their calls were refused, or their agent uses another
    address or key."""

    def __init__(self) -> None:
        self._num = 0
        self._next_warning_at = 0.0
        self._refused: OrderedDict[str, str] = OrderedDict()
        """Episode id -> reason why a proxy refused a model call of the episode."""

    def note_refusal(self, refused: Mapping[str, Any]) -> None:
        """Remember why a proxy refused a model call. `refused`: fields of its `refused` event."""
        self._refused[str(refused.get("episode_id"))] = str(refused.get("why"))
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def check(self, episode: Mapping[str, Any], now: float) -> str | None:
        """Return a warning about an `episode` event, given its fields, or None. There is at most one warning every
        PATIENCE_S."""
        if episode["reason"] != "no_turns":
            return None
        self._num += 1
        if now < self._next_warning_at:
            return None
        num, self._num, self._next_warning_at = self._num, 0, now + PATIENCE_S
        who = f"the last {episode['episode_id']} of client {episode['client_id']}, kind {episode['kind']}"
        ended, are = count_of(num, "episode ended", "episodes ended"), "is" if num == 1 else "are"
        if why := self._refused.get(episode["episode_id"]):
            return f"{ended} without an answered model call and {are} not trained, {who}: its calls were refused: {why}"
        return (
            f"{ended} without a model call and {are} not trained, {who}: does the agent use ep.base_url and ep.api_key?"
        )


def _standstills(core: Core, now: float) -> Iterator[tuple[Hashable, str]]:
    """Yield (key, text) for everything that waits now. The key contains the values that change when the wait ends."""
    rules, counts = core.rules, core.counts
    for group_id, group in core.groups.open.items():
        if group.winners:
            yield ("group", group_id, len(group.winners)), _describe_group(core, group_id, now)
    for policy in core.run.learning():
        if (num := core.groups.ready[policy]) >= rules.groups_per_batch:
            version = core.run.versions[policy]
            yield (
                ("learner", policy, version, num),
                f"{count_of(num, 'group waits for the learner', 'groups wait for the learner')} of {policy} at version {version}",
            )
    if core.episodes.open:
        idle = count_of(
            len(core.episodes.open),
            "episode is open, it does not call the model",
            "episodes are open, none calls the model",
        )
        yield ("turns", counts["turns"]), f"no turns: {idle}"
    busy = {episode.begin.kind for episode in core.episodes.open.values() if episode.begin}
    for kind, tickets in core.tickets.out.items():
        if tickets and kind not in busy:
            why = f"no client takes tickets of kind {kind}, or its tasks are all done"
            yield (
                ("clients", kind, counts["begun"], len(tickets)),
                f"no turns: {count_of(len(tickets), 'ticket out, 0 episodes open', 'tickets out, 0 episodes open')}: {why}",
            )


def _describe_group(core: Core, group_id: str, now: float) -> str:
    group, deadline_s = core.groups.open[group_id], core.rules.deadline_s
    need, got = core.groups.need(group), len(group.winners)
    then = f"goes on with {got}" if got >= need else f"is dropped, as it has {got} and needs {need} (groups.min_group)"
    return (
        f"group {group_id} waits {now - group.since:.0f} s for {group.lacks} of {group.size} members, "
        f"{len(group.running)} of them running; at {deadline_s:g} s (groups.deadline_s) it {then}"
    )
