"""The batch feeder: the learner's broker side. Forms batches from rollouts, logs them, and hands them to the trainer.

`process` runs as a process of its own without torch; `ipc` is the trainer's end of the link to it. Never imports torch or `train`.
"""
