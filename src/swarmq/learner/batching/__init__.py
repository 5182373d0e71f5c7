"""From a batch record to the micro-batches of each rank: weights and advantages by token, layouts, division among ranks.

Runs in the learner's ranks; pure, numpy only, except for the collection of token traces on the device.
"""
