"""The loop beside TRL's trainer, on the same model, prompts and number of episodes.

`python -m benchmarks.trl` is `run`; `trl_process` runs in an environment that has TRL.
"""
