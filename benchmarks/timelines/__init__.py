"""Training on folded timelines against one row for every turn.

`python -m benchmarks.timelines` is `run`; `workloads` makes the episodes, `oracle` compares gradients, `results` and `figure` show them.
"""
