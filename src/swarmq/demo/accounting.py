"""The final account of a demo, from three independent records of the same episodes.

  clients' ledgers     (a line per outcome whose confirmation they saw)
  batch log            (which episodes were trained, and in which step)
  collector's ledger   (which were dropped, and why; which still wait)

Every confirmed outcome must be in exactly one of: trained once, dropped for a reason, still waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from rich.table import Table

from swarmq.collector.ledger import read_fates
from swarmq.config import SwarmJob
from swarmq.demo.client import LedgerEntry
from swarmq.learner.store.batch_log import read_records

WAITING_STATES = frozenset({"open", "waiting", "published"})


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of a run's episodes; `lost` and `twice` must be empty."""

    begun: int = 0
    """Number of training attempts that the collector knows."""
    confirmed: int
    """Number of outcomes of training episodes whose confirmation clients saw."""
    trained: int
    dropped: dict[str, int]
    waiting: int
    """Number of finished episodes in the collector or the ready queue when the run ended."""
    redelivered: int = 0
    """Number of slots whose attempt the kill cut off and that another client then finished."""
    lost: tuple[str, ...]
    twice: tuple[str, ...]


def settle(
    confirmed: Iterable[str],
    trained: Iterable[str],
    dropped: Mapping[str, str],
    waiting: Iterable[str],
) -> Account:
    """Compare the records by episode id; `trained` has one entry for each time an episode was trained."""
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


def settle_run(job: SwarmJob, confirmed: Iterable[str]) -> Account:
    """Reconcile the batch logs and the ledger of a stopped run with the clients' `confirmed` episodes, and return the account."""
    trained: Counter[str] = Counter()
    dropped: dict[str, str] = {}
    for name, policy in job.policies.items():
        if policy.trained:
            log = list(read_records(job.run_folder.batch_log(name)))
            trained |= Counter(
                episode for record in log for episode in record.index.trained
            )  # an episode counted twice was trained twice by one policy
            for record in log:
                dropped |= record.index.dropped
    ledger = {episode: fate for episode, fate in read_fates(job.run_folder.inbox).items() if fate.state != "eval"}
    dropped |= {episode: fate.reason for episode, fate in ledger.items() if fate.state == "dropped"}
    waiting = [episode for episode, fate in ledger.items() if fate.state in WAITING_STATES]
    return msgspec.structs.replace(settle(confirmed, trained.elements(), dropped, waiting), begun=len(ledger))


def settle_demo(job: SwarmJob, entries: Iterable[LedgerEntry]) -> Account:
    """Settle a stopped demo from its clients' ledgers, which also tell which slots the kill cut off."""
    written = list(entries)
    ended = {entry.episode_id: entry for entry in written if entry.reward is not None}
    cut_off = {entry.slot for entry in written if entry.episode_id not in ended}
    redelivered = len(cut_off & {entry.slot for entry in ended.values()})
    return msgspec.structs.replace(settle_run(job, ended), redelivered=redelivered)


def render_table(account: Account) -> Table:
    """Render the final table."""
    table = Table(title="account of all episodes", title_justify="left", show_header=False, min_width=48)
    table.add_column("what")
    table.add_column("episodes", justify="right")
    rows = [
        ("begun", account.begun),
        ("outcomes confirmed to clients", account.confirmed),
        ("trained", account.trained),
        *((f"dropped: {reason}", count) for reason, count in account.dropped.items()),
        ("waiting when the run ended", account.waiting),
        ("slots finished by another client after the kill", account.redelivered),
    ]
    for what, count in rows:
        table.add_row(what, f"{count:,}")
    table.add_section()
    for what, episodes in (("lost", account.lost), ("trained twice", account.twice)):
        table.add_row(what, str(len(episodes)), style="bold red" if episodes else "bold green")
    return table
