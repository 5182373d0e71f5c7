"""Names and markers that the plug-in inside vLLM and its callers agree on. Standard library only."""

from __future__ import annotations

UPDATING = "updating-"
"""Prefix of an engine's weight-version label while its weights are being changed or are in doubt."""

UNANNOUNCED = f"{UPDATING}unannounced"
"""Label that the plug-in sets if weights change without an `updating-` label (`unannounced_changes.py`)."""

UNTOUCHED = "the model was not touched"
"""Text in every error after which the engine can continue with its former weights."""

WORKER_FACTS_ROUTE = "/swarmq/facts"
"""HTTP route that returns the facts of every worker (`worker_extension.py`)."""

RECEIVER_PORT_ENV = "SWARMQ_RECEIVER_PORT"
"""Environment variable that tells an engine the port of the weight receiver on its host (`weights/receiver/`)."""

DRAFT_COUNTS = (8, 3, 0)
"""Numbers of tokens that an engine with `speculation = "ngram"` may draft in a step, the first one first."""

DRAFT_SCHEDULE = [[1, 1, 8], [2, 2, 3], [3, 1 << 20, 0]]
"""vLLM's table of batch sizes and drafts. It captures CUDA graphs of whole steps for the numbers in it alone; the ranges mean nothing, because
`drafts.py` replaces what is read from it."""

SHORTEST_MATCH, LONGEST_MATCH = 2, 8
"""Tokens that must be the same before a draft, and number after which further ones no longer count."""
