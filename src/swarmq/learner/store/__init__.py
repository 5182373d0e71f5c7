"""The learner's files and records: batch log, writer lock, report offsets, token traces, and the records between its processes.

Used by trainer and batch feeder, and read by `observe`. Never imports torch.
"""
