"""The tables of README and docs, made from `benchmarks/results`.

`python -m benchmarks.tables` writes them; a test compares.
"""
