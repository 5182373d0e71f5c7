"""Measurements anyone can repeat: `python -m benchmarks.NAME --help`."""
