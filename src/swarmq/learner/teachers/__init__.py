"""Models that score sampled tokens and never change: references, loaded teachers, served teachers; and tokenizer checks.

Runs in the learner's ranks; `availability` also in the batch feeder, without torch.
"""
