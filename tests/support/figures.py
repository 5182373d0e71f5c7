"""Figures that a test measures on its way, for a benchmark that runs the test and publishes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

FIGURES_ENV = "SWARMQ_TEST_FIGURES"
"""Environment variable with the folder that gets a file for each figure, NAME.json."""


def write_figures(**figures: float) -> None:
    if folder := os.environ.get(FIGURES_ENV):
        for name, value in figures.items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(value))
