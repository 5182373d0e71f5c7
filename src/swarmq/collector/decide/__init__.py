"""The collector's decisions as pure functions of state, message and time: no clock, no I/O, no logger.

`core` dispatches messages to the aggregates, each of which owns its state and its rules: `episodes`, `groups`, `tickets`, `evals`
and `control`. `assemble` decides which turns of an episode are trained; `effects` lists everything that the shell can be asked
to do; `state` holds their shared records. Runs in the collector's process and in simulations. Imports no store, broker client
or clock.
"""
