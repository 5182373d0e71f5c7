"""The version of swarmq. pyproject.toml and all code read it here; no other file states it."""

__version__ = "0.1.0"
