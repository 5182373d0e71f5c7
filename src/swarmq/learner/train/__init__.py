"""Training: the trainer (one optimizer step), the loop around it, metrics, trackers, and updates of the engines.

Runs in the learner's ranks, with torch; only rank 0 talks to the batch feeder and to engines. Offers `trainer.Trainer` and
`loop.Learner`.
"""
