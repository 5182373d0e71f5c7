"""Distributed training: accelerator, sharding (FSDP2), loading by rank 0, child processes of the learner.

Runs in the learner's ranks; `processes` also in the process that starts them. Never imports the trainer.
"""
