"""The whole loop of sampling, training and weight pushes, timed phase by phase.

`python -m benchmarks.loop` is `run`; `model` makes the random model, `agent` is a worker process.
"""
