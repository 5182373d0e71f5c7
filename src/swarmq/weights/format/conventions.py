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
