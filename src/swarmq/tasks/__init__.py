"""Making of tasks from documents, and from traces of an agent in production. `swarmq tasks` runs it.

    from swarmq.tasks import score      # the reward of a task that was made from a document

    documents ──> passages ──teacher──> drafts ──> checked, deduplicated, solved ──> tasks.jsonl ──> swarmq feed
    traces    ──> conversations ─────────────────> deduplicated ───────────────────> tasks.jsonl

The `worker` runs `agent`; everything else runs once, in the command. A task that cannot be checked by code is dropped.
"""

from swarmq.tasks.checks import Check, extract_answer, score

__all__ = ["Check", "extract_answer", "score"]
