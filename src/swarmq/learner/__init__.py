"""The learner: takes whole groups of rollouts, logs each batch, takes optimizer steps, and pushes the new weights to the engines.

`swarmq-learner` runs `main`; each rank runs `train.loop`, and rank 0 has the batch feeder (`feed.process`) as a child process. Other
packages may read `store` (batch log, token traces) and call `preflight`, `replay` and `doctor`.
"""
