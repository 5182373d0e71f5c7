"""The job of tests that start a whole run with the tiny model."""

from __future__ import annotations

from typing import Any

import tomli_w

from support.tiny_model import tiny_model


def small_job(run: str, *, train: dict[str, Any], **settings: Any) -> str:
    """Return the text of a job file: groups of four, two in a batch, and short answers."""
    policy = {
        "model": str(tiny_model()),
        "engine": {"dtype": "float32"},
        "sampling": {"max_tokens": 8},
        "train": train,
    }
    groups = {"group_size": 4, "groups_per_batch": 2}
    return tomli_w.dumps({"run": run, "groups": groups, "policies": {"main": policy}, **settings})
