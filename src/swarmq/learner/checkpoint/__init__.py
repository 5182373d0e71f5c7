"""Checkpoints: writing and restoring (`save_load`), the model's files, and discovery of the newest valid one (without torch).

Runs in the learner's ranks; rank 0 writes. Knows the trainer only as `save_load.TrainerState`.
"""
