"""The collector's decisions as pure functions of state, message and time: no clock, no I/O, no logger.

`core` dispatches messages; `assemble` decides which turns are trained; `groups`, `tickets`, `evals` and `control` own one aggregate
each; `effects` lists everything that the shell can be asked to do.
"""
