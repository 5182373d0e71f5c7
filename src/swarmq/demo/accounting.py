"""The closing proof of a demo: three independent records of the same episodes, compared.

    clients' own ledgers (a line per outcome they saw confirmed)
    batch log            (what was trained, and in which step)
    collector's ledger   (what was dropped, and why; what still waits)

Every outcome a client saw confirmed must be in exactly one of: trained once, dropped for a reason, still waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from rich.table import Table

from swarmq.collector.ledger import fates
from swarmq.config import SwarmJob
from swarmq.demo.client import Entry
from swarmq.learner.store.batch_log import records

WAITING_STATES = frozenset({"open", "waiting", "published"})


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where the episodes of a run went; `lost` and `twice` are what must be empty."""

    begun: int = 0
    """Training attempts the collector heard of."""
    confirmed: int
    """Outcomes that clients saw confirmed, training episodes alone."""
    trained: int
    dropped: dict[str, int]
    waiting: int
    """Finished, in the collector or the ready queue when the run ended."""
    redelivered: int = 0
    """Slots whose attempt was cut off by the kill, and which another client then finished."""
    lost: tuple[str, ...]
    twice: tuple[str, ...]


def settle(
    confirmed: Iterable[str],
    trained: Iterable[str],
    dropped: Mapping[str, str],
    waiting: Iterable[str],
) -> Account:
    """Compare the records; all ids are episode ids, `trained` has one entry for each time an episode was trained."""
    ended, steps, pending = set(confirmed), Counter(trained), set(waiting)
    lost = ended - steps.keys() - dropped.keys() - pending
    return Account(
        confirmed=len(ended),
        trained=len(steps),
        dropped=dict(Counter(dropped.values()).most_common()),
        waiting=len(pending - steps.keys() - dropped.keys()),
        lost=tuple(sorted(lost)),
        twice=tuple(sorted(episode for episode, times in steps.items() if times > 1)),
    )


def account_of(job: SwarmJob, confirmed: Iterable[str]) -> Account:
    """Settle a run that has stopped: its batch logs and its collector's ledger against the clients' `confirmed`."""
    trained: Counter[str] = Counter()
    dropped: dict[str, str] = {}
    for name, policy in job.policies.items():
        if policy.trained:
            log = list(records(job.run_folder.batch_log(name)))
            trained |= Counter(episode for record in log for episode in record.index.trained)  # twice by one policy
            for record in log:
                dropped |= record.index.dropped
    ledger = {episode: fate for episode, fate in fates(job.run_folder.inbox).items() if fate.state != "eval"}
    dropped |= {episode: fate.reason for episode, fate in ledger.items() if fate.state == "dropped"}
    waiting = [episode for episode, fate in ledger.items() if fate.state in WAITING_STATES]
    return msgspec.structs.replace(settle(confirmed, trained.elements(), dropped, waiting), begun=len(ledger))


def account_of_demo(job: SwarmJob, entries: Iterable[Entry]) -> Account:
    """As account_of, from the ledgers of the demo's clients, which also say which slots the kill cut off."""
    written = list(entries)
    ended = {entry.episode_id: entry for entry in written if entry.reward is not None}
    cut_off = {entry.slot for entry in written if entry.episode_id not in ended}
    redelivered = len(cut_off & {entry.slot for entry in ended.values()})
    return msgspec.structs.replace(account_of(job, ended), redelivered=redelivered)


def table_of(account: Account) -> Table:
    """The closing table."""
    table = Table(title="every episode accounted for", title_justify="left", show_header=False, min_width=48)
    table.add_column("what")
    table.add_column("episodes", justify="right")
    rows = [
        ("begun", account.begun),
        ("outcomes that clients saw confirmed", account.confirmed),
        ("trained", account.trained),
        *((f"dropped: {reason}", count) for reason, count in account.dropped.items()),
        ("waiting when the run ended", account.waiting),
        ("slots taken over after the kill", account.redelivered),
    ]
    for what, count in rows:
        table.add_row(what, f"{count:,}")
    table.add_section()
    for what, episodes in (("lost", account.lost), ("trained twice", account.twice)):
        table.add_row(what, str(len(episodes)), style="bold red" if episodes else "bold green")
    return table
